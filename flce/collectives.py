"""The collectives of a divided vocabulary: the operators that csrc/binding/op_comm.h calls while an
operator of flce runs. A collective begins on the current stream and is asynchronous until waited
for; `slot` is its number among those in flight."""

import socket
import threading

import torch
import torch.distributed as dist

from ._C import getenv
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


# ---- memory of all GPUs of a host ----

_FLAG_BYTES = 256  # 2 x 16 ranks x uint32, and alignment
_shares_memory = {}  # by group: whether its ranks can read each other's memory
_placed = {}  # (group, slot): the tensor of this rank and its handle


def _can_share(group):
    """Whether the group's ranks are GPUs of one host that can read each other's memory, by
    agreement of all."""
    if getenv("FLCE_PEERS") == "0" or dist.get_backend(group) != "nccl":
        return False
    ranks, own = dist.get_world_size(group), torch.cuda.current_device()
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    reads = all(torch.cuda.can_device_access_peer(own, other) for other in others)
    mine = (socket.gethostname(), own, reads and 1 < ranks <= 16)
    all_of = [None] * ranks
    dist.all_gather_object(all_of, mine, group=group)
    hosts, devices, able = zip(*all_of, strict=True)
    return len(set(hosts)) == 1 and len(set(devices)) == ranks and all(able)


def shares_memory():
    """Whether a group of this process exchanges by copy engines."""
    return any(_shares_memory.values())


def _place(name, slot, size):
    """(data, flags) of each rank, as addresses, in memory that all ranks have mapped, of `size`
    bytes on each; [] where there is none. Synchronises; a graph being captured cannot."""
    if torch.cuda.is_current_stream_capturing():
        return []
    group = _group(name)
    if name not in _shares_memory:
        _shares_memory[name] = _can_share(group)
    if not _shares_memory[name]:
        return []
    from torch.distributed import _symmetric_memory as symmetric

    data = -(-size // _FLAG_BYTES) * _FLAG_BYTES
    memory = symmetric.empty(data + _FLAG_BYTES, dtype=torch.uint8, device="cuda")
    handle = symmetric.rendezvous(memory, group)
    memory[data:] = 0
    torch.cuda.synchronize()
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    _placed[name, slot] = memory, handle
    return [base + offset for base in handle.buffer_ptrs for offset in (0, data)]


for _name, _function in (
    ("gather", _gather),
    ("exchange", _exchange),
    ("wait", _wait),
    ("place", _place),
):
    library.impl(f"comm_{_name}", _function, "CompositeExplicitAutograd")
