"""The collectives of a divided vocabulary: the operators that csrc/binding/op_comm.h calls while an
operator of flce runs. A collective begins on the current stream and is asynchronous until waited
for; `slot` is its number among those in flight."""

import threading

import torch.distributed as dist

from .autograd import library

_in_flight = threading.local()
# torch 2.13 renames the functions.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _works():
    if not hasattr(_in_flight, "works"):
        _in_flight.works = {}
    return _in_flight.works


def _group(name):
    return dist.distributed_c10d._resolve_process_group(name)


def _gather(received, sent, group, slot):
    work = _all_gather(received, sent, group=_group(group), async_op=True)
    _works()[group, slot] = work


def _exchange(received, sent, group, slot):
    work = dist.all_to_all_single(received, sent, group=_group(group), async_op=True)
    _works()[group, slot] = work


def _wait(group, slot):
    _works().pop((group, slot)).wait()


for _name, _function in (("gather", _gather), ("exchange", _exchange), ("wait", _wait)):
    library.impl(f"comm_{_name}", _function, "CompositeExplicitAutograd")
