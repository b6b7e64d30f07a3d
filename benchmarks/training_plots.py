"""Tables and pictures of sampled_training.py's records."""

import json
import statistics

import style

COLOURS = {"exact": style.INK, "2^-8": style.GREEN, "2^-6": style.BLUE, "2^-4": style.ORANGE}


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


def draw_curves(axes, gradients):
    """The mean over seeds, and from the least to the most of them, after the first fifth of the
    steps, whose losses are far above the others."""
    for gradient, runs in gradients.items():
        colour = COLOURS.get(gradient, style.GREY)
        steps = [one["step"] for one in runs[0]["validation"]]
        losses = zip(*([one["loss"] for one in run["validation"]] for run in runs), strict=True)
        late = [pair for pair in zip(steps, losses, strict=True) if 5 * pair[0] >= steps[-1]]
        steps, losses = zip(*late, strict=True)
        axes.fill_between(
            steps,
            *zip(*((min(one), max(one)) for one in losses), strict=True),
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
        axes.plot(steps, list(map(statistics.mean, losses)), color=colour, linewidth=0.8)


def draw_final(axes, gradients):
    for place, (gradient, runs) in enumerate(gradients.items()):
        colour, losses = COLOURS.get(gradient, style.GREY), list(map(final, runs))
        axes.plot([place] * len(losses), losses, "o", color=colour, alpha=0.8)
        axes.hlines(statistics.mean(losses), place - 0.3, place + 0.3, color=colour)
    axes.grid(False, axis="x")
    axes.set_xticks(range(len(gradients)), gradients)
    for name in axes.get_xticklabels():
        name.set_color(COLOURS.get(name.get_text(), style.GREY))


def draw(found):
    """For each configuration the validation loss during training and at the end."""
    title = "Training with exact and sampled gradients"
    figure = style.figure(640, 350 * len(found) + 10, title)
    for row, (text, gradients) in enumerate(found.items()):
        top = 350 * row
        for line, words in enumerate(described(json.loads(text)).splitlines()):
            style.write(figure, 20, top + 30 + 18 * line, words, size=10.5, weight="bold")
        left = style.frame(figure, 74, top + 68, 230, 226, "step", "validation loss")
        draw_curves(left, gradients)
        left.locator_params("x", nbins=4)
        names = "gradient", "validation loss at the end"
        draw_final(style.frame(figure, 392, top + 68, 230, 226, *names), gradients)
    return figure


def plot(paths, out):
    found = groups(load_runs(paths))
    print_tables(found)
    style.save(draw(found), out)
    print(out)
