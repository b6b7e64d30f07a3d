#!/usr/bin/env python3
"""Very many steps, next to an eager twin: is memory flat, are caches bounded, do results drift?

`shapes` draws tokens, hidden size, classes, dtype and options anew for every step and compares loss
and gradients with eager ones. Any other shape is trained: flce and the twin start from one weight,
see the same data and update their own weight in float32; the drift is the distance of the weights
over what the twin's has moved.

At checkpoints, of which there are CHECKPOINTS, the record has what the process holds: resident
memory, device memory and the entries of flce's caches. Exit status 1 if, after the first quarter, a
figure grows by more than its bar. The bars of errors count the roundings of each dtype: they are
the same at the first step and at the last.

    python benchmarks/soak.py shapes --device cpu --steps 100000 --json record.json
    python benchmarks/soak.py small --steps 20000 --json record.json
    python benchmarks/soak.py head --steps 2000 --json record.json
"""

import argparse
import gc
import json
import pathlib
import random
import re
import sys
import time

import measure
import problem as problems
import torch
import torch.nn.functional as F

import flce

CHECKPOINTS, SETTLED = 20, 5
MIB = 1 << 20
# Growth after checkpoint SETTLED, at most. The heap's own fragmentation is some MiB.
BARS = {"resident": 16 * MIB, "allocated": 0, "reserved": 0, "cache entries": 64}
# Error of a step relative to the norm of eager's result, whose terms may cancel (p - 1 of a certain
# row), and drift relative to the twin's way.
ERRORS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}
DRIFT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
OPTIONS = {
    "softcap": lambda draw: draw.uniform(5.0, 50.0),
    "label_smoothing": lambda draw: draw.uniform(0.01, 0.3),
    "z_loss": lambda draw: draw.uniform(1e-5, 1e-3),
    "logit_scale": lambda draw: draw.uniform(0.5, 2.0),
}


def cache_entries():
    """Entries of all caches and containers of flce's modules."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name != "flce" and not name.startswith("flce."):
            continue
        for value in list(vars(module).values()):
            if hasattr(value, "cache_info"):
                count += value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and value is not vars(module):
                count += len(value)
    return count


def allocated_on(device):
    """What the process holds, after Python's cycles are gone."""
    gc.collect()
    measure.synchronize(device)
    status = pathlib.Path("/proc/self/status").read_text()
    figures = {"resident": 1024 * int(re.search(r"VmRSS:\s*(\d+)", status)[1])}
    figures["cache entries"] = cache_entries()
    if device == "cuda":
        figures["allocated"] = torch.cuda.memory_allocated()
        figures["reserved"] = torch.cuda.memory_reserved()
    return figures


def distance(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def eager(x, w, y, softcap=None, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0):
    logits = logit_scale * F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, y, label_smoothing=label_smoothing)
    if z_loss:
        valid = y != -100
        loss = loss + z_loss * logits.logsumexp(-1)[valid].square().sum() / valid.sum()
    return loss


class Shapes:
    """Steps of ever new shapes."""

    def __init__(self, device, seed):
        self.device, self.draw = device, random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.seen, self.worst = set(), dict.fromkeys(map(str, ERRORS), 0.0)

    def normal(self, *size, dtype):
        made = torch.randn(size, generator=self.generator, device=self.device)
        return made.to(dtype).requires_grad_()

    def step(self):
        draw, dtype = self.draw, self.draw.choice(list(ERRORS))
        tokens, hidden, vocab = draw.randint(2, 64), draw.randint(1, 96), draw.randint(2, 500)
        self.seen.add((tokens, hidden, vocab, dtype))
        x, w = self.normal(tokens, hidden, dtype=dtype), self.normal(vocab, hidden, dtype=dtype)
        y = torch.randint(vocab, (tokens,), generator=self.generator, device=self.device)
        y[:: draw.randint(2, 9)] = -100
        y[1] = 0  # one row counts
        given = {name: of(draw) for name, of in OPTIONS.items() if draw.random() < 0.25}
        save = draw.choice(("auto", "grads", "logits", "stats"))
        budget = draw.choice((None, max(8, tokens // 3) * vocab * 8))
        loss = flce.linear_cross_entropy(x, w, y, save=save, max_memory=budget, **given)
        ours = [loss, *torch.autograd.grad(loss, (x, w))]
        loss = eager(x, w, y, **given)
        for mine, theirs in zip(ours, [loss, *torch.autograd.grad(loss, (x, w))], strict=True):
            error = distance(mine, theirs)
            # NaN counts as the largest error.
            if not error <= self.worst[str(dtype)]:
                self.worst[str(dtype)] = error

    def figures(self):
        """The largest errors since the last checkpoint."""
        row = {"errors": dict(self.worst), "shapes": len(self.seen)}
        self.worst = dict.fromkeys(self.worst, 0.0)
        return row

    def missed(self, rows):
        for row in rows:
            for dtype, bar in ERRORS.items():
                if not row["errors"][str(dtype)] <= bar:
                    yield f"error in {dtype} until step {row['step']}: {row['errors']}, bar {bar}"


class Training:
    """flce and its twin, trained on the same data."""

    def __init__(self, name, device, dtype, seed):
        torch.manual_seed(seed)
        problem = problems.make_problem(problems.named_shape(name)[1], device, dtype)
        problem.refresh()
        self.x, self.y, self.dtype = problem.x.detach(), problem.y, dtype
        self.start = problem.w.detach().float()
        self.ours, self.twins = self.start.clone(), self.start.clone()
        self.losses = [0.0, 0.0]

    def train(self, call, weight):
        x, w = self.x.requires_grad_(), weight.to(self.dtype).detach().requires_grad_()
        loss = call(x, w, self.y)
        gradient = torch.autograd.grad(loss, (x, w))[1]
        weight.sub_(gradient.float(), alpha=0.5)
        return loss.detach()

    def step(self):
        self.x.requires_grad_(False).normal_()
        self.y.random_(0, len(self.start))
        self.losses = [
            self.train(flce.linear_cross_entropy, self.ours),
            self.train(eager, self.twins),
        ]

    def figures(self):
        moved = (self.twins - self.start).norm()
        drift = ((self.ours - self.twins).norm() / moved).item()
        return {"drift": drift, "losses": [float(loss) for loss in self.losses]}

    def missed(self, rows):
        for row in rows:
            if not row["drift"] <= DRIFT[self.dtype]:
                yield f"drift until step {row['step']}: {row['drift']}, bar {DRIFT[self.dtype]}"


def missed_bars(rows, soak):
    """Sentences, one for each bar that is missed."""
    settled, behind = rows[SETTLED - 1], rows[SETTLED - 1 :]
    for name, bar in BARS.items():
        if name in settled:
            growth = max(row[name] for row in behind) - settled[name]
            if not growth <= bar:
                yield f"{name} grew by {growth}, bar {bar}"
    yield from soak.missed(rows)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", help="shapes, or a shape of benchmarks/problem.py")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", help="of a trained shape")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="where to write the record")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.shape == "shapes":
        soak = Shapes(options.device, options.seed)
    else:
        dtype = getattr(torch, options.dtype)
        soak = Training(options.shape, options.device, dtype, options.seed)
    rows, begin = [], time.perf_counter()
    for number in range(1, CHECKPOINTS + 1):
        done = options.steps * (number - 1) // CHECKPOINTS
        for _ in range(done, options.steps * number // CHECKPOINTS):
            soak.step()
        row = {"step": options.steps * number // CHECKPOINTS, **allocated_on(options.device)}
        rows.append({**row, **soak.figures()})
        print(json.dumps(rows[-1]), flush=True)
    missed = list(missed_bars(rows, soak))
    record = {
        "command": " ".join(["soak.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": measure.machine(options.device),
        "steps": options.steps,
        "seconds": time.perf_counter() - begin,
        "bars": BARS,
        "missed": missed,
        "checkpoints": rows,
    }
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    for sentence in missed:
        print(f"MISSED: {sentence}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
