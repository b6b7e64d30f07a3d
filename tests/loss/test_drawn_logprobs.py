"""Drawn calls of each function of log-probabilities against the definition (drawn.py). FLCE_DRAWS
sets how many of each; a failing one has its seed in its message, and FLCE_DRAW=SEED runs it
alone."""

import os

import pytest
import torch
import torch.distributed as dist

from harness import drawn_checks
from harness.drawn import FUNCTIONS, Draw
from harness.processes import run_on_ranks

DRAWS, ON_RANKS = (int(os.environ.get("FLCE_DRAWS", default)) for default in ("40", "10"))
SHARES = {torch.float64: 1.0, torch.float32: 0.4, torch.bfloat16: 0.4, torch.float16: 0.4}


def seeds(dtype, draws=DRAWS):
    if "FLCE_DRAW" in os.environ:
        return [int(os.environ["FLCE_DRAW"])]
    return range(int(draws * SHARES[dtype]))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", SHARES, ids=str)
def test_drawn(device, function, dtype):
    record = drawn_checks.Record()
    for seed in seeds(dtype):
        drawn_checks.check(Draw(function, dtype, seed).call(), record, device=device)
    print(f"\n{function} {dtype}: {record.text()}")


def on_ranks(ranks, draws):
    """Notes what fails and goes on, so that the collectives of the ranks remain the same."""
    shards, texts = drawn_checks.Shards(dist.group.WORLD), []
    for function in FUNCTIONS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            record = drawn_checks.Record()
            for seed in seeds(dtype, draws):
                try:
                    drawn_checks.check(Draw(function, dtype, seed, ranks).call(), record, shards)
                except AssertionError as error:
                    texts.append(str(error))
            print(f"rank {shards.rank} of {ranks}, {function} {dtype}: {record.text()}")
    assert not texts, f"{len(texts)} calls\n" + "\n".join(texts[:5])


@pytest.mark.parametrize("ranks", [2, 3])
def test_drawn_shards(ranks):
    run_on_ranks(ranks, on_ranks, ranks=ranks, draws=ON_RANKS)
