"""The picture of train_parallel.py's record: loss curves, their differences, speed and memory."""

import parallel_cases
import svg

COLOURS = {"plain": "ink", "loss_parallel": "green", "flce": "orange", "float32": "grey"}
PAIR_COLOURS = {"flce": "orange", "loss_parallel": "green", "plain": "ink"}
ROW, LEFT, WIDTH, HEIGHT = 330, 76, 262, 200
LEAST = 1e-7  # of a difference in the picture: some are 0


def draw_curves(picture, box, rows):
    curves = {row["loss"]: row["losses"] for row in rows}
    points = [(x, y) for losses in curves.values() for x, y in enumerate(losses)]
    axes = svg.Axes(picture, box, *zip(*points, strict=True))
    axes.frame("step", "loss")
    for loss, losses in curves.items():
        width, dash = (4.0, None) if loss == "plain" else (1.6, "5 3" if loss != "flce" else None)
        opacity = 0.35 if loss == "plain" else None
        line = [axes.at(*point) for point in enumerate(losses)]
        picture.line(line, COLOURS[loss], width, dash, opacity)


def draw_differences(picture, box, pairs):
    """`to` plain in full lines, to float32 dashed."""
    lines = {(p["loss"], p["to"]): [max(one, LEAST) for one in p["each"]] for p in pairs}
    points = [(x, y) for values in lines.values() for x, y in enumerate(values)]
    axes = svg.Axes(picture, box, *zip(*points, strict=True), logarithmic=(False, True))
    axes.frame("step", "difference of losses")
    for (loss, other), values in lines.items():
        dash = "5 3" if other == "float32" else None
        line = [axes.at(*point) for point in enumerate(values)]
        picture.line(line, PAIR_COLOURS[loss], 1.6, dash)
        if len(values) == 1:
            picture.dot(*line[0], PAIR_COLOURS[loss])


def describe(picture, place, rows):
    """A line for each loss."""
    x, y = place
    for i, row in enumerate(rows):
        text = row["loss"]
        if row["loss"] != "float32" and "failed" in row:
            text += f": {row['failed']}"
        elif row["loss"] != "float32":
            text += f": {row['tokens_per_s']:,.0f} tokens/s"
            text += f", {row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
        picture.text(x, y + 22 * i, text, COLOURS[row["loss"]], 13.5)


def groups(record):
    """[(model, case, rows)]"""
    found = {}
    for row in record["rows"]:
        found.setdefault((row["model"], row["case"]), []).append(row)
    return [(*key, rows) for key, rows in found.items() if any("losses" in row for row in rows)]


def draw(record):
    found, machine = groups(record), record["machine"]
    picture = svg.Picture(960, ROW * len(found) + 62, "Training on several GPUs")
    for index, (model, case, rows) in enumerate(found):
        top = ROW * index
        title = f"{model}, {parallel_cases.CASES[case].name}, {record['ranks']} ranks"
        picture.text(20, top + 30, title, size=15, weight=600)
        done = [row for row in rows if "losses" in row]
        draw_curves(picture, (LEFT, top + 52, WIDTH, HEIGHT), done)
        pairs = [p for p in record["agreement"] if (p["model"], p["case"]) == (model, case)]
        if pairs:
            draw_differences(picture, (LEFT + 340, top + 52, WIDTH, HEIGHT), pairs)
        describe(picture, (LEFT + 628, top + 70), rows)
    foot = ROW * len(found) + 20
    words = f"{record['ranks']} x {machine.get('gpu', machine['device'])}, {record['dtype']}, "
    words += f"{record['sequences']} sequences of {record['length']} tokens a step, "
    words += f"torch {machine['torch']}, {machine['date'][:10]}."
    picture.text(20, foot, words, "grey", 12.5)
    words = "Differences: full lines to plain, dashed to logits in float32 in the first steps."
    picture.text(20, foot + 20, words, "grey", 12.5)
    return picture
