"""Deferred logits are a tensor like any other: whatever reaches them, values and gradients are
those of real logits, and hooks run as often."""

import contextlib
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from processes import on_ranks
from tiny_models import BATCH, HIDDEN, IDS, LENGTH, VOCAB, LogitsMade, Model, equal, same, whole
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import flce

pytestmark = pytest.mark.filterwarnings("ignore:flce.fuse", "ignore:.*torch.jit.*")
Y = IDS.flatten()


def results(model, loss_of):
    """(the loss, the gradients, how often each parameter's hook ran)"""
    model.zero_grad(set_to_none=True)
    counts = [0] * len(list(model.parameters()))

    def count(i, parameter):
        counts[i] += 1

    hooks = [
        p.register_post_accumulate_grad_hook(functools.partial(count, i))
        for i, p in enumerate(model.parameters())
    ]
    loss = loss_of(model(IDS)[1])
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss.detach(), [p.grad for p in model.parameters()], counts


def compare(loss_of, use=same, **options):
    model = Model(use)
    expected = results(model, loss_of)
    with flce.fuse(model, when="always", **options) as handle:
        got = results(model, loss_of)
    equal(got[0], expected[0], 1e-11)
    for one, other in zip(got[1], expected[1], strict=True):
        equal(one, other, 1e-11)
    assert got[2] == expected[2]
    return handle


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


class OwnLoss(torch.autograd.Function):
    """As Liger's, Megatron's and apex's: values in the forward, the gradient of them saved."""

    @staticmethod
    def forward(ctx, z, y):
        p = z.float().softmax(-1).to(z.dtype)
        ctx.save_for_backward(p, y)
        return F.nll_loss(z.log_softmax(-1), y)

    @staticmethod
    def backward(ctx, gradient):
        p, y = ctx.saved_tensors
        return gradient * (p - F.one_hot(y, p.shape[-1])) / len(y), None


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


def flat_loss(z):
    return F.cross_entropy(z.flatten(0, 1), Y)


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


def test_a_gradient_without_values_passes_a_function():
    """No logits are made, and no gradient of them."""
    ids = torch.randint(VOCAB, (16, 32))
    model = Model(dtype=torch.float32)
    with flce.fuse(model, when="always", strict=True, save="stats", max_memory="16KiB") as handle:
        with LogitsMade(16 * 32, VOCAB) as seen:
            F.cross_entropy(Passed.apply(model(ids)[1]).flatten(0, 1), ids.flatten()).backward()
    assert handle.losses and not handle.reads and len(seen.found) <= 1  # the view of Passed


# ---- gradients that are asked for ----


def gradient_of_logits(z):
    (gradient,) = torch.autograd.grad(flat_loss(z), z, retain_graph=True)
    return (z * gradient).sum() + flat_loss(z / 2)


def hooked(z):
    """By a hook, after the loss is computed."""
    seen = []
    loss = flat_loss(z) + z.logsumexp(-1).mean()
    z.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
    loss.backward(retain_graph=True)
    return loss + seen[0]


def hooked_to_a_step(z):
    seen = []
    rows = z[:, 1:] / 3
    rows.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
    loss = F.cross_entropy(rows.flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward(retain_graph=True)
    return loss + seen[0]


def changed_by_a_hook(z):
    z.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return flat_loss(z)


def retained(z):
    z.retain_grad()
    loss = flat_loss(z)
    loss.backward(retain_graph=True)
    return loss + z.grad.square().sum()


def of_several_tensors(z):
    """retain_graph, then gradients of the loss and of a value of the logits."""
    loss, lse = flat_loss(z), z.logsumexp(-1)
    one, other = torch.autograd.grad([loss, lse.mean()], [z, lse], retain_graph=True)
    return loss + (one * z.detach()).sum().detach() + (other * lse.detach()).sum()


ASKED = (gradient_of_logits, hooked, hooked_to_a_step, changed_by_a_hook, retained)
ASKED += (of_several_tensors,)


@pytest.mark.parametrize("loss_of", ASKED)
def test_gradients_of_the_logits(loss_of):
    compare(loss_of)


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


# ---- gradients on their way through the steps ----


def own(z):
    """A leaf with the values of z, as gradient caches make them."""
    return z.detach().requires_grad_()


def kept_by_a_node_hook(z):
    kept = []
    one, two = F.cross_entropy(z.flatten(0, 1), Y), F.cross_entropy(z.flatten(0, 1) / 2, Y)
    two.grad_fn.register_hook(lambda inputs, outputs: kept.extend(inputs))
    return one + z.sin().sum() + two


def doubled_by_a_node_hook(z):
    one, two = F.cross_entropy(z.flatten(0, 1), Y), F.cross_entropy(z.flatten(0, 1) / 2, Y)
    one.grad_fn.register_hook(lambda inputs, _: tuple(g if g is None else g * 2 for g in inputs))
    return one + two


def clamped_in_place(z):
    z.register_hook(lambda gradient: gradient.clamp_(-0.01, 0.01))
    return F.cross_entropy(z.flatten(0, 1), Y)


def written_by_a_view(z):
    def hook(gradient):
        gradient.view(-1)[3:90].zero_()

    z.register_hook(hook)
    return F.cross_entropy(z.flatten(0, 1), Y)


def hooked_between(z):
    half = z / 2
    scaled = half * 3
    half.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(scaled.flatten(0, 1), Y)


def hooked_on_one_path(z):
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    p.register_hook(lambda gradient: gradient * 2)
    return -(p * log_p).sum(-1).mean()


def read_by_a_hook(z):
    norms = []
    z.register_hook(lambda gradient: norms.append(gradient.norm()))
    return F.cross_entropy(z.flatten(0, 1), Y)


def of_trained_vector(z):
    vector = torch.linspace(-1, 1, VOCAB, dtype=z.dtype).requires_grad_()
    loss = F.cross_entropy((z + vector).flatten(0, 1), Y)
    (gradient,) = torch.autograd.grad(loss, vector, retain_graph=True)
    return loss + gradient.detach().square().sum()


def of_some_pieces(z):
    first, second, _ = z.flatten(0, 1).split([4, 5, BATCH * LENGTH - 9])
    return F.cross_entropy(first, Y[:4]) + F.cross_entropy(second, Y[4:9])


def of_some_rows(z):
    return sum(F.cross_entropy(row[1:], y[1:]) for row, y in zip(z, IDS, strict=True) if y[0] >= 0)


def by_counted_classes(z):
    index = (IDS - VOCAB).unsqueeze(-1)
    return -z.log_softmax(-1).take_along_dim(index, -1).mean()


def of_a_byte_mask(z):
    return F.cross_entropy(z[(IDS >= 0).to(torch.uint8)], Y)


PASSED = [
    kept_by_a_node_hook,
    doubled_by_a_node_hook,
    clamped_in_place,
    written_by_a_view,
    hooked_between,
    hooked_on_one_path,
    read_by_a_hook,
    of_trained_vector,
    of_some_pieces,
    of_some_rows,
    by_counted_classes,
    of_a_byte_mask,
]


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("loss_of", PASSED)
def test_gradients_on_their_way(loss_of):
    compare(loss_of)


def test_pieces_without_a_loss_make_no_zeros():
    model, ids = Model(), IDS.repeat(8, 1)
    with flce.fuse(model, when="always", strict=True), LogitsMade(50, VOCAB) as made:
        first, second, _ = model(ids)[1].flatten(0, 1).split([20, 30, len(ids.flatten()) - 50])
        y = ids.flatten()
        (F.cross_entropy(first, y[:20]) + F.cross_entropy(second, y[20:50])).backward()
    assert not made.found


def gradient_written_to(z):
    (gradient,) = torch.autograd.grad(F.cross_entropy(z.flatten(0, 1), Y), z)
    return gradient, gradient.mul_(10)


def gradient_of_a_step(z):
    half = z / 2
    loss = F.cross_entropy(half.flatten(0, 1), Y)
    half.retain_grad()
    loss.backward(retain_graph=True)
    return half.grad, torch.autograd.grad(loss, half)[0]


def gradient_of_a_leaf(z):
    leaf, target = own(z), Y.clone()
    F.cross_entropy(leaf.flatten(0, 1), target).backward()
    target.zero_()  # a buffer that is used again
    torch.nn.utils.clip_grad_norm_([leaf], 0.01)
    return leaf.grad, leaf.grad * 2


GRADIENTS = [gradient_written_to, gradient_of_a_step, gradient_of_a_leaf]


@pytest.mark.parametrize("gradients_of", GRADIENTS)
def test_gradients_that_are_asked_for(gradients_of):
    model, made = Model(), []
    for is_fused in (False, True):
        with flce.fuse(model, when="always") if is_fused else contextlib.nullcontext():
            made.append(gradients_of(model(IDS)[1]))
    for got, expected in zip(made[1], made[0], strict=True):
        equal(got + 0, expected, 1e-11)


def test_hooks_of_parameters_run_once():
    expected, counts = [], []
    for is_fused in (False, True):
        model, runs = Model(), []
        with flce.fuse(model, when="always") if is_fused else contextlib.nullcontext():
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient, runs=runs: runs.append(1) or gradient / 2)
            torch.autograd.graph.register_multi_grad_hook(
                list(model.parameters()), lambda gradients, runs=runs: runs.append(2)
            )
            F.cross_entropy(model(IDS)[1].flatten(0, 1), Y).backward()
        expected.append([p.grad for p in model.parameters()])
        counts.append(runs)
    assert counts[0] == counts[1]
    for got, one in zip(expected[1], expected[0], strict=True):
        equal(got, one, 1e-11)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first_lm_head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
        self.second_lm_head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
        self.second_lm_head.weight = self.first_lm_head.weight


def test_two_heads_of_one_weight():
    x = torch.randn(14, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = []
    for is_fused in (False, True):
        model = TwoHeads()
        with flce.fuse(model, when="always") if is_fused else contextlib.nullcontext():
            z = model.first_lm_head(x) + model.second_lm_head(x.tanh())
            (F.cross_entropy(z, Y) + F.cross_entropy(model.first_lm_head(x), Y)).backward()
        made.append(model.first_lm_head.weight.grad)
    equal(made[1], made[0], 1e-11)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_double_backward_is_refused(is_hooked):
    model = Model()
    with flce.fuse(model, when="always"):
        z = model(IDS)[1]
        if is_hooked:
            z.register_hook(lambda gradient: gradient * 1)
        loss = F.cross_entropy(z.flatten(0, 1), Y)
        with pytest.raises(RuntimeError, match="flce: double backward"):
            torch.autograd.grad(loss, z if is_hooked else model.lm_head.weight, create_graph=True)


REPLACED_IN_PLACE = {
    "transpose_": lambda z: z.transpose_(0, 1),
    "unsqueeze_": lambda z: (z / 2).unsqueeze_(0),
    "data": lambda z: setattr(z, "data", torch.ones(z.shape, dtype=z.dtype)),
}


@pytest.mark.parametrize("name", REPLACED_IN_PLACE)
def test_replacements_in_place_are_refused(name):
    model = Model()
    with flce.fuse(model, when="always"), torch.no_grad():
        with pytest.raises(RuntimeError, match="flce.fuse: .*keep their shape and memory"):
            REPLACED_IN_PLACE[name](model(IDS)[1])


def test_gradients_of_leaves_do_not_leak():
    model, alive = Model(), []
    with flce.fuse(model, when="always"):
        for _ in range(3):
            z = model(IDS)[1]
            leaf = own(z)
            F.cross_entropy(leaf.flatten(0, 1), Y).backward()
            alive.append(weakref.ref(z._flce.call))
            del z, leaf
    gc.collect()
    assert [one() for one in alive] == [None] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_the_forward_twice(reentrant):
    counts = []
    for is_fused in (False, True):
        model, runs = Model(), []
        model.body.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        with flce.fuse(model) if is_fused else contextlib.nullcontext():
            loss_of = functools.partial(lambda x, model: model(IDS, IDS)[0] + 0 * x, model=model)
            x = torch.zeros((), dtype=torch.float64, requires_grad=True)
            checkpoint(loss_of, x, use_reentrant=reentrant).backward()
        counts.append(len(runs))
    assert counts == [2, 2]


# ---- several processes ----


class Parts(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        logits = self.lm_head(self.norm(x + torch.tanh(self.body(x))))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


UNITS = [  # (tied, the head's unit, reshard_after_forward, when, read after the backward)
    (True, ("embedding", "lm_head"), True, "always", False),
    (False, ("norm", "lm_head"), True, "labels", True),
    (False, ("norm", "lm_head"), False, "labels", True),
    (False, ("norm", "lm_head"), True, "always", False),
    (False, ("norm", "lm_head"), False, "always", True),
    (False, ("lm_head",), False, "labels", True),
    (False, ("lm_head",), True, "always", True),
]


def steps_of(fused, tied, unit, reshard, when, reads, save):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, rank = Parts(tied), torch.distributed.get_rank()
    handle = flce.fuse(model, when=when, strict=True, save=save) if fused else None
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    modules = [getattr(model, name) for name in unit]
    modules = modules if len(modules) > 1 else modules[0]
    fully_shard(modules, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(9 * step + rank))
        loss, logits = model(ids, ids) if when == "labels" else model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) if loss is None else loss
        loss.backward()
        made += [loss.detach(), *([logits.detach() + 0] if reads else [])]
        optimizer.step()
        optimizer.zero_grad()
    assert handle is None or (sum(handle.losses.values()) == 3 and not handle.fallbacks)
    return made, [whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize("save", ["grads", "stats"])
@on_ranks(2)
def test_units_of_fsdp2(save):
    for case in UNITS:
        expected, got = (steps_of(fused, *case, save) for fused in (False, True))
        for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            equal(one, other, 1e-4)


class Auxiliary(Model):
    def forward(self, ids, labels):
        x = self.body(self.embedding(ids))
        loss = OwnLoss.apply(self.lm_head(x).flatten(0, 1), labels.flatten())
        return loss + x.square().mean()


@on_ranks(2)
def test_a_custom_function_and_an_auxiliary_loss_under_ddp():
    rank, made = torch.distributed.get_rank(), []
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(rank))
    for fused in (False, True):
        model = Auxiliary(body=nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64))
        if fused:
            flce.fuse(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(ids, labels=ids).backward()
        made.append([p.grad for p in model.parameters()])
    for one, other in zip(*made, strict=True):
        equal(one, other)
        gathered = [torch.empty_like(one) for _ in range(2)]
        torch.distributed.all_gather(gathered, one)
        equal(*gathered)
