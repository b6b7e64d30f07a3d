"""Distils a small language model from a larger one, and compares the eager loss with flce's.

The teacher is trained by train_lm.py's cross entropy; then a student of half the width and depth
learns from the teacher's whole distributions: once with logits of both and F.kl_div, once by
flce.linear_divergence; and once more from the text alone, for comparison. Same seed, same batches:
in float32 the curves of the first two have to agree within 1e-3, else the exit status is 1.

    python examples/distill.py                    # two CPU cores, a few minutes
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

TEMPERATURE = 1.5


def log_probabilities(hidden, weight):
    return F.log_softmax(F.linear(hidden, weight).float() / TEMPERATURE, -1).flatten(0, -2)


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


def eager_loss(student, taught, target, arguments):
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.5}[arguments.divergence]
    return eager_divergence(log_probabilities(*student), log_probabilities(*taught), beta)


def flce_loss(student, taught, target, arguments):
    settings = {"divergence": arguments.divergence, "temperature": TEMPERATURE}
    return flce.linear_divergence(*student, *taught, **settings)


def text_loss(student, taught, target, arguments):
    """Without the teacher."""
    return flce.linear_cross_entropy(*student, target)


LOSSES = {"eager": eager_loss, "flce": flce_loss, "text alone": text_loss}


def distil(name, teacher, tokens, preset, steps, arguments):
    """[(loss, cross entropy of the text)] of each step, of a new student."""
    torch.manual_seed(train_lm.SEED)
    student = train_lm.Transformer(preset).to(arguments.device)
    optimizer = torch.optim.AdamW(student.parameters(), preset.learning_rate, betas=(0.9, 0.95))
    curve, data = [], train_lm.batches(tokens, preset, steps, arguments.device)
    progress = tqdm(data, f"student, {name}", steps)
    for ids, target in progress:
        with train_lm.precision(arguments.device):
            with torch.no_grad():
                taught = teacher(ids), teacher.head.weight
            hidden = student(ids)
            loss = LOSSES[name]((hidden, student.head.weight), taught, target, arguments)
            with torch.no_grad():
                text = flce.linear_cross_entropy(hidden, student.head.weight, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        curve.append((loss.item(), text.item()))
        progress.set_postfix(loss=f"{curve[-1][0]:.4f}", text=f"{curve[-1][1]:.4f}")
    return curve


def plot(curves, divergence, path):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, style in (("eager", "-"), ("flce", "--")):
        left.plot([loss for loss, _ in curves[name]], style, label=name, linewidth=2)
    for name, curve in curves.items():
        right.plot([text for _, text in curve], label=name, linewidth=1.5)
    left.set(xlabel="step", ylabel="nats", title=f"{divergence} from the teacher")
    right.set(xlabel="step", ylabel="nats", title="cross entropy of the text")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=train_lm.PRESETS, default="cpu")
    parser.add_argument("--steps", type=int, help="of teacher and students (default: 40, 300)")
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
    settings = {"max_memory": preset.max_memory}
    _, teacher = train_lm.train("flce", tokens, preset, steps, device, settings)
    teacher.requires_grad_(False)
    halves = {name: getattr(preset, name) // 2 for name in ("layers", "hidden", "heads")}
    small = dataclasses.replace(preset, **halves)
    curves = {name: distil(name, teacher, tokens, small, steps, arguments) for name in LOSSES}

    picture = folder / "distillation.png"
    plot(curves, arguments.divergence, picture)
    for name, curve in curves.items():
        print(
            f"{name:>10}: last loss {curve[-1][0]:.5f}, "
            f"cross entropy of the text {curve[-1][1]:.5f}"
        )
    losses = ([loss for loss, _ in curves[name]] for name in ("eager", "flce"))
    difference = train_lm.largest_difference(*losses)
    print(f"largest relative difference of eager and flce: {difference:.2e}\npicture: {picture}")
    if device == "cpu" and not difference < train_lm.TOLERANCE:
        print(f"the curves differ by more than {train_lm.TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
