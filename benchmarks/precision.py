"""Log-probabilities of a trainer (flce) and of a rollout engine, bfloat16 operands: the trainer's
errors against float64, and |ratio - 1|, ratio = exp(log p of the trainer - log p of the rollout),
for logits rounded to bfloat16 or kept in float32 on either side.

    python benchmarks/precision.py --json record.json

The rollout is an eager head in torch whose GEMM adds its terms in another order: on the CPU the two
halves of the hidden dimension apart, on CUDA 64 rows at a time. `noise`: relative standard
deviation of what its hidden states differ by before they are rounded to bfloat16; 0 for none.

On the CPU bfloat16 operands always give bfloat16 logits. There the float32 logits are those of the
same operands in float32, and the bfloat16 logits are these, rounded.
"""

import argparse
import json
import math
import os
import pathlib

import measure
import torch

import flce

NOISES = (0.0, 2.0**-9)  # 2^-9: half of the largest relative error of rounding to bfloat16
ROLLOUT_ROWS = 64  # of a GEMM on CUDA
TOP = (24.0, 23.0, 22.0, 20.0)  # peaked: the logits of a row's likeliest classes, about
SIDES = ("bfloat16", "float32")


def draw(kind, options):
    """Hidden states in float32 and a weight in bfloat16. "random": logits of standard deviation
    4. "peaked": of standard deviation 2, but four classes of each row have those of TOP."""
    random = torch.Generator(device=options.device).manual_seed(0)
    size = {"generator": random, "device": options.device}
    w = torch.randn(options.vocab, options.hidden, **size) / math.sqrt(options.hidden)
    x = torch.randn(options.tokens, options.hidden, **size) * (4 if kind == "random" else 2)
    if kind == "peaked":
        top = torch.randint(options.vocab, (options.tokens, len(TOP)), **size)
        levels = torch.tensor(TOP, device=options.device) + torch.randn(top.shape, **size)
        x = x + torch.einsum("nkh,nk->nh", w[top], levels)  # rows of w have a norm of about 1
    return x, w.bfloat16(), random


def of_logits(logits, y):
    return logits.float().log_softmax(-1).gather(-1, y[:, None])[:, 0]


def trainer(x, w, y, side):
    """flce's log p."""
    if x.is_cuda:
        # Hopper's fused kernel rounds no logits, whatever logits_dtype permits.
        os.environ["FLCE_KERNEL"] = "gemm" if side == "bfloat16" else "auto"
        return flce.linear_logprobs(x, w, y, entropy=None, logits_dtype=getattr(torch, side))[0]
    if side == "float32":
        return flce.linear_logprobs(x.float(), w.float(), y, entropy=None)[0]
    return -flce.cross_entropy((x.float() @ w.float().T).bfloat16(), y, reduction="none")


def rollout(x, w, y, side):
    """An eager head's log p."""
    if x.is_cuda:
        dtype = {"out_dtype": torch.float32} if side == "float32" else {}
        parts = zip(x.split(ROLLOUT_ROWS), y.split(ROLLOUT_ROWS), strict=True)
        return torch.cat([of_logits(torch.mm(rows, w.T, **dtype), some) for rows, some in parts])
    x, w, half = x.float(), w.float(), x.shape[1] // 2
    logits = x[:, half:] @ w[:, half:].T + x[:, :half] @ w[:, :half].T
    return of_logits(logits.to(getattr(torch, side)), y)


@torch.no_grad()
def rows_of(kind, options):
    """Errors of the trainer's log p by side, and the ratios of each pair of sides."""
    hidden, w, random = draw(kind, options)
    x = hidden.bfloat16()
    log_p = (x.double() @ w.double().T).log_softmax(-1)
    y = torch.multinomial(log_p.float().exp(), 1, generator=random)[:, 0]
    truth = log_p.gather(-1, y[:, None])[:, 0]
    made = {side: trainer(x, w, y, side).double() for side in SIDES}
    for side in SIDES:
        error = (made[side] - truth).abs()
        yield {
            "logits": kind,
            "trainer": side,
            "mean_error": error.mean(),
            "max_error": error.max(),
        }
    for noise in NOISES:
        factor = 1 + noise * torch.randn(x.shape, generator=random, device=options.device)
        for rollout_side in SIDES:
            theirs = rollout((hidden * factor).bfloat16(), w, y, rollout_side).double()
            for side in SIDES:
                gap = torch.expm1(made[side] - theirs).abs()
                row = {"logits": kind, "noise": noise, "trainer": side, "rollout": rollout_side}
                yield {**row, "mean_gap": gap.mean(), "max_gap": gap.max()}


def main(arguments=None):
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("tokens", 1024), ("hidden", 1024), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "vocab")}
    facts = measure.machine(options.device) | sizes
    print(measure.described(facts))
    rows = []
    for kind in ("random", "peaked"):
        for row in rows_of(kind, options):
            rows.append({k: v.item() if torch.is_tensor(v) else v for k, v in row.items()})
            print("  ".join(f"{k} {v:.2e}" if type(v) is float else v for k, v in rows[-1].items()))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
