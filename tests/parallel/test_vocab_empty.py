"""Ranks of a sharded vocabulary without a class or with one, each in turn, in every function. On
ranks over gloo; test_vocab_gpus.py runs them on GPUs."""

import pytest
import torch

from harness.vocab_case import VOCAB
from harness.vocab_functions import compare_all, compare_in_16_bits, ends_with
from harness.vocab_ranks import on


@on(2, 4)
@pytest.mark.parametrize("own", [0, 1])
def test_each_rank_with_few_classes(ranks, own):
    for rank in range(ranks.ranks):
        compare_all(ranks, ends_with(rank, ranks.ranks, own))


@on(4)
def test_one_rank_with_all_classes(ranks):
    for holder in range(ranks.ranks):
        compare_all(ranks, [0] * holder + [VOCAB] * (ranks.ranks - holder))


@on(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits(ranks, dtype):
    compare_in_16_bits(ranks, dtype, "cpu", 96, 64, 1003)
