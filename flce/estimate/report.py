"""An Estimate as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .memory import Peaks
from .step import Estimate

GIB = 1 << 30
_MOMENTS = {
    "loss": "the loss and its gradients",
    "backward": "backward of the last layer",
    "gradients": "end of the backward",
    "update": "the optimizer's step",
}


def text(found: Estimate) -> str:
    """A table and sentences."""
    model, training = found.model, found.training
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {model.layers} layers, "
        f"hidden {model.hidden}, vocabulary {model.vocab}{', tied' if model.tied else ''}",
        f"{found.tokens} tokens in {_counted(training.sequences, 'sequence')}, "
        f"{str(training.dtype).removeprefix('torch.')}, {_optimizer(found)}, activation "
        f"checkpointing {'on' if training.checkpointing else 'off'}",
        f"{found.gpu.text}: {found.gpu.memory / GIB:.0f} GiB, of which a step may take "
        f"{found.usable / GIB:.0f}",
        *(f"note: {note}" for note in model.notes),
        "",
        f"{'':34}{'eager loss':>14}{'flce':>14}",
    ]
    lines += [_row(name, eager, fused) for name, eager, fused in _rows(found)]
    lines += ["", found.advice.verdict]
    lines += [f"  - {option}" for option in found.advice.options]
    return "\n".join(lines)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _optimizer(found: Estimate) -> str:
    optimizer = found.training.optimizer
    return optimizer if isinstance(optimizer, str) else f"{optimizer:g} optimizer bytes a parameter"


def _row(name: str, eager: str, fused: str) -> str:
    return f"{name:34}{eager:>14}{fused:>14}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rows(found: Estimate) -> list[tuple[str, str, str]]:
    eager, fused, times = found.eager, found.flce, found.times
    rows = [("peak memory of a step", _gib(eager.peak), _gib(fused.peak))]
    for moment, name in _MOMENTS.items():
        rows.append((f"  {name}", _gib(getattr(eager, moment)), _gib(getattr(fused, moment))))
    longest = (f"{found.longest.eager:,}", f"{found.longest.flce:,}")
    rows.append(("longest sequence, one a step", *longest))
    if times.eager:
        rows.append(("time of a step, roughly", _ms(times.eager), _ms(times.flce)))
        shares = f"{times.share(times.eager_head):.0%}", f"{times.share(times.flce_head):.0%}"
        rows.append(("  of which the head and its loss", *shares))
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _peaks(peaks: Peaks) -> dict[str, Any]:
    return {"peak_bytes": peaks.peak, "moment": peaks.moment, "moments": asdict(peaks)}


def record(found: Estimate) -> dict[str, Any]:
    """What `text` shows, as an object of JSON; bytes and seconds."""
    times, plan = found.times, found.plan
    training = asdict(found.training) | {
        "dtype": str(found.training.dtype).removeprefix("torch."),
    }
    sides = {
        "eager": _peaks(found.eager) | {"longest_sequence": found.longest.eager},
        "flce": _peaks(found.flce) | {"longest_sequence": found.longest.flce},
    }
    if times.eager:
        heads = {"eager": times.eager_head, "flce": times.flce_head}
        for side, head in heads.items():
            step = times.layers + head
            sides[side] |= {"seconds": step, "head_share": times.share(head)}
    return {
        "model": asdict(found.model) | {"parameters": found.model.parameters},
        "tokens": found.tokens,
        "training": training,
        "gpu": found.gpu._asdict() | {"usable_bytes": found.usable},
        "plan": {
            "save": plan.save,
            "kernel": plan.kernel,
            "chunks": plan.chunks,
            "chunk_rows": plan.chunk_rows,
            "peak_bytes": plan.peak_bytes,
        },
        **sides,
        "helps": found.helps,
        "verdict": found.advice.verdict,
        "options": list(found.advice.options),
    }
