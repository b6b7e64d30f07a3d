#!/usr/bin/env python3
"""Draws every picture of README.md and docs/ from the records in results/: `make pictures`.

python benchmarks/pictures.py --out docs/pictures
"""

import argparse
import json
import pathlib

import distill_plot
import plot
import svg
import training_plots

RESULTS = pathlib.Path(__file__).parent / "results"
DOCS = pathlib.Path(__file__).parents[1] / "docs"
SHAPES = ("head", "half", "gemma", "mid", "long", "gist", "small")
TRAINING = ("", "-tied", "-accumulate")


def record(name):
    return json.loads((RESULTS / f"2026-11-{name}.json").read_text())


# ---- README: a training step, a long sequence ----

LOSSES = {"plain": "eager", "liger": "Liger", "fuse": "flce"}


def of_llama():
    """{loss: (peak bytes of a step of 8192 tokens, of one of 32768)}, the longest sequence of the
    eager loss in 80 GB, which was run, and the machine."""
    made = record("23-h200-models")
    rows = [row for row in made["rows"] if row["model"] == "llama-1b"]
    peaks = {(row["contestant"], row["tokens"]): row["peak_bytes"] for row in rows}
    (longest,) = [row["longest"] for row in rows if row.get("ran_longest")]
    found = {loss: (peaks[loss, 8192], peaks[loss, 32768]) for loss in LOSSES}
    return found, longest, made["machine"]


def draw_bars(picture, top, title, note, values, shown):
    """A bar for each loss, from the longest to scale."""
    picture.text(24, top, title, size=16, weight=600)
    picture.text(24, top + 20, note, "grey", 13)
    scale = (picture.width - 210) / max(values.values())
    for i, (loss, value) in enumerate(values.items()):
        y, colour = top + 34 + 32 * i, "blue" if loss == "fuse" else "grey"
        picture.text(72, y + 17, LOSSES[loss], size=15, anchor="end")
        picture.rectangle(82, y, value * scale, 24, colour, radius=3)
        weight = 600 if loss == "fuse" else None
        picture.text(92 + value * scale, y + 17, shown(value), size=15, weight=weight)


def readme():
    found, longest, machine = of_llama()
    picture = svg.Picture(560, 404, "Peak memory of a training step")
    picture.text(24, 36, "Llama 3.2 1B, one line changed", size=18, weight=600)
    notes = "8,192 tokens", "32,768 tokens, with activation checkpointing"
    for i, note in enumerate(notes):
        peaks = {loss: pair[i] for loss, pair in found.items()}
        title = "Peak memory of a training step"
        draw_bars(picture, 74 + 158 * i, title, note, peaks, lambda value: f"{value / 1e9:.1f} GB")
    end = f"In 80 GB the eager loss takes {longest:,} tokens at most. {machine['gpu']},"
    picture.text(24, 376, end, "grey", 12)
    where = f"bfloat16, torch {machine['torch']}, {machine['date'][:10]}"
    picture.text(24, 392, f"{where}; Liger: its fused loss alone", "grey", 12)
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


def box(picture, place, lines, fill="pale", edge="blue"):
    """A box with a name and what it is, centred. place: (x, y, width, height)."""
    x, y, width, height = place
    picture.rectangle(*place, fill, edge, radius=6)
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    picture.text(x + width / 2, first, lines[0], "ink", 14, "middle", 600)
    for i, line in enumerate(lines[1:], 1):
        picture.text(x + width / 2, first + 18 * i, line, "grey", 13, "middle")


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
    bars.append(("flce", ours, [(chunk, "chunk", "blue"), (gradients, "dX, dW", "blue")]))
    picture = svg.Picture(560, 310, "Memory of the loss: eager and flce")
    picture.text(20, 32, "Peak memory over the inputs", size=16, weight=600)
    picture.text(20, 53, f"{tokens} tokens, H = {hidden}, V = {vocab}, bfloat16", "grey", 13)
    scale = 384 / eager["peak_bytes"]
    for i, (name, row, parts) in enumerate(bars):
        x, y = 78.0, 74 + 84 * i
        picture.text(20, y + 36, name, size=15, weight=600)
        for size, label, edge in parts:
            picture.rectangle(x, y, size * scale, 60, "pale", edge, radius=3)
            middle = x + size * scale / 2
            picture.text(middle, y + 27, label, "ink", 13 if size > chunk else 11, "middle")
            picture.text(middle, y + 45, f"{size / 1e9:.2f}", "grey", 12, "middle")
            x += size * scale + 3
        picture.text(x + 6, y + 36, f"{row['peak_bytes'] / 1e9:.2f} GB", size=15, weight=600)
    picture.text(20, 268, "Eager: three tensors of N x V before dX and dW exist.", "grey", 13)
    words = "flce: one buffer for a chunk of rows, used again for the next one."
    picture.text(20, 288, words, "grey", 13)
    return picture


def chunks():
    picture = svg.Picture(560, 392, "The loop over chunks of rows")
    picture.text(20, 32, "Forward of a mean or a sum, for each chunk of rows", size=16, weight=600)
    box(picture, (20, 62, 110, 62), ["x, chunk", "rows x H"], "paper", "grey")
    box(picture, (20, 150, 110, 62), ["W", "V x H"], "paper", "grey")
    box(picture, (190, 62, 170, 72), ["logits GEMM", "z = x W^T + b"])
    box(picture, (190, 198, 170, 92), ["row pass", "loss, logsumexp,", "E = exp(l - c)"])
    box(picture, (414, 150, 126, 70), ["dX GEMM", "diag(r) E W"])
    box(picture, (414, 262, 126, 70), ["dW GEMM", "+= E^T diag(r) x"])
    for points in (
        [(130, 93), (188, 93)],
        [(130, 181), (160, 181), (160, 108), (188, 108)],
        [(275, 134), (275, 196)],
        [(360, 230), (387, 230), (387, 185), (412, 185)],
        [(360, 258), (387, 258), (387, 297), (412, 297)],
    ):
        picture.line(points, "grey", 1.5, arrow=True)
    picture.line([(412, 318), (75, 318), (75, 214)], "blue", 1.5, "5 4", arrow=True)
    picture.text(230, 312, "next chunk, same buffer", "blue", 13, "middle")
    words = "On Hopper E leaves the epilogue of the logits GEMM: the logits never do."
    picture.text(20, 356, words, "grey", 13)
    words = "loss.backward() scales dX and dW by the gradient of the loss."
    picture.text(20, 376, words, "grey", 13)
    return picture


def deferred():
    picture = svg.Picture(560, 352, "What flce.fuse does with a head")
    picture.text(20, 32, "The head's call returns deferred logits", size=16, weight=600)
    box(picture, (20, 62, 130, 62), ["model", "hidden states"], "paper", "grey")
    box(picture, (200, 62, 150, 62), ["lm_head(x)", "a Tensor, no memory"])
    box(picture, (400, 62, 140, 62), ["/ T, cap, [:-1]", "recorded"])
    box(picture, (200, 188, 150, 62), ["cross_entropy", "one call of flce"])
    box(picture, (400, 188, 140, 62), ["anything else", "real logits"], "paper", "orange")
    for points in (
        [(150, 93), (198, 93)],
        [(350, 93), (398, 93)],
        [(450, 124), (450, 156), (275, 156), (275, 186)],
        [(470, 124), (470, 186)],
    ):
        picture.line(points, "grey", 1.5, arrow=True)
    for y, words in (
        (288, "log_softmax with gather, logsumexp and entropies become calls of flce too."),
        (308, "What is not recognised gets the head's own logits: results do not depend"),
        (328, "on what is recognised."),
    ):
        picture.text(20, y, words, "grey", 13)
    return picture


# The heads of the first picture, by the shapes of its record.
HEADS = {
    "head": "8192 x 4096 x 128256 (Llama 3 8B)",
    "mid": "16384 x 2048 x 151936 (Qwen3 1.7B)",
    "gemma": "8192 x 2304 x 256000 (Gemma 2 2B)",
    "6000x3072x200064": "6000 x 3072 x 200064 (Phi-4-mini)",
}


def every():
    """{file name: picture}"""
    made = {"readme.svg": readme(), "memory.svg": memory(), "chunks.svg": chunks()}
    made["memory-time.svg"] = plot.draw_panels(record("27-h100-budgets"), HEADS)
    made["deferred.svg"] = deferred()
    made["distillation.svg"] = distill_plot.draw(record("26-h200-distill-sweep"))
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
