"""Time, peak memory, order of the rounds, and facts of the machine."""

import contextlib
import datetime
import functools
import pathlib
import platform
import re
import signal
import statistics
import time
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import flce

CLOCKS = ("wall", "device")
CALIBRATION_CYCLES = 10_000_000  # 5 ms at 2 GHz, a thousand times an event's resolution
# Upper bound of the sleep before a step on the device clock. The driver queues about a thousand
# launches before it blocks the host, and torch needs 10 to 20 us for one: a host that takes longer
# blocks anyway, and no sleep hides that. A longer sleep would let the GPU cool down to a higher
# clock than in training.
LONGEST_SLEEP = 20e-3  # seconds


class Round(NamedTuple):
    """`hidden`, for the device clock: the host had queued the whole step before the step began."""

    seconds: float
    hidden: bool | None = None


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run, problem, device):
    """Seconds by the host's clock, between two synchronisations."""
    synchronize(device)
    begin = time.perf_counter()
    results = run(problem)
    synchronize(device)
    elapsed = time.perf_counter() - begin
    del results
    return elapsed


@functools.cache
def sleep_cycles_per_second():
    """Cycles per second of torch.cuda._sleep, which counts the GPU's clock: the fastest
    measured, so that a sleep is rather too long than too short."""
    rates = []
    for _ in range(5):  # the first one includes loading the kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        rates.append(1e3 * CALIBRATION_CYCLES / begin.elapsed_time(end))
    return max(rates)


def queued_round(run, problem, estimate):
    """Times a step by two events of the device, with the step queued behind a sleep of the device.

    `estimate`: seconds of the step by the host's clock. The host takes at most that long to queue
    it; the sleep adds half of it and a millisecond for variations of the host's time.
    """
    cycles = int(min(1.5 * estimate + 1e-3, LONGEST_SLEEP) * sleep_cycles_per_second())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    begin.record()
    results = run(problem)
    end.record()
    hidden = not begin.query()  # queried when everything is queued: is the device still sleeping?
    end.synchronize()
    del results
    return Round(1e-3 * begin.elapsed_time(end), hidden)


def timed_round(run, problem, device, clock, estimate):
    """A Round by the requested clock."""
    if clock == "device":
        return queued_round(run, problem, estimate)
    return Round(seconds(run, problem, device))


class OutOfPatience(BaseException):
    """Not an Exception: a tuner that catches its candidates' errors must not catch this."""


@contextlib.contextmanager
def patience(limit):
    """Interrupts what takes longer than `limit` seconds (main thread, while Python code runs)."""

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
    """Order of a round. In `count` rounds each contestant comes first once and, for an even
    count, runs right after each other one once: the first after a synchronisation has a higher
    clock (5 %), and one right after eager a lower clock (3 to 5 %)."""
    zigzag = [(-1) ** (k + 1) * ((k + 1) // 2) for k in range(count)]  # 0, 1, -1, 2, -2, ...
    order = [(turn + step) % count for step in zigzag]
    return order[::-1] if turn // count % 2 else order


def interleaved(runs, problem, device, rounds, limit, clock="wall"):
    """Rounds of each run by label, on fresh data each time; and the exceptions of those that
    raised.

    `runs`: (run, estimated seconds) by label. A run whose rounds would take longer than `limit`
    seconds gets fewer, evenly spread, at least one.
    """
    labels, taken, failed = list(runs), {label: [] for label in runs}, {}
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
            run, estimate = runs[label]
            try:
                taken[label].append(timed_round(run, problem, device, clock, estimate))
            except Exception as error:  # a peer may raise anything: the others continue
                failed[label] = error.with_traceback(None)  # its traceback's frames hold tensors
    return {label: some for label, some in taken.items() if label not in failed}, failed


def quartiles(values):
    """The 25 %, 50 % and 75 % quantiles."""
    return statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3


def peak_extra_bytes(run, problem, device):
    """Peak of the bytes held at one time, in addition to the inputs."""
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
    """Facts of the machine for a record."""
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


def time_rows(rows, runs, problem, device, rounds):
    """Adds to each row its contestant's "ms", and "over_gemms", as a ratio to the run "GEMMs".
    runs: {contestant: function of the problem}, interleaved; an error of one is raised."""
    timed = {label: (run, 0.1) for label, run in runs.items()}
    taken, failed = interleaved(timed, problem, device, rounds, 60.0)
    for error in failed.values():
        raise error
    ms = {label: 1e3 * statistics.median(e.seconds for e in of) for label, of in taken.items()}
    for row in rows:
        row["ms"] = ms[row["contestant"]]
        row["over_gemms"] = row["ms"] / ms["GEMMs"]
