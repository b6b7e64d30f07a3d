#!/usr/bin/env python3
"""What each option and output costs: forward+backward against the plain loss of the same rounds.

    python benchmarks/options.py head --save auto logits --rounds 11 --json out.json
    python benchmarks/options.py cpu --device cpu --dtype float32

Each contestant runs right after the plain loss, round by round on fresh random data (a GPU's clock
falls as a round goes on); medians of the two are compared. Errors of loss, dX and dW are relative
to flce.reference in float32 (float64 on the CPU), in chunks of rows; all use reduction="sum", so
that chunks add up. "reading" is the plain loss plus two sums over the probabilities: the cost of
reading them as often as their loss does.
"""

import argparse
import json
import pathlib
import statistics

import measure
import problem as problems
import torch

import flce

IGNORED = 0.6
REFERENCE_ROWS = 256


def make_options(problem, device, dtype):
    """Options of flce.linear_cross_entropy by contestant; their tensors are drawn once."""
    tokens, vocab = problem.y.numel(), problem.w.shape[0]

    def uniform(*size, dtype=torch.float32):
        return torch.rand(*size, device=device, dtype=dtype) + 0.5

    outputs = ("lse", "entropy", "accuracy", "predictions")
    masked = torch.rand(tokens, device=device) < IGNORED
    valid = int((~masked).sum())
    probabilities = uniform(tokens, vocab, dtype=dtype).mul_(1.0 / vocab)
    entries = {
        "plain": {},
        "bias": {"linear_bias": uniform(vocab).to(dtype).requires_grad_()},
        "class weights": {"weight": uniform(vocab)},
        "smoothing": {"label_smoothing": 0.1},
        "softcap": {"softcap": 30.0},
        "temperature": {"temperature": 0.7},
        "token temperature": {"temperature": uniform(tokens)},
        "z-loss": {"z_loss": 1e-4},
        "token weight": {"token_weight": uniform(tokens)},
        "all outputs": {f"return_{name}": True for name in outputs},
        "probabilities": {"target": probabilities},
        "reading": {"reads": (probabilities, probabilities)},
        "60 % ignored": {"masked": masked},
        "60 % ignored, bound": {"masked": masked, "valid_bound": valid},
        "60 % ignored, count": {"masked": masked, "valid_bound": "count"},
    }
    return entries


def arguments(problem, entry, rows=slice(None)):
    """Input, target and options for some rows of the problem."""
    options = {name: value for name, value in entry.items() if name != "reads"}
    target = options.pop("target", problem.y)[rows]
    masked = options.pop("masked", None)
    if masked is not None:
        target = target.masked_fill(masked[rows], -100)
    for name in ("temperature", "token_weight"):
        if isinstance(options.get(name), torch.Tensor):
            options[name] = options[name][rows]
    return target, options


def contestant(entry, save):
    def run(problem):
        target, options = arguments(problem, entry)
        for tensor in entry.get("reads", ()):
            tensor.sum()
        made = flce.linear_cross_entropy(
            problem.x, problem.w, target, reduction="sum", save=save, **options
        )
        loss = made if isinstance(made, torch.Tensor) else made.loss
        leaves = [problem.x, problem.w]
        if "linear_bias" in options:
            leaves.append(options["linear_bias"])
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return run


def truth(problem, entry, wide):
    """Loss, dX and dW by the definition, a chunk of rows at a time."""
    loss, dx, dw = 0.0, [], torch.zeros_like(problem.w, dtype=wide)
    w = problem.w.detach().to(wide).requires_grad_()
    tokens = problem.y.numel()
    with problems.exact_products():
        for begin in range(0, tokens, REFERENCE_ROWS):
            rows = slice(begin, begin + REFERENCE_ROWS)
            target, options = arguments(problem, entry, rows)
            options = {name: value for name, value in options.items() if name != "valid_bound"}
            options = {n: v for n, v in options.items() if not n.startswith("return_")}
            if "linear_bias" in options:
                options["linear_bias"] = options["linear_bias"].detach().to(wide)
            x = problem.x.detach()[rows].to(wide).requires_grad_()
            part = flce.reference.linear_cross_entropy(x, w, target, reduction="sum", **options)
            grad_x, grad_w = torch.autograd.grad(part, (x, w))
            loss = loss + part.detach().double()
            dx.append(grad_x)
            dw += grad_w
    return loss, torch.cat(dx), dw


def bench_options(name, shape, save, options):
    problem = problems.make_problem(shape, options.device, options.dtype, options.std)
    problem.refresh()
    entries = make_options(problem, options.device, options.dtype)
    if options.only:
        entries = {label: entry for label, entry in entries.items() if label in options.only}
    runs = {label: contestant(entry, save) for label, entry in entries.items()}
    for run in runs.values():
        run(problem)
    plain = contestant({}, save)
    times = {label: [] for label in runs}
    plains = {label: [] for label in runs}
    for _ in range(options.rounds):
        problem.refresh()
        for label, run in runs.items():
            plains[label].append(measure.seconds(plain, problem, options.device))
            times[label].append(measure.seconds(run, problem, options.device))
    rows = []
    wide = problems.wide_dtype(options.device)
    for label, run in runs.items():
        median = statistics.median(times[label])
        row = {
            "shape": name,
            "save": save,
            "option": label,
            "ms": 1e3 * median,
            "over_plain": median / statistics.median(plains[label]),
            "peak_bytes": measure.peak_extra_bytes(run, problem, options.device),
        }
        if not options.no_errors:
            row["errors"] = problems.errors(run(problem), truth(problem, entries[label], wide))
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row):
    text = (
        f"{row['shape']:10} {row['save']:7} {row['option']:20} {row['ms']:9.2f} ms"
        f" {row['over_plain']:6.3f}x {row['peak_bytes'] / 1e6:9.1f} MB"
    )
    return text + problems.error_columns(row)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("shape", nargs="?", default="head" if cuda else "cpu")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--save", nargs="+", default=["auto"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--std", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", help="contestants, plain among them")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    return options


def main():
    options = parse_options()
    torch.manual_seed(0)
    facts = measure.machine(options.device) | {
        "dtype": str(options.dtype).removeprefix("torch."),
        "std": options.std,
        "rounds": options.rounds,
    }
    print(measure.described(facts))
    name, shape = problems.named_shape(options.shape)
    rows = []
    for save in options.save:
        rows += bench_options(name, shape, save, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
