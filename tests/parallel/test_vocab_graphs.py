"""A sharded vocabulary under torch.compile: several losses in a graph, sizes that change, groups.
On ranks over gloo."""

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import flce
from harness.vocab_ranks import on


def operands(rows, vocab, hidden=64):
    generator = torch.Generator().manual_seed(2)
    sizes = (rows, hidden), (hidden, hidden), (vocab, hidden), (vocab,)
    x, p, w, b = (torch.randn(*size, generator=generator) for size in sizes)
    return (x, p / 8, w, b), torch.randint(vocab, (rows,), generator=generator)


def three_losses(loss_of, x, p, w, b, y):
    """One head called three times, as for several tokens ahead."""
    first = loss_of(x, w, y, b)
    second = loss_of(torch.tanh(x @ p), w, y.roll(-1), None)
    return first + 0.3 * second + 0.1 * loss_of(torch.tanh(x @ p @ p), w, y.roll(-2), b)


def agree_compiled(ranks, name, function, own, expected, gradients, bar):
    """The compiled function's loss of a rank's own tensors, and its gradients, are these."""
    own = [one.detach().clone().requires_grad_() for one in own]
    loss = torch.compile(function, fullgraph=True)(*own)
    ranks.agree(f"loss {name}", loss, expected, 1e-5)
    for at, pair in enumerate(zip(torch.autograd.grad(loss, own), gradients, strict=True)):
        ranks.agree(f"gradient {at} {name}", *pair, bar)
    torch._dynamo.reset()


@on(4)
def test_several_losses(ranks):
    """The last rank has no class: its Inductor orders the calls as that of the others does."""
    torch._inductor.config.compile_threads = 1
    whole, y = operands(16, 9)
    classes, vp = ranks.classes(9), ranks.parallel(9)
    leaves = [one.clone().requires_grad_() for one in whole]
    expected = three_losses(lambda x, w, y, b: F.cross_entropy(F.linear(x, w, b), y), *leaves, y)
    gradients = torch.autograd.grad(expected, leaves)
    gradients = (*gradients[:2], gradients[2][classes], gradients[3][classes])
    own = *whole[:2], whole[2][classes], whole[3][classes]
    for save in ("logits", "stats", "grads"):

        def loss_of(x, w, y, b, save=save):
            return flce.linear_cross_entropy(x, w, y, linear_bias=b, vocab_parallel=vp, save=save)

        function = functools.partial(three_losses, loss_of, y=y)
        agree_compiled(ranks, save, function, own, expected, gradients, 1e-5)


class SummedOutput(torch.autograd.Function):
    """As Megatron's reduce_from_tensor_model_parallel_region."""

    @staticmethod
    def forward(ctx, x):
        return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        return grad


class SummedGradient(torch.autograd.Function):
    """As Megatron's copy_to_tensor_model_parallel_region."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return functional.wait_tensor(functional.all_reduce(grad, "sum", dist.group.WORLD))


def layers_and_losses(loss_of, begin, end, x, a, b, w, y):
    """Two tensor-parallel layers, with a loss before each and after the last."""
    loss = loss_of(x, w, y)
    for ahead in (1, 2):
        x = x + end(torch.tanh(begin(x) @ a.T) @ b.T)
        loss = loss + 0.3 * loss_of(x, w, y.roll(-ahead))
    return loss


@on(2)
def test_layers_between_losses(ranks):
    """torch's collectives of the group keep their order too, though the shards are unequal."""
    torch._inductor.config.compile_threads = 1
    (x, _, w, _), y = operands(16, 5)
    a, b = torch.randn(128, 64) / 8, torch.randn(64, 128) / 11
    leaves = [one.clone().requires_grad_() for one in (x, a, b, w)]

    def plain(x, w, y):
        return F.cross_entropy(x @ w.T, y)

    expected = layers_and_losses(plain, torch.clone, torch.clone, *leaves, y)
    gradients = torch.autograd.grad(expected, leaves)
    units, classes = slice(64 * ranks.rank, 64 * ranks.rank + 64), ranks.classes(5)
    gradients = gradients[0], gradients[1][units], gradients[2][:, units], gradients[3][classes]
    own = x, a[units], b[:, units], w[classes]
    for save in ("logits", "stats"):
        options = {"vocab_parallel": ranks.parallel(5), "save": save}
        loss_of = functools.partial(flce.linear_cross_entropy, **options)
        regions = SummedGradient.apply, SummedOutput.apply
        function = functools.partial(layers_and_losses, loss_of, *regions, y=y)
        agree_compiled(ranks, save, function, own, expected, gradients, 1e-4)


@on(2)
def test_sizes_that_change(ranks):
    """Several sizes in one compiled function, unbroken where it is given the VocabParallel."""
    for way in ("equal shards", "vocab", "sequence"):
        given = ranks.parallel(sequence=True) if way == "sequence" else None

        def call(x, w, y, valid, weight, way=way, given=given):
            vocab = 2 * w.shape[0] if way == "vocab" else None
            vp = given or flce.VocabParallel(dist.group.WORLD, vocab=vocab)
            options = {"vocab_parallel": vp, "valid_vocab": valid, "weight": weight}
            return flce.linear_cross_entropy(x, w, y, label_smoothing=0.1, **options)

        settings = {"backend": "aot_eager", "dynamic": True, "fullgraph": given is not None}
        function = torch.compile(call, **settings)
        for rows, share, valid in ((8, 21, None), (10, 15, 17), (12, 12, 20)):
            x, w = torch.randn(rows, 16).double(), torch.randn(2 * share, 16).double()
            y, weight = torch.randint(17, (rows,)), torch.rand(2 * share).double()
            leaves = x.requires_grad_(), w.requires_grad_()
            weights, smoothing = weight[: valid or 2 * share], {"label_smoothing": 0.1}
            expected = F.cross_entropy(x @ w[: len(weights)].T, y, weights, **smoothing)
            dx, dw = torch.autograd.grad(expected, leaves)
            classes = slice(ranks.rank * share, (ranks.rank + 1) * share)
            rows_of = ranks.rows if way == "sequence" else torch.clone
            own = [t.detach().clone().requires_grad_() for t in (rows_of(x), w[classes])]
            made = function(*own, y, valid, weight)
            made.backward()
            triples = ("loss", made, expected), ("dX", own[0].grad, rows_of(dx))
            for name, got, true in (*triples, ("dW", own[1].grad, dw[classes])):
                ranks.agree(f"{name} {way} {rows} {share}", got, true)
        torch._dynamo.reset()


@on(2)
def test_denominators(ranks):
    target = torch.tensor([3, -100, 5])

    def count(target):
        return flce.num_items(target, dist.group.WORLD, averaged_over=2)

    made = torch.compile(count, backend="aot_eager", fullgraph=True)(target)
    ranks.agree("num_items", made, torch.tensor(2.0).double(), 0.0)
