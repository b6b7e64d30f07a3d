"""flce.conformance's suite: a right implementation passes all of it, and each of many wrong ones
fails a case of the group that has to find it. A wrong one is run on cases of that group alone, up
to the first that it fails; the suite's own run would fail there too."""

import pytest
import torch

from flce.conformance import FEATURES, NAMES, Adapter, evaluate, run, suite
from harness import ROOT, wrong, wrong_calls, wrong_options, wrong_rows, wrong_sizes

CPU = torch.device("cpu")
ALL = frozenset((*FEATURES, *NAMES))
SUITE = suite()
MODULES = (wrong_calls, wrong_options, wrong_rows, wrong_sizes)  # each adds to wrong.WRONG

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("group", dict.fromkeys(case.group for case in SUITE))
def test_a_right_implementation_passes_every_case(group):
    cases = [(n, case) for n, case in enumerate(SUITE) if case.group == group]
    record = run(Adapter("right", wrong.right, ALL), cases, CPU)
    assert record.counts == {"passed": len(cases)}, record.failures


def cases_that_find(one):
    for case in SUITE:
        if case.group == one.group and all(getattr(case, k) == v for k, v in one.fields.items()):
            yield case


def passes(loss, case):
    try:
        ratio, _ = evaluate(Adapter("wrong", loss, ALL), case, CPU)
    except wrong.Raised:
        return False
    return ratio <= 1.0


@pytest.mark.parametrize("one", wrong.WRONG, ids=lambda one: one.name)
def test_a_wrong_implementation_fails(one):
    assert not all(passes(one.loss, case) for case in cases_that_find(one))


def test_the_page_has_their_number():
    number = f"{len(wrong.WRONG)} wrong implementations"
    for name in ("docs/conformance.md", "CHANGELOG.md"):
        assert number in " ".join((ROOT / name).read_text().split()), name


def test_the_right_function_passes_as_the_wrong_ones_are_called():
    for case in SUITE:
        if case.group == "calls":
            assert passes(wrong_calls.Call(), case), case
