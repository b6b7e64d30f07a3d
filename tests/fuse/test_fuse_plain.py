"""flce.fuse on models without transformers: what is recorded, and what makes logits instead."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import flce
from harness.logprob_forms import entropy_of_chunks, policy_loss, selective
from harness.tiny_models import (
    BATCH,
    IDS,
    LENGTH,
    ROWS,
    VOCAB,
    LogitsMade,
    Model,
    compare,
    equal,
    flat_loss,
    run,
    same,
    shifted_loss,
)

BIAS = torch.linspace(-2, 2, VOCAB, dtype=torch.float64)
TWICE = torch.arange(2 * ROWS) % 10
ROW_MASK = torch.arange(ROWS).reshape(BATCH, LENGTH) % 3 != 1


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


def moved_loss(logits, labels):
    moved = (logits.transpose(1, 2), logits.permute(0, 2, 1), torch.transpose(logits, -1, -2))
    return sum(
        F.cross_entropy(z, labels, label_smoothing=i / 10, reduction=reduction).sum()
        for i, (z, reduction) in enumerate(zip(moved, ("mean", "none", "sum"), strict=True))
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
    "rows by a mask": (same, lambda z, y: F.cross_entropy(z[ROW_MASK], y[ROW_MASK])),
    "rows by lists": (same, listed_loss),
    "last row": (same, lambda z, y: F.cross_entropy(z[:, -1], y[:, -1])),
    "shift": (lambda z: z[:], shifted_loss),
    "a Module": (same, lambda z, y: torch.nn.CrossEntropyLoss()(z.flatten(0, 1), y.flatten())),
    "first classes": (same, first_classes),
    "first classes, bias": (lambda z: z + BIAS, first_classes),
    "later classes": (same, later_classes),
    "probabilities": (same, probabilities),
    "logsumexp": (
        lambda z: z / 2,
        lambda z, y: flat_loss(z, y) + 0.1 * z.logsumexp(-1).pow(2).mean(),
    ),
    "options": (
        same,
        lambda z, y: flat_loss(
            z, y, ignore_index=int(y[0, 0]), reduction="sum", label_smoothing=0.2
        ),
    ),
    "classes as the second dimension": (lambda z: z / 3, moved_loss),
    "groups of classes": (
        lambda z: (z * 2 + BIAS).reshape(BATCH, LENGTH, 5, 10),
        lambda z, y: (
            sum(flat_loss(z[:, :, i, :].contiguous(), y % 10) for i in (0, 2, -1))
            + flat_loss(z[:1, 2:, 3, :].contiguous(), y[:1, 2:] % 10)
        ),
    ),
    "rows of one sequence": (same, lambda z, y: F.cross_entropy(z[0], y[0])),
    "one row": (same, lambda z, y: F.cross_entropy(z[1, 2], y[1, 2])),
    "none": (same, lambda z, y: (flat_loss(z, y, reduction="none") * BIAS[:ROWS]).sum()),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("bias", [True, False])
def test_recorded(name, bias):
    use, loss_of = RECORDED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = compare(Model(use, loss_of, bias=bias), strict=True)
    assert sum(handle.losses.values()) >= 1 and not handle.fallbacks


def test_save_grads_serves_what_it_can():
    """A loss for each row and a logsumexp have no gradients to make in the forward."""
    for name in ("none", "logsumexp", "shift"):
        compare(Model(*RECORDED[name]), strict=True, save="grads")


def in_place_mask(logits):
    logits[..., 7] = -100.0
    return logits


def copy_before_a_change(logits):
    kept = logits * 1.5
    logits *= 100
    return kept


def in_place_through_a_view(logits):
    rows = logits.view(-1, VOCAB)
    rows[3] = rows[3] * 2
    return logits


MADE = {
    "exp": (torch.exp, None, "exp"),
    "mask in place": (in_place_mask, None, "__setitem__"),
    "view in place": (in_place_through_a_view, None, "__getitem__|mul|__setitem__"),
    "copy, then in place": (copy_before_a_change, None, "mul_"),
    "factor 0": (lambda z: z * 0, None, "mul"),
    "factors whose product is 0": (lambda z: z * 1e-200 * 1e-200, None, "mul"),
    "logsumexp, then another": (same, lambda z, y: z.logsumexp(-1).sum() - z.sum(), "sum"),
    "two caps": (lambda z: torch.tanh(torch.tanh(z / 3) * 3), None, "tanh"),
    "factor of a tensor": (lambda z: z * torch.tensor(2.0), None, "mul"),
    "bias after a cap": (lambda z: torch.tanh(z) + BIAS, None, "add"),
    "matrix added": (lambda z: z + torch.ones(LENGTH, VOCAB), None, "add"),
    "negative cap": (lambda z: torch.tanh(z) * -2, None, "mul"),
    "log_softmax": (same, lambda z, y: -z.log_softmax(-1)[0, 0, 3], "__getitem__"),
    "classes with a step": (lambda z: z[..., ::2], lambda z, y: z.sum(), "__getitem__"),
    "classes gathered": (lambda z: z[..., [1, 2]], lambda z, y: z.sum(), "__getitem__"),
    "classes first": (same, lambda z, y: z.permute(2, 0, 1).sum(), "permute"),
    "classes moved, then scaled": (
        same,
        lambda z, y: F.cross_entropy(z.transpose(1, 2) * 2, y),
        "mul",
    ),
    "two groups at once": (
        same,
        lambda z, y: F.cross_entropy(z.view(BATCH, LENGTH, 5, 10)[:, :, 1:3].flatten(0, 2), TWICE),
        "__getitem__",
    ),
    "detached": (same, lambda z, y: z.detach().sum() + flat_loss(z, y), "detach"),
}


@pytest.mark.parametrize("name", MADE)
def test_made_instead(name):
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(wide, inside, dtype):
    """The head multiplies in bfloat16 and the loss is float32, wherever the loss is computed;
    float64 is not cast."""
    model = Model((lambda z: z.float()) if wide else (lambda z: z), dtype=dtype)

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
        got = losses()
        for one, other in zip(got, expected, strict=True):
            equal(one, other, 2e-2)
        assert torch.equal(got[2], expected[2])
    assert handle.losses


def capped_loss(z, y):
    return shifted_loss(torch.tanh(z / 3) * 3, y)


def trl_loss(z, y):
    z, y = z[:, :-1], y[:, 1:]
    return -selective(z, y).mean() - 0.01 * entropy_of_chunks(z).mean()


@pytest.mark.parametrize("loss_of", [capped_loss, trl_loss, policy_loss])
def test_makes_no_logits(loss_of):
    ids = torch.randint(VOCAB, (16, 32))
    model = Model(lambda z: z.float() / 0.9, loss_of, dtype=torch.float32)
    with LogitsMade(16 * 31, VOCAB) as seen:
        run(model, ids)
    assert seen.found
    with flce.fuse(model, strict=True, save="stats", max_memory="16KiB"):
        with LogitsMade(16 * 31, VOCAB) as seen:
            run(model, ids)
    assert not seen.found


def test_logits_after_the_loss():
    """Written to after the backward; with a gradient after the model is unfused."""
    model = Model(lambda z: z / 2)
    expected = model(IDS)[1]
    with flce.fuse(model, strict=True) as handle:
        loss, logits = model(IDS, labels=IDS)
        loss.backward()
        with torch.no_grad():
            assert torch.equal(logits, expected)
            logits[0, 0, 0] = 5.0
            assert logits[0, 0, 0] == 5.0
        assert handle.reads and not handle.fallbacks
        kept = model(IDS, labels=IDS)[1]
    model.zero_grad()
    (kept.sum() + 0).backward()
    assert model.lm_head.weight.grad is not None and torch.equal(kept, expected)


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
        assert logits.requires_grad and not logits.is_leaf and hash(logits) == hash(logits)
        assert not handle.reads


def test_what_changes_nothing_returns_the_same_object():
    model = Model()
    with flce.fuse(model, strict=True) as handle:
        deferred = model(IDS, labels=IDS)[1]
        for z in (deferred, torch.zeros(deferred.shape, dtype=deferred.dtype)):
            assert z.double() is z and z.to(z) is z and z.contiguous() is z
            assert z.clone() is not z and z.view(z.shape) is not z
        assert not handle.reads


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
            assert torch.equal(logits.sin_(), expected.sin())
        assert torch.equal(logits, expected.sin())
