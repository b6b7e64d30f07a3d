"""vocab_parallel over gloo: two and four processes run the functions of vocab_cases.py,
vocab_calls.py, vocab_graphs.py and vocab_others.py, each of which is a test here."""

import pytest
import torch.distributed as dist
import vocab_calls  # noqa: F401  registers its functions
import vocab_cases  # noqa: F401
import vocab_graphs  # noqa: F401
import vocab_others  # noqa: F401
from processes import failures_of
from vocab_ranks import CASES

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    """{ranks: {name: text}} of the functions that this run of pytest has selected. One start of
    processes for each number of ranks, because a start takes as long as hundreds of calls."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    found = {}
    for ranks in CASES:
        names = [
            given["name"] for given in chosen if given.get("ranks") == ranks and "name" in given
        ]
        if names:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            found[ranks] = failures_of(ranks, folder, __name__, names)
    return found


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, functions in CASES.items() for name in functions]
)
def test_ranks(failures, ranks, name):
    if text := failures[ranks][name]:
        pytest.fail(text, pytrace=False)
