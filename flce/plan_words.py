"""A plan in words and MiB, for people. csrc/core/plan_text.c has it by its fields' names."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from .plan import Plan

MIB = 1 << 20
_STRATEGIES = {
    "grads": "the forward makes the gradients, the backward scales them",
    "logits": "the forward keeps the logits, from which the backward makes the gradients",
    "stats": "the forward keeps eight numbers a row; the backward computes the logits again",
    "samples": "the forward draws classes of each row, from which the gradients are estimated",
    "nothing": "no gradients",
}
# What a buffer holds. Smaller ones are summed up as workspace.
_BUFFERS = {
    "loss": "the loss",
    "predictions": "predictions",
    "class_logits": "logits of chosen classes",
    "grad_input": "gradient of input",
    "grad_weight": "gradient of linear_weight",
    "grad_bias": "gradient of linear_bias",
    "saved": "kept for the backward",
    "logits": "logits of a chunk",
    "dw_accum": "sum of the weight's gradient over chunks",
    "teacher": "the teacher's logits of a chunk",
}
_LEAST = 0.01  # of the peak: what is less is workspace


def mib(size: int) -> str:
    """Bytes as MiB, or KiB below one, with three digits at least."""
    if size < MIB:
        kib = size / 1024
        return f"{kib:.0f} KiB" if kib >= 100 else f"{kib:.3g} KiB"
    value = size / MIB
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:,.3g} MiB"


def _loop(plan: Plan) -> str:
    rows = f"{plan.rows:,} rows"
    if plan.chunks > 1:
        rows += f" in {plan.chunks} chunks of up to {plan.chunk_rows:,}"
    if plan.backward_chunks > 1:
        rows += f", in the backward in {plan.backward_chunks} of up to "
        rows += f"{plan.backward_chunk_rows:,}"
    if plan.block_classes:
        rows += f"\n{_blocks(plan)}"
    return rows


def _blocks(plan: Plan) -> str:
    made = "weight's gradient" if plan.blocks == "dx_first" else "gradients"
    block = f"blocks of {plan.block_rows:,} rows x {plan.block_classes:,} classes"
    if plan.whole_classes == 0:
        return f"{made} by {block}"
    first = f"the first {plan.whole_classes:,} classes"
    return f"{made} by blocks over all rows for {first}, by {block} for the others"


def _memory(plan: Plan) -> list[str]:
    """The buffers that are a part of the peak worth naming, the largest first."""
    named = {
        name: size
        for name, size in plan.buffers.items()
        if name in _BUFFERS and size >= _LEAST * plan.peak_bytes
    }
    ordered = sorted(named.items(), key=lambda item: -item[1])
    lines = [f"  {_BUFFERS[name]:42}{mib(size):>12}" for name, size in ordered]
    others = sum(size for name, size in plan.buffers.items() if name not in named)
    return [*lines, f"  {'workspace and small tensors':42}{mib(others):>12}"] if others else lines


def summary(plan: Plan) -> str:
    """Loop, chunks, GEMMs, memory and its parts, and what ranks exchange."""
    where = "forward" if plan.forward_peak_bytes >= plan.backward_peak_bytes else "backward"
    kernel = ", logits by a kernel of flce's own" if plan.kernel == "fused" else ""
    lines = [
        f'save="{plan.save}": {_STRATEGIES[plan.save]}',
        _loop(plan),
        f"{plan.dtype} GEMMs: {plan.forward_gemms} in the forward, {plan.backward_gemms} in the "
        f"backward{kernel}; logits in {plan.logits_dtype}, sums in {plan.accum_dtype}",
        f"memory over the inputs: {mib(plan.peak_bytes)} at the peak, in the {where} (forward "
        f"{mib(plan.forward_peak_bytes)}, backward {mib(plan.backward_peak_bytes)})",
        *_memory(plan),
    ]
    if plan.ranks > 1:
        count = sum(one.forward + one.backward for one in plan.collectives.values())
        size = sum(one.bytes for one in plan.collectives.values())
        lines.append(f"one of {plan.ranks} ranks: receives {mib(size)} in {count} exchanges")
    return "\n".join(lines)
