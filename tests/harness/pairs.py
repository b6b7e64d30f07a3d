"""Pairwise parameters of tests: `cases.pairwise`."""

import collections
import itertools

import pytest


def covering_rows(**values):
    """Combinations of values in which every pair of values of every two parameters occurs.

    Greedy: a row begins with the first pair that no row contains yet, and takes for each further
    parameter the value with the most new pairs; among equals the one used least. Deterministic.
    """
    names = list(values)
    sizes = [range(len(values[name])) for name in names]
    pairs = itertools.combinations(range(len(names)), 2)
    missing = {
        ((i, a), (j, b)): None for i, j in pairs for a, b in itertools.product(sizes[i], sizes[j])
    }
    used = collections.Counter()
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in sorted(set(range(len(names))) - row.keys(), key=lambda i: -len(sizes[i])):

            def gain(value, name=name, row=row):
                new = sum(tuple(sorted([(name, value), item])) in missing for item in row.items())
                return new, -used[name, value], -value

            row[name] = max(sizes[name], key=gain)
        row = sorted(row.items())
        used.update(row)
        for pair in itertools.combinations(row, 2):
            missing.pop(pair, None)
        rows.append(tuple(values[names[i]][value] for i, value in row))
    return rows


def _id(value):
    """A function's name; its str has an address, which differs between xdist's processes."""
    return getattr(value, "__name__", None) or str(value)


def pairwise(**values):
    """Parametrizes a test by `covering_rows` instead of the full product of all values."""
    return pytest.mark.parametrize(list(values), covering_rows(**values), ids=_id)
