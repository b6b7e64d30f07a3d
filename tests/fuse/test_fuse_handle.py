"""flce.fuse: when it defers, which heads it takes, what it refuses, and how it is undone."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.tiny_models import (
    BATCH,
    HIDDEN,
    IDS,
    LENGTH,
    VOCAB,
    Adapted,
    Model,
    Own,
    compare,
    equal,
    equal_runs,
    flat_loss,
    run,
    trained,
)


def test_when():
    model = Model()
    with flce.fuse(model) as handle:
        assert type(model(IDS)[1]) is torch.Tensor
        assert type(model(IDS, None)[1]) is torch.Tensor
        assert type(model(IDS, IDS)[1]) is not torch.Tensor
        assert type(model.lm_head(torch.ones(2, HIDDEN).double())) is torch.Tensor
        with pytest.raises(IndexError):
            model(IDS, labels=IDS + VOCAB)
        assert type(model.lm_head(torch.ones(2, HIDDEN).double())) is torch.Tensor
        assert handle.losses
    with flce.fuse(model, when="always", strict=True) as handle:
        logits = model(IDS)[1]
        expected = F.linear(model.embedding(IDS), model.lm_head.weight, model.lm_head.bias)
        equal(flat_loss(logits, IDS).detach(), flat_loss(expected, IDS).detach())
        assert handle.losses


def test_heads_by_name_and_module():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.inner = nn.Linear(HIDDEN, 7), nn.Sequential(nn.Linear(HIDDEN, 9))

        def forward(self, x, labels):
            return flat_loss(self.one(x), labels % 7) + flat_loss(self.inner(x), labels % 9)

    model, x = Two(), torch.randn(BATCH, LENGTH, HIDDEN)
    expected = model(x, IDS)
    for head in (["one", model.inner[0]], [model.one, "inner.0"]):
        with flce.fuse(model, head, strict=True) as handle:
            equal(model(x, IDS).detach(), expected.detach(), 1e-6)
        assert sum(handle.losses.values()) == 2
    with pytest.raises(ValueError, match="flce.fuse: model: expected one with a vocabulary head"):
        flce.fuse(model)


def test_remove_restores_the_classes():
    model = Model()
    before = type(model.lm_head), dict(model.lm_head.__dict__), str(model)
    handle = flce.fuse(model)
    assert str(model) == before[2] and isinstance(model.lm_head, nn.Linear)
    handle.remove()
    handle.remove()
    assert (type(model.lm_head), model.lm_head.__dict__) == before[:2]
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("strict", [False, True])
def test_a_fused_head_is_refused(strict):
    model = Model()
    model.second = nn.Linear(HIDDEN, VOCAB)
    handle = flce.fuse(model)
    expected = r"flce.fuse: lm_head: it is fused already; call remove\(\) of that handle first"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=expected):
            flce.fuse(model, ["second", "lm_head"], strict=strict)
    assert type(model.second) is nn.Linear
    assert model(IDS, IDS)[0].requires_grad and handle.losses and not handle.fallbacks


def test_a_head_named_twice():
    model = Model()
    with pytest.warns(UserWarning, match="lm_head is not fused: its nn.Linear belongs to another"):
        handle = compare(model, head=["lm_head", model.lm_head])
    assert handle.losses and type(model.lm_head) is nn.Linear


def test_fused_again_under_a_class_of_others():
    """FSDP2 derives its class from that of the fused head, which remove() cannot undo."""
    model = Model()
    flce.fuse(model).remove()
    first = flce.fuse(model)
    base = type(model.lm_head)
    model.lm_head.__class__ = type("Derived", (base,), {})
    first.remove()
    assert type(model.lm_head).__name__ == "Derived"
    assert not flce.explain(model).is_fused and type(model(IDS, IDS)[1]) is torch.Tensor
    handle = compare(model, strict=True)
    assert handle.losses and not first.losses


def test_other_hooks_get_real_logits():
    model = Model()
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *a: seen.append(a[-1]))
    with pytest.warns(UserWarning, match="lm_head is not fused: .*<lambda> is hooked to it"):
        flce.fuse(model).remove()
    hook.remove()
    with flce.fuse(model):
        model.lm_head.register_forward_hook(lambda *a: seen.append(a[-1]))
        with pytest.warns(UserWarning, match="<lambda> is hooked to Linear, the head"):
            model(IDS, labels=IDS)
    assert [type(value) for value in seen] == [torch.Tensor]


def partition(module):
    """As ZeRO-3: the weight is whole inside the hooks and from the output's gradient on."""
    whole = module.weight.data

    def gather(module, arguments):
        module.weight.data = whole

    def release(module, arguments, output):
        module.weight.data = whole.new_empty(0)
        if output.requires_grad:
            output.register_hook(lambda gradient: gather(module, None))

    gather.__module__ = release.__module__ = "deepspeed.runtime"
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    module.weight.data = whole.new_empty(0)


@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_a_weight_that_is_whole_inside_the_hooks_alone(save):
    plain, model = Model(), Model()
    with flce.fuse(model, strict=True, save=save) as handle:
        partition(plain.lm_head)
        partition(model.lm_head)
        expected, expected_logits = plain(IDS, IDS)
        loss, logits = model(IDS, IDS)
        assert model.lm_head.weight.numel() == 0 and handle.losses
        equal(logits, expected_logits)
        assert model.lm_head.weight.numel() == 0
        for one in (expected, loss):
            one.backward()
        equal(loss, expected)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            equal(one.grad, other.grad)


def test_a_head_that_is_not_called_is_told():
    model = Own()
    expected = (
        r"labels did not call the head \(lm_head\): flce computed no loss; .*trl.install\(\).*"
        r"multiplies by the weight itself.*call flce.linear_cross_entropy"
    )
    with flce.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        with pytest.raises(UserWarning, match=expected):
            model(IDS, IDS)
    with flce.fuse(model, strict=True):
        with pytest.raises(RuntimeError, match="strict=True: forward with labels did not call"):
            model(IDS, IDS)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_loss_without_labels_is_told(compiles):
    """Once, in the first step; not before, and not after a loss by flce."""
    model = Model()
    called = torch.compile(model, backend="aot_eager") if compiles else model

    def without_labels(model):
        return flat_loss(called(IDS)[1], IDS)

    expected = (
        r'\(lm_head\) was called without labels in training.*flce.fuse\(model, when="always"\)'
    )
    with flce.fuse(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        without_labels(model)
        trained(Model(), lambda other: flat_loss(other(IDS)[1], IDS))
        with pytest.raises(UserWarning, match=expected):
            trained(model, without_labels)
        trained(model, without_labels)
        assert len(handle.fallbacks) == 1
    for when, loss_of in (("labels", lambda m: m(IDS, IDS)[0]), ("always", without_labels)):
        with flce.fuse(model, when=when) as handle, warnings.catch_warnings():
            warnings.simplefilter("error")
            trained(model, loss_of)
            trained(model, without_labels)
        assert handle.losses and not handle.fallbacks
    torch.compiler.reset()
    with flce.fuse(model, strict=True), pytest.raises(RuntimeError, match="called without labels"):
        trained(model, without_labels)


def test_a_head_that_training_does_not_call_is_told():
    model = Own()
    for when in ("labels", "always"):
        expected = r"training did not call the head \(lm_head\).*F.linear"
        with flce.fuse(model, when=when), pytest.warns(UserWarning, match=expected):
            trained(model, lambda model: flat_loss(model(IDS)[1], IDS))
    model.get_output_embeddings = lambda: model.embedding
    del model.lm_head
    expected = "it is an nn.Embedding, .* call flce.linear_cross_entropy"
    with pytest.warns(UserWarning, match=expected):
        flce.fuse(model)


def test_odd_heads_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = Model()
    model.lm_head = Scaled(HIDDEN, VOCAB, dtype=torch.float64)
    with pytest.warns(
        UserWarning, match="lm_head is not fused: Scaled is no plain nn.Linear"
    ) as made:
        handle = flce.fuse(model)
    assert "logits" not in str(made[0].message) and not handle.fallbacks
    with pytest.raises(ValueError, match="strict=True: lm_head: Scaled is no plain nn.Linear"):
        flce.fuse(model, strict=True)
    assert "left alone: Scaled" in str(flce.explain(model))
    model.other = nn.Linear(HIDDEN, VOCAB)
    model.odd = Scaled(HIDDEN, VOCAB)
    with pytest.warns(UserWarning, match="odd is not fused"), flce.fuse(model, ["other", "odd"]):
        refused = flce.explain(model).refused
    assert [name for name, _ in refused] == ["lm_head", "odd"]


def test_unfit_weights_fall_back():
    """Found inside the hooks: the eager loss is computed there."""

    class Odd(torch.Tensor):
        pass

    model = Model()
    weight = model.lm_head.weight.detach()
    expected = model(IDS, IDS)[0].detach()
    with flce.fuse(model) as handle:
        del model.lm_head.weight
        model.lm_head.weight = weight.as_subclass(Odd)
        expected_warning = "the head's weight is a Odd: the loss is computed from all logits"
        with pytest.warns(UserWarning, match=expected_warning):
            equal(model(IDS, IDS)[0].detach().as_subclass(torch.Tensor), expected)
        assert not handle.losses


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(model=3), TypeError, "model: expected an nn.Module, got int"),
        (dict(model=nn.DataParallel(nn.Linear(2, 2))), ValueError, "got nn.DataParallel"),
        (dict(when="never"), ValueError, 'when: expected "labels" or "always", got \'never\''),
        (dict(head="lm"), ValueError, "these, got 'lm'"),
        (dict(head=nn.Linear(2, 2)), ValueError, "head: expected a Module of the model"),
        (dict(head=3), ValueError, "head: expected a Module of the model, its name"),
        (dict(softcap=3.0), TypeError, "unexpected keyword argument 'softcap'"),
        (dict(save="all"), ValueError, "save: expected"),
        (dict(z_loss=-1.0), ValueError, "z_loss: expected"),
        (dict(accum_dtype="float32"), TypeError, "accum_dtype: expected one of .torch.float64"),
        (dict(valid_bound=1.5), TypeError, "valid_bound: expected an int of at least 0, got 1.5"),
        (dict(max_memory="much"), ValueError, "max_memory"),
        (dict(model=nn.Linear(2, 2)), ValueError, "model: expected one with a vocabulary head"),
        (dict(model=nn.Linear(2, 2)), ValueError, 'an nn.Linear whose name ends in "lm_head"'),
    ],
)
def test_refusals(change, error, message):
    arguments = {"model": Model(), **change}
    with pytest.raises(error, match=message):
        flce.fuse(arguments.pop("model"), arguments.pop("head", None), **arguments)


def test_replicas_of_data_parallel_are_refused():
    model = Model()
    with flce.fuse(model, when="always"):
        replica = model._replicate_for_data_parallel()
        replica.lm_head = model.lm_head._replicate_for_data_parallel()
        with pytest.raises(RuntimeError, match="got nn.DataParallel"):
            replica(IDS)


def test_options_reach_the_loss():
    model = Model()
    expected = model(IDS, IDS)[0] + 0.5 * model(IDS)[1].logsumexp(-1).pow(2).mean()
    with flce.fuse(model, z_loss=0.5, save="stats", strict=True):
        equal(model(IDS, IDS)[0].detach(), expected.detach())


def test_accumulation_into_the_gradient():
    model = Model()
    _, gradients, _ = run(model)
    with flce.fuse(model, strict=True, accumulate_into="grad"):
        for times in (1.0, 2.0):
            model(IDS, IDS)[0].backward() if times == 2.0 else run(model)
            equal(model.lm_head.weight.grad, times * gradients[1])


def test_all_rows_ignored():
    """flce's mean, 0 with gradients 0, where torch has NaN."""
    model = Model(loss_of=lambda z, y: flat_loss(z, torch.full_like(y, -100)))
    with flce.fuse(model, strict=True):
        loss, gradients, _ = run(model)
    assert loss == 0 and not any(g.any() for g in gradients)


class Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


def test_an_adapter_around_the_head():
    model = Model()
    model.lm_head = Adapted(model.lm_head)
    handle = compare(model, strict=True)
    assert list(handle.losses) == ["sum of 2 products"]
    model.lm_head.base_layer = Quantised(HIDDEN, VOCAB, dtype=torch.float64)
    with pytest.warns(UserWarning, match="lm_head is not fused: Adapted is no plain nn.Linear"):
        flce.fuse(model)
    assert type(model.lm_head.up) is nn.Linear


def test_accumulation_with_an_adapter():
    """flce's accumulate_into takes no adapter. A base weight that is not trained needs none."""
    model = Model()
    model.lm_head = Adapted(model.lm_head)
    expected, gradients, _ = run(model)
    with flce.fuse(model, accumulate_into="grad") as handle:
        with pytest.warns(UserWarning, match="accumulate_into does not serve an adapter"):
            loss, fused_gradients, _ = run(model)
        equal_runs((loss, fused_gradients), (expected, gradients))
        assert not handle.losses
    with flce.fuse(model, accumulate_into="grad", strict=True) as handle:
        with pytest.raises(RuntimeError, match="accumulate_into does not serve an adapter"):
            model(IDS, IDS)
        model.lm_head.base_layer.requires_grad_(False)
        equal(model(IDS, IDS)[0], expected)
        assert handle.losses


def test_the_handle_in_words():
    model = Model()
    handle = flce.fuse(model)
    assert repr(handle) == "<flce.fuse of Model: attached, no loss computed yet>"
    model(IDS)
    assert "no loss computed yet, calls without labels" in str(flce.explain(model))
    for _ in range(3):
        model(IDS, IDS)
    model.use = torch.exp
    with pytest.warns(UserWarning):
        model(IDS, IDS)
    counts = "3 losses without logits, 1 from logits because torch.exp is not deferred"
    assert repr(handle) == f"<flce.fuse of Model: attached, {counts}>"
    assert flce.explain(model).summary == counts
    handle.remove()
    assert repr(handle) == f"<flce.fuse of Model: removed, {counts}>"


def test_a_model_on_meta():
    model = Model().to("meta")
    with flce.fuse(model, strict=True):
        loss, logits = model(IDS.to("meta"), IDS.to("meta"))
        loss.backward()
    assert loss.device.type == "meta" and logits.shape == (BATCH, LENGTH, VOCAB)
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape


def test_explain():
    model = Model(lambda z: z / 4)
    assert str(flce.explain(model)).startswith(
        "Model: not fused\n  head lm_head: nn.Linear(16, 50)"
    )
    with flce.fuse(model):
        model(IDS, IDS)[1].sum()
        report = flce.explain(model)
        assert report.is_fused and report.losses == {"scale 0.25": 1}
        assert "1 x loss without logits (steps after the head: scale 0.25)" in str(report)
        assert "logits read in addition to the loss: by torch.Tensor.sum" in str(report)
    with pytest.raises(TypeError, match="flce.explain: model: expected an nn.Module, got str"):
        flce.explain("model")
