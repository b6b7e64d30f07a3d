"""Tables and pictures of sampled_training.py's records."""

import json
import statistics

COLOURS = {"exact": "#222222", "2^-8": "#3a8f3a", "2^-6": "#1f6fb4", "2^-4": "#d9660a"}


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


def draw_curves(axes, gradients, curve):
    """The mean over seeds, and from the least to the most of them; `curve`: run -> (xs, ys)."""
    for gradient, runs in gradients.items():
        colour = COLOURS.get(gradient, "#8a8a8a")
        steps = curve(runs[0])[0]
        columns = list(zip(*(curve(run)[1] for run in runs), strict=True))
        axes.plot(steps, list(map(statistics.mean, columns)), color=colour, label=gradient)
        lower, upper = list(map(min, columns)), list(map(max, columns))
        axes.fill_between(steps, lower, upper, color=colour, alpha=0.18, linewidth=0)


def training_curve(run):
    count, steps = len(run["train"]), run["configuration"]["steps"]
    return [min(run["window"] * (i + 1), steps) for i in range(count)], run["train"]


def validation_curve(run):
    return tuple([one[key] for one in run["validation"]] for key in ("step", "loss"))


def draw_final(axes, gradients):
    for place, (gradient, runs) in enumerate(gradients.items()):
        values = [final(run) for run in runs]
        colour = COLOURS.get(gradient, "#8a8a8a")
        axes.plot([place] * len(values), values, "o", color=colour, alpha=0.7, label=gradient)
        axes.hlines(statistics.mean(values), place - 0.3, place + 0.3, color=colour)
    axes.set_xticks(range(len(gradients)), gradients)
    axes.margins(x=0.15)


def draw(found):
    """A row of three panels for each configuration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (12, 3.9 * len(found))
    figure, grid = pyplot.subplots(len(found), 3, figsize=size, squeeze=False, layout="constrained")
    for panels, (text, gradients) in zip(grid, found.items(), strict=True):
        draw_curves(panels[0], gradients, training_curve)
        draw_curves(panels[1], gradients, validation_curve)
        draw_final(panels[2], gradients)
        panels[0].set_title(described(json.loads(text)), fontsize=9.5, loc="left")
        panels[0].set(xlabel="step", ylabel="training loss, means of windows")
        panels[0].legend(fontsize=8.5, frameon=False)
        panels[1].set(xlabel="step", ylabel="validation loss")
        panels[2].set(ylabel="validation loss at the end, each seed")
        for axes in panels:
            axes.grid(which="both", color="#e6e6e6", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot(paths, out):
    found = groups(load_runs(paths))
    print_tables(found)
    draw(found).savefig(out, dpi=120, facecolor="white")
    print(out)
