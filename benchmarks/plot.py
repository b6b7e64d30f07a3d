#!/usr/bin/env python3
"""Draws time against memory for each shape of bench.py's records: one picture a shape.

    python benchmarks/plot.py benchmarks/results/2026-11-22-h200-everyone.json --out docs

Peers are points, their Pareto front (no other is both faster and smaller) is a stepped line; flce's
points are joined in order of budget. The dashed line is the time of the bare GEMMs.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

INK, GREY, BLUE, ORANGE = "#222222", "#8a8a8a", "#1f6fb4", "#d9660a"
TITLES = {"step": "forward + backward", "forward": "forward under no_grad"}


def front(rows):
    """The Pareto front, by memory: rows that no other row beats in both time and memory."""
    best, kept = float("inf"), []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], row["ms"])):
        if row["ms"] < best:
            best = row["ms"]
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
    return row["peak_bytes"] / 1e9, row["ms"]


def label_of(row):
    """A peer's name; for flce the budget, or `save` if it was given explicitly."""
    if row["kind"] == "peer":
        return row["contestant"]
    words = [] if row["save"] == "auto" else [f"save={row['save']}"]
    words += [row["budget"]] if row["budget"] != "default" else []
    return (" ".join(words) or "default") + " bound" * ("valid_bound" in row)


def labelled(rows):
    """The rows that get a label: peers, and flce's points with one logits dtype, because the
    others are close to them."""
    fused = [row for row in rows if row["kind"] == "flce"]
    dtype = fused[0]["logits_dtype"] if fused else None
    return [row for row in rows if row["kind"] == "peer" or row["logits_dtype"] == dtype]


def draw_floor(axes, rows):
    floor = next(row for row in rows if row["kind"] == "floor")
    axes.axhline(floor["ms"], color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        f"bare products {floor['ms']:.3g} ms",
        (1.0, floor["ms"]),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREY,
        fontsize=8.5,
    )


def draw_peers(axes, peers):
    axes.plot(*zip(*map(point, peers), strict=True), "o", color=ORANGE, markersize=5, label="peers")
    edge = [point(row) for row in front(peers)]
    if edge[1:]:
        axes.plot(
            *zip(*edge, strict=True),
            drawstyle="steps-post",
            color=ORANGE,
            linewidth=1,
            alpha=0.6,
            label="front of the peers",
        )


def draw_fused(axes, fused):
    """One line for each logits dtype; rows with a valid_bound separately."""
    groups = {}
    for row in fused:
        groups.setdefault((row["logits_dtype"], "valid_bound" in row), []).append(row)
    for (dtype, bound), rows in groups.items():
        points = sorted(map(point, rows))
        filled = BLUE if dtype == "float32" else "white"
        style = {"color": BLUE, "linewidth": 1.2, "markersize": 6.5, "markerfacecolor": filled}
        name = f"flce, {dtype} logits" + ", bound" * bound
        axes.plot(*zip(*points, strict=True), "s-", label=name, **style)


def place_labels(figure, axes, rows):
    """Each label at the first of eight positions around its point where it overlaps nothing
    drawn."""
    renderer = figure.canvas.get_renderer()
    spots = [axes.transData.transform(point(row)) for row in rows]
    taken = []
    for row in sorted(labelled(rows), key=lambda row: row["ms"]):
        blue = row["kind"] == "flce"
        text = axes.annotate(
            label_of(row),
            point(row),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=BLUE if blue else INK,
        )
        places = [(8, -3), (6, 6), (6, -12), (0, 14), (0, -21), (8, 22), (8, -30), (8, 38)]
        places = [(x, y, "left") for x, y in places] + [(-x, y, "right") for x, y in places]
        for x, y, side in places:
            text.set(position=(x, y), ha=side)
            box = text.get_window_extent(renderer).expanded(1.02, 1.05)
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            free = not any(box.overlaps(other) for other in taken)
            if inside and free and not any(box.contains(*spot) for spot in spots):
                break
        taken.append(box)


def logarithmic(axis):
    """Ticks at 1, 2, 5 of each decade, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))  # a ScalarFormatter prints 1.5 as 2
    axis.set_minor_formatter(NullFormatter())


def title(rows, machine):
    row = rows[0]
    shape = f"{row['tokens']} x {row['hidden']} x {row['vocab']}" + (" + bias" * row["bias"])
    extra = f", {row['ignored']:.0%} ignored" if row["ignored"] else ""
    return (
        f"{shape}, {row['dtype']}, {TITLES[row['pass']]}{extra}\n"
        f"{machine.get('gpu') or machine.get('cpu')}, torch {machine['torch']}, "
        f"{machine['date'][:10]}"
    )


def time_label(rows):
    """Records without a clock are older ones, timed by the host's clock."""
    return "time on the device, ms" if rows[0].get("clock") == "device" else "time, ms"


def draw(rows, machine):
    """The figure of one shape: 7 in x 4.6 in, 700 pixels wide at 100 dpi."""
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    drawn = [row for row in rows if row["kind"] != "floor"]
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("peak memory over the inputs, GB", fontsize=9.5)
    axes.set_ylabel(time_label(rows), fontsize=9.5)
    axes.set_title(title(rows, machine), fontsize=10, loc="left", color=INK)
    draw_floor(axes, rows)
    peers = [row for row in drawn if row["kind"] == "peer"]
    if peers:
        draw_peers(axes, peers)
    draw_fused(axes, [row for row in drawn if row["kind"] == "flce"])
    axes.margins(x=0.16, y=0.1)
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    axes.tick_params(which="both", labelsize=8.5)
    axes.grid(which="major", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False, loc="upper right")
    figure.canvas.draw()  # fixes the layout before anything is measured in it
    place_labels(figure, axes, drawn)
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
        path = options.out / f"{name}-{options.pass_name}.png"
        figure = draw(rows, machine)
        figure.savefig(path, dpi=200, facecolor="white")
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
