"""vocab_parallel over gloo: the functions of vocab_cases.py and of the other modules imported here,
each of which two or four processes run."""

import pytest
import vocab_calls  # noqa: F401  registers its functions
import vocab_cases  # noqa: F401
import vocab_divergence  # noqa: F401
import vocab_failures  # noqa: F401
import vocab_graphs  # noqa: F401
import vocab_others  # noqa: F401
from processes import run_on_ranks
from vocab_ranks import CASES, Ranks

from flce.distributed import parallel


def run_case(ranks, name):
    own = Ranks()
    CASES[ranks][name](own)
    assert not own.failures, "\n".join(own.failures)


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, functions in CASES.items() for name in functions]
)
def test_ranks(ranks, name):
    run_on_ranks(ranks, run_case, ranks=ranks, name=name)


def test_a_rank_without_classes_may_begin_anywhere():
    """Each has start, vocab, rows, first class, all classes, error."""
    parallel._check_ranges([(0, 6, 6, 0, 6, ""), (3, 6, 0, 3, 6, "")])
