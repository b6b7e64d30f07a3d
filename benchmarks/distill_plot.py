#!/usr/bin/env python3
"""Picture and table of a record of distill.py --sweep: memory and time over the number of tokens.

    python benchmarks/distill_plot.py record.json --out sweep.svg
    python benchmarks/distill_plot.py record.json --docs docs/distillation.md

--docs replaces what is between the lines `<!-- sweep -->` and `<!-- end of sweep -->` of the page
by the table.
"""

import argparse
import json
import pathlib

import svg

NAMES = {"forward_kl": "Forward KL", "reverse_kl": "Reverse KL", "jsd": "JSD"}
COLOURS = {"eager": "grey", "compile": "orange", "Liger": "green", "flce": "blue"}
TITLES = {"compile": "torch.compile"}
MARKS = "<!-- sweep -->", "<!-- end of sweep -->"


def by_length(record):
    """{tokens: {contestant: row}} of the record's one shape and divergence."""
    rows = record["rows"]
    kinds = {(row["shape"], row["kind"]) for row in rows}
    if len(kinds) != 1:
        raise ValueError(f"record: expected one shape and divergence, got {sorted(kinds)}")
    lengths = {}
    for row in rows:
        lengths.setdefault(row["tokens"], {})[row["contestant"]] = row
    return lengths


def contestants(lengths):
    made = {name for rows in lengths.values() for name in rows}
    return [name for name in COLOURS if name in made]


def cell(row):
    if "ms" not in row:
        return f"does not fit: {row['would_take_bytes'] / 1e9:.0f} GB"
    return f"{row['over_gemms']:.2f}x, {row['peak_bytes'] / 1e9:.2f} GB"


def table(record):
    """Markdown."""
    lengths = by_length(record)
    names = contestants(lengths)
    heads = ["tokens", "four GEMMs", *(TITLES.get(name, name) for name in names)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for tokens, rows in lengths.items():
        cells = [f"{tokens:,}", f"{rows['GEMMs']['ms']:.1f} ms"]
        cells += [cell(rows[name]) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def panel(picture, box, lengths, value, label, unit="", floor=()):
    """A line for each contestant over the tokens, both logarithmic. floor: a dashed line."""
    curves = {
        name: [(tokens, value(of[name])) for tokens, of in lengths.items() if "ms" in of[name]]
        for name in contestants(lengths)
    }
    ys = [*(y for curve in curves.values() for _, y in curve), *floor]
    axes = svg.Axes(picture, box, list(lengths), ys, (True, True), margin=0.1)
    axes.frame("tokens", label, unit, xticks=False)
    for tokens in lengths:
        x, _ = axes.at(tokens, ys[0])
        shown = f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
        picture.text(x, axes.top + axes.height + 16, shown, "grey", 12.5, "middle")
    for value in floor:
        left, y = axes.at(next(iter(lengths)), value)
        picture.line([(left, y), (axes.left + axes.width, y)], "grey", dash="5 4")
    for name, curve in curves.items():
        points = [axes.at(*point) for point in curve]
        picture.line(points, COLOURS[name], 1.8)
        for x, y in points:
            (picture.square if name == "flce" else picture.dot)(x, y, COLOURS[name])


def draw(record):
    lengths = by_length(record)
    first, machine = next(iter(lengths.values()))["GEMMs"], record["machine"]
    title = f"{NAMES[first['kind']]} of a student's head from a teacher's"
    picture = svg.Picture(640, 424, f"Distillation over the number of tokens: {title}")
    picture.text(20, 32, title, size=16, weight=600)
    sizes = f"H {first['hidden']} and {first['teacher']}, V {first['vocab']}, {machine['dtype']}"
    where = (
        f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, {machine['date'][:10]}"
    )
    picture.text(20, 53, f"{sizes}; {where}", "grey", 12)
    boxes = (84, 104, 232, 262), (394, 104, 226, 262)
    label = "peak memory over the inputs, GB"
    panel(picture, boxes[0], lengths, lambda row: row["peak_bytes"] / 1e9, label)
    panel(
        picture, boxes[1], lengths, lambda row: row["over_gemms"], "time / four GEMMs", "x", [1.0]
    )
    x = 84.0
    for name in contestants(lengths):
        picture.dot(x, 82, COLOURS[name])
        shown = TITLES.get(name, name)
        picture.text(x + 9, 86, shown, COLOURS[name], 13, weight=600 if name == "flce" else None)
        x += 42 + 8 * len(shown)
    return picture


def write_table(page, record):
    """Replaces the page's table between MARKS."""
    before, rest = page.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n\n{table(record)}\n\n{MARKS[1]}{after}")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--docs", type=pathlib.Path)
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text())
    print(table(record))
    if options.out:
        draw(record).save(options.out)
    if options.docs:
        write_table(options.docs, record)


if __name__ == "__main__":
    main()
