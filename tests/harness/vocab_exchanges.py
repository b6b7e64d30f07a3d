"""The exchanges of a sharded vocabulary's ranks: counted, interrupted, and what ranks refuse."""

import contextlib
import itertools
import unittest.mock

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from flce.distributed import collectives


@contextlib.contextmanager
def counted_exchanges():
    """The list of the mocks that count what begins."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                unittest.mock.patch.object(module, name, wraps=getattr(module, name))
            )
            for module, name in (
                (collectives, "_all_gather_single"), (dist, "all_to_all_single"),
                (functional, "all_reduce"), (dist, "all_gather_object"),
            )
        ]  # fmt: skip


def raised(ranks, what, error, function):
    """Notes where `function` does not raise exactly `error` with `what` at its beginning."""
    try:
        function()
    except Exception as caught:
        same = type(caught) is error and str(caught).startswith(what)
        ranks.note(same, f"{what}: {type(caught).__name__}: {caught}")
    else:
        ranks.note(False, f"{what}: nothing was raised")


class Preempted(RuntimeError):
    """What a signal's handler raises."""


def raise_preempted(*_):
    raise Preempted("by the scheduler")


@contextlib.contextmanager
def interrupting(name, at, how=raise_preempted):
    """Calls `how` in the call number `at` of a function of collectives: before a collective begins
    (_group), or after it has begun and before it is waited for (_works)."""
    function, calls = getattr(collectives, name), itertools.count()

    def counted(*args):
        if next(calls) == at:
            how()
        return function(*args)

    with unittest.mock.patch.object(collectives, name, counted):
        yield
