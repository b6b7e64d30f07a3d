#!/usr/bin/env python3
"""Draws time against memory for each shape of bench.py's records: one picture a shape.

    python benchmarks/plot.py new.json --out pictures

Time is the ratio to the bare GEMMs of the same run, the dashed line. Peers are points, their Pareto
front (no other is both faster and smaller) is a stepped line; flce's points are joined in order of
budget.
"""

import argparse
import json
import pathlib

import style

TITLES = {"step": "forward + backward", "forward": "forward under no_grad"}


def front(rows):
    """The Pareto front, by memory: rows that no other row beats in both time and memory."""
    best, kept = float("inf"), []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], row["ratio"])):
        if row["ratio"] < best:
            best = row["ratio"]
            kept.append(row)
    return kept


def by_shape(records, pass_name):
    """Rows of a pass by shape, from the last record with that shape; and that record's machine."""
    shapes = {}
    for record in records:
        for name in {row["shape"] for row in record["rows"]}:
            rows = [r for r in record["rows"] if r["shape"] == name and r["pass"] == pass_name]
            if rows:
                shapes[name] = rows, record["machine"]
    return shapes


def point(row):
    return row["peak_bytes"] / 1e9, row["ratio"]


def line(rows):
    """The points' memory and time, by memory."""
    return zip(*sorted(map(point, rows)), strict=True) if rows else ([], [])


def label_of(row):
    """A peer's name; for flce the budget, or `save` if it was given explicitly."""
    if row["kind"] == "peer":
        return row["contestant"]
    words = [] if row["save"] == "auto" else [f"save={row['save']}"]
    words += [row["budget"]] if row["budget"] != "default" else []
    return "flce, " + (" ".join(words) or "default") + ", bound" * ("valid_bound" in row)


def labelled(rows):
    """The rows that get a label: peers, and flce's points with one logits dtype, because the
    others are close to them."""
    fused = [row for row in rows if row["kind"] == "flce"]
    dtype = fused[0]["logits_dtype"] if fused else None
    return [r for r in rows if r["kind"] == "peer" or r.get("logits_dtype", "") == dtype]


def titles(rows, machine):
    row = next(row for row in rows if row["kind"] == "floor")
    shape = f"{row['tokens']} x {row['hidden']} x {row['vocab']}" + (" + bias" * row["bias"])
    extra = f", {row['ignored']:.0%} ignored" if row["ignored"] else ""
    clock = ", time on the device" if row.get("clock") == "device" else ""
    where = f"{machine.get('gpu') or machine.get('cpu')}, torch {machine['torch']}"
    return (
        f"{shape}, {row['dtype']}, {TITLES[row['pass']]}{extra}",
        f"{where}, {machine['date'][:10]}; bare products {row['ms']:.3g} ms{clock}",
    )


def compare(axes, rows, texts):
    """Time against memory: peers are points, flce's budgets a line for each logits dtype.
    texts: [(row, label)]"""
    drawn = [row for row in rows if row["kind"] != "floor"]
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.2, y=0.1)
    axes.axhline(1, color=style.GREY, linewidth=0.9, linestyle=style.DASHED)
    peers = [row for row in drawn if row["kind"] == "peer"]
    axes.plot(*line(peers), "o", color=style.ORANGE)
    groups = {}
    for row in (row for row in drawn if row["kind"] == "flce"):
        groups.setdefault((row["logits_dtype"], "valid_bound" in row), []).append(row)
    for fused in groups.values():
        axes.plot(*line(fused), "s-", color=style.BLUE)
    style.logarithmic(axes.xaxis)
    style.logarithmic(axes.yaxis, "x")
    colours = {"flce": style.BLUE, "peer": style.INK}
    found = [(point(row), text, colours[row["kind"]]) for row, text in texts]
    style.label(axes, found)


def draw(rows, machine):
    """The picture of one shape. `rows` have one of the bare GEMMs."""
    title, where = titles(rows, machine)
    figure = style.figure(640, 520, f"Time against memory, {title}")
    style.head(figure, title, where)
    labels = "peak memory over the inputs, GB", "time / bare products"
    axes = style.frame(figure, 74, 74, 544, 388, *labels)
    xs, ys = line(front([row for row in rows if row["kind"] == "peer"]))
    steps = [x for x in xs for _ in "ab"][1:], [y for y in ys for _ in "ab"][:-1]
    axes.plot(*steps, color=style.ORANGE, alpha=0.6, linewidth=0.9)
    shown = sorted(labelled(rows), key=lambda row: (row["kind"] != "flce", row["ratio"]))
    compare(axes, rows, [(row, label_of(row)) for row in shown])
    return figure


NAMES = {"liger": "Liger", "cce": "Cut Cross Entropy", "cce exact": "Cut Cross Entropy, exact"}
NAMES |= {"torch chunked": "torch's chunks"}


def draw_panels(record, shapes):
    """One picture of a record of bench.py with budgets and peers: a panel for each shape."""
    columns, width, height = 2, 540, 350
    lines = -(-len(shapes) // columns)
    title = "Loss and gradients of a head: time against memory"
    figure = style.figure(columns * width, lines * height + 64, title)
    machine = record["machine"]
    where = f"{machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}, bfloat16, forward"
    style.head(figure, title, f"{where} + backward; flce at max_memory from 16 MiB to its default")
    for i, (shape, name) in enumerate(shapes.items()):
        rows = [r for r in record["rows"] if r["shape"] == shape and r["pass"] == "step"]
        left, top = width * (i % columns) + 74, 64 + height * (i // columns) + 36
        labels = "peak memory over the inputs, GB", "time / three GEMMs"
        axes = style.frame(figure, left, top, width - 100, height - 110, *labels)
        axes.set_title(name)
        fused = sorted((row for row in rows if row["kind"] == "flce"), key=point)
        shown = [fused[0], next(row for row in fused if row["budget"] == "default")]
        shown += [row for row in rows if row["kind"] == "peer"]
        compare(axes, rows, [(row, NAMES.get(label_of(row), label_of(row))) for row in shown])
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=pathlib.Path, help="of bench.py --json")
    parser.add_argument("--pass", dest="pass_name", choices=list(TITLES), default="step")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text()) for path in options.records]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (rows, machine) in by_shape(records, options.pass_name).items():
        path = options.out / f"{name}-{options.pass_name}.svg"
        style.save(draw(rows, machine), path)
        print(path)


if __name__ == "__main__":
    main()
