"""flce.fuse on models without transformers: what is recorded, what falls back, what is refused."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from fuse_case import LogitsMade
from torch import nn

import flce

HIDDEN, VOCAB, BATCH, LENGTH = 16, 50, 2, 7
ROWS = BATCH * LENGTH
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """An embedding, a head, what `use` makes of the logits, and the loss that `loss_of` makes of
    that: the class of all of transformers, in small."""

    def __init__(self, use=lambda z: z, loss_of=None, dtype=torch.float64, bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(3 * torch.randn(parameter.shape, generator=generator))
        self.use, self.loss_of = use, loss_of or flat_loss

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        logits = self.use(self.lm_head(self.embedding(ids)))
        return (None if labels is None else self.loss_of(logits, labels)), logits


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), **options)


def run(model, ids=IDS):
    model.zero_grad(set_to_none=True)
    loss, logits = model(ids, labels=ids)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], logits


def equal(got, expected, bar=1e-12):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = got.detach(), expected.detach()
    error = float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-300)
    assert error <= bar, error


def compare(model, bar=1e-12, **options):
    """Loss, gradients and logits of the model with and without fuse."""
    loss, gradients, logits = run(model)
    with flce.fuse(model, **options) as handle:
        fused_loss, fused_gradients, fused_logits = run(model)
        equal(fused_loss, loss, bar)
        for got, expected in zip(fused_gradients, gradients, strict=True):
            equal(got, expected, bar)
        equal(fused_logits, logits.detach(), bar)
    return handle


BIAS = torch.linspace(-2, 2, VOCAB, dtype=torch.float64)
TWICE = torch.arange(2 * ROWS) % 10
ROW_MASK = torch.arange(ROWS).reshape(BATCH, LENGTH) % 3 != 1


def masked_loss(logits, labels):
    return F.cross_entropy(logits[ROW_MASK], labels[ROW_MASK])


def shifted_loss(logits, labels):
    shifted = logits[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(shifted.view(-1, shifted.size(-1)), labels[..., 1:].flatten())


def last_loss(logits, labels):
    return F.cross_entropy(logits[:, -1], labels[:, -1])


def listed_loss(logits, labels):
    return F.cross_entropy(
        logits[torch.tensor([1, 0]), 2:5].flatten(0, 1), labels[[1, 0], 2:5].flatten()
    )


def first_classes(logits, labels):
    kept = logits[..., :40]
    return F.cross_entropy(kept.flatten(0, 1), labels.flatten().clamp(max=39))


def later_classes(logits, labels):
    kept = logits[..., 10:40]
    target = (labels.flatten() - 10).clamp(0, 29)
    return F.cross_entropy(kept.reshape(-1, 30), target, weight=BIAS[:30].exp())


def probabilities(logits, labels):
    target = torch.softmax(torch.arange(40.0 * ROWS, dtype=logits.dtype).sin().view(-1, 40), -1)
    return F.cross_entropy(logits[..., :40].flatten(0, 1), target, label_smoothing=0.1)


def z_loss(logits, labels):
    return flat_loss(logits, labels) + 0.1 * logits.logsumexp(-1).pow(2).mean()


def moved_loss(logits, labels):
    moved = (logits.transpose(1, 2), logits.permute(0, 2, 1), torch.transpose(logits, -1, -2))
    return sum(
        F.cross_entropy(z, labels, label_smoothing=i / 10, reduction=reduction).sum()
        for i, (z, reduction) in enumerate(zip(moved, ("mean", "none", "sum"), strict=True))
    )


def grouped_loss(logits, labels):
    groups = logits.reshape(*logits.shape[:2], 5, 10)
    losses = [flat_loss(groups[:, :, i, :].contiguous(), labels % 10) for i in (0, 2, -1)]
    return sum(losses) + flat_loss(groups[:1, 2:, 3, :].contiguous(), labels[:1, 2:] % 10)


def options_loss(logits, labels):
    return flat_loss(
        logits, labels, ignore_index=int(labels[0, 0]), reduction="sum", label_smoothing=0.2
    )


RECORDED = {
    "scale": (lambda z: 0.5 * z * 3, None),
    "division": (lambda z: z / 7, None),
    "negative scale": (lambda z: z * -0.25, None),
    "softcap": (lambda z: torch.tanh(z / 4) * 4, None),
    "softcap, other factors": (lambda z: (z * 2 / 5).tanh() * 3 / 2, None),
    "bias": (lambda z: z + BIAS, None),
    "bias first": (lambda z: BIAS + torch.mul(2, z), None),
    "bias of another shape, scaled": (lambda z: (z * 2 + BIAS.view(1, 1, -1)) / 3, None),
    "bias before a cap": (lambda z: torch.tanh((z / 2 + BIAS) / 5) * 5, None),
    "bias of fewer classes": (lambda z: z[..., 5:45] + BIAS[5:45], later_classes),
    "clone": (lambda z: z.clone().contiguous().to(z.device).to(z.dtype).type_as(z), None),
    "same device": (lambda z: z.to("cpu").to(device=z.device, dtype=z.dtype), None),
    "rows by a mask": (lambda z: z, masked_loss),
    "rows by lists": (lambda z: z, listed_loss),
    "last row": (lambda z: z, last_loss),
    "shift": (lambda z: z[:], shifted_loss),
    "first classes": (lambda z: z, first_classes),
    "first classes, bias": (lambda z: z + BIAS, first_classes),
    "later classes": (lambda z: z, later_classes),
    "probabilities": (lambda z: z, probabilities),
    "logsumexp": (lambda z: z / 2, z_loss),
    "options": (lambda z: z, options_loss),
    "classes as the second dimension": (lambda z: z / 3, moved_loss),
    "groups of classes": (lambda z: z * 2 + BIAS, grouped_loss),
    "rows of one sequence": (lambda z: z, lambda z, y: F.cross_entropy(z[0], y[0])),
    "one row": (lambda z: z, lambda z, y: F.cross_entropy(z[1, 2], y[1, 2])),
    "none": (lambda z: z, lambda z, y: (flat_loss(z, y, reduction="none") * BIAS[:ROWS]).sum()),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("bias", [True, False])
def test_recorded(name, bias):
    use, loss_of = RECORDED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = compare(Model(use, loss_of, bias=bias), strict=True)
    assert sum(handle.losses.values()) >= 1 and not handle.fallbacks


def in_place_mask(logits):
    logits[..., 7] = -100.0
    return logits


def in_place_through_a_view(logits):
    rows = logits.view(-1, VOCAB)
    rows[3] = rows[3] * 2
    return logits


def copy_before_a_change(logits):
    kept = logits * 1.5
    logits *= 100
    return kept


def two_caps(logits):
    return torch.tanh(torch.tanh(logits / 3) * 3)


class Exponential(torch.autograd.Function):
    """Takes what it is given past __torch_function__."""

    @staticmethod
    def forward(ctx, z, labels):
        ctx.save_for_backward(z, labels)
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())

    @staticmethod
    def backward(ctx, gradient):
        z, labels = ctx.saved_tensors
        target = F.one_hot(labels, VOCAB).to(z.dtype)
        return gradient * (torch.softmax(z, -1) - target) / labels.numel(), None


MADE = {
    "exp": (torch.exp, None, "exp"),
    "mask in place": (in_place_mask, None, "__setitem__"),
    "view in place": (in_place_through_a_view, None, "__getitem__|mul|__setitem__"),
    "copy, then in place": (copy_before_a_change, None, "mul_"),
    "factor 0": (lambda z: z * 0, None, "mul"),
    "factors whose product is 0": (lambda z: z * 1e-200 * 1e-200, None, "mul"),
    "logsumexp, then another": (
        lambda z: z,
        lambda z, y: z.logsumexp(-1).sum() - z.gather(-1, y.unsqueeze(-1)).sum(),
        "gather",
    ),
    "two caps": (two_caps, None, "tanh"),
    "factor of a tensor": (lambda z: z * torch.tensor(2.0), None, "mul"),
    "bias after a cap": (lambda z: torch.tanh(z) + BIAS, None, "add"),
    "matrix added": (lambda z: z + torch.ones(LENGTH, VOCAB), None, "add"),
    "negative cap": (lambda z: torch.tanh(z) * -2, None, "mul"),
    "log_softmax": (lambda z: z, lambda z, y: -z.log_softmax(-1)[0, 0, 3], "log_softmax"),
    "classes with a step": (lambda z: z[..., ::2], lambda z, y: z.sum(), "__getitem__"),
    "classes gathered": (lambda z: z[..., [1, 2]], lambda z, y: z.sum(), "__getitem__"),
    "classes first": (lambda z: z, lambda z, y: z.permute(2, 0, 1).sum(), "permute"),
    "classes moved, then scaled": (
        lambda z: z,
        lambda z, y: F.cross_entropy(z.transpose(1, 2) * 2, y),
        "mul",
    ),
    "two groups at once": (
        lambda z: z,
        lambda z, y: F.cross_entropy(z.view(BATCH, LENGTH, 5, 10)[:, :, 1:3].flatten(0, 2), TWICE),
        "__getitem__",
    ),
    "detached": (lambda z: z, lambda z, y: z.detach().sum() + flat_loss(z, y), "detach"),
}


@pytest.mark.parametrize("name", MADE)
def test_made_instead(name):
    """The operation gets real logits, and a warning or an error names it."""
    use, loss_of, operation = MADE[name]
    with pytest.warns(UserWarning, match=f"flce.fuse: Model: torch.*({operation}) is not deferred"):
        handle = compare(Model(use, loss_of))
    assert handle.fallbacks
    with flce.fuse(model := Model(use, loss_of), strict=True):
        with pytest.raises(RuntimeError, match=f"strict=True: torch.*({operation}) is not defer"):
            model(IDS, labels=IDS)


def test_warns_once_for_each_reason():
    model = Model(torch.exp)
    with flce.fuse(model) as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(IDS, labels=IDS)
    assert len(caught) == 1 and list(handle.fallbacks.values()) == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes_of_the_loss(dtype, wide):
    """As F.cross_entropy has them; the values within the eager loss's rounding of its logits."""
    model = Model((lambda z: z.float()) if wide else (lambda z: z), dtype=dtype)
    compare(model, bar=3e-2, strict=True)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(wide, inside):
    """The head multiplies in bfloat16 and the loss is float32, wherever the loss is computed."""
    model = Model((lambda z: z.float()) if wide else (lambda z: z), dtype=torch.float32)

    def losses():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(IDS)[1]
            loss = flat_loss(logits, IDS) if inside else None
        loss = loss if inside else flat_loss(logits, IDS)
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad, logits

    expected = losses()
    with flce.fuse(model, when="always", strict=True) as handle:
        for got, one in zip(losses(), expected, strict=True):
            equal(got, one.detach(), 2e-2)
    assert handle.losses


def test_makes_no_logits():
    ids = torch.randint(VOCAB, (16, 32))
    model = Model(lambda z: torch.tanh(z.float() / 3) * 3, shifted_loss, dtype=torch.float32)
    with LogitsMade(16 * 31, VOCAB) as seen:
        run(model, ids)
    assert seen.found
    with flce.fuse(model, strict=True, save="stats", max_memory="16KiB"):
        with LogitsMade(16 * 31, VOCAB) as seen:
            run(model, ids)
    assert not seen.found


def test_logits_after_the_loss():
    """Equal and with a gradient, after the backward and under no_grad, as often as asked."""
    model = Model(lambda z: z / 2)
    expected = model(IDS)[1]
    with flce.fuse(model, strict=True) as handle:
        loss, logits = model(IDS, labels=IDS)
        loss.backward()
        with torch.no_grad():
            assert torch.equal(logits, expected)
            logits[0, 0, 0] = 5.0
            assert logits[0, 0, 0] == 5.0
        with torch.no_grad():
            assert torch.equal(model(IDS, labels=IDS)[1].argmax(-1), expected.argmax(-1))
        assert handle.reads and not handle.fallbacks
    loss, logits = model(IDS, labels=IDS)
    fused = flce.fuse(model, strict=True)
    kept = model(IDS, labels=IDS)[1]
    fused.remove()
    (kept.sum() + 0).backward()
    assert model.lm_head.weight.grad is not None and torch.equal(kept, logits)


def test_logits_of_changed_weights_are_refused():
    model = Model()
    with flce.fuse(model):
        loss, logits = model(IDS, labels=IDS)
        loss.backward()
        with torch.no_grad():
            model.lm_head.weight += 1
        with pytest.raises(RuntimeError, match="expected the logits to be read before the head's"):
            logits.sum()


def test_a_shell_tells_its_shape_without_logits():
    model = Model()
    with flce.fuse(model, strict=True) as handle:
        logits = model(IDS, labels=IDS)[1]
        assert logits.shape == (BATCH, LENGTH, VOCAB) == logits.size() and len(logits) == BATCH
        assert logits.size(-1) == VOCAB and logits.dim() == logits.ndim == 3
        assert logits.dtype == torch.float64 and logits.device.type == "cpu"
        assert logits.numel() == ROWS * VOCAB and logits.is_floating_point()
        assert torch.finfo(logits.dtype).bits == 64 and isinstance(logits, torch.Tensor)
        assert torch.equal(logits.new_full((2,), 3.0), torch.full((2,), 3.0).double())
        assert not logits.requires_grad and hash(logits) == hash(logits)
        with pytest.raises(RuntimeError, match="register_hook: expected a tensor that the loss"):
            logits.register_hook(print)
        assert not handle.reads


def test_a_custom_function_gets_its_gradient():
    compare(Model(double, Exponential.apply))


def test_values_made_without_gradients_are_constants():
    def loss_of(logits, labels):
        with torch.no_grad():
            constant = logits * 2
            rows = logits.view(-1, VOCAB)
        assert not flat_loss(constant, labels).requires_grad
        constants = flat_loss(constant, labels) + F.cross_entropy(rows, labels.flatten())
        return flat_loss(logits, labels) + constants

    compare(Model(loss_of=loss_of), strict=True)


def test_c_functions_get_values():
    model = Model()
    expected = model(IDS)[1]
    with flce.fuse(model), torch.no_grad():
        logits = model(IDS, labels=IDS)[1]
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(torch.sin(logits), expected.sin())
            with pytest.raises(RuntimeError, match="expected real tensors, got logits that have"):
                logits.sin_()


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
    with pytest.raises(ValueError, match="lm_head: it is fused already"):
        flce.fuse(model, strict=True)
    handle.remove()
    handle.remove()
    assert (type(model.lm_head), model.lm_head.__dict__) == before[:2]
    assert not model._forward_hooks and not model._forward_pre_hooks


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


def double(logits):
    return logits * 2


def test_copies_and_pickles():
    model = Model(double, flat_loss)
    expected = model(IDS, IDS)[0]
    flce.fuse(model, strict=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        loss, logits = other(IDS, IDS)
        equal(loss.detach(), expected.detach())
        assert type(logits) is not torch.Tensor and other.lm_head is not model.lm_head
        assert list(other.state_dict()) == list(model.state_dict())


def test_other_hooks_get_real_logits():
    model = Model()
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *a: seen.append(a[-1]))
    with pytest.warns(UserWarning, match="lm_head: .*<lambda> is hooked to it"):
        flce.fuse(model).remove()
    hook.remove()
    with flce.fuse(model):
        model.lm_head.register_forward_hook(lambda *a: seen.append(a[-1]))
        with pytest.warns(UserWarning, match="<lambda> is hooked to Linear, the head"):
            model(IDS, labels=IDS)
    assert [type(value) for value in seen] == [torch.Tensor]


def test_a_head_that_is_not_called_is_told():
    class Own(Model):
        def forward(self, ids, labels=None):
            logits = F.linear(self.embedding(ids), self.lm_head.weight, self.lm_head.bias)
            return (None if labels is None else flat_loss(logits, labels)), logits

    model = Own()
    with flce.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
        with pytest.raises(UserWarning, match=r"labels did not call the head \(lm_head\)"):
            model(IDS, IDS)
    with flce.fuse(model, strict=True):
        with pytest.raises(RuntimeError, match="strict=True: forward with labels did not call"):
            model(IDS, IDS)


def test_odd_heads_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = Model()
    model.lm_head = Scaled(HIDDEN, VOCAB, dtype=torch.float64)
    with pytest.warns(UserWarning, match="lm_head: Scaled is no plain nn.Linear"):
        flce.fuse(model)
    with pytest.raises(ValueError, match="strict=True: lm_head: Scaled is no plain nn.Linear"):
        flce.fuse(model, strict=True)
    assert "left alone: Scaled" in str(flce.explain(model))


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
        with pytest.warns(UserWarning, match="the head's weight is a Odd"):
            equal(model(IDS, IDS)[0].detach().as_subclass(torch.Tensor), expected)
        assert not handle.losses


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(model=3), TypeError, "model: expected an nn.Module, got int"),
        (dict(model=nn.DataParallel(nn.Linear(2, 2))), ValueError, "got nn.DataParallel"),
        (dict(when="never"), ValueError, 'when: expected "labels" or "always", got \'never\''),
        (dict(head="lm"), ValueError, "head: expected the name of a Module of Model, got 'lm'"),
        (dict(head=nn.Linear(2, 2)), ValueError, "head: expected a Module of the model"),
        (dict(head=3), ValueError, "head: expected a Module of the model, its name"),
        (dict(softcap=3.0), TypeError, "unexpected keyword argument 'softcap'"),
        (dict(save="all"), ValueError, "save: expected"),
        (dict(z_loss=-1.0), ValueError, "z_loss: expected"),
        (dict(max_memory="much"), ValueError, "max_memory"),
        (dict(model=nn.Linear(2, 2)), ValueError, "model: expected one with a vocabulary head"),
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


def test_nothing_else_is_imported():
    """transformers and peft only by those who use them."""
    code = "import sys, flce; flce.fuse; print({'transformers', 'peft'} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "set()\n"


def test_save_grads_serves_what_it_can():
    """A loss for each row and a logsumexp have no gradients to make in the forward."""
    for name in ("none", "logsumexp", "shift"):
        compare(Model(*RECORDED[name]), strict=True, save="grads")


def test_all_rows_ignored():
    """flce's mean, 0 with gradients 0, where torch has NaN."""
    model = Model(loss_of=lambda z, y: flat_loss(z, torch.full_like(y, -100)))
    with flce.fuse(model, strict=True):
        loss, gradients, _ = run(model)
    assert loss == 0 and not any(g.any() for g in gradients)


class Adapted(nn.Module):
    """An adapter as PEFT writes them, around a base layer of any class."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.out_features = base, VOCAB
        self.down = nn.Linear(HIDDEN, 3, bias=False, dtype=torch.float64)
        self.up = nn.Linear(3, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.up(self.down(x)) * 2.0


class Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


def test_an_adapter_around_the_head():
    model = Model()
    model.lm_head = Adapted(model.lm_head)
    handle = compare(model, strict=True)
    assert list(handle.losses) == ["sum of 2 products"]
    model.lm_head.base_layer = Quantised(HIDDEN, VOCAB, dtype=torch.float64)
    with pytest.warns(UserWarning, match="lm_head: Adapted is no plain nn.Linear, and no adapter"):
        flce.fuse(model)
    assert type(model.lm_head.up) is nn.Linear


def test_explain():
    model = Model(lambda z: z / 4)
    assert str(flce.explain(model)).startswith(
        "Model: not fused\n  head lm_head: nn.Linear(16, 50)"
    )
    with flce.fuse(model):
        model(IDS, IDS)[1].sum()
        report = flce.explain(model)
        assert report.is_fused and report.losses == {"scale 0.25": 1}
        assert "1 losses without logits; steps before them: scale 0.25" in str(report)
        assert "logits read beside the loss: by torch.Tensor.sum" in str(report)
    with pytest.raises(TypeError, match="flce.explain: model: expected an nn.Module, got str"):
        flce.explain("model")


def test_a_plain_loop_learns_alike():
    """Twenty steps of SGD in a loop that computes the loss itself."""
    plain = Model(dtype=torch.float32)
    fused = copy.deepcopy(plain)
    flce.fuse(fused, when="always", strict=True)
    losses = []
    for model in (plain, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
            loss = flat_loss(model(ids)[1], ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    for got, expected in zip(losses[20:], losses[:20], strict=True):
        equal(got, expected, 1e-5)
