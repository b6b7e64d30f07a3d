"""Gradients by blocks of rows and classes with a sharded vocabulary. On ranks over gloo."""

import pytest
import torch
import torch.distributed as dist

import flce
from harness.blocks import blocks_of, check_on_ranks
from harness.processes import on_ranks, run_on_ranks
from harness.vocab_case import make
from harness.vocab_ranks import on

VOCAB = 300  # five blocks of 64 on one rank, three on each of two


@pytest.mark.parametrize("ranks", [2, 3])
def test_drawn(ranks):
    run_on_ranks(ranks, check_on_ranks, ranks=ranks, seeds=range(15))


@on(3)
@pytest.mark.parametrize("save", ["grads", "stats"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_rank_without_a_class(ranks, save, dtype):
    """And one that has all: the ranks take the shape of an equal share, over which classes of one
    rank are many blocks."""
    ends = [[0, 150, VOCAB], [100, 100, VOCAB], [150, VOCAB, VOCAB], [0, 0, VOCAB], [VOCAB] * 3]
    for at, options in enumerate((
        {}, {"softcap": 3.0}, {"label_smoothing": 0.1}, {"weight": True}, {"valid_vocab": VOCAB - 9}
    )):  # fmt: skip
        case = make(dtype, vocab=VOCAB, ignored=5, **options)
        for shape in ("5x64", "100x128"):
            with blocks_of(shape):
                for how in ({}, {"reduce_input_grad": False}):
                    ranks.compare(case, save=save, ends=ends[at], vocab_parallel=how)


@on_ranks(2)
def test_blocks_of_a_small_max_memory():
    """Chosen for an equal share; the ranks' classes are not equal."""
    plan = flce.plan(
        24, 24, VOCAB, dtype=torch.float64, device="cpu", ranks=2, save="grads", max_memory="4KiB"
    )
    assert plan.block_classes == 64
    rank = dist.get_rank()
    case = make(torch.float64, vocab=VOCAB, tokens=24)
    classes = slice(0, 250) if rank == 0 else slice(250, VOCAB)
    vocab_parallel = flce.VocabParallel(dist.group.WORLD, start=classes.start, vocab=VOCAB)
    results = []
    for own, options in (
        (classes, {"vocab_parallel": vocab_parallel, "max_memory": "4KiB"}),
        (slice(None), {}),
    ):
        x = case.input.clone().requires_grad_()
        w = case.linear_weight[own].clone().requires_grad_()
        bias = case.options["linear_bias"][own]
        loss = flce.linear_cross_entropy(
            x, w, case.target, linear_bias=bias, save="grads", **options
        )
        results.append([loss.detach(), *torch.autograd.grad(loss, (x, w))])
    results[1][2] = results[1][2][classes]
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
