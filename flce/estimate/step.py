"""`estimate`: a training step with the eager loss and with flce, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import flce

from .advice import Advice, Longest, Outcome, advise, small_memory
from .gpus import Gpu, find_gpu
from .memory import (
    Peaks,
    Training,
    eager_loss_bytes,
    flce_loss_bytes,
    liger_loss_bytes,
    peaks,
)
from .model import Model
from .times import Times, times

GRAIN = 1024  # tokens: the longest sequence is found to a multiple of it
MOST_TOKENS = 1 << 24
# Of a GPU's memory: the CUDA context, cuBLAS's workspaces and what the allocator cannot use.
RESERVED = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """What `estimate` found; bytes and seconds.

    eager, flce, liger: the peaks of a step. plan: of flce's call. times: 0 where the GPU's rates
    are not known. longest: tokens of the longest sequence whose step fits, one a step.
    usable: bytes of the GPU's memory that a step may take.
    """

    model: Model
    tokens: int
    training: Training
    gpu: Gpu
    plan: flce.Plan
    eager: Peaks
    flce: Peaks
    liger: Peaks
    times: Times
    longest: Longest
    usable: int
    advice: Advice

    @property
    def helps(self) -> bool:
        """Whether flce makes a difference that can be seen."""
        return self.advice.helps


def estimate(
    model: Model,
    tokens: int,
    *,
    gpu: str | Gpu = "h100",
    training: Training | None = None,
    max_memory: int | str | None = None,
) -> Estimate:
    """The Estimate of a step of `model` on `gpu`, which need not be there.

    Args:
        model: of `read_model`, or made of numbers.
        tokens: of a step, in all sequences.
        gpu: a name of `gpu_names`, text as `find_gpu` takes it, or a Gpu.
        training: how the step trains; None for bfloat16, AdamW, no checkpointing, one sequence.
        max_memory: of `flce.linear_cross_entropy`.

    Raises:
        ValueError: a number out of its range, or what `flce.plan` refuses.
    """
    gpu = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    training = training or Training()
    if not training.sequences <= tokens < 1 << 31 or tokens % training.sequences:
        expected = f"a positive multiple of {training.sequences} sequences, less than {1 << 31}"
        raise ValueError(f"tokens: expected {expected}, got {tokens}")

    def plan_of(count: int, memory: int | str | None, **others: str) -> flce.Plan:
        options = {"dtype": training.dtype, "softcap": model.softcap, "max_memory": memory}
        options["grad_weight"] = not training.lora
        return gpu.plan(count, model.hidden, model.vocab, **options, **others)

    plan = plan_of(tokens, max_memory)
    eager = peaks(model, tokens, training, eager_loss_bytes(model, tokens, training))
    fused = peaks(model, tokens, training, flce_loss_bytes(plan))
    liger = peaks(model, tokens, training, liger_loss_bytes(model, tokens, training))
    taken = times(model, tokens, training, gpu, plan)
    usable = gpu.memory - min(RESERVED, gpu.memory // 8)
    single = replace(training, sequences=1)
    lengths = Longest(
        longest(lambda n: peaks(model, n, single, eager_loss_bytes(model, n, single)).peak, usable),
        longest(
            lambda n: peaks(model, n, single, flce_loss_bytes(plan_of(n, max_memory))).peak, usable
        ),
        longest(lambda n: peaks(model, n, single, liger_loss_bytes(model, n, single)).peak, usable),
    )
    less = small_memory(model)
    small = peaks(model, tokens, training, flce_loss_bytes(plan_of(tokens, less)))
    added = plan if training.lora else plan_of(tokens, max_memory, accumulate_into="grad")
    outcome = Outcome(
        model, tokens, training, plan, eager, fused, small, less, added, taken, lengths, usable
    )
    return Estimate(
        model=model,
        tokens=tokens,
        training=training,
        gpu=gpu,
        plan=plan,
        eager=eager,
        flce=fused,
        liger=liger,
        times=taken,
        longest=lengths,
        usable=usable,
        advice=advise(outcome),
    )


def longest(peak_of: Callable[[int], int], usable: int) -> int:
    """The most tokens, a multiple of GRAIN, whose peak is at most `usable` bytes."""
    low, high = 0, MOST_TOKENS // GRAIN
    while low < high:
        middle = (low + high + 1) // 2
        if peak_of(middle * GRAIN) <= usable:
            low = middle
        else:
            high = middle - 1
    return low * GRAIN
