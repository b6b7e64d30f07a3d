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
    """Median, fastest and number of rounds; peak memory over the operands; median and memory over
    those of eager, where it ran."""
    eager = next((one for one in results if one.name == "eager" and not one.failed), None)
    ratios = f"{'time':>10}{'memory':>10}" if eager else ""
    lines = [f"{'':60}{'over eager:':>20}".rstrip()] if eager else []
    lines += [f"{'':14}{'median':>12}{'fastest':>12}{'rounds':>8}{'peak memory':>14}{ratios}"]
    for result in results:
        if result.failed:
            lines.append(f"{result.name:14}  failed: {result.failed}")
            continue
        times = (f"{1e3 * value:.2f} ms" for value in (result.median, min(result.seconds)))
        row = "".join(f"{time:>12}" for time in times)
        memory = f"{result.peak_bytes / GIB:.3f} GiB"
        if eager:
            over = result.median / eager.median, result.peak_bytes / max(eager.peak_bytes, 1)
            ratios = "".join(f"{f'{ratio:.2f}x':>10}" for ratio in over)
        lines.append(f"{result.name:14}{row}{len(result.seconds):>8}{memory:>14}{ratios}")
    return "\n".join(lines)


def record(case: Case, facts: dict[str, str | int], results: list[Result]) -> dict[str, Any]:
    """All of it; seconds and bytes."""
    sizes = {"tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab}
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.failed:
            rows.append({"name": result.name, "failed": result.failed})
            continue
        row = {"name": result.name, "seconds": result.seconds, "median_seconds": result.median}
        rows.append(row | {"peak_bytes": result.peak_bytes, "loss": result.loss})
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

    done = [result for result in results if not result.failed]
    figure = figures.Figure(figsize=(8, 2.6), layout="constrained")
    agg.FigureCanvasAgg(figure)
    sides = [
        ("ms, forward and backward (median)", [1e3 * result.median for result in done]),
        ("GiB over the operands (peak)", [result.peak_bytes / GIB for result in done]),
    ]
    names = [result.name for result in done]
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
