"""Distils a small language model from a larger one, by the eager loss and by flce's.

The teacher learns from all of the text of train_lm.py. Students of half its width and depth have
a fiftieth of it: one learns the teacher's whole distributions there, by flce.linear_divergence,
another the text alone, with the same seed, batches and steps. On text that neither has seen the
teacher's is far ahead: a distribution says more than one token. A third learns as the first, for a
quarter of the steps, by all logits and F.kl_div: in float32 these losses have to agree within 1e-3,
else the exit status is 1.

    python examples/distill.py                    # two CPU cores, about two minutes
    python examples/distill.py --device cuda --divergence jsd
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import train_lm
from torch import nn
from tqdm import tqdm
from train_lm import pyplot

import flce

PART = 50  # of the text, what the students have
VALIDATION = 16  # sequences at its end, on which nobody trains
MAX_MEMORY = {"cpu": "64MiB", "cuda": "512MiB"}  # flce's bound for logits, of student and teacher


def log_probabilities(hidden, weight):
    return F.log_softmax(F.linear(hidden, weight).float(), -1).flatten(0, -2)


def eager_divergence(s, t, beta):
    """Of log-probabilities, the mean over the rows: beta 0 is KL(t || s), 1 is KL(s || t)."""
    if beta in (0, 1):
        first, second = (s, t) if beta == 0 else (t, s)
        return F.kl_div(first, second, log_target=True, reduction="batchmean")
    parts = t + torch.tensor(beta).log(), s + torch.tensor(1 - beta).log()
    m = torch.logsumexp(torch.stack(parts), 0)
    return sum(
        share * F.kl_div(m, one, log_target=True, reduction="batchmean")
        for share, one in ((beta, t), (1 - beta, s))
    )


def eager_loss(hidden, weight, taught, teacher_weight, settings):
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.5}[settings["divergence"]]
    student = log_probabilities(hidden, weight)
    return eager_divergence(student, log_probabilities(taught, teacher_weight), beta)


def flce_loss(hidden, weight, taught, teacher_weight, settings):
    return flce.linear_divergence(hidden, weight, taught, teacher_weight, **settings)


LOSSES = {"eager": eager_loss, "flce": flce_loss}
TEXT = "text alone"


def distil(name, teacher, tokens, preset, steps, device, settings):
    """The losses of all steps, and the student. name: of LOSSES, or TEXT, without the teacher."""
    torch.manual_seed(train_lm.SEED)
    student = train_lm.Transformer(preset).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), preset.learning_rate, betas=(0.9, 0.95))
    curve = []
    progress = tqdm(train_lm.batches(tokens, preset, steps, device), f"student, {name}", steps)
    for ids, target in progress:
        with train_lm.precision(device):
            hidden, weight = student(ids), student.head.weight
            if name == TEXT:
                loss = flce.linear_cross_entropy(hidden, weight, target)
            else:
                with torch.no_grad():
                    taught = teacher(ids)
                loss = LOSSES[name](hidden, weight, taught, teacher.head.weight, settings)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
        progress.set_postfix(loss=f"{curve[-1]:.4f}")
    return curve, student


@torch.no_grad()
def text_loss(model, rows, device):
    """The cross entropy of rows of text."""
    rows = rows.to(device)
    with train_lm.precision(device):
        hidden = model(rows[:, :-1])
        loss = flce.linear_cross_entropy(hidden, model.head.weight, rows[:, 1:].contiguous())
    return loss.item()


def plot(curves, unseen, times, memory, divergence, path):
    figure, (left, middle, *right) = pyplot.subplots(
        1, 4, figsize=(16, 4.5), width_ratios=(2, 2, 1, 1), layout="constrained"
    )
    for name, style in (("flce", "-C1"), ("eager", "--C0")):
        left.plot(curves[name], style, label=name, linewidth=2)
    left.set(xlabel="step", ylabel="nats", title=f"{divergence} from the teacher")
    left.legend()
    left.grid(alpha=0.3)
    bars = middle.barh(list(unseen), list(unseen.values()), color="C2")
    middle.bar_label(bars, fmt="%.2f", padding=3)
    middle.margins(x=0.15)
    middle.invert_yaxis()
    middle.set(xlabel="nats", title="cross entropy of unseen text")
    train_lm.draw_measured(right, times, memory)
    figure.savefig(path, dpi=120)


def report(curves, unseen, times, memory):
    """Prints the comparison; the largest relative difference of eager's curve and flce's."""
    print("\ncross entropy of unseen text")
    for name, loss in unseen.items():
        print(f"{name:>19}: {loss:.3f}")
    for name in LOSSES:
        print(
            f"{name:>6}: loss after {len(curves[name])} steps {curves[name][-1]:.5f}, "
            f"loss step {times[name]:.1f} ms, peak memory {memory[name] / train_lm.MIB:.0f} MiB"
        )
    eager = curves["eager"]
    difference = train_lm.largest_difference(eager, curves["flce"][: len(eager)])
    print(f"largest relative difference in {len(eager)} steps: {difference:.2e}")
    return difference


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=train_lm.PRESETS, default="cpu")
    parser.add_argument(
        "--steps", type=int, help="of a student; twice as many of the teacher (default: 40, 300)"
    )
    kinds = ("forward_kl", "reverse_kl", "jsd")
    parser.add_argument("--divergence", choices=kinds, default="forward_kl")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all results")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    device, folder = arguments.device, arguments.out
    preset = train_lm.PRESETS[device]
    steps = preset.steps if arguments.steps is None else arguments.steps
    folder.mkdir(parents=True, exist_ok=True)
    tokens = train_lm.load_tokens(preset.text_bytes, folder)
    border = len(tokens) - VALIDATION * (preset.sequence + 1)
    tokens, validation = tokens[:border], tokens[border:].view(VALIDATION, -1)

    bound = {"max_memory": MAX_MEMORY[device]}
    _, teacher = train_lm.train("flce", tokens, preset, 2 * steps, device, bound)
    teacher.requires_grad_(False)
    halves = {name: getattr(preset, name) // 2 for name in ("layers", "hidden", "heads")}
    small = dataclasses.replace(preset, **halves, learning_rate=2 * preset.learning_rate)
    settings = bound | {"divergence": arguments.divergence}
    curves, unseen, part = (
        {},
        {"teacher": text_loss(teacher, validation, device)},
        tokens[: border // PART],
    )
    for name, count in {"eager": -(-steps // 4), "flce": steps, TEXT: steps}.items():
        curves[name], student = distil(name, teacher, part, small, count, device, settings)
        if count == steps:
            unseen[f"student, {name}"] = text_loss(student, validation, device)
    ids, _ = next(train_lm.batches(part, small, 1, device))
    with torch.no_grad(), train_lm.precision(device):
        state = student(ids), student.head.weight, teacher(ids), teacher.head.weight
    times, memory = train_lm.measure(LOSSES, state, device, settings, folder)

    picture = folder / "distillation.png"
    plot(curves, unseen, times, memory, arguments.divergence, picture)
    difference = report(curves, unseen, times, memory)
    print(f"picture: {picture}")
    if device == "cpu" and not difference < train_lm.TOLERANCE:
        print(f"the curves differ by more than {train_lm.TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
