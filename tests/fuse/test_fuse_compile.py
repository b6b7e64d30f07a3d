"""flce.fuse under torch.compile: one graph, the same results."""

import warnings

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flce
from harness.tiny_models import (
    BATCH,
    HIDDEN,
    IDS,
    VOCAB,
    Model,
    Own,
    equal,
    equal_runs,
    flat_loss,
    run,
    same,
    shifted_loss,
    trained,
)

BAR = 1e-5  # float32


def make(use=same):
    return Model(use, shifted_loss, dtype=torch.float32, scale=0.5)


def compiled(model, **options):
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **options})


USES = {
    "plain": same,
    "scale, cap, cast": lambda z: torch.tanh(z.to(torch.float32) / 3) * 3.0,
    "bias": lambda z: (z * 0.5).float() + torch.linspace(-1, 1, VOCAB),
}


@pytest.mark.parametrize("name", USES)
def test_one_graph(name):
    model = make(USES[name])
    expected = run(model)
    assert dynamo.explain(model)(IDS, labels=IDS).graph_break_count == 0
    dynamo.reset()
    with flce.fuse(model, strict=True) as handle:
        got = run(model, called=compiled(model))
        assert handle.losses
        assert torch.equal(got[2].argmax(-1), expected[2].argmax(-1))
        equal(torch.add(got[2], 0), expected[2], BAR)
        equal_runs(got, expected, BAR)
        dynamo.reset()
        assert dynamo.explain(model)(IDS, labels=IDS).graph_break_count == 0


@pytest.mark.parametrize("name", ["plain", "exp"])
def test_compiles_once(name):
    """In one graph; also what falls back, which is told of while it is traced."""
    model = make(USES.get(name, torch.exp))
    expected = run(model)
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    with flce.fuse(model) as handle, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        called = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(5):
            equal_runs(run(model, called=called), expected, BAR)
            counts.append(counter.frame_count)
    told = [str(one.message) for one in told if "flce" in str(one.message)]
    assert counts == [1] * 5 and list(handle.fallbacks) == ["exp is not deferred"] * len(told)
    assert len(told) == (name == "exp")


def test_strict_refuses_a_fall_back_in_a_graph():
    with flce.fuse(model := make(torch.exp), strict=True):
        for fullgraph in (True, False):
            with pytest.raises(RuntimeError, match="strict=True: .*exp is not deferred"):
                compiled(model, fullgraph=fullgraph)(IDS, labels=IDS)


def nll(logp, labels):
    return -logp.gather(-1, labels[..., None]).squeeze(-1)


def two_values_live(logits, labels):
    logp = logits.log_softmax(-1)
    spread = logits.std(-1).mean()
    return nll(logp, labels).mean() + spread


def two_values_live_over_a_break(logits, labels):
    logp = logits.log_softmax(-1)
    dynamo.graph_break()
    return logits.amax(-1).mean() + nll(logp, labels).mean()


def a_mask(logits, labels):
    """A loss of one's own for models of transformers: the masks break the graph."""
    keep = labels != 3
    logp = logits.log_softmax(-1)
    return nll(logp, labels)[keep].mean() + logits.logsumexp(-1)[keep].pow(2).mean()


def detached_after_a_write(logits, labels):
    changed = logits.clone()
    changed[..., 0].fill_(-5.0)
    weight = logits.detach().softmax(-1).amax(-1).mean()
    return flat_loss(changed, labels) * weight


def detached_after_a_break(logits, labels):
    loss = flat_loss(logits, labels)
    print(end="")
    return loss * nll(logits.detach().log_softmax(-1), labels).exp().mean()


def breaks_in_a_row(logits, labels):
    scaled = logits * 2
    rows = scaled[:, :-1].contiguous()
    dynamo.graph_break()
    loss = flat_loss(rows, labels[:, 1:])
    dynamo.graph_break()
    loss = loss + scaled.logsumexp(-1).mean()
    print(end="")
    return loss + logits.mean(-1).sum()


def a_view_of_made_logits(logits, labels):
    """torch.compile asks the view for its dtype when it writes guards, in torch 2.10 and 2.11."""
    rows = logits.flatten(0, 1)
    spread = logits.std(-1).mean()
    dynamo.graph_break()
    return spread + rows.pow(2).mean()


LOSSES = (two_values_live, two_values_live_over_a_break, a_mask, detached_after_a_write)
LOSSES += (detached_after_a_break, breaks_in_a_row, a_view_of_made_logits)


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_values_keep_apart_over_breaks_of_the_graph(loss_of, when):
    """Where the loss stands in a function that the forward calls; without further compilations."""
    model = Model(same, loss_of, dtype=torch.float32, scale=0.5)
    expected = run(model)
    counter, counts = CompileCounterWithBackend("eager"), []
    with flce.fuse(model, when=when), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called = torch.compile(model, backend=counter)
        for _ in range(4):
            got = run(model, called=called)
            counts.append(counter.frame_count)
            equal_runs(got, expected, BAR)
            equal(got[2], expected[2], BAR)
    assert counts[1:] == counts[:1] * 3


def gradients_of(model, logits_of, loss_of):
    model.zero_grad(set_to_none=True)
    loss = loss_of(logits_of(IDS), IDS)
    loss.backward()
    return loss.detach(), model.embedding.weight.grad, model.lm_head.weight.grad


LOSSES_OUTSIDE = {
    "two functions": lambda z, y: z.max(-1).values.mean() + z.amax(-1).mean(),
    "a fall-back, then not": lambda z, y: z.pow(2).mean() + flat_loss(z, y),
    "a break between": lambda z, y: (
        z.mean(-1).sum() + (print(end=""), nll(z.log_softmax(-1), y))[1].sum()
    ),
    "a function of torch": lambda z, y: torch.logsumexp(z, -1).mean(),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", LOSSES_OUTSIDE)
def test_a_compiled_loss_of_an_eager_model(name, checkpointed):
    """Logits of a reentrant checkpoint have a graph of their own, through which gradients go."""
    model, loss_of = make(), LOSSES_OUTSIDE[name]

    def logits_of(ids):
        x = model.embedding(ids)
        return (
            checkpoint(model.lm_head, x, use_reentrant=True) if checkpointed else model.lm_head(x)
        )

    expected = gradients_of(model, logits_of, loss_of)
    with flce.fuse(model, when="always"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = gradients_of(model, logits_of, torch.compile(loss_of, backend="eager"))
    for one, other in zip(got, expected, strict=True):
        equal(one, other, BAR)


def test_a_compiled_forward_of_an_eager_model():
    """As transformers compiles: the hooks of the model run outside."""
    model = make()
    expected = run(model)
    with flce.fuse(model, strict=True) as handle:
        model.forward = compiled(model.forward)
        for _ in range(2):
            equal_runs(run(model), expected, BAR)
    assert handle.losses == {"none": 1}


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("was_called", [False, True])
def test_a_compiled_model_is_fused(when, was_called):
    model = make()
    expected = run(model)
    called = compiled(model)
    if was_called:
        run(model, called=called)
    with flce.fuse(called, when=when, strict=True) as handle:
        got = run(model, called=called)
        assert handle.model is model and handle.losses and flce.explain(called).is_fused
        assert torch.equal(got[2].argmax(-1), expected[2].argmax(-1))
    equal_runs(got, expected, BAR)


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_give_logits(when, strict):
    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make()

        def forward(self, ids):
            return self.model(ids, labels=ids)

    module = Exported()
    expected = module(IDS)
    with flce.fuse(module, when=when), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = torch.export.export(module, (IDS,), strict=strict).module()(IDS)
    for got, one in zip(made, expected, strict=True):
        equal(got, one, BAR)


def labelled(called):
    return lambda model: called(IDS, labels=IDS)[0]


def unlabelled(called):
    return lambda model: flat_loss(called(IDS)[1], IDS)


NOT_CALLED = r"with labels did not call the head \(lm_head\)"
NOT_IN_TRAINING = r"training did not call the head \(lm_head\).*F.linear"


@pytest.mark.parametrize("exports", [False, True])
def test_a_step_without_a_loss_is_told_whatever_was_compiled_before(exports):
    """Here, of a model of the same class."""
    other = Model()
    with flce.fuse(other):
        if exports:
            torch.export.export(other, (IDS, IDS))
            with pytest.warns(UserWarning, match="called without labels in training"):
                trained(other, unlabelled(other))  # also of that which was exported
        else:
            trained(other, labelled(compiled(other)))
    for loss_of, expected in ((labelled, NOT_CALLED), (unlabelled, NOT_IN_TRAINING)):
        with flce.fuse(model := Own()), pytest.warns(UserWarning, match=expected):
            trained(model, loss_of(model))


@pytest.mark.parametrize("part", ["model", "forward"])
@pytest.mark.parametrize("when", ["labels", "always"])
def test_a_compiled_step_that_does_not_call_the_head_is_told(when, part):
    def of(model):
        if part == "forward":
            model.forward = compiled(model.forward)
        return model if part == "forward" else compiled(model)

    expected = NOT_IN_TRAINING if (when, part) == ("always", "model") else NOT_CALLED
    for loss_of, told in ((labelled, expected), (unlabelled, NOT_IN_TRAINING)):
        with flce.fuse(model := Own(), when=when), pytest.warns(UserWarning, match=told):
            trained(model, loss_of(of(model)))
    with flce.fuse(model := Own(), when=when, strict=True):
        with pytest.raises(RuntimeError, match=f"strict=True: .*{expected}".split(r".*F")[0]):
            trained(model, labelled(of(model)))


def test_a_graph_counts_for_no_other_handle():
    """Not of a model of the same class, nor of the same model fused anew."""
    one, other = Model(), Model()
    called = torch.compile(lambda model, *inputs: model(*inputs), backend="eager", fullgraph=True)

    def with_labels(model):
        return called(model, IDS, IDS)[0]

    with flce.fuse(one, strict=True) as first, flce.fuse(other, strict=True) as second:
        for handle in (first, second, first):
            trained(handle.model, with_labels)
        assert first.losses == second.losses == {"none": 1}
    for _ in range(2):
        with flce.fuse(one, strict=True) as handle:
            trained(one, with_labels)
            assert handle.losses == {"none": 1}
        with flce.fuse(one), pytest.warns(UserWarning, match="without labels in training"):
            trained(one, lambda model: flat_loss(called(model, IDS)[1], IDS))


def test_a_checkpoint_in_a_graph():
    """Nothing that flce notes there breaks the graph."""
    model = make()

    def of_rows(x):
        return F.cross_entropy(model.lm_head(x)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    def loss_of(ids):
        return checkpoint(of_rows, model.embedding(ids), use_reentrant=False)

    loss = loss_of(IDS)
    with flce.fuse(model, when="always", strict=True):
        got = compiled(loss_of)(IDS)
        got.backward()
    equal(got, loss, BAR)


def test_a_head_that_is_replaced_or_compiled_later():
    model = make()
    with flce.fuse(model, strict=True) as handle:
        called = compiled(model)
        run(model, called=called)
        model.lm_head = nn.Linear(HIDDEN, VOCAB)
        got = run(model, called=called)
        assert handle.losses == {"none": 2}  # graphs
        equal_runs(got, run(model), BAR)
    with flce.fuse(model, strict=True) as handle:
        model.lm_head = torch.compile(model.lm_head, backend="aot_eager")
        equal_runs(run(model), got, BAR)
    assert handle.losses == {"none": 1}


def test_logits_of_a_compiled_call_are_a_tensor():
    """In functions that ask for instances, as inputs of other graphs, in collectives' copies."""
    model = make()
    expected = model(IDS)[1].detach()
    with flce.fuse(model, strict=True):
        called = compiled(model)
        logits = called(IDS, labels=IDS)[1]
        assert torch.is_tensor(logits) and logits.shape == expected.shape
        assert logits.dtype == expected.dtype and logits.untyped_storage().nbytes() > 4
        for _ in range(2):
            logits = called(IDS, labels=IDS)[1]
            summed = torch.compile(lambda z: z.exp().sum() * z.shape[0], backend="aot_eager")
            equal(summed(logits), expected.exp().sum() * BATCH, BAR)
            assert (logits.detach() == expected).all() and logits.numpy(force=True).any()
            equal(summed(logits), expected.exp().sum() * BATCH, BAR)  # made by now


def test_dynamic_shapes():
    model = make(USES["scale, cap, cast"])
    with flce.fuse(model, strict=True):
        called = compiled(model, dynamic=True)
        for length in (7, 5, 6):
            ids = IDS[:, :length]
            equal_runs(run(model, ids, called), run(model, ids), BAR)


def test_evaluation_and_inference():
    model = make()
    with torch.no_grad():
        loss, logits = model(IDS, labels=IDS)
        with flce.fuse(model, strict=True) as handle:
            called = compiled(model)
            equal(called(IDS, labels=IDS)[0], loss, BAR)
            assert handle.losses and torch.equal(called(IDS)[1], logits)
