"""Threads, a fork and the end of a process around steps on a GPU. Run by test_faults.py; prints
what was as expected."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import flce
from harness import cases

THREADS, STEPS = 4, 5


def make(seed):
    case = cases.make_case(256, 128, 3000, dtype=torch.bfloat16, device="cuda", std=4.0, seed=seed)
    leaves = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    return (*leaves, case.target)


def results(leaves):
    loss = flce.linear_cross_entropy(*leaves, max_memory=130 * 3000 * 4)
    return [loss.detach(), *torch.autograd.grad(loss, leaves[:2])]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def threads():
    """Threads with streams of their own, against one of them alone on the default stream."""
    every = [make(seed) for seed in range(THREADS)]
    expected = [results(leaves) for leaves in every]
    torch.cuda.synchronize()
    start = threading.Barrier(THREADS)

    def run(leaves):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            made = [results(leaves) for _ in range(STEPS)]
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(THREADS) as pool:
        for made, one in zip(pool.map(run, every), expected, strict=True):
            assert all(same(other, one) for other in made)
    print("threads", flush=True)


def fork():
    """A child has no CUDA: its calls raise; the parent's go on."""
    leaves = make(0)
    expected = results(leaves)
    torch.cuda.synchronize()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        try:
            results(leaves)
        except RuntimeError as error:
            print(f"child: {type(error).__name__}", flush=True)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(results(leaves), expected)
    print("fork", flush=True)


def leave():
    """The process ends while a stream has steps to do and a loss waits for its backward."""
    leaves = make(1)
    torch.cuda._sleep(2_000_000_000)
    for _ in range(STEPS):
        results(leaves)
    global kept
    kept = flce.linear_cross_entropy(*leaves)
    print("exit", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    threads()
    fork()
    leave()
