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

import style

NAMES = {"forward_kl": "Forward KL", "reverse_kl": "Reverse KL", "jsd": "JSD"}
TITLES = {"compile": "torch.compile", "sampled": "flce, sampled"}
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
    return [name for name in style.CONTESTANTS if name in made]


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


def panel(axes, lengths, value):
    """A line for each contestant over the tokens, both logarithmic."""
    axes.set(xscale="log", yscale="log")
    axes.margins(0.1)
    for name in contestants(lengths):
        points = [(tokens, value(of[name])) for tokens, of in lengths.items() if "ms" in of[name]]
        mark = "s-" if name in ("flce", "sampled") else "o-"
        colour, shown = style.CONTESTANTS[name], TITLES.get(name, name)
        axes.plot(*zip(*points, strict=True), mark, color=colour, label=shown)
    axes.grid(False, axis="x")
    names = [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths]
    axes.set_xticks(list(lengths), names)
    axes.minorticks_off()


def draw(record):
    lengths = by_length(record)
    first, machine = next(iter(lengths.values()))["GEMMs"], record["machine"]
    title = f"{NAMES[first['kind']]} of a student's head from a teacher's"
    figure = style.figure(640, 424, f"Distillation over the number of tokens: {title}")
    sizes = f"H {first['hidden']} and {first['teacher']}, V {first['vocab']}, {machine['dtype']}"
    where = machine.get("gpu") or machine["cpu"]
    note = f"{sizes}; {where}, torch {machine['torch']}, {machine['date'][:10]}"
    style.head(figure, title, note)
    label = "peak memory over the inputs, GB"
    memory = style.frame(figure, 84, 104, 232, 262, "tokens", label)
    panel(memory, lengths, lambda row: row["peak_bytes"] / 1e9)
    style.logarithmic(memory.yaxis)
    time = style.frame(figure, 394, 104, 226, 262, "tokens", "time / four GEMMs")
    time.axhline(1, color=style.GREY, linewidth=0.9, linestyle=style.DASHED)
    panel(time, lengths, lambda row: row["over_gemms"])
    style.logarithmic(time.yaxis, "x")
    close = {"handlelength": 1.2, "columnspacing": 1.4}
    figure.legend(*memory.get_legend_handles_labels(), ncols=5, loc=(0.1, 0.77), **close)
    return figure


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
        style.save(draw(record), options.out)
    if options.docs:
        write_table(options.docs, record)


if __name__ == "__main__":
    main()
