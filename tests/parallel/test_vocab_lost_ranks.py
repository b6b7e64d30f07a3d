"""A rank that raises, is interrupted or killed in the middle of a call and leaves: every other one
ends with an error, soon after its group's timeout at the latest. Over gloo; on two and four GPUs
through NCCL and by copy engines.

On GPUs a call returns before its exchanges have run. So the others go on to the next collective of
their group, as training does; it is that one's timeout which ends a wait for copy engines
(docs/parallel-reference.md, Limits). NCCL's watchdog then aborts the process. Every case has
processes of its own, and cases run side by side: nearly all of their time is waiting.
"""

import concurrent.futures
import contextlib
import datetime
import fcntl
import functools
import itertools
import os
import resource
import signal
import typing
import unittest.mock

import pytest
import torch
import torch.distributed as dist

import flce
from flce.distributed import collectives
from harness import cases
from harness.processes import Processes
from harness.vocab_exchanges import interrupting

TOKENS, HIDDEN, VOCAB = 256, 64, 1003
SECONDS = 5  # the group's timeout; harness.processes has AFTER_FAILURE for the end of all ranks
AT_ONCE = 4  # cases
LEFT = 3  # exit code of a rank that has left with an exception
WATCHDOG = "exit code -6"  # NCCL's aborts
NCCL = {"NCCL_NVLS_ENABLE": "0"}
# Without them the watchdog first waits a minute, for files that describe the timeout.
NCCL |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
# Environment variables. They are set before a rank's group exists, whose threads read them.
SETTINGS = {
    "gloo": {},
    "nccl": {**NCCL, "FLCE_PEERS": "0"},
    "copy engines": {**NCCL, "FLCE_PEERS": "1"},
}


class AsAskedError(Exception):
    pass


def raise_error():
    raise AsAskedError


def interrupt():
    """During a backward on a GPU, which has a thread of its own, it comes out after the call."""
    signal.raise_signal(signal.SIGINT)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


# What a rank does, and how its process then ends: the name of an exception, or the exit code.
FAULTS = {
    "raises": (raise_error, "AsAskedError"),
    "is interrupted": (interrupt, "KeyboardInterrupt"),
    "is killed": (kill, -signal.SIGKILL),
}


# ---- calls, in two parts: forward, and backward of what it gives ----


def loss_of(x, w, y, **options):
    return flce.linear_cross_entropy(x, w, y, **options)


def loss_of_own_tokens(x, w, y, vocab_parallel, **options):
    own = x.chunk(vocab_parallel.ranks)[vocab_parallel.rank]
    return loss_of(own, w, y, vocab_parallel=vocab_parallel, **options)


def logprobs(x, w, y, **options):
    made, entropy = flce.linear_logprobs(x, w, y, **options)
    return made.sum() + entropy.sum()


def divergence(x, w, y, **options):
    return flce.linear_divergence(x, w, x.detach(), 0.5 * w.detach(), **options)


class Call(typing.NamedTuple):
    """`fails_in`: the part in which the rank fails, 0 the forward, 1 the backward."""

    function: typing.Callable
    options: dict
    fails_in: int = 0
    sequence: bool = False


CALLS = {
    "forward": Call(loss_of, {"save": "grads"}),
    "sequence": Call(loss_of_own_tokens, {"save": "logits"}, sequence=True),
    "backward by stats": Call(loss_of, {"save": "stats"}, fails_in=1),
    "log-probabilities": Call(logprobs, {}),
    "divergence": Call(divergence, {}),
}


def parts_of(call, device, group):
    """Functions of this rank: forward, and backward of what it gives."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, seed=3)
    rank, share = dist.get_rank(), -(-VOCAB // dist.get_world_size())
    own = case.linear_weight[rank * share : (rank + 1) * share]
    x, w = (one.to(device).requires_grad_() for one in (case.input, own))
    y = case.target.to(device)
    vocab_parallel = flce.VocabParallel(group, vocab=VOCAB, sequence=call.sequence)

    def forward():
        return call.function(x, w, y, vocab_parallel=vocab_parallel, **call.options)

    def backward(loss):
        return torch.autograd.grad(loss, (x, w))

    return forward, backward


def failing_part(call, device, group):
    """(the part of a call in which a rank fails, after a whole call; its exchanges, as a number of
    the group's uses)"""
    forward, backward = parts_of(call, device, group)
    backward(forward())  # makes communicators and symmetric memory
    with counted() as used:
        loss = forward()
        uses = used.call_count
        backward(loss)
    if call.fails_in == 0:
        return forward, uses
    return functools.partial(backward, forward()), used.call_count - uses


def counted():
    return unittest.mock.patch.object(collectives, "_group", wraps=collectives._group)


@contextlib.contextmanager
def alone(path):
    """One process at a time: the driver fails where many open the same GPUs at once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- a rank that leaves ----


def leave(part, uses, fault, path):
    """Fails at the beginning of the last exchange. An exception ends the process as it would end a
    program that does not catch it, but at once, without waiting for its GPU."""
    try:
        with interrupting("_group", uses - 1, FAULTS[fault][0]):
            part()
    except BaseException as error:
        path.write_text(type(error).__name__)
    os._exit(LEFT)


def lose(name, fault, leaving, transport, path):
    device = "cpu" if transport == "gloo" else "cuda"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the watchdog's abort would write it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a backward's thread may not set it
    if device == "cuda":
        with alone(path.parent / "lock"):
            torch.cuda.set_device(dist.get_rank())
            torch.zeros(1, device="cuda")
    group = dist.new_group()  # with these settings
    part, uses = failing_part(CALLS[name], device, group)
    assert uses > 1, uses
    shares = any(shared.possible for shared in collectives._shared.values())
    assert shares == (transport == "copy engines"), f"the GPUs share memory: {shares}"
    seconds = datetime.timedelta(seconds=SECONDS)
    dist.distributed_c10d._set_pg_timeout(seconds, group)  # not for what makes communicators
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    if dist.get_rank() == leaving:
        leave(part, uses, fault, path)
    part()
    dist.all_reduce(total, group=group)
    total.item()


def ends_with_error(text):
    """With an exception, or aborted by NCCL's watchdog (its own exit, or an abort)."""
    aborted = text.endswith((WATCHDOG, "exit code 255"))
    return aborted or ("Traceback" in text and "AssertionError" not in text)


def faults_of(texts, leaving, fault, path):
    """What is wrong with how the ranks have ended. `texts`: of each rank, as Processes gives
    them."""
    found, end = [], FAULTS[fault][1]
    for rank, text in enumerate(texts):
        if rank == leaving:
            name = path.read_text() if path.exists() else None
            expected = (LEFT, end) if isinstance(end, str) else (end, None)
            if not text.endswith(f"exit code {expected[0]}") or name != expected[1]:
                found.append(f"rank {rank}, which {fault}: {name}: {text}")
        elif not ends_with_error(text):
            found.append(f"rank {rank}: {text}")
    return found


def run(number, ranks, transport, folder):
    """What is wrong with a case, as a text."""
    name, fault = list(itertools.product(CALLS, FAULTS))[number]
    leaving, path = number % ranks, folder / str(number)
    given = {"name": name, "fault": fault, "leaving": leaving, "transport": transport}
    backend, processes = "gloo" if transport == "gloo" else "nccl", Processes()
    try:
        case = lose.__module__, "lose", {**given, "path": path}
        texts = processes.run(ranks, backend, SETTINGS[transport], *case)
    finally:
        processes.stop()
    texts = {int(text.split(":")[0].removeprefix("rank ")): text for text in texts}
    texts = [texts.get(rank, f"rank {rank}: no error") for rank in range(ranks)]
    return "\n".join(f"{name}, {one}" for one in faults_of(texts, leaving, fault, path))


@pytest.mark.parametrize(
    ("ranks", "transport"), [(2, "gloo"), *itertools.product((2, 4), ("nccl", "copy engines"))]
)
def test_a_rank_leaves(ranks, transport, tmp_path):
    if transport != "gloo" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    numbers = range(len(CALLS) * len(FAULTS))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        one = functools.partial(run, ranks=ranks, transport=transport, folder=tmp_path)
        wrong = list(filter(None, pool.map(one, numbers)))
    assert not wrong, "\n".join(wrong)
