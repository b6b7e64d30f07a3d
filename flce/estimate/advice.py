"""Which options to use, and whether flce helps at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import flce

from .memory import Peaks, Training
from .model import Model
from .times import Times

LEAST = 0.03  # of memory, time or length: what is less cannot be told from the estimate's error
LEAST_BYTES, LEAST_SECONDS = 64 << 20, 1e-3  # what is less is no help, whatever its share
NEAR = 1 / 8  # of the longest sequence: a step of less does not need longer ones
LARGE_HEAD = 0.25  # share of a step from which sampled gradients are worth a thought
GIB, MIB = 1 << 30, 1 << 20
_PEAKS = {
    "loss": "nearly all of the peak memory are activations",
    "backward": "memory has its peak in the layers' backward",
    "gradients": "memory has its peak at the end of the backward, when all gradients are there",
    "update": "memory has its peak in the optimizer's step",
}


class Longest(NamedTuple):
    """Tokens of the longest sequence, one a step."""

    eager: int
    flce: int
    liger: int = 0


class Outcome(NamedTuple):
    """What the advice follows from. `small`: the peaks with max_memory=`small_memory`.
    `accumulating`: the plan with accumulate_into="grad"."""

    model: Model
    tokens: int
    training: Training
    plan: flce.Plan
    eager: Peaks
    flce: Peaks
    small: Peaks
    small_memory: int
    accumulating: flce.Plan
    times: Times
    longest: Longest
    usable: int

    @property
    def memory(self) -> float:
        """Saved, over the eager peak."""
        return 1 - self.flce.peak / self.eager.peak

    @property
    def saves_memory(self) -> bool:
        return self.memory >= LEAST and self.eager.peak - self.flce.peak >= LEAST_BYTES

    @property
    def saves_time(self) -> bool:
        return self.time >= LEAST and self.times.eager - self.times.flce >= LEAST_SECONDS

    @property
    def time(self) -> float:
        """Saved, over the eager step; 0 where it is not known."""
        return 1 - self.times.flce / self.times.eager if self.times.eager else 0.0


class Advice(NamedTuple):
    """helps: whether memory, time or the longest sequence change by more than the estimate's error.
    verdict: sentences. options: those to use, the most useful first."""

    helps: bool
    verdict: str
    options: tuple[str, ...]


def small_memory(model: Model) -> int:
    """A max_memory whose chunks still fill a GPU: 256 MiB, or 512 rows of 16-bit logits."""
    return -(-max(256 * MIB, 512 * 2 * model.vocab) // MIB) * MIB


def advise(outcome: Outcome) -> Advice:
    before, after = outcome.longest.eager, outcome.longest.flce
    longer = after >= (1 + LEAST) * before and after > 0
    is_long = outcome.tokens >= NEAR * before * outcome.training.sequences
    helps = outcome.saves_memory or outcome.saves_time or (longer and is_long)
    verdict = _verdict(outcome, longer) if helps else _refusal(outcome, longer)
    return Advice(helps, verdict, tuple(_options(outcome)) if helps else ())


def _options(outcome: Outcome) -> Iterator[str]:
    fused, plan, times = outcome.flce, outcome.plan, outcome.times
    yield "flce.fuse(model), or flce.linear_cross_entropy(hidden, head.weight, labels)"
    less = fused.peak - outcome.small.peak
    if less >= LEAST * fused.peak:
        name = f'max_memory="{outcome.small_memory // MIB}MiB"'
        yield f"{name}: {less / GIB:.2f} GiB less, a little slower"
    less = plan.peak_bytes - outcome.accumulating.peak_bytes
    if less >= LEAST * fused.peak:
        yield (
            'with gradient accumulation, accumulate_into="grad": '
            f"{less / GIB:.2f} GiB less in each step after the first (docs/memory.md)"
        )
    if not outcome.training.checkpointing and outcome.longest.flce < 2 * outcome.longest.eager:
        yield (
            "activation checkpointing (--checkpointing here): activations are most of what is "
            "left, and without them the logits are what bounds a sequence"
        )
    share = times.share(times.flce_head)
    if share >= LARGE_HEAD:
        yield (
            f'gradient="sampled": the head is {share:.0%} of this step, and unbiased estimates of '
            "its gradients take one GEMM of three (docs/sampled.md)"
        )


def _refusal(outcome: Outcome, longer: bool) -> str:
    where = _PEAKS[outcome.eager.moment]
    text = f"It will not help: the loss takes little of a step, and {where}."
    if longer:
        before, after = outcome.longest.eager, outcome.longest.flce
        text += f" It would for long sequences: up to {after:,} tokens in place of {before:,}."
    return text


def _verdict(outcome: Outcome, longer: bool) -> str:
    eager, fused, gains = outcome.eager.peak, outcome.flce.peak, []
    if outcome.saves_memory:
        gains.append(f"{(eager - fused) / GIB:.2f} GiB less memory ({outcome.memory:.0%})")
    if outcome.saves_time:
        gains.append(f"a step about {outcome.time:.0%} shorter")
    if longer:
        before, after = outcome.longest.eager, outcome.longest.flce
        gains.append(f"sequences of up to {after:,} tokens in place of {before:,}")
    text = f"It helps: {', '.join(gains)}."
    if not outcome.saves_memory:
        text += f" This step takes as much memory as before: {_PEAKS[outcome.flce.moment]}."
    if fused > outcome.usable:
        text += " The step does not fit this GPU either way."
    elif eager > outcome.usable:
        text += " Without flce the step does not fit this GPU."
    return text
