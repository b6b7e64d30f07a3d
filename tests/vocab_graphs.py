"""A sharded vocabulary under torch.compile: several losses in a graph, sizes that change, groups.
Run by test_vocab_parallel.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from vocab_ranks import on

import flce


def losses(rows, vocab, hidden=64):
    """Operands of three heads' calls on one input, and the loss that torch makes of them."""
    generator = torch.Generator().manual_seed(2)
    x, p, w = (
        torch.randn(*size, generator=generator).double()
        for size in ((rows, hidden), (hidden, hidden), (vocab, hidden))
    )
    p, y = p / 8, torch.randint(vocab, (rows,), generator=generator)
    leaves = [one.requires_grad_() for one in (x, p, w)]
    inputs = x, torch.tanh(x @ p), torch.tanh(x @ p @ p)
    loss = sum(F.cross_entropy(one @ w.T, y.roll(k)) / (k + 1) for k, one in enumerate(inputs))
    return [one.detach() for one in (x, p, w)], y, loss.detach(), torch.autograd.grad(loss, leaves)


@on(4)
def several_losses(ranks):
    """One head called three times in a graph, the last rank without a class: its Inductor orders
    the calls as that of the others does."""
    torch._inductor.config.compile_threads = 1
    (x, p, w), y, expected, gradients = losses(16, 9)
    classes, vp = ranks.classes(9), ranks.parallel(9)
    for save in ("logits", "stats", "grads"):

        def call(x, p, w, save=save):
            inputs = x, torch.tanh(x @ p), torch.tanh(x @ p @ p)
            return sum(
                flce.linear_cross_entropy(one, w, y.roll(k), vocab_parallel=vp, save=save) / (k + 1)
                for k, one in enumerate(inputs)
            )

        leaves = [one.clone().requires_grad_() for one in (x, p, w[classes])]
        loss = torch.compile(call, fullgraph=True)(*leaves)
        made = torch.autograd.grad(loss, leaves)
        ranks.agree(f"loss {save}", loss.detach(), expected, 1e-12)
        for name, got, true in zip(
            "xpw", made, (*gradients[:2], gradients[2][classes]), strict=True
        ):
            ranks.agree(f"gradient of {name}, {save}", got, true, 1e-12)
    torch._dynamo.reset()


@on(2)
def sizes_that_change(ranks):
    """Shards, rows and valid_vocab of several sizes in one compiled function."""
    for ways in ({}, {"vocab": True}):

        def call(x, w, y, valid, ways=ways):
            vocab = 2 * w.shape[0] if ways else None
            vp = flce.VocabParallel(dist.group.WORLD, vocab=vocab)
            return flce.linear_cross_entropy(x, w, y, vocab_parallel=vp, valid_vocab=valid)

        function = torch.compile(call, backend="aot_eager", dynamic=True)
        for rows, share, valid in ((8, 21, None), (9, 15, 17), (10, 12, 20)):
            x = torch.randn(rows, 16).double()
            w, y = torch.randn(2 * share, 16).double(), torch.randint(17, (rows,))
            own = w[ranks.rank * share : (ranks.rank + 1) * share]
            expected = F.cross_entropy(x @ w[: valid or 2 * share].T, y)
            ranks.agree(f"{rows} {share}", function(x, own, y, valid), expected, 1e-12)
        torch._dynamo.reset()


@on(2)
def denominators(ranks):
    """num_items over a group inside of a compiled function."""
    target = torch.tensor([3, -100, 5])

    def count(target):
        return flce.num_items(target, dist.group.WORLD, averaged_over=2)

    made = torch.compile(count, backend="aot_eager", fullgraph=True)(target)
    ranks.agree("num_items", made, torch.tensor(2.0).double(), 0.0)
    torch._dynamo.reset()
