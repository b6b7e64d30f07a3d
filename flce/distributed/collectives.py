"""The collectives of a sharded vocabulary: the operators that csrc/binding/collectives.h calls
while an operator of flce runs. A collective begins on the current stream and is asynchronous until
waited for. `id`: which one (flce_collective_id); at most one of each is in flight in a thread."""

import functools
import re
import socket
import threading
import traceback
import weakref

import torch
import torch.distributed as dist

from .. import torch_private, validate
from .._C import call_keeping, getenv
from ..operators import library

_in_flight = threading.local()  # .works: {(group, id): Work}; a backward has a thread of its own
_IDS = ("input", "statistics", "partial_dx", "summed_dx")  # flce_collective_id, as in flce.plan
# torch 2.13 renames the function.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
compared = weakref.WeakSet()  # groups whose class ranges are not compared any more


def _works():
    return _in_flight.__dict__.setdefault("works", {})


_group = torch_private.process_group_of


def group_of(name, rank, ranks):
    """The group; refuses a VocabParallel of another rank or process, as a pickle may have."""
    try:
        group = _group(name)
    except RuntimeError as error:
        if not _is_of_torch(error):
            raise
        validate.refuse("vocab_parallel", "a group of this process", repr(name))
    present = (dist.get_rank(group), dist.get_world_size(group))
    if (rank, ranks) != present:
        expected = "that of rank {} of {}; make a flce.VocabParallel on each rank".format(*present)
        validate.refuse("vocab_parallel", expected, f"that of rank {rank} of {ranks}")
    return group


def _all_gather(group, id, received, sent):
    # No later call compares class ranges. Where this call is of a compiled graph, a rank that falls
    # back to eager would compare them alone.
    compared.add(_group(group))
    _works()[group, id] = _all_gather_single(received, sent, group=_group(group), async_op=True)


def _all_to_all(group, id, received, sent):
    _works()[group, id] = dist.all_to_all_single(received, sent, group=_group(group), async_op=True)


def _wait(group, id):
    work = _works().pop((group, id), None)
    if work is None:
        validate.refuse("id", "that of a collective of the group in flight", id)
    work.wait()


def _abandon():
    # A thread runs one operator at a time. Without their Works the collectives keep their memory
    # until they have ended (binding/collectives.h), and no longer.
    _works().clear()


# ---- symmetric memory ----

_MOST_RANKS = 16  # FLCE_MOST_PEERS
_FLAG_BYTES = 256  # 2 x _MOST_RANKS x uint32, and alignment


def _can_share(group):
    """Whether the group's ranks are GPUs of one host that can read each other's memory, by
    agreement of all. torch's symmetric memory requires that the ranks' device indices differ: not
    where CUDA_VISIBLE_DEVICES gives each process one GPU."""
    ranks, device = dist.get_world_size(group), torch.cuda.current_device()
    allowed = getenv("FLCE_PEERS") != "0" and 1 < ranks <= _MOST_RANKS
    if not allowed or "cuda:nccl" not in dist.get_backend_config(group):
        return False
    visible, of_ranks = range(torch.cuda.device_count()), [None] * ranks
    can_read = torch.cuda.can_device_access_peer
    readable = {peer for peer in visible if peer == device or can_read(device, peer)}
    dist.all_gather_object(of_ranks, (socket.gethostname(), device, readable), group=group)
    hosts, devices, readable = zip(*of_ranks, strict=True)
    of_one_host = len(set(hosts)) == 1 and len(set(devices)) == ranks
    return of_one_host and all(peers.issuperset(devices) for peers in readable)


class _SharedMemory:
    """The symmetric memory of a group, from which its copy engines send."""

    def __init__(self, group):
        self.group, self.possible = weakref.ref(group), _can_share(group)
        self.buffers = {}  # by id: bytes, addresses
        self.allocations = []  # a captured CUDA graph may have the addresses of a smaller one

    def allocate(self, id, size):
        group = self.group()
        data = -(-size // _FLAG_BYTES) * _FLAG_BYTES
        memory, handle = torch_private.symmetric_memory(data + _FLAG_BYTES, group)
        memory[data:] = 0
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        self.allocations.append((memory, handle))
        addresses = [base + offset for base in handle.buffer_ptrs for offset in (0, data)]
        self.buffers[id] = size, addresses


_shared = {}  # by the group's name; a later group may reuse a name


def _send_buffer(name, id, size):
    """(data, flags) of each rank, as addresses, in memory that all ranks have mapped, of at least
    `size` bytes on each; [] where there is none. The first call and a larger `size` synchronise all
    ranks, which is not possible while a CUDA graph is captured."""
    group, shared = _group(name), _shared.get(name)
    compared.add(group)  # as in _all_gather
    captures = torch.cuda.is_current_stream_capturing()
    if shared is None or shared.group() is not group:
        if captures:
            return []
        shared = _shared[name] = _SharedMemory(group)
    if shared.possible and not captures and shared.buffers.get(id, (0,))[0] < size:
        shared.allocate(id, size)
    available, addresses = shared.buffers.get(id, (0, []))
    return addresses if available >= size else []


# ---- errors ----


def _text(failed):
    error, (function, group, id, *_) = failed
    which = _IDS[id] if id in range(len(_IDS)) else id
    which = f"{function.__name__.strip('_')} ({which}) of group {group!r}"
    return f"{which}: {type(error).__name__}: {error}"


def _last_error():
    failed = _in_flight.__dict__.get("failed")
    return _text(failed) if failed else ""


_ADDED = re.compile(r"; with accumulate_into .*? this backward's sum")  # op.cpp


def _is_of_torch(error):
    """Whether an exception is an error of torch.distributed, and not what a signal's handler has
    raised while a collective ran, which may have any class."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    # The last one of Python: these two call torch's functions of C++.
    callers = "torch.", f"{__name__}.", f"{torch_private.__name__}."
    return isinstance(error, RuntimeError) and f"{module}.".startswith(callers)


def pending_error(text):
    """The exception to raise for an operator of this thread that failed in a collective, once; None
    if there is none. An interrupt is that exception itself, with its traceback; an error of
    torch.distributed is the cause of a RuntimeError that names the collective and its group, and
    has what the operator's error `text` says of a gradient that it has begun to add to."""
    failed = _in_flight.__dict__.pop("failed", None)
    if failed is None or not _is_of_torch(failed[0]):
        return failed and failed[0]
    added = _ADDED.search(text)
    error = RuntimeError(f"flce: exchange failed: {_text(failed)}{added[0] if added else ''}")
    error.__cause__ = failed[0]
    return error


for _function in (_all_gather, _all_to_all, _wait, _send_buffer):
    _keeping = functools.partial(call_keeping, _in_flight, _function)
    library.impl(f"comm{_function.__name__}", _keeping, "CompositeExplicitAutograd")
library.impl("comm_abandon", _abandon, "CompositeExplicitAutograd")
library.impl("comm_error", _last_error, "CompositeExplicitAutograd")
