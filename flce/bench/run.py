"""Rounds of the contestants, one after another, until the time is over."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from .cases import CONTESTANTS, Case, Loss
from .progress import Progress

LEAST_ROUNDS = 3
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Result:
    """Of one contestant. peak_bytes: over the operands, gradients included. failed: why it has no
    times, or ""."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = 0.0
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run(
    case: Case,
    seconds: float = 30.0,
    contestants: tuple[str, ...] = tuple(CONTESTANTS),
    progress: Progress | None = None,
) -> list[Result]:
    """A Result of each contestant, names in CONTESTANTS (KeyError for another). At least
    LEAST_ROUNDS rounds, whatever `seconds` is. A contestant that raises has `failed` set."""
    begin = time.monotonic()
    shown = progress or Progress(seconds)
    operands = case.operands()
    results, steps = [], {}
    for name in contestants:
        shown.show(f"{name}: first step")
        results.append(Result(name))
        step = _prepared(results[-1], operands, case.device)
        if step:
            steps[name] = step
    rounds = 0
    while steps and (rounds < LEAST_ROUNDS or time.monotonic() - begin < seconds):
        # Each comes first in turn: the first one after another's rest finds a higher clock.
        order = results[rounds % len(results) :] + results[: rounds % len(results)]
        for result in order:
            if result.name in steps:
                shown.show(f"{result.name}: round {rounds + 1}")
                result.seconds.append(_timed(steps[result.name], case.device))
        rounds += 1
    return results


def _prepared(result: Result, operands: Operands, device: str) -> Callable[[], torch.Tensor] | None:
    """The step of a contestant after two runs, with peak memory and loss set; None if it fails."""
    loss_of: Loss = CONTESTANTS[result.name]()

    def step() -> torch.Tensor:
        x, weight, target = operands
        loss = loss_of(x, weight, target)
        torch.autograd.grad(loss, (x, weight))
        return loss.detach()

    try:
        result.loss = float(step())  # compiles, and allocates what stays
        result.peak_bytes = _peak(step, device)
    except Exception as error:  # torch.compile without a compiler, too little memory: others go on
        result.failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        return None
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return step


def _timed(step: Callable[[], torch.Tensor], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _peak(step: Callable[[], torch.Tensor], device: str) -> int:
    """Bytes that a step allocates at one time."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints to the progress bar's line
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    profiler = trace.profiler
    if profiler is None or profiler.kineto_results is None:
        raise RuntimeError("torch's profiler gave no events")
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    bytes_now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        bytes_now += event.nbytes()
        peak = max(peak, bytes_now)
    return peak
