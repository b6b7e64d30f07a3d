"""Deferred logits are a tensor like any other: whatever reaches them, values and gradients are
those of real logits, and hooks run as often."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import flce
from harness.fuse_compare import OwnLoss, Y, compare, flat_loss
from harness.tiny_models import BATCH, IDS, LENGTH, VOCAB, LogitsMade, Model, equal

pytestmark = pytest.mark.filterwarnings("ignore:flce.fuse", "ignore:.*torch.jit.*")


# ---- ways around __torch_function__ ----


@torch.jit.script
def scripted_lse(z: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.logsumexp(z / temperature, -1).mean()


@torch.jit.script
def scripted_loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(z.flatten(0, 1), y)


def disabled(z):
    with torch._C.DisableTorchFunctionSubclass():
        return F.cross_entropy(z.flatten(0, 1), Y)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Doubled(Passed):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def leaf(z):
    """As of gradient caching: the backward of the loss ends at the logits, and is sent on."""
    own = z.detach().requires_grad_()
    loss = flat_loss(own)
    (gradient,) = torch.autograd.grad(loss, own)
    return loss.detach() + (z * (gradient + 0)).sum() - (z.detach() * gradient).sum()


WAYS = {
    "script, logsumexp": lambda z: scripted_lse(z, 0.7),
    "script, cross entropy": lambda z: scripted_loss(z, Y),
    "vmap": lambda z: torch.vmap(F.cross_entropy)(z, IDS).mean(),
    "DisableTorchFunctionSubclass": disabled,
    "a custom Function": lambda z: OwnLoss.apply(z.flatten(0, 1), Y),
    "a custom Function and a loss": lambda z: OwnLoss.apply(z.flatten(0, 1), Y) + flat_loss(z),
    "through a custom Function": lambda z: flat_loss(Passed.apply(z)),
    "a Function that changes gradients": lambda z: flat_loss(Doubled.apply(z)),
    "one Function of two values": lambda z: flat_loss(Doubled.apply(z)) + z.logsumexp(-1).mean(),
    "a leaf": leaf,
    "foreach": lambda z: sum(x.logsumexp(-1).mean() for x in torch._foreach_mul([z, z], 2.0)),
    "checkpointed loss": lambda z: torch.utils.checkpoint.checkpoint(
        flat_loss, z, use_reentrant=False
    ),
    "checkpointed loss, reentrant": lambda z: torch.utils.checkpoint.checkpoint(
        flat_loss, z, use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_the_logits(name):
    compare(WAYS[name])


UNCHANGED = {
    "flatten": lambda z: z.flatten(0, -2),
    "contiguous": lambda z: z.contiguous(),
    "to": lambda z: z.to(z.dtype),
    "reshape": lambda z: z.reshape(z.shape),
    "view": lambda z: z.view(z.shape),
    "squeeze": lambda z: z.squeeze(0),
    "double": lambda z: z.double(),
}


@pytest.mark.parametrize("name", UNCHANGED)
@pytest.mark.parametrize("rows", [lambda z: z.flatten(0, 1), lambda z: z[IDS >= 0]])
def test_functions_that_return_their_argument(name, rows):
    def loss_of(z):
        once = UNCHANGED[name](rows(z))
        twice = UNCHANGED[name](once)
        return F.cross_entropy(twice, Y) + F.cross_entropy(once / 2, Y)

    assert sum(compare(loss_of).losses.values()) == 2


@pytest.mark.parametrize("rows", [lambda z: z[:, :-1], lambda z: z[1:], lambda z: z[..., 5:]])
def test_a_copy_before_a_reshape(rows):
    def loss_of(z):
        part = rows(z)
        flat = part.reshape(-1, part.shape[-1])
        assert part.clone().stride() == rows(torch.empty(z.shape)).clone().stride()
        return flat.std(-1).mean() + F.cross_entropy(flat, Y[: flat.shape[0]] % flat.shape[1])

    compare(loss_of)


VIEWS = {
    "logits": lambda z: z,
    "rows": lambda z: z[1:],
    "rows of rows": lambda z: z[1:][:, 2:],
    "shape of rows": lambda z: z[1:].view(-1, LENGTH, VOCAB),
    "rows of a shape of rows": lambda z: z[1:].view(-1, LENGTH, VOCAB)[:, 2:],
    "rows of flat rows": lambda z: z[1:].flatten(0, 1)[2:],
    "rows of a part": lambda z: z.split(1)[1].view(1, LENGTH, VOCAB)[:, 2:],
    "rows of a copy": lambda z: z[1:].clone()[:, 2:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_where_views_lie(name):
    """Without values, a Tensor says the same about its memory as real logits."""
    model = Model()
    real = VIEWS[name](torch.empty(BATCH, LENGTH, VOCAB))
    with flce.fuse(model, when="always") as handle:
        got = VIEWS[name](model(IDS)[1])
        assert (got.shape, got.stride()) == (real.shape, real.stride())
        assert got.storage_offset() == real.storage_offset()
    assert not handle.reads


def test_a_gradient_without_values_passes_a_function():
    """No logits are made, and no gradient of them."""
    ids = torch.randint(VOCAB, (16, 32))
    model = Model(dtype=torch.float32)
    with flce.fuse(model, when="always", strict=True, save="stats", max_memory="16KiB") as handle:
        with LogitsMade(16 * 32, VOCAB) as seen:
            F.cross_entropy(Passed.apply(model(ids)[1]).flatten(0, 1), ids.flatten()).backward()
    assert handle.losses and not handle.reads and len(seen.found) <= 1  # the view of Passed


# ---- what is written to ----


def as_numpy(z):
    with torch.no_grad():
        kept = z.log_softmax(-1)
        z.detach().numpy()[..., 7] = -50.0
    return flat_loss(z) + kept[..., 7].sum()


def as_data(z):
    kept = z.clone()
    z.data.mul_(0.5)
    return kept.square().mean() + flat_loss(z)


def as_dlpack(z):
    kept = z.logsumexp(-1).sum().detach()
    torch.from_dlpack(z.detach())[0].zero_()
    return flat_loss(z) + kept


def through_a_view(z):
    rows, half = z.view(-1, VOCAB), z * 0.5
    rows[3].mul_(2)
    return flat_loss(z) + flat_loss(half)


def in_place(z):
    return flat_loss(z.mul(2).add_(1).div_(3))


def an_index(z):
    rows = torch.tensor([0, 2, 4])
    some = z.flatten(0, 1)[rows]
    lse = z.logsumexp(-1).sum()
    with torch.no_grad():
        rows += 1
    return some.detach().logsumexp(-1).sum() + lse


def a_mask(z):
    keep = Y % 2 == 0
    some = z.flatten(0, 1).detach()[keep]
    lse = z.logsumexp(-1).sum()
    keep.copy_(keep.roll(1))
    return -(some.softmax(-1) * some.log_softmax(-1)).sum() + lse


def a_target(z):
    buffer = Y.clone().numpy()
    target, logp = torch.from_numpy(buffer), z.log_softmax(-1).flatten(0, 1)
    first = logp.gather(-1, target[:, None]).sum().detach()
    buffer[:] = buffer[::-1].copy()
    return first + logp.gather(-1, target[:, None]).square().sum()


def selected_log_p(z):
    """A copy in torch, which may be written to."""
    logp = z.flatten(0, 1).log_softmax(-1)[Y % 2 == 0]
    logp[:, 0] = -100.0
    return -logp.max(-1)[0].mean()


def of_inference(z):
    with torch.inference_mode():
        accuracy = (z.argmax(-1) == IDS).double().mean()
    return flat_loss(z) + 10 * z.logsumexp(-1).square().mean() + z.square().mean() + float(accuracy)


WRITTEN = (as_numpy, as_data, as_dlpack, through_a_view, in_place, an_index, a_mask, a_target)
WRITTEN += (selected_log_p, of_inference)


@pytest.mark.parametrize("loss_of", WRITTEN)
def test_values_are_of_their_time(loss_of):
    compare(loss_of)


def test_an_address_is_refused():
    """C++ that asks for it, here DLPack's: there is none."""
    model = Model()
    with flce.fuse(model, when="always"), torch.no_grad():
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(model(IDS)[1])


def test_a_second_call_with_equal_targets_is_known():
    model = Model()
    with flce.fuse(model, when="always") as handle:
        logp = model(IDS)[1].log_softmax(-1)
        for target in (IDS, IDS.clone(), IDS.roll(1, 1)):
            logp.gather(-1, target[..., None])
    assert sum(handle.losses.values()) == 2


# ---- functions of another meaning ----


class Twice(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = (args[0], args[1] * 2, *args[2:]) if function is F.linear else args
        return function(*args, **(kwargs or {}))


LINEAR, FORWARD, CROSS_ENTROPY = F.linear, nn.Linear.forward, F.cross_entropy
REPLACED = {
    "F.linear": (F, "linear", lambda x, w, b=None: LINEAR(x, w * 2, b)),
    "nn.Linear.forward": (nn.Linear, "forward", lambda s, x: LINEAR(x, s.weight * 2, s.bias)),
    "F.cross_entropy": (F, "cross_entropy", lambda z, y: CROSS_ENTROPY(z * 2, y)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions(name, monkeypatch):
    monkeypatch.setattr(*REPLACED[name])
    handle = compare(flat_loss)
    assert list(handle.fallbacks) == [f"{name} was replaced"] and not handle.losses


def test_a_function_mode():
    model = Model()
    with Twice():
        expected = flat_loss(model(IDS)[1])
        with flce.fuse(model, when="always") as handle:
            equal(flat_loss(model(IDS)[1]), expected)
    assert list(handle.fallbacks) == ["the torch function mode Twice is active"]
    with flce.fuse(model, when="always", strict=True), torch.device("cpu"):
        flat_loss(model(IDS)[1])


COMPILED = {
    "recognised": (flat_loss, True),
    "not recognised": (lambda z: (z - z.amax(-1, keepdim=True)).exp().sum(-1).log().mean(), False),
    "rows": (lambda z: torch.stack([row.logsumexp(-1) for row in z]).mean(), True),
    "in place": (lambda z: F.cross_entropy(z.mul(2).div_(0.7).flatten(0, 1), Y), False),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_of_an_eager_model(name):
    loss_of, is_fused = COMPILED[name]
    torch._dynamo.reset()
    handle = compare(torch.compile(loss_of, backend="aot_eager"))
    assert bool(handle.losses) == is_fused


def test_a_whole_graph_of_deferred_logits_is_refused():
    model = Model()
    with flce.fuse(model, when="always"):
        logits = model(IDS)[1]
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(flat_loss, backend="eager", fullgraph=True)(logits)


def test_a_hook_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")

    class Halved(hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 0.5

    model = Model()
    hooks.add_hook_to_module(model.lm_head, Halved())
    expected = flat_loss(model(IDS)[1])
    with flce.fuse(model, when="always", strict=True) as handle:
        equal(flat_loss(model(IDS)[1]), expected)
    assert list(handle.losses) == ["scale 0.5"]


def test_addresses_of_kept_values_do_not_matter():
    """Memory of a target that was freed serves the next one."""
    model = Model()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = model(IDS)[1].log_softmax(-1)
        with flce.fuse(model, when="always"):
            logp = model(IDS)[1].log_softmax(-1)
            for i in range(9):
                target = torch.full((BATCH, LENGTH, 1), i)
                equal(logp.gather(-1, target), expected.gather(-1, target))


def test_a_head_of_two_models():
    one, other = Model(), Model()
    other.lm_head = one.lm_head
    first = flce.fuse(one)
    with pytest.warns(UserWarning, match="lm_head belongs to another model, Model, too"):
        second = flce.fuse(other)
    assert second.is_attached() and not first.is_attached()
    second.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flce.fuse(one)
        flce.fuse(nn.ModuleDict({"inner": one}), head="inner.lm_head").remove()


def test_accumulation_of_a_slice_of_the_classes():
    def loss_of(z):
        return F.cross_entropy(z[..., 10:40].flatten(0, 1), Y % 30)

    handle = compare(loss_of, accumulate_into="grad")
    assert list(handle.fallbacks) == ["accumulate_into does not serve a slice of the classes"]
