"""flce, in each of its strategies. benchmarks/conformance_peers.py has other implementations."""

from __future__ import annotations

import functools
import typing

import torch

import flce

from .cases import FEATURES, NAMES
from .check import Adapter
from .truth import Rounding


def of_flce(name: str, early: bool = False, chunks: int = 1, **settings) -> Adapter:
    def loss(x, w, y, bias, options):
        if chunks > 1:
            row = -(-max(w.itemsize, 4) * len(w) // 128) * 128
            options["max_memory"] = row * max(1, -(-len(x) // chunks))
            options |= {"accum_dtype": torch.float32} if w.itemsize == 2 else {}
        return flce.linear_cross_entropy(x, w, y, linear_bias=bias, **options, **settings)

    def rounds(case, device):
        """What is rounded to the operands' dtype (docs/environment.md; forms: csrc/core/plan.c).
        Form exp: E, the rows of x times their factors, a GEMM's product of these. Form dz: dz, and
        on the CPU the product of a chunk where several are summed. float16: the CPU computes in
        float32; a GPU may save E, from which it makes dz."""
        cpu, half = device.type == "cpu", case.dtype == "float16"
        results = 1 + (early and case.reduction != "none" and case.upstream not in ("one", "zero"))
        if half:
            return Rounding(0, 0, 0, results) if cpu else Rounding(0, 1, 1, results)
        logits = int(cpu and case.dtype == "bfloat16")
        if case.softcap and case.label_smoothing:  # form dz
            return Rounding(logits, 0, 1 + (cpu and chunks > 1), results)
        return Rounding(logits, 3, 0, results)

    offers = frozenset((*FEATURES, *NAMES)) - ({"none"} if "grads" in settings.values() else set())
    return Adapter(name, loss, offers, rounds, version=flce.__version__)


ADAPTERS: dict[str, typing.Callable[..., Adapter]] = {
    "flce": functools.partial(of_flce, early=True),
    "flce-logits": functools.partial(of_flce, save="logits"),
    "flce-grads": functools.partial(of_flce, early=True, save="grads"),
    "flce-stats": functools.partial(of_flce, save="stats"),
    "flce-chunks": functools.partial(of_flce, early=True, chunks=4),
}
