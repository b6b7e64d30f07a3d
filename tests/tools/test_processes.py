"""The runner of cases in several processes: a case that fails takes no other with it."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from harness import processes
from harness.processes import on_ranks, run_on_ranks

failing = pytest.raises(pytest.fail.Exception)


@on_ranks(2)
def test_a_group_of_its_own():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    assert total == 1 and dist.get_world_size() == 2


def identify(folder):
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))


def pids(folder):
    run_on_ranks(2, identify, folder=folder)
    return [(folder / str(rank)).read_text() for rank in range(2)]


def raise_on(failing):
    """The other ranks wait in a collective. When the rank raises it has a mesh and a Work."""
    mesh = dist.init_device_mesh("cpu", (2,))
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if dist.get_rank() == failing:
        raise ValueError(f"as asked, with {mesh} and {work}")
    dist.barrier()


def end_on(ending):
    if dist.get_rank() == ending:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_on(waiting):
    if dist.get_rank() == waiting:
        signal.pause()


def test_an_exception_ends_its_case_alone(tmp_path):
    before = pids(tmp_path)
    with failing as caught:
        run_on_ranks(2, raise_on, failing=1)
    assert "rank 1: Traceback" in str(caught.value) and "ValueError: as asked" in str(caught.value)
    assert pids(tmp_path) == before  # not even the processes


def test_the_end_of_a_process_ends_its_case_alone(tmp_path):
    with failing as caught:
        run_on_ranks(2, end_on, ending=1)
    assert "rank 1: the process ended with exit code -9" in str(caught.value)
    assert len(set(pids(tmp_path))) == 2


def test_a_hang_ends_its_case_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "IN_CASE", 1)
    with failing as caught:
        run_on_ranks(2, wait_on, waiting=0)
    assert "not ended after 1 s" in str(caught.value)
    monkeypatch.undo()
    assert len(set(pids(tmp_path))) == 2
