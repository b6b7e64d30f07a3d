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

import svg

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
    return [row for row in rows if row["kind"] == "peer" or row["logits_dtype"] == dtype]


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


def draw(rows, machine):
    """The picture of one shape. `rows` have one of the bare GEMMs."""
    title, where = titles(rows, machine)
    picture = svg.Picture(640, 520, f"Time against memory, {title}")
    picture.text(20, 32, title, size=16, weight=600)
    picture.text(20, 53, where, "grey", 13)
    drawn = [row for row in rows if row["kind"] != "floor"]
    peers = [row for row in drawn if row["kind"] == "peer"]
    xs, ys = zip(*map(point, drawn), strict=True)
    box, logarithmic = (74, 74, 544, 388), (True, True)
    axes = svg.Axes(picture, box, xs, (*ys, 1.0), logarithmic, margin=0.12)
    axes.frame("peak memory over the inputs, GB", "time / bare products", "x")
    _, one = axes.at(xs[0], 1.0)
    picture.line([(axes.left, one), (axes.left + axes.width, one)], "grey", dash="5 4")
    edge = [axes.at(*point(row)) for row in front(peers)]
    steps = [s for (_, y), (x, z) in zip(edge, edge[1:], strict=False) for s in ((x, y), (x, z))]
    picture.line([*edge[:1], *steps], "orange", opacity=0.6)
    for row in peers:
        picture.dot(*axes.at(*point(row)), "orange")
    groups = {}
    for row in (row for row in drawn if row["kind"] == "flce"):
        groups.setdefault((row["logits_dtype"], "valid_bound" in row), []).append(row)
    for fused in groups.values():
        points = [axes.at(*one) for one in sorted(map(point, fused))]
        picture.line(points, "blue", 1.5)
        for x, y in points:
            picture.square(x, y, "blue")
    labels = svg.Labels(axes, [axes.at(*point(row)) for row in drawn])
    for row in sorted(labelled(drawn), key=lambda row: (row["kind"] != "flce", row["ratio"])):
        colour = "blue" if row["kind"] == "flce" else "ink"
        labels.put(*axes.at(*point(row)), label_of(row), colour)
    return picture


PANEL = (660, 400)  # width and height of a panel
NAMES = {"liger": "Liger", "cce": "Cut Cross Entropy", "cce exact": "the same, exact"}
NAMES |= {"torch chunked": "torch's chunks"}


def panel(picture, left, top, title, rows):
    """Time against memory of one shape: peers are points, flce's budgets a line."""
    drawn = [row for row in rows if row["kind"] != "floor"]
    xs, ys = zip(*map(point, drawn), strict=True)
    box = (left + 74, top + 36, PANEL[0] - 100, PANEL[1] - 110)
    axes = svg.Axes(picture, box, (*xs, max(xs) * 1.2), (*ys, 1.0), (True, True), margin=0.08)
    picture.text(left + 74, top + 22, title, size=15, weight=600)
    axes.frame("peak memory over the inputs, GB", "time / three GEMMs", "x")
    _, one = axes.at(xs[0], 1.0)
    picture.line([(axes.left, one), (axes.left + axes.width, one)], "grey", dash="5 4")
    fused = sorted((row for row in drawn if row["kind"] == "flce"), key=point)
    picture.line([axes.at(*point(row)) for row in fused], "blue", 2)
    labels = svg.Labels(axes, [axes.at(*point(row)) for row in drawn])
    for row in fused:
        picture.square(*axes.at(*point(row)), "blue")
    shown = [fused[0], next(row for row in fused if row["budget"] == "default")]
    for row in (*shown, *(row for row in drawn if row["kind"] == "peer")):
        ours = row["kind"] == "flce"
        if not ours:
            picture.dot(*axes.at(*point(row)), "orange")
        name = label_of(row)
        labels.put(*axes.at(*point(row)), NAMES.get(name, name), "blue" if ours else "ink")


def draw_panels(record, shapes):
    """One picture of a record of bench.py with budgets and peers: a panel for each shape."""
    columns, rows = 2, -(-len(shapes) // 2)
    picture = svg.Picture(columns * PANEL[0], rows * PANEL[1] + 64, "Time against memory")
    picture.text(24, 34, "Loss and gradients of a head: time against memory", size=19, weight=600)
    machine = record["machine"]
    where = f"{machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}, bfloat16, forward"
    picture.text(
        24, 56, f"{where} + backward; flce at max_memory from 16 MiB to its default", "grey"
    )
    for i, (shape, title) in enumerate(shapes.items()):
        made = [r for r in record["rows"] if r["shape"] == shape and r["pass"] == "step"]
        left, top = PANEL[0] * (i % columns), 64 + PANEL[1] * (i // columns)
        panel(picture, left, top, title, made)
    return picture


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
        draw(rows, machine).save(path)
        print(path)


if __name__ == "__main__":
    main()
