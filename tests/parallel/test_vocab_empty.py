"""Ranks of a sharded vocabulary without a class, each in turn, in every function. On ranks over
gloo; test_vocab_gpus.py runs them on GPUs."""

from harness.vocab_case import VOCAB
from harness.vocab_functions import compare_all, ends_without
from harness.vocab_ranks import on


@on(2, 4)
def test_each_rank_without_a_class(ranks):
    for empty in range(ranks.ranks):
        compare_all(ranks, ends_without(empty, ranks.ranks))


@on(4)
def test_one_rank_with_all_classes(ranks):
    for holder in range(ranks.ranks):
        compare_all(ranks, [0] * holder + [VOCAB] * (ranks.ranks - holder))
