"""GPUs by name or numbers, as csrc/core/gpus.c has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flce

_plan: Callable[..., flce.Plan] = flce.plan


class Gpu(NamedTuple):
    """A GPU that need not be there.

    text: its name, or "capability,multiprocessors,memory".
    capability: compute capability, 90 for 9.0.
    memory: bytes.
    multiply_adds: a second, dense, 16-bit operands; the vendor's number, 0 where it is not known.
    bandwidth: of the memory, bytes a second; likewise.
    """

    text: str
    capability: int
    multiprocessors: int
    memory: int
    multiply_adds: float
    bandwidth: float

    def plan(self, *sizes: int, **options: Any) -> flce.Plan:
        """`flce.plan` for this GPU."""
        numbers = self.capability, self.multiprocessors, self.memory
        return _plan(*sizes, device=numbers, **options)


def gpu_names() -> list[str]:
    """The GPUs that have a name."""
    return str(torch.ops.flce.gpu_names()).split()


def find_gpu(text: str) -> Gpu:
    """The GPU of a name, or of "capability,multiprocessors,memory" and optionally ",TFLOP/s,TB/s",
    dense ones of bfloat16 and those of the memory; ValueError for other text."""
    numbers, rates = text, (0.0, 0.0)
    if text.count(",") == 4:
        numbers, *both = text.rsplit(",", 2)
        rates = _rates(text, both)
    try:
        capability, multiprocessors, memory, *named = torch.ops.flce.find_gpu(numbers)
    except Exception:  # of which class depends on the version of torch
        names = ", ".join(gpu_names())
        expected = f"expected {names}, or numbers (compute capability from 80 on, multiprocessors, "
        expected += "bytes of memory)"
        raise ValueError(f"gpu: {expected}, got {text!r}") from None
    multiply_adds, bandwidth = rates if any(rates) else named
    sizes = int(capability), int(multiprocessors), int(memory)
    return Gpu(text, *sizes, float(multiply_adds), float(bandwidth))


def _rates(text: str, both: list[str]) -> tuple[float, float]:
    """Multiply-adds and bytes a second from TFLOP/s and TB/s."""
    try:
        flops, bandwidth = map(float, both)
    except ValueError:
        flops = bandwidth = 0.0
    if not (0 < flops < 1e6 and 0 < bandwidth < 1e6):
        expected = "expected positive TFLOP/s and TB/s at the end"
        raise ValueError(f"gpu: {expected}, got {text!r}")
    return flops * 1e12 / 2, bandwidth * 1e12
