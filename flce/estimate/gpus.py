"""GPUs by name or numbers, as csrc/core/gpus.c has them."""

from __future__ import annotations

import re
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


# In addition to those of csrc/core/gpus.c, as there: capability, multiprocessors, GiB as CUDA
# reports them, dense bfloat16 multiply-adds a second, bytes a second.
_MORE = {
    "a10": (86, 72, 22, 62.5e12, 0.6e12),
    "a100-40gb": (80, 108, 39, 156e12, 1.555e12),
    "a6000": (86, 84, 47, 77.4e12, 0.768e12),
    "b300": (103, 148, 267, 1125e12, 8e12),
    "gh200": (90, 132, 94, 494.5e12, 4e12),
    "h20": (90, 78, 95, 74e12, 4e12),
    "l4": (89, 58, 22, 60.5e12, 0.3e12),
    "l40s": (89, 142, 44, 181e12, 0.864e12),
    "rtx3090": (86, 82, 23, 35.6e12, 0.936e12),
    "rtx5090": (120, 170, 31, 104.75e12, 1.792e12),
}


def gpu_names() -> list[str]:
    """The GPUs that have a name for `find_gpu` and `estimate`; `flce.plan` has fewer."""
    return [*str(torch.ops.flce.gpu_names()).split(), *_MORE]


def _plain(name: str) -> str:
    """A name without what vendors and users write differently: "NVIDIA RTX 4090" is rtx4090."""
    name = re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())
    return {"rtxa6000": "a6000", "a10040g": "a10040gb", "a10080gb": "a100"}.get(name, name)


def find_gpu(text: str) -> Gpu:
    """The GPU of a name in any letter case, or of "capability,multiprocessors,memory" (bytes) and
    optionally ",TFLOP/s,TB/s", dense ones of bfloat16 and those of the memory; ValueError for other
    text."""
    name = {_plain(name): name for name in gpu_names()}.get(_plain(text), text)
    if name in _MORE:
        capability, multiprocessors, gib, multiply_adds, bandwidth = _MORE[name]
        return Gpu(name, capability, multiprocessors, gib << 30, multiply_adds, bandwidth)
    return _find_gpu_of_core(name)


def _find_gpu_of_core(text: str) -> Gpu:
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
