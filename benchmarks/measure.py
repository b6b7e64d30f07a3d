"""Time, peak memory, order of the rounds, and facts of the machine."""

import contextlib
import datetime
import pathlib
import platform
import re
import signal
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

import flce


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run, problem, device):
    synchronize(device)
    begin = time.perf_counter()
    results = run(problem)
    synchronize(device)
    elapsed = time.perf_counter() - begin
    del results
    return elapsed


class OutOfPatience(BaseException):
    """No Exception: a tuner that passes over failing candidates must not pass over this."""


@contextlib.contextmanager
def patience(limit):
    """Ends what takes longer than `limit` seconds (in the main thread, when it is in Python)."""

    def expire(*_):
        raise OutOfPatience(f"not ready after {limit:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def balanced_order(count, turn):
    """Order of a round. In `count` rounds each comes first once and, for an even count, runs right
    after each other once: whoever comes first after a wait has a higher clock (5 %), and whoever
    runs right after eager pays for it (3 to 5 %)."""
    zigzag = [(-1) ** (k + 1) * ((k + 1) // 2) for k in range(count)]  # 0, 1, -1, 2, -2, ...
    order = [(turn + step) % count for step in zigzag]
    return order[::-1] if turn // count % 2 else order


def interleaved(runs, problem, device, rounds, limit):
    """Seconds of each run by label, on fresh data each round; and the errors of those that raised.

    `runs`: (run, estimate of its seconds) by label. One whose rounds would take longer than
    `limit` seconds gets fewer, spread evenly, at least one.
    """
    labels, times, failed = list(runs), {label: [] for label in runs}, {}
    turns = {}
    for label, (_, estimate) in runs.items():
        count = max(1, min(rounds, int(limit / max(estimate, 1e-9))))
        turns[label] = {index * rounds // count for index in range(count)}
    for turn in range(rounds):
        problem.refresh()
        for index in balanced_order(len(labels), turn):
            label = labels[index]
            if turn not in turns[label] or label in failed:
                continue
            try:
                times[label].append(seconds(runs[label][0], problem, device))
            except Exception as error:  # a peer of today or tomorrow: the others go on
                failed[label] = error.with_traceback(None)  # its frames hold tensors
    return {label: taken for label, taken in times.items() if label not in failed}, failed


def quartiles(values):
    """25 %, 50 % and 75 %."""
    return statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3


def peak_extra_bytes(run, problem, device):
    """The most bytes held at one time over the inputs."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(problem)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run(problem)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device):
    """What a record says of where it was made."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flce": flce.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        return facts
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    facts["cpu"] = model[1] if model else platform.processor()
    return facts


def described(facts):
    return ", ".join(f"{key} {value}" for key, value in facts.items())
