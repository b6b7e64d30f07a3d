#!/usr/bin/env python3
"""Draws every picture of README.md and docs/ from the records in results/: `make pictures`.

python benchmarks/pictures.py --out docs/pictures
"""

import argparse
import json
import pathlib

import plot
import svg
import training_plots

RESULTS = pathlib.Path(__file__).parent / "results"
DOCS = pathlib.Path(__file__).parents[1] / "docs"
SHAPES = ("head", "half", "gemma", "mid", "long", "gist", "small")
TRAINING = ("", "-tied", "-accumulate")


def record(name):
    return json.loads((RESULTS / f"2026-11-{name}.json").read_text())


# ---- README: a training step, the longest sequence ----

LOSSES = {"plain": "eager", "liger": "Liger", "fuse": "flce"}


def of_llama():
    """{loss: (peak bytes of a step of 8192 tokens, longest sequence in 80 GB)}, and the machine."""
    made = record("23-h200-models")
    rows = [row for row in made["rows"] if row["model"] == "llama-1b"]
    steps = {row["contestant"]: row["peak_bytes"] for row in rows if row["tokens"] == 8192}
    longest = {row["contestant"]: row["longest"] for row in rows if "longest" in row}
    return {loss: (steps[loss], longest[loss]) for loss in LOSSES}, made["machine"]


def draw_bars(picture, left, width, title, note, values, shown):
    """A bar for each loss, from the longest to scale."""
    picture.text(left, 74, title, size=14.5, weight=600)
    picture.text(left, 93, note, "grey", 12)
    scale = (width - 150) / max(values.values())
    for i, (loss, value) in enumerate(values.items()):
        y, colour = 110 + 34 * i, "blue" if loss == "fuse" else "grey"
        picture.text(left + 48, y + 17, LOSSES[loss], size=13.5, anchor="end")
        picture.rectangle(left + 58, y, value * scale, 24, colour, radius=3)
        weight = 600 if loss == "fuse" else None
        picture.text(left + 66 + value * scale, y + 17, shown(value), size=13.5, weight=weight)


def readme():
    found, machine = of_llama()
    picture = svg.Picture(900, 246, "Peak memory of a training step and longest sequence")
    picture.text(24, 34, "Llama 3.2 1B, one line changed", size=17, weight=600)
    peaks, longest = ({loss: pair[i] for loss, pair in found.items()} for i in (0, 1))
    title = "Peak memory of a training step"
    draw_bars(
        picture,
        24,
        430,
        title,
        "8192 tokens, no checkpointing; less is better",
        peaks,
        lambda value: f"{value / 1e9:.1f} GB",
    )
    title, note = "Longest sequence in 80 GB", "activation checkpointing, tokens; from two lengths"
    draw_bars(picture, 472, 420, title, note, longest, lambda value: f"{value:,}")
    where = f"{machine['gpu']}, bfloat16, torch {machine['torch']}, {machine['date'][:10]}"
    picture.text(24, 232, f"{where}; Liger: its fused loss alone", "grey", 11.5)
    return picture


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


def box(picture, x, y, width, height, lines, fill="pale", edge="blue", dash=None):
    picture.rectangle(x, y, width, height, fill, edge, radius=6, dash=dash)
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    for i, line in enumerate(lines):
        weight = 600 if i == 0 else None
        colour = "ink" if i == 0 else "grey"
        picture.text(
            x + width / 2, first + 18 * i, line, colour, 13 if i == 0 else 12, "middle", weight
        )


def memory():
    """What is in memory at the peak of eager's step and of flce's; peaks from the records."""
    rows, _ = rows_of("head")
    eager = next(row for row in rows if row.get("contestant") == "eager")
    ours = next(row for row in rows if row["kind"] == "flce" and row["budget"] == "default")
    tokens, hidden, vocab = (eager[name] for name in ("tokens", "hidden", "vocab"))
    logits, gradients = 2 * tokens * vocab, 2 * hidden * (tokens + vocab)
    if abs(eager["peak_bytes"] - 3 * logits) > 0.01 * logits:
        raise ValueError("the peak of the eager loss is no longer that of three N x V tensors")
    names = ("logits", "log-softmax", "gradient")
    bars = [("eager", eager, [(logits, name, "grey") for name in names])]
    chunk = ours["peak_bytes"] - gradients
    bars.append(("flce", ours, [(chunk, "a chunk", "blue"), (gradients, "dX, dW", "blue")]))
    picture = svg.Picture(760, 296, "Memory of the loss: eager and flce")
    title = f"{tokens} tokens, H = {hidden}, V = {vocab}, bfloat16: peak memory over the inputs"
    picture.text(24, 32, title, size=15, weight=600)
    scale = 530 / eager["peak_bytes"]
    for i, (name, row, parts) in enumerate(bars):
        x, y = 84.0, 62 + 96 * i
        picture.text(24, y + 38, name, size=14.5, weight=600)
        for size, label, edge in parts:
            picture.rectangle(x, y, size * scale, 62, "pale", edge, radius=3)
            middle = x + size * scale / 2
            picture.text(middle, y + 28, label, "ink", 12, "middle")
            picture.text(middle, y + 46, f"{size / 1e9:.2f} GB", "grey", 11.5, "middle")
            x += size * scale + 3
        picture.text(x + 6, y + 36, f"{row['peak_bytes'] / 1e9:.2f} GB", size=13.5, weight=600)
    words = "Eager: three tensors of N x V before dX and dW exist. flce: one buffer for a chunk of "
    picture.text(24, 256, words + "rows,", "grey", 12.5)
    picture.text(24, 274, "used again for the next one, while dX and dW are summed.", "grey", 12.5)
    return picture


def chunks():
    picture = svg.Picture(760, 330, "The loop over chunks of rows")
    picture.text(24, 32, "Forward of a mean or a sum: for each chunk of rows", size=15, weight=600)
    box(picture, 24, 60, 150, 62, ["x, chunk", "rows x H"], "paper", "grey")
    box(picture, 24, 150, 150, 62, ["W", "V x H"], "paper", "grey")
    box(picture, 222, 96, 150, 80, ["logits GEMM", "z = x W^T + b", "one chunk, rows x V"])
    box(picture, 420, 96, 140, 80, ["row pass", "loss, logsumexp,", "E = exp(l - c)"])
    box(picture, 608, 54, 130, 70, ["dX GEMM", "diag(r) E W"])
    box(picture, 608, 148, 130, 70, ["dW GEMM", "+= E^T diag(r) x"])
    for points in (
        [(174, 91), (198, 91), (198, 126), (220, 126)],
        [(174, 181), (198, 181), (198, 146), (220, 146)],
        [(372, 136), (418, 136)],
        [(560, 126), (584, 126), (584, 89), (606, 89)],
        [(560, 146), (584, 146), (584, 183), (606, 183)],
    ):
        picture.line(points, "grey", 1.5, arrow=True)
    picture.line([(673, 218), (673, 252), (99, 252), (99, 214)], "blue", 1.5, "5 4", arrow=True)
    picture.text(386, 270, "next chunk, same buffer", "blue", 12.5, "middle")
    words = "On Hopper the row pass is in the epilogue of the logits GEMM: exp(l - c) leaves it, "
    picture.text(24, 298, words + "the logits never do.", "grey", 12.5)
    picture.text(
        24, 316, "loss.backward() scales dX and dW by the gradient of the loss.", "grey", 12.5
    )
    return picture


def deferred():
    picture = svg.Picture(760, 300, "What flce.fuse does with a head")
    picture.text(24, 32, "flce.fuse: the head's call returns deferred logits", size=15, weight=600)
    box(picture, 24, 92, 130, 62, ["model", "hidden states"], "paper", "grey")
    box(picture, 196, 92, 150, 62, ["lm_head(x)", "a Tensor, no memory"])
    box(picture, 388, 92, 150, 62, ["/ T, softcap, [:-1]", "recorded"])
    box(picture, 594, 56, 146, 62, ["cross_entropy", "one call of flce"])
    box(picture, 594, 160, 146, 62, ["anything else", "real logits are made"], "paper", "orange")
    for points in (
        [(154, 123), (194, 123)],
        [(346, 123), (386, 123)],
        [(538, 113), (566, 113), (566, 87), (592, 87)],
        [(538, 133), (566, 133), (566, 191), (592, 191)],
    ):
        picture.line(points, "grey", 1.5, arrow=True)
    words = "log_softmax with gather, logsumexp and entropies become calls of flce too;"
    picture.text(24, 252, words, "grey", 12.5)
    picture.text(
        24,
        270,
        "what is not recognised gets the head's own logits: the results do not depend on it.",
        "grey",
        12.5,
    )
    return picture


def every():
    """{file name: picture}"""
    made = {"readme.svg": readme(), "memory.svg": memory(), "chunks.svg": chunks()}
    made["deferred.svg"] = deferred()
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
    for name, picture in every().items():
        picture.save(options.out / name)


if __name__ == "__main__":
    main()
