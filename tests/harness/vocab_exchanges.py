"""The exchanges of a sharded vocabulary's ranks: seen, interrupted, and what ranks refuse."""

import contextlib
import itertools
import typing
import unittest.mock

from torch.profiler import ProfilerActivity, profile

from flce.distributed import collectives

# torch.distributed's operators, by what they do.
GATHERED, EXCHANGED = "_allgather_base_", "alltoall_base_"
COMPARED = "allgather_"  # two for each all_gather_object, its sizes and its bytes


class Exchange(typing.NamedTuple):
    """A collective that has begun, and the bytes of its buffers, if they are single tensors."""

    name: str
    received: int
    sent: int


@contextlib.contextmanager
def exchanges():
    """The list of the Exchanges that begin, complete at the end."""
    found = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        yield found
    for event in trace.profiler.kineto_results.events():
        space, _, name = event.name().partition("::")
        if space == "c10d":
            buffers = zip(event.shapes()[:2], event.dtypes()[:2], strict=True)
            sizes = [shape[0] if dtype == "unsigned char" else 0 for shape, dtype in buffers]
            found.append(Exchange(name, *sizes))


def comparisons(found):
    """How many times objects of the ranks were compared."""
    return sum(one.name == COMPARED for one in found) // 2


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
