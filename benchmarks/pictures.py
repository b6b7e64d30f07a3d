#!/usr/bin/env python3
"""Draws every picture of README.md and docs/ from the records in results/: `make pictures`.

python benchmarks/pictures.py --out docs/pictures
"""

import argparse
import json
import pathlib

import distill_plot
import parallel_plot
import plot
import style
import training_plots
from matplotlib.patches import FancyBboxPatch

RESULTS = pathlib.Path(__file__).parent / "results"
DOCS = pathlib.Path(__file__).parents[1] / "docs"
SHAPES = ("head", "half", "gemma", "mid", "long", "gist", "small")
TRAINING = ("", "-tied", "-accumulate")


def record(name):
    return json.loads((RESULTS / f"2026-11-{name}.json").read_text())


# ---- README: a training step, a long sequence ----

LOSSES = {"plain": "eager", "liger": "Liger", "fuse": "flce", "256MiB": "flce, 256MiB"}


def of_llama():
    """{loss: peak bytes} of a step of 8192 tokens and of one of 32768, the longest sequence of the
    eager loss in 80 GB, which was run, and the machine. The first has flce with max_memory, from
    a later record of another GPU, in which the other losses have the same peaks."""
    made = record("23-h200-models")
    rows = [row for row in made["rows"] if row["model"] == "llama-1b"]
    (longest,) = [row["longest"] for row in rows if row.get("ran_longest")]
    steps = []
    for tokens in (8192, 32768):
        peaks = {row["contestant"]: row["peak_bytes"] for row in rows if row["tokens"] == tokens}
        steps.append({loss: peaks[loss] for loss in LOSSES if loss in peaks})
    later = {row["contestant"]: row["peak_bytes"] for row in record("27-h100-models")["rows"]}
    assert all(abs(later[loss] - peak) < 1 << 20 for loss, peak in steps[0].items())
    steps[0]["256MiB"] = later["256MiB"]
    return steps, longest, made["machine"]


def draw_peaks(figure, top, peaks):
    """A bar for each loss, from the longest to scale."""
    axes = style.frame(figure, 118, top, 404, 32 * len(peaks))
    sizes = [peak / 1e9 for peak in peaks.values()]
    colours = [style.BLUE if LOSSES[loss].startswith("flce") else style.GREY for loss in peaks]
    bars = axes.barh([LOSSES[loss] for loss in peaks], sizes, 0.74, color=colours)
    texts = axes.bar_label(bars, [f"{size:.1f} GB" for size in sizes], padding=8, size=11)
    texts[list(peaks).index("fuse")].set_weight("bold")
    axes.set(xlim=(0, max(sizes) * 1.26), ylim=(len(peaks) - 0.5, -0.5), frame_on=False, xticks=[])
    axes.tick_params("y", labelsize=11, labelcolor=style.INK, pad=8)
    axes.grid(False)


def readme():
    steps, longest, machine = of_llama()
    figure = style.figure(560, 436, "Peak memory of a training step")
    style.write(figure, 24, 36, "Llama 3.2 1B, one line changed", size=13.5, weight="bold")
    notes = "8,192 tokens", "32,768 tokens, with activation checkpointing"
    for top, note, peaks in zip((74, 264), notes, steps, strict=True):
        style.write(figure, 24, top, "Peak memory of a training step", size=12, weight="bold")
        style.notes(figure, top + 20, note, x=24)
        draw_peaks(figure, top + 30, peaks)
    end = f"In 80 GB the eager loss takes {longest:,} tokens at most. {machine['gpu']},"
    where = (
        f"bfloat16, torch {machine['torch']}, {machine['date'][:10]}; Liger: its fused loss alone"
    )
    style.notes(figure, 406, end, where, x=24, size=9)
    return figure


# ---- time against memory: the table of docs/performance.md ----


def peers_of(shape):
    """The record whose peers the table has."""
    if shape != "small":
        return record("22-h200-everyone")
    runs = record("22-h200-small-beside")["runs"]
    return next(run for run in runs if any(r["contestant"] == "eager" for r in run["rows"]))


def rows_of(shape):
    """The rows of a shape's picture, and the machine: peers, the products of their run, flce's
    smaller budgets, and its default from a later run, as a ratio to that run's products."""

    def steps(made):
        return [r for r in made["rows"] if r["shape"] == shape and r["pass"] == "step"]

    made, later = peers_of(shape), steps(record("22-h200-defaults"))
    default = next(r for r in later if r["kind"] == "flce" and r["budget"] == "default")
    floor = next(r for r in steps(made) if r["kind"] == "floor")
    budgets = {}
    for row in (*steps(made), *later):
        if row["kind"] == "flce" and row["peak_bytes"] < 0.99 * default["peak_bytes"]:
            if row["logits_dtype"] == default["logits_dtype"]:
                budgets[row["budget"]] = row
    budgets.pop("default", None)
    peers = [row for row in steps(made) if row["kind"] == "peer"]
    return [floor, default, *budgets.values(), *peers], made["machine"]


# ---- how it works: three figures ----


def drawing(width, height, title, note=""):
    """A figure, and axes that cover it in pixels, y downwards."""
    figure = style.figure(width, height, title)
    style.head(figure, title, note)
    axes = style.frame(figure, 0, 0, width, height)
    axes.set(xlim=(0, width), ylim=(height, 0), frame_on=False, xticks=[], yticks=[])
    return figure, axes


def box(axes, place, lines, fill=style.PALE, edge=style.BLUE, size=10.5):
    """A box with a name and what it is, centred. place: (x, y, width, height)."""
    x, y, width, height = place
    round_ = "round,pad=0,rounding_size=6"
    axes.add_patch(FancyBboxPatch((x, y), width, height, round_, facecolor=fill, edgecolor=edge))
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    for i, line in enumerate(lines):
        how = {"color": style.GREY} if i else {"size": size, "weight": "bold"}
        axes.text(x + width / 2, first + 18 * i, line, ha="center", **how)


def arrow(axes, points, colour=style.GREY, dash="-"):
    """Lines from point to point, with a head at the last one."""
    *_, before, last = points
    axes.plot(*zip(*points[:-1], strict=True), dash, color=colour, linewidth=1.1)
    how = {"arrowstyle": "-|>", "color": colour, "linestyle": dash, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", last, before, arrowprops=how)


def memory():
    """What is in memory at the peak of eager's step and of flce's; peaks from the records."""
    rows, _ = rows_of("head")
    eager = next(row for row in rows if row.get("contestant") == "eager")
    ours = next(row for row in rows if row["kind"] == "flce" and row["budget"] == "default")
    tokens, hidden, vocab = (eager[name] for name in ("tokens", "hidden", "vocab"))
    logits, gradients = 2 * tokens * vocab, 2 * hidden * (tokens + vocab)
    if abs(eager["peak_bytes"] - 3 * logits) > 0.01 * logits:
        raise ValueError("the peak of the eager loss is no longer that of three N x V tensors")
    chunk = ours["peak_bytes"] - gradients
    parts = [(logits, name) for name in ("logits", "log-softmax", "gradient")]
    bars = [("eager", eager, parts, style.GREY)]
    bars.append(("flce", ours, [(chunk, "chunk"), (gradients, "dX, dW")], style.BLUE))
    note = f"{tokens} tokens, H = {hidden}, V = {vocab}, bfloat16"
    figure, axes = drawing(560, 310, "Peak memory over the inputs", note)
    for i, (name, row, parts, edge) in enumerate(bars):
        x, y = 78.0, 74 + 84 * i
        axes.text(20, y + 36, name, size=11, weight="bold")
        for size, text in parts:
            width = 384 * size / eager["peak_bytes"]
            words = [text, f"{size / 1e9:.2f}"]
            box(axes, (x, y, width, 60), words, edge=edge, size=10 if size > chunk else 7.5)
            x += width + 3
        axes.text(x + 6, y + 36, f"{row['peak_bytes'] / 1e9:.2f} GB", size=11, weight="bold")
    notes = (
        "Eager: three tensors of N x V before dX and dW exist.",
        "flce: one buffer for a chunk of rows, used again for the next one.",
    )
    style.notes(figure, 268, *notes)
    return figure


def chunks():
    figure, axes = drawing(560, 392, "Forward of a mean or a sum, for each chunk of rows")
    box(axes, (20, 62, 110, 62), ["x, chunk", "rows x H"], style.PAPER, style.GREY)
    box(axes, (20, 150, 110, 62), ["W", "V x H"], style.PAPER, style.GREY)
    box(axes, (190, 62, 170, 72), ["logits GEMM", "z = x W^T + b"])
    box(axes, (190, 198, 170, 92), ["row pass", "loss, logsumexp,", "E = exp(l - c)"])
    box(axes, (414, 150, 126, 70), ["dX GEMM", "diag(r) E W"])
    box(axes, (414, 262, 126, 70), ["dW GEMM", "+= E^T diag(r) x"])
    for points in (
        [(130, 93), (188, 93)],
        [(130, 181), (160, 181), (160, 108), (188, 108)],
        [(275, 134), (275, 196)],
        [(360, 230), (387, 230), (387, 185), (412, 185)],
        [(360, 258), (387, 258), (387, 297), (412, 297)],
    ):
        arrow(axes, points)
    arrow(axes, [(412, 318), (75, 318), (75, 214)], style.BLUE, "--")
    axes.text(230, 312, "next chunk, same buffer", color=style.BLUE, ha="center")
    notes = (
        "On Hopper E leaves the epilogue of the logits GEMM: the logits never do.",
        "loss.backward() scales dX and dW by the gradient of the loss.",
    )
    style.notes(figure, 356, *notes)
    return figure


def deferred():
    figure, axes = drawing(560, 352, "The head's call returns deferred logits")
    box(axes, (20, 62, 130, 62), ["model", "hidden states"], style.PAPER, style.GREY)
    box(axes, (200, 62, 150, 62), ["lm_head(x)", "a Tensor, no memory"])
    box(axes, (400, 62, 140, 62), ["/ T, cap, [:-1]", "recorded"])
    box(axes, (200, 188, 150, 62), ["cross_entropy", "one call of flce"])
    box(axes, (400, 188, 140, 62), ["anything else", "real logits"], style.PAPER, style.ORANGE)
    for points in (
        [(150, 93), (198, 93)],
        [(350, 93), (398, 93)],
        [(450, 124), (450, 156), (275, 156), (275, 186)],
        [(470, 124), (470, 186)],
    ):
        arrow(axes, points)
    notes = (
        "log_softmax with gather, logsumexp and entropies become calls of flce too.",
        "What is not recognised gets the head's own logits: results do not depend",
        "on what is recognised.",
    )
    style.notes(figure, 288, *notes)
    return figure


def of_model(name, runs):
    """The part of a record of train_parallel.py."""
    parts = ("rows", "agreement")
    return runs | {part: [row for row in runs[part] if row["model"] == name] for part in parts}


# The heads of the first picture, by the shapes of its record.
HEADS = {
    "head": "8192 x 4096 x 128256 (Llama 3 8B)",
    "mid": "16384 x 2048 x 151936 (Qwen3 1.7B)",
    "gemma": "8192 x 2304 x 256000 (Gemma 2 2B)",
    "6000x3072x200064": "6000 x 3072 x 200064 (Phi-4-mini)",
}


def every():
    """{file name: figure}"""
    made = {"readme.svg": readme(), "memory.svg": memory(), "chunks.svg": chunks()}
    made["memory-time.svg"] = plot.draw_panels(record("27-h100-budgets"), HEADS)
    made["deferred.svg"] = deferred()
    made["distillation.svg"] = distill_plot.draw(record("26-h200-distill-sweep"))
    made["train-parallel.svg"] = parallel_plot.draw(of_model("1b", record("27-h100x4-train-100")))
    for shape in SHAPES:
        made[f"{shape}-step.svg"] = plot.draw(*rows_of(shape))
    runs = [RESULTS / f"2026-11-23-h200-sampled-training{name}.json" for name in TRAINING]
    found = training_plots.groups(training_plots.load_runs(runs))
    made["sampled-training.svg"] = training_plots.draw(found)
    return made


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=DOCS / "pictures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, figure in every().items():
        style.save(figure, options.out / name)


if __name__ == "__main__":
    main()
