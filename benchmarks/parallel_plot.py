"""The picture of train_parallel.py's record: loss curves, their differences, speed and memory."""

import parallel_cases
import style

ROW, LEFT, WIDTH, HEIGHT = 330, 76, 262, 200
LEAST = 1e-7  # of a difference in the picture: some are 0


def draw_curves(axes, rows):
    """Plain is a broad, pale line, on which the others lie."""
    for row in rows:
        how = {"linewidth": 1.2, "linestyle": "-" if row["loss"] == "flce" else "--"}
        if row["loss"] == "plain":
            how = {"linewidth": 3, "alpha": 0.35}
        axes.plot(row["losses"], color=style.CONTESTANTS[row["loss"]], **how)


def draw_differences(axes, pairs):
    """`to` plain in full lines, to float32 dashed."""
    axes.set(yscale="log")
    for pair in pairs:
        how = {"linestyle": "--" if pair["to"] == "float32" else "-", "linewidth": 1.2}
        how["marker"] = "o" if len(pair["each"]) == 1 else ""
        values = [max(one, LEAST) for one in pair["each"]]
        axes.plot(values, color=style.CONTESTANTS[pair["loss"]], **how)
    style.logarithmic(axes.yaxis)


def describe(row):
    loss = row["loss"]
    if loss == "float32":
        return loss
    if "failed" in row:
        return f"{loss}: {row['failed']}"
    memory = f", {row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
    return f"{loss}: {row['tokens_per_s']:,.0f} tokens/s{memory}"


def groups(record):
    """[(model, case, rows)]"""
    found = {}
    for row in record["rows"]:
        found.setdefault((row["model"], row["case"]), []).append(row)
    return [(*key, rows) for key, rows in found.items() if any("losses" in row for row in rows)]


def draw(record):
    found, machine = groups(record), record["machine"]
    figure = style.figure(990, ROW * len(found) + 62, "Training on several GPUs")
    for index, (model, case, rows) in enumerate(found):
        top = ROW * index
        title = f"{model}, {parallel_cases.CASES[case].name}, {record['ranks']} ranks"
        style.write(figure, 20, top + 30, title, size=11, weight="bold")
        axes = style.frame(figure, LEFT, top + 52, WIDTH, HEIGHT, "step", "loss")
        axes.xaxis.get_major_locator().set_params(integer=True)
        draw_curves(axes, [row for row in rows if "losses" in row])
        pairs = [p for p in record["agreement"] if (p["model"], p["case"]) == (model, case)]
        if pairs:
            place = LEFT + 340, top + 52, WIDTH, HEIGHT
            axes = style.frame(figure, *place, "step", "difference of losses")
            axes.xaxis.get_major_locator().set_params(integer=True)
            draw_differences(axes, pairs)
        for i, row in enumerate(rows):
            place = LEFT + 628, top + 70 + 22 * i
            style.write(figure, *place, describe(row), color=style.CONTESTANTS[row["loss"]])
    words = f"{record['ranks']} x {machine.get('gpu', machine['device'])}, {record['dtype']}, "
    words += f"{record['sequences']} sequences of {record['length']} tokens a step, "
    words += f"torch {machine['torch']}, {machine['date'][:10]}."
    other = "Differences: full lines to plain, dashed to logits in float32 in the first steps."
    style.notes(figure, ROW * len(found) + 20, words, other)
    return figure
