"""Tests of the tests' own helper: pairwise parameters."""

import itertools

import pytest

from harness import cases

SIZES = [(2, 2), (4, 9, 3, 2, 3), (1, 5, 1, 4), (2, 2, 2, 2, 2, 2, 2), (3, 12, 12)]


def make(sizes):
    return {f"p{i}": [f"{i}.{value}" for value in range(size)] for i, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_occurs(sizes):
    """In at most half as many rows more than the two largest parameters require."""
    values = make(sizes)
    rows = cases.covering_rows(**values)
    for (i, some), (j, others) in itertools.combinations(enumerate(values.values()), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(some, others))
    least = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert least <= len(rows) <= max(1.5 * least, least + 4)
    assert len(set(rows)) == len(rows)
