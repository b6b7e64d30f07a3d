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


def text(estimate: Estimate) -> str:
    """A table and sentences."""
    model, training = estimate.model, estimate.training
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {model.layers} layers, "
        f"hidden {model.hidden}, vocabulary {model.vocab}{', tied' if model.tied else ''}",
        f"{estimate.tokens} tokens in {_counted(training.sequences, 'sequence')}, "
        f"{str(training.dtype).removeprefix('torch.')}, {_optimizer(estimate)}, activation "
        f"checkpointing {'on' if training.checkpointing else 'off'}",
        f"{estimate.gpu.text}: {estimate.gpu.memory / GIB:.0f} GiB, of which a step may take "
        f"{estimate.usable / GIB:.0f}",
        *(f"note: {note}" for note in model.notes),
        "",
        f"{'':34}{'eager loss':>14}{'flce':>14}",
    ]
    lines += [_row(name, eager, fused) for name, eager, fused in _rows(estimate)]
    lines += ["", estimate.advice.verdict]
    lines += [f"  - {option}" for option in estimate.advice.options]
    return "\n".join(lines)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _optimizer(estimate: Estimate) -> str:
    optimizer = estimate.training.optimizer
    return optimizer if isinstance(optimizer, str) else f"{optimizer:g} optimizer bytes a parameter"


def _row(name: str, eager: str, fused: str) -> str:
    return f"{name:34}{eager:>14}{fused:>14}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rows(estimate: Estimate) -> list[tuple[str, str, str]]:
    eager, fused, times = estimate.eager, estimate.flce, estimate.times
    rows = [("peak memory of a step", _gib(eager.peak), _gib(fused.peak))]
    for moment, name in _MOMENTS.items():
        rows.append((f"  {name}", _gib(getattr(eager, moment)), _gib(getattr(fused, moment))))
    longest = (f"{estimate.longest.eager:,}", f"{estimate.longest.flce:,}")
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


def record(estimate: Estimate) -> dict[str, Any]:
    """What `text` shows, as an object of JSON; bytes and seconds."""
    times, plan = estimate.times, estimate.plan
    training = asdict(estimate.training) | {
        "dtype": str(estimate.training.dtype).removeprefix("torch."),
    }
    sides = {
        "eager": _peaks(estimate.eager) | {"longest_sequence": estimate.longest.eager},
        "flce": _peaks(estimate.flce) | {"longest_sequence": estimate.longest.flce},
    }
    if times.eager:
        heads = {"eager": times.eager_head, "flce": times.flce_head}
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
