"""The collectives of a sharded vocabulary: the operators that csrc/binding/op_comm.h calls while an
operator of flce runs. A collective begins on the current stream and is asynchronous until waited
for. `id`: which one (flce_collective_id); at most one of each is in flight in a thread."""

import contextlib
import functools
import socket
import threading
import weakref

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from . import parallel, validate
from ._C import getenv
from .autograd import library

_in_flight = threading.local()  # forward and backward run in different threads
# torch 2.13 renames the function.
_renamed = hasattr(dist, "all_gather_single")
_all_gather_single = dist.all_gather_single if _renamed else dist.all_gather_into_tensor
_compared = weakref.WeakSet()  # groups whose class ranges are not compared any more


def _works():
    if not hasattr(_in_flight, "works"):
        _in_flight.works = {}
    return _in_flight.works


def _group(name):
    return dist.distributed_c10d._resolve_process_group(name)


def check_group(shard):
    """Refuses a VocabShard of another rank or process, as a pickle may have."""
    try:
        group = _group(shard.group)
    except Exception:
        validate.refuse("vocab_parallel", "a group of this process", repr(shard.group))
    given, present = (shard.rank, shard.ranks), (dist.get_rank(group), dist.get_world_size(group))
    if given != present:
        expected = "that of rank {} of {}; make a flce.VocabParallel on each rank".format(*present)
        validate.refuse("vocab_parallel", expected, "that of rank {} of {}".format(*given))


def _communicates(group, tensor):
    """Whether ranks can exchange objects: not where the tensors or the group are fake, nor while a
    CUDA graph is captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return dist.get_backend(group) != "fake" and detect_fake_mode((tensor,)) is None


def compare_ranges(shard, linear_weight):
    """Compares the class ranges of all ranks in a group's first call: all ranks have to take part
    in the same call."""
    group = _group(shard.group)
    if group in _compared or not _communicates(group, linear_weight):
        return
    ranges = [None] * shard.ranks
    own = shard.start, shard.vocab, len(linear_weight)
    device = linear_weight.device  # NCCL exchanges objects through the current device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(ranges, own, group=group)
    parallel.check_ranges(shard, ranges)
    _compared.add(group)


def _all_gather(received, sent, group, id):
    # No later call compares class ranges. Where this call is of a compiled graph, a rank that falls
    # back to eager would compare them alone.
    _compared.add(_group(group))
    work = _all_gather_single(received, sent, group=_group(group), async_op=True)
    _works()[group, id] = work


def _all_to_all(received, sent, group, id):
    work = dist.all_to_all_single(received, sent, group=_group(group), async_op=True)
    _works()[group, id] = work


def _wait(group, id):
    _works().pop((group, id)).wait()


# ---- symmetric memory ----

_MOST_RANKS = 16  # FLCE_MOST_PEERS
_FLAG_BYTES = 256  # 2 x _MOST_RANKS x uint32, and alignment


def _can_share(group):
    """Whether the group's ranks are GPUs of one host that can read each other's memory, by
    agreement of all. torch's symmetric memory requires that the ranks' device indices differ: not
    where CUDA_VISIBLE_DEVICES gives each process one GPU."""
    ranks, own = dist.get_world_size(group), torch.cuda.current_device()
    if getenv("FLCE_PEERS") == "0" or not 1 < ranks <= _MOST_RANKS:
        return False
    if "cuda:nccl" not in dist.get_backend_config(group):
        return False
    of_ranks, readable = [None] * ranks, [None] * ranks
    dist.all_gather_object(of_ranks, (socket.gethostname(), own), group=group)
    hosts, devices = zip(*of_ranks, strict=True)
    if len(set(hosts)) > 1 or len(set(devices)) < ranks:
        return False
    others = [device for device in devices if device != own]
    visible = max(devices) < torch.cuda.device_count()
    reads = visible and all(torch.cuda.can_device_access_peer(own, other) for other in others)
    dist.all_gather_object(readable, reads, group=group)
    return all(readable)


class _SharedMemory:
    """The symmetric memory of a group, from which its copy engines send."""

    def __init__(self, group):
        self.group = weakref.ref(group)
        self.possible = _can_share(group)
        self.buffers = {}  # by id: bytes, addresses
        self.kept = []  # a captured CUDA graph may have the addresses of a smaller one

    def allocate(self, id, size):
        from torch.distributed import _symmetric_memory as symmetric

        group = self.group()
        data = -(-size // _FLAG_BYTES) * _FLAG_BYTES
        memory = symmetric.empty(data + _FLAG_BYTES, dtype=torch.uint8, device="cuda")
        handle = symmetric.rendezvous(memory, group)
        memory[data:] = 0
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
        self.kept.append((memory, handle))
        addresses = [base + offset for base in handle.buffer_ptrs for offset in (0, data)]
        self.buffers[id] = size, addresses


_shared = {}  # by the group's name; a later group may reuse a name


def shares_memory():
    """Whether a group of this process exchanges by copy engines."""
    return any(shared.possible for shared in _shared.values())


def _send_buffer(name, id, size):
    """(data, flags) of each rank, as addresses, in memory that all ranks have mapped, of at least
    `size` bytes on each; [] where there is none. The first call and a larger `size` synchronise all
    ranks, which is not possible while a CUDA graph is captured."""
    group, shared = _group(name), _shared.get(name)
    _compared.add(group)  # as in _all_gather
    captures = torch.cuda.is_current_stream_capturing()
    if shared is None or shared.group() is not group:
        if captures:
            return []
        shared = _shared[name] = _SharedMemory(group)
    if shared.possible and not captures and shared.buffers.get(id, (0,))[0] < size:
        shared.allocate(id, size)
    held, addresses = shared.buffers.get(id, (0, []))
    return addresses if held >= size else []


def _noting(name, function):
    """`function`, which keeps the text of its exception for flce::comm_error."""

    @functools.wraps(function)
    def called(*args):
        try:
            return function(*args)
        except Exception as error:
            group = next((arg for arg in args if isinstance(arg, str)), "")
            _in_flight.error = f"{name} of group {group!r}: {type(error).__name__}: {error}"
            raise

    return called


for _name, _function in (
    ("all_gather", _all_gather),
    ("all_to_all", _all_to_all),
    ("wait", _wait),
    ("send_buffer", _send_buffer),
):
    _function = _noting(_name, _function)
    library.impl(f"comm_{_name}", _function, "CompositeExplicitAutograd")
library.impl("comm_error", lambda: _in_flight.error, "CompositeExplicitAutograd")
