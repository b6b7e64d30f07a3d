"""Interrupts, threads, forks and the end of a process around steps on the CPU. Run by
test_faults.py; prints what was as expected."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import flce

TOKENS, HIDDEN, VOCAB, CHUNK = 96, 32, 4000, 8
OPTIONS = {"max_memory": CHUNK * VOCAB * 4}


CASES = (("grads", None), ("logits", None), ("stats", "grad"), ("linear_loss", "grad"))


class Interrupt(Exception):
    """What a signal's handler raises."""


def make(seed=0):
    random = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, HIDDEN, generator=random) for size in (TOKENS, VOCAB))
    return x.requires_grad_(), w.requires_grad_(), torch.randint(VOCAB, (TOKENS,), generator=random)


def loss_of_rows(logprobs, entropy, rows):
    return -logprobs.sum()


def step(leaves, save="auto", **options):
    if save == "linear_loss":  # its loop over chunks is Python's
        loss = flce.linear_loss(*leaves, loss_of_rows, **OPTIONS, **options)
    else:
        loss = flce.linear_cross_entropy(*leaves, save=save, **OPTIONS, **options)
    loss.backward()
    return loss.detach()


def clear(leaves, begin=None):
    leaves[0].grad, leaves[1].grad = None, None if begin is None else begin.clone()


def forward(leaves):
    with torch.no_grad():
        return [flce.linear_cross_entropy(*leaves, **OPTIONS)]


def results(leaves, begin=None, **options):
    clear(leaves, begin)
    return [step(leaves, **options), *(leaf.grad for leaf in leaves[:2])]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def raise_interrupt(*_):
    raise Interrupt


def interrupts():
    """A signal within a call: Python runs its handler when the operator returns, in linear_loss
    between two chunks. A weight's gradient that accumulate_into adds to has all of the sum by then,
    or nothing."""
    signal.signal(signal.SIGALRM, raise_interrupt)
    leaves, begin = make(), torch.randn(VOCAB, HIDDEN)
    for save, accumulate in CASES:
        options, start = (
            {"save": save, "accumulate_into": accumulate},
            begin if accumulate else None,
        )
        expected = results(leaves, start, **options)
        since = time.perf_counter()
        results(leaves, start, **options)
        duration, ended = time.perf_counter() - since, 0
        for moment in range(40):
            clear(leaves, start)
            try:
                signal.setitimer(signal.ITIMER_REAL, duration * (moment + 0.5) / 40)
                step(leaves, **options)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            except Interrupt:
                ended += 1
            grad = leaves[1].grad
            whole = grad is not None and torch.equal(grad, expected[2])
            nothing = grad is start is None or start is not None and torch.equal(grad, start)
            assert whole or nothing, f"save={save}, moment {moment}: a part of the gradient"
            assert same(results(leaves, start, **options), expected), f"save={save}: the next step"
        assert ended > 5, f"{ended} interrupts"
    print("interrupts")


def threads():
    every = [make(seed) for seed in range(4)]
    expected = [results(leaves) for leaves in every]
    start = threading.Barrier(len(every))

    def run(leaves):
        start.wait()
        return [results(leaves) for _ in range(10)]

    with ThreadPoolExecutor(len(every)) as pool:
        for made, one in zip(pool.map(run, every), expected, strict=True):
            assert all(same(other, one) for other in made)
    print("threads")


def wait_for_ended_threads():
    """While a thread ends it returns its memory to MKL's allocator, whose lock a child that is
    forked then would never get: Python's join does not wait for that."""
    before, now = 0, len(os.listdir("/proc/self/task"))
    while now != before:
        time.sleep(0.2)
        before, now = now, len(os.listdir("/proc/self/task"))


def fork():
    """A child of one thread has the bits of its parent, whose threads it lacks. With a GPU torch
    refuses a backward in the child: its autograd has a thread for each device."""
    wait_for_ended_threads()
    leaves = make()
    made_by = forward if torch.cuda.is_available() else results
    torch.set_num_threads(2)
    made_by(leaves)
    torch.set_num_threads(1)
    expected = made_by(leaves)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        torch.set_num_threads(1)
        os._exit(0 if same(made_by(leaves), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(made_by(leaves), expected)
    print("fork")


def leave():
    """The process ends while a thread computes and a loss waits for its backward."""
    leaves, begun, leaving = make(), threading.Event(), threading.Event()

    def work():
        while not leaving.is_set():
            step(leaves)
            begun.set()
        for _ in range(20):
            step(leaves)
        print("the thread's steps", flush=True)

    global kept
    kept = flce.linear_cross_entropy(*make(1), **OPTIONS)
    threading.Thread(target=work).start()
    begun.wait()
    print("exit", flush=True)
    leaving.set()
    sys.exit(0)


if __name__ == "__main__":
    interrupts()
    threads()
    fork()
    leave()
