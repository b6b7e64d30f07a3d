"""Gradients by blocks of rows and classes: calls that are drawn, and shapes of blocks."""

import contextlib
import os
import random

import torch
import torch.distributed as dist

from harness import drawn_checks
from harness.drawn import FUNCTIONS, Draw

# Fewer, as many and more classes than one, two and five blocks of 64 have.
VOCABS = (1, 63, 64, 65, 128, 129, 130, 191, 200, 321)
ROWS, CLASSES = (1, 2, 3, 5, 8, 100), (64, 64, 128)
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shape_of_blocks(pick):
    """The value of FLCE_BLOCKS, by a random.Random. Where the memory of dW is not free, or holds no
    block, all blocks are in the workspace."""
    return f"{pick.choice(('', 'in_dw:'))}{pick.choice(ROWS)}x{pick.choice(CLASSES)}"


def drawn_call(function, seed, ranks=1):
    """(a drawn call whose strategy makes gradients by blocks where its options allow it, the shape
    of its blocks)"""
    pick = random.Random(f"{function} {seed}")
    call = Draw(function, pick.choice(DTYPES), seed, ranks, VOCABS).call()
    if call.options.get("save") in ("auto", "logits"):
        takes_grads = function == "classes" and call.meant["reduction"] != "none"
        takes_grads = takes_grads and "accumulate_into" not in call.options
        call.options["save"] = pick.choice(["stats", "grads"]) if takes_grads else "stats"
    return call, shape_of_blocks(pick)


@contextlib.contextmanager
def blocks_of(shape):
    os.environ["FLCE_BLOCKS"] = shape
    try:
        yield
    finally:
        del os.environ["FLCE_BLOCKS"]


def check_on_ranks(ranks, seeds, device="cpu"):
    """Drawn calls of all functions with a sharded vocabulary. Notes what fails and goes on, so that
    the collectives of the ranks remain the same."""
    shards, texts = drawn_checks.Shards(dist.group.WORLD), []
    for function in FUNCTIONS:
        for seed in seeds:
            call, shape = drawn_call(function, seed, ranks)
            with blocks_of(shape):
                try:
                    drawn_checks.check(call, drawn_checks.Record(), shards, device)
                except AssertionError as error:
                    texts.append(f"blocks of {shape}: {error}")
    assert not texts, f"{len(texts)} calls\n" + "\n".join(texts[:5])
