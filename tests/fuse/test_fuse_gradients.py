"""Gradients of deferred logits and of steps of them are those of real logits, for autograd.grad,
hooks and writes to them."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import flce
from harness.fuse_compare import Y, compare, flat_loss
from harness.tiny_models import BATCH, HIDDEN, IDS, LENGTH, VOCAB, LogitsMade, Model, equal

pytestmark = pytest.mark.filterwarnings("ignore:flce.fuse")


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


# ---- gradients on their way through the steps ----


def own(z):
    """A leaf with the values of z, as gradient caches make them."""
    return z.detach().requires_grad_()


def kept_by_a_node_hook(z):
    kept = []
    one, two = flat_loss(z), F.cross_entropy(z.flatten(0, 1) / 2, Y)
    two.grad_fn.register_hook(lambda inputs, outputs: kept.extend(inputs))
    return one + z.sin().sum() + two


def doubled_by_a_node_hook(z):
    one, two = flat_loss(z), F.cross_entropy(z.flatten(0, 1) / 2, Y)
    one.grad_fn.register_hook(lambda inputs, _: tuple(g if g is None else g * 2 for g in inputs))
    return one + two


def clamped_in_place(z):
    z.register_hook(lambda gradient: gradient.clamp_(-0.01, 0.01))
    return flat_loss(z)


def written_by_a_view(z):
    def hook(gradient):
        gradient.view(-1)[3:90].zero_()

    z.register_hook(hook)
    return flat_loss(z)


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
    return flat_loss(z)


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
    (gradient,) = torch.autograd.grad(flat_loss(z), z)
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
        loss = flat_loss(z)
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
            alive.append(weakref.ref(z._flce.head_call))
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
