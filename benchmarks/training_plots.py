"""Tables and pictures of sampled_training.py's records."""

import json
import statistics

import svg

COLOURS = {"exact": "ink", "2^-8": "green", "2^-6": "blue", "2^-4": "orange"}


def load_runs(paths):
    return [run for path in paths for run in json.loads(path.read_text())["runs"]]


def described(chosen):
    continued = f", then {chosen['finetune']} steps on other text" if "finetune" in chosen else ""
    return (
        f"{chosen['layers']} layers of {chosen['width']}, V = {chosen['vocab']}, "
        f"{'tied' if chosen['tied'] else 'untied'}, "
        f"{chosen['accumulate']} x {chosen['batch']} x {chosen['sequence']} tokens a step,\n"
        f"{chosen['optimizer']}, learning rate {chosen['lr']:g}, decay "
        f"{chosen['weight_decay']:g}, {'clipped at norm 1' if chosen['clip'] else 'not clipped'}"
        f"{continued}"
    )


def groups(runs):
    """{configuration as text: {gradient: runs}}, exact first, then eps upwards."""
    found = {}
    for run in sorted(runs, key=lambda run: run["eps"] or 0.0):
        gradients = found.setdefault(json.dumps(run["configuration"], sort_keys=True), {})
        gradients.setdefault(run["gradient"], []).append(run)
    return found


def final(run):
    return run["validation"][-1]["loss"]


def table(gradients):
    """Rows of Markdown; `to exact`: the mean difference to the exact run of the same seed."""
    lines = [
        "| gradient | seeds | validation | least | most | to exact |",
        "|---|---|---|---|---|---|",
    ]
    exact = {run["seed"]: final(run) for run in gradients.get("exact", [])}
    for gradient, runs in gradients.items():
        values = [final(run) for run in runs]
        paired = [final(run) - exact[run["seed"]] for run in runs if run["seed"] in exact]
        difference = f"{statistics.mean(paired):+.4f}" if paired else ""
        lines.append(
            f"| {gradient} | {len(runs)} | {statistics.mean(values):.4f} | {min(values):.4f} "
            f"| {max(values):.4f} | {difference} |"
        )
    return "\n".join(lines)


def finetuned_table(gradients):
    """The Markdown table of runs with --finetune: means over seeds, the seeds in brackets."""
    lines = ["| gradient | other text | first text |", "|---|---|---|"]
    trained = {run["seed"]: run["trained"] for runs in gradients.values() for run in runs}

    def shown(values):
        values = list(values)
        each = ", ".join(f"{value:.4f}" for value in values)
        return f"{statistics.mean(values):.4f} ({each})"

    before = (shown(one[text] for one in trained.values()) for text in ("other", "first"))
    lines.append("| before | {} | {} |".format(*before))
    for gradient, runs in gradients.items():
        runs = sorted(runs, key=lambda run: run["seed"])
        texts = shown(map(final, runs)), shown(run["first"] for run in runs)
        lines.append(f"| {gradient} | {texts[0]} | {texts[1]} |")
    return "\n".join(lines)


def print_tables(found):
    for text, gradients in found.items():
        chosen = json.loads(text)
        made = finetuned_table if "finetune" in chosen else table
        print(f"{described(chosen)}\n\n{made(gradients)}\n")


def validation_curve(run):
    return tuple([one[key] for one in run["validation"]] for key in ("step", "loss"))


def draw_curves(picture, box, gradients, curve, ylabel):
    """The mean over seeds, and from the least to the most of them, after the first fifth of the
    steps, whose losses are far above the others; `curve`: run -> (xs, ys)."""
    means, bands = {}, {}
    for gradient, runs in gradients.items():
        xs = curve(runs[0])[0]
        columns = list(zip(*(curve(run)[1] for run in runs), strict=True))
        late = [i for i, x in enumerate(xs) if 5 * x >= xs[-1]]
        ends = [[(xs[i], end(columns[i])) for i in late] for end in (max, statistics.mean, min)]
        means[gradient], bands[gradient] = ends[1], [*ends[0], *reversed(ends[2])]
    points = [one for band in bands.values() for one in band]
    axes = svg.Axes(picture, box, *zip(*points, strict=True))
    axes.frame("step", ylabel)
    for gradient, mean in means.items():
        colour = COLOURS.get(gradient, "grey")
        picture.area([axes.at(*one) for one in bands[gradient]], colour, opacity=0.18)
        picture.line([axes.at(*one) for one in mean], colour)


def draw_final(picture, box, gradients):
    losses = {gradient: list(map(final, runs)) for gradient, runs in gradients.items()}
    places = range(len(losses))
    every = [value for values in losses.values() for value in values]
    axes = svg.Axes(picture, box, [-0.5, len(losses) - 0.5], every)
    axes.frame("gradient", "validation loss at the end", xticks=False)
    for place, (gradient, values) in zip(places, losses.items(), strict=True):
        colour = COLOURS.get(gradient, "grey")
        for value in values:
            picture.dot(*axes.at(place, value), colour, opacity=0.8)
        mean = statistics.mean(values)
        picture.line([axes.at(place - 0.3, mean), axes.at(place + 0.3, mean)], colour, 1.5)
        x, _ = axes.at(place, mean)
        picture.text(x, box[1] + box[3] + 16, gradient, colour, 11.5, "middle")


def draw(found):
    """For each configuration the validation loss during training and at the end."""
    picture = svg.Picture(640, 350 * len(found) + 10, "Training with exact and sampled gradients")
    for row, (text, gradients) in enumerate(found.items()):
        top = 350 * row
        for line, words in enumerate(described(json.loads(text)).splitlines()):
            picture.text(20, top + 30 + 18 * line, words, size=14, weight=600)
        boxes = [(left, top + 68, 230, 226) for left in (74, 392)]
        draw_curves(picture, boxes[0], gradients, validation_curve, "validation loss")
        draw_final(picture, boxes[1], gradients)
    return picture


def plot(paths, out):
    found = groups(load_runs(paths))
    print_tables(found)
    draw(found).save(out)
    print(out)
