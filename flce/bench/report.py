"""Results as a table, as JSON and as a picture."""

from __future__ import annotations

import pathlib
from typing import Any

from .cases import Case
from .run import Result

GIB = 1 << 30
FORMAT = 1  # of the JSON
_COLOURS = {"eager": "#9a9a9a", "torch.compile": "#d9a441", "flce": "#2f7ed8"}


def describe(case: Case, facts: dict[str, str | int]) -> str:
    where = facts.get("gpu") or f"{facts.get('cpu')}, {facts.get('threads')} threads"
    dtype = str(case.dtype).removeprefix("torch.")
    return (
        f"{case.tokens} tokens x {case.hidden} hidden x {case.vocab} classes, {dtype}, on {where}, "
        f"torch {facts['torch']}, flce {facts['flce']}"
    )


def table(results: list[Result]) -> str:
    """Median, fastest and number of rounds; peak memory over the operands."""
    lines = [f"{'':14}{'median':>12}{'fastest':>12}{'rounds':>8}{'peak memory':>14}"]
    for one in results:
        if one.failed:
            lines.append(f"{one.name:14}  failed: {one.failed}")
            continue
        times = (f"{1e3 * value:.2f} ms" for value in (one.median, min(one.seconds)))
        row = "".join(f"{time:>12}" for time in times)
        memory = f"{one.peak_bytes / GIB:.3f} GiB"
        lines.append(f"{one.name:14}{row}{len(one.seconds):>8}{memory:>14}")
    return "\n".join(lines)


def record(case: Case, facts: dict[str, str | int], results: list[Result]) -> dict[str, Any]:
    """All of it; seconds and bytes."""
    sizes = {"tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab}
    rows: list[dict[str, Any]] = []
    for one in results:
        if one.failed:
            rows.append({"name": one.name, "failed": one.failed})
            continue
        row = {"name": one.name, "seconds": one.seconds, "median_seconds": one.median}
        rows.append(row | {"peak_bytes": one.peak_bytes, "loss": one.loss})
    dtype = str(case.dtype).removeprefix("torch.")
    return {
        "flce_bench": FORMAT,
        "machine": facts,
        "case": sizes | {"dtype": dtype, "device": case.device},
        "results": rows,
    }


def draw(
    path: pathlib.Path, case: Case, facts: dict[str, str | int], results: list[Result]
) -> None:
    """Bars of time and of memory. ImportError where there is no matplotlib."""
    from matplotlib import figure as figures
    from matplotlib.backends import backend_agg as agg

    done = [one for one in results if not one.failed]
    figure = figures.Figure(figsize=(8, 2.6), layout="constrained")
    agg.FigureCanvasAgg(figure)
    sides = [
        ("ms, forward and backward (median)", [1e3 * one.median for one in done]),
        ("GiB over the operands (peak)", [one.peak_bytes / GIB for one in done]),
    ]
    names = [one.name for one in done]
    colours = [_COLOURS.get(name, "#555555") for name in names]
    for axes, (label, values) in zip(figure.subplots(1, 2), sides, strict=True):
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(describe(case, facts), fontsize=7)
    figure.savefig(path, dpi=150)
