"""The processes of the tests that need several."""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist


@contextlib.contextmanager
def one_of(rank, file, ranks=2, seconds=600):
    """The body of a process that torch.multiprocessing.spawn has started: a group of `ranks` over
    gloo, whose collectives wait `seconds` for each other. The process ends after it."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    store = {"init_method": f"file://{file}", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", timeout=timeout, **store)
    yield
    dist.barrier()
    dist.destroy_process_group()
    # A normal exit aborts now and then: gloo's threads may outlive their group.
    os._exit(0)
