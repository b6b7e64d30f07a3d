"""The processes of the tests that need several."""

import contextlib
import os

import torch
import torch.distributed as dist


@contextlib.contextmanager
def one_of_two(rank, file):
    """The body of a process that torch.multiprocessing.spawn has started: a group of two over
    gloo. The process ends after it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    yield
    dist.barrier()
    dist.destroy_process_group()
    # A normal exit aborts now and then: gloo's threads may outlive their group.
    os._exit(0)
