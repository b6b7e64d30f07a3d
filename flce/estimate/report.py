"""An Estimate as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .memory import Peaks, Training
from .step import Estimate

GIB = 1 << 30
_MOMENTS = {
    "loss": "the loss and its gradients",
    "backward": "backward of the last layer",
    "gradients": "end of the backward",
    "update": "the optimizer's step",
}


def text(estimate: Estimate, width: int = 100) -> str:
    """A table and sentences, in lines of at most `width` characters where they can be broken."""
    model, training = estimate.model, estimate.training
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {model.layers} layers, "
        f"hidden {model.hidden}, vocabulary {model.vocab}{', tied' if model.tied else ''}",
        f"{estimate.tokens} tokens in {_counted(training.sequences, 'sequence')}, "
        f"{str(training.dtype).removeprefix('torch.')}, {_optimizer(estimate)}, activation "
        f"checkpointing {'on' if training.checkpointing else 'off'}",
        f"{estimate.gpu.text}: {estimate.gpu.memory / GIB:.0f} GiB, of which a step may take "
        f"{estimate.usable / GIB:.0f}",
        *(f"note: {note}" for note in [*model.notes, *_notes(training)]),
        "",
        _row("", "eager loss", "Liger", "flce"),
    ]
    lines += [_row(*row) for row in _rows(estimate)]
    lines += ["", estimate.advice.verdict]
    lines += [f"  - {option}" for option in estimate.advice.options]
    return "\n".join(_wrapped(line, width) for line in lines)


def _wrapped(line: str, width: int) -> str:
    """A line of the table is left as it is."""
    if len(line) <= width or line.startswith("  ") and not line.startswith("  - "):
        return line
    indent = "    " if line.startswith("  - ") else ""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(line, max(width, 40), subsequent_indent=indent, **options)


def _notes(training: Training) -> list[str]:
    notes = []
    if training.lora:
        notes.append(
            f"adapters of rank {training.lora} on the layers' matrices; the head is frozen"
        )
    if training.fsdp > 1:
        notes.append(
            f"parameters, gradients and optimizer over {training.fsdp} ranks; tokens, memory and "
            "times are of one rank, without the time of its communication"
        )
    return notes


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _optimizer(estimate: Estimate) -> str:
    optimizer = estimate.training.optimizer
    return optimizer if isinstance(optimizer, str) else f"{optimizer:g} optimizer bytes a parameter"


def _row(name: str, eager: str, liger: str, fused: str) -> str:
    return f"{name:34}{eager:>14}{liger:>14}{fused:>14}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rows(estimate: Estimate) -> list[tuple[str, str, str, str]]:
    """(what, of the eager loss, of Liger's, of flce)"""
    sides = (estimate.eager, estimate.liger, estimate.flce)
    times, longest = estimate.times, estimate.longest

    def row(name: str, values: Iterable[str]) -> tuple[str, str, str, str]:
        eager, liger, fused = values
        return name, eager, liger, fused

    rows = [row("peak memory of a step", (_gib(side.peak) for side in sides))]
    for moment, name in _MOMENTS.items():
        rows.append(row(f"  {name}", (_gib(getattr(side, moment)) for side in sides)))
    lengths = (longest.eager, longest.liger, longest.flce)
    rows.append(row("longest sequence, one a step", (f"{length:,}" for length in lengths)))
    if times.eager:
        steps = (times.eager, times.liger, times.flce)
        heads = (times.eager_head, times.liger_head, times.flce_head)
        rows.append(row("time of a step, roughly", (_ms(step) for step in steps)))
        shares = (f"{times.share(head):.0%}" for head in heads)
        rows.append(row("  of which the head and its loss", shares))
    return rows


def _ms(seconds: float) -> str:
    """Whole milliseconds, or two digits of less than ten."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def _peaks(peaks: Peaks) -> dict[str, Any]:
    return {"peak_bytes": peaks.peak, "moment": peaks.moment, "moments": asdict(peaks)}


def record(estimate: Estimate) -> dict[str, Any]:
    """What `text` shows, as an object of JSON; bytes and seconds."""
    times, plan = estimate.times, estimate.plan
    training = asdict(estimate.training) | {
        "dtype": str(estimate.training.dtype).removeprefix("torch."),
    }
    sides = {
        "eager": _peaks(estimate.eager) | {"longest_sequence": estimate.longest.eager},
        "liger": _peaks(estimate.liger) | {"longest_sequence": estimate.longest.liger},
        "flce": _peaks(estimate.flce) | {"longest_sequence": estimate.longest.flce},
    }
    if times.eager:
        heads = {"eager": times.eager_head, "flce": times.flce_head, "liger": times.liger_head}
        for side, head in heads.items():
            step = times.layers + head
            sides[side] |= {"seconds": step, "head_share": times.share(head)}
    return {
        "model": asdict(estimate.model) | {"parameters": estimate.model.parameters},
        "tokens": estimate.tokens,
        "training": training,
        "gpu": estimate.gpu._asdict() | {"usable_bytes": estimate.usable},
        "plan": {
            "save": plan.save,
            "kernel": plan.kernel,
            "chunks": plan.chunks,
            "chunk_rows": plan.chunk_rows,
            "peak_bytes": plan.peak_bytes,
        },
        **sides,
        "helps": estimate.helps,
        "verdict": estimate.advice.verdict,
        "options": list(estimate.advice.options),
    }
