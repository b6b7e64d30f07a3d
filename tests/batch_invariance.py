"""Which results of a row are bitwise independent of the rest of its batch (docs/rl-precision.md).

    python tests/batch_invariance.py --json matrix.json
    python tests/batch_invariance.py --kernel fused --shape 1024x32064 --tokens 5000

For each kernel, shape and dtype prints one line for each change of a batch: which results of its
rows have the same bits, and of the others in how many rows bits differ, by how much at most, and in
which cases. test_batch_invariance.py asserts what the page promises.
"""

import argparse
import json
import os
import pathlib
import re
import sys
from typing import NamedTuple

import torch

import flce

SIZES = (1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 511, 513, 1000)
SIZES += (2049, 4096, 4097)
# Standard deviations of the logits, of one row after the other. The offset of a row of the fused
# kernel follows from its target's logit; with 60 a sum of exp overflows, and the kernel computes
# the row's tiles again.
SPREADS = (0.01, 1.0, 8.0, 60.0)
CHUNK_ROWS = 300  # about, of the changes that make chunks
CLASSES = 3
IGNORE_INDEX = -100
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


class Batch(NamedTuple):
    """Rows to make batches of: twice as many as the largest batch has."""

    x: torch.Tensor  # (2 N, H)
    w: torch.Tensor  # (V, H)
    y: torch.Tensor  # (2 N,)
    classes: torch.Tensor  # (2 N, CLASSES), classes of which the logits are an output
    upstream: torch.Tensor  # (2 N,) float32, the gradient of each row's results

    @property
    def tokens(self):
        """N, the rows of the largest batch."""
        return len(self.y) // 2


class Change(NamedTuple):
    """A batch, and the options of its call, to be compared with the rows 0 to N - 1 in order."""

    name: str
    case: str
    rows: torch.Tensor  # of the Batch, in the order of the batch
    kept: slice = slice(None)  # the compared ones among `rows`
    ignores_others: bool = False
    options: dict = {}
    base: dict = {}  # options of the call that it is compared with


class Finding(NamedTuple):
    """A result under a change: in how many of the compared rows a bit differs."""

    change: str
    case: str
    result: str
    rows: int
    differing: int
    largest: float

    def __str__(self):
        what = f"{self.result}, {self.change} ({self.case})"
        return f"{what}: {self.differing} of {self.rows} rows differ, by {self.largest:.2e} at most"


def draw(tokens, hidden, vocab, dtype, device, exact=False):
    """A Batch of random numbers. `exact`: integers times a power of two, so small that every
    sum of their products is exact in float32, in whatever order."""
    random = torch.Generator(device=device).manual_seed(0)
    size = {"generator": random, "device": device}
    spread = torch.tensor(SPREADS, device=device)[torch.arange(2 * tokens, device=device) % 4]
    if exact:
        x = (
            torch.randint(-2, 3, (2 * tokens, hidden), **size)
            * (1.0 + 31.0 * (spread > 8))[:, None]
        )
        w = torch.randint(-3, 4, (vocab, hidden), **size) * 2.0**-4
    else:
        x = torch.randn(2 * tokens, hidden, **size) * spread[:, None]
        w = torch.randn(vocab, hidden, **size) / hidden**0.5
    y = torch.randint(vocab, (2 * tokens,), **size)
    classes = torch.randint(vocab, (2 * tokens, CLASSES), **size)
    upstream = torch.rand(2 * tokens, **size) + 0.5
    return Batch(x.to(dtype), w.to(dtype), y, classes, upstream)


def budgets_of(batch):
    """max_memory with which calls make chunks of at most about CHUNK_ROWS rows: those of no_grad,
    and the backward of those with save="stats"."""
    vocab, hidden = batch.w.shape
    sizes = batch.tokens, hidden, vocab
    plan = flce.plan(*sizes, dtype=batch.x.dtype, device=batch.x.device, save="stats")
    # A row of the fused kernel's scratch (csrc/core/gpu_facts.c), and one of float32 logits.
    scratch, logits = 4 * (-(-vocab // 192) + 8), 4 * vocab
    return CHUNK_ROWS * (scratch if plan.kernel == "fused" else logits), CHUNK_ROWS * logits


def changes(batch):
    """The changes of a batch of N rows, and, from "max_memory" on, of its call alone."""
    tokens = batch.tokens
    every = torch.arange(tokens)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    others = every.clone()
    others[1::2] = tokens + every[: len(others[1::2])]
    even, valid = slice(0, None, 2), (tokens + 1) // 2
    logits, stats = {"save": "logits"}, {"save": "stats"}
    same_call = {"options": logits, "base": logits}
    yield Change("other rows", f"every other of {tokens}", others, even, **same_call)
    for n in SIZES:
        if n < tokens:
            yield Change("N", f"N={n}", every[:n], **same_call)
    yield Change("position", f"permuted, N={tokens}", order, **same_call)
    for n in (tokens // 16, tokens // 2, tokens - 1):
        yield Change("position and N", f"N={n}", order[:n], **same_call)
    mild = every[every % len(SPREADS) != len(SPREADS) - 1]
    yield Change("no row overflows", f"N={len(mild)}", mild, **same_call)
    yield Change("ignored rows", f"{valid} of {tokens} valid", every, even, True, **same_call)
    bound = {**logits, "valid_bound": valid}
    yield Change("valid_bound", f"valid_bound={valid}", every, even, True, bound, logits)
    calls = {"no_grad": {"grad": False}, "stats": stats}
    for (case, base), budget in zip(calls.items(), budgets_of(batch), strict=True):
        bounded = {**base, "max_memory": budget}
        yield Change("max_memory", f"{case}, {budget} bytes", every, options=bounded, base=base)
    yield Change("save", "stats, not logits", every, options=stats, base=logits)
    yield Change("no_grad", "not save=stats", every, options={"grad": False}, base=stats)
    yield Change("entropy", "asked for", every, options={**logits, "asks": True}, base=logits)
    parts = {**logits, "rows": CHUNK_ROWS}
    yield Change("linear_loss", f"rows={CHUNK_ROWS}", every, options=parts, base=logits)


def results(batch, change, options):
    """{result: its rows} of the change's batch. "dx" is the gradient of the log-probabilities, "dx
    of all" that of loss, lse and entropy together."""
    rows = change.rows.to(batch.y.device)
    x, y, upstream = (each[rows] for each in (batch.x, batch.y, batch.upstream))
    if change.ignores_others:
        ignored = torch.ones_like(y, dtype=torch.bool)
        ignored[change.kept] = False
        y = y.masked_fill(ignored, IGNORE_INDEX)
    options = dict(options)
    grad, asks, part = (options.pop(name, None) for name in ("grad", "asks", "rows"))
    if part is not None:
        return {"logprobs": logprobs_of_linear_loss(x, batch.w, y, part)}
    returned = {"return_lse": True, "return_entropy": True, "return_predictions": True}
    with torch.set_grad_enabled(grad is not False):
        x.requires_grad_()
        returned["classes"] = batch.classes[rows]
        made = flce.linear_cross_entropy(x, batch.w, y, reduction="none", **returned, **options)
        if asks:
            return {"logprobs": -made.loss.detach()}
        logprobs, _ = flce.linear_logprobs(x, batch.w, y, entropy=None, **options)
    found = {"logprobs": logprobs, **{n: getattr(made, n) for n in ("loss", "lse", "entropy")}}
    found |= {"predictions": made.predictions, "class logits": made.class_logits}
    if grad is not False:
        given = [upstream.to(logprobs.dtype)]
        (found["dx"],) = torch.autograd.grad(logprobs, x, given)
        outputs = [made.loss, made.lse, made.entropy]
        (found["dx of all"],) = torch.autograd.grad(outputs, x, given * 3)
    return {name: value.detach() for name, value in found.items()}


def logprobs_of_linear_loss(x, w, y, part):
    """The log-probabilities that linear_loss gives to loss_fn, of chunks of `part` rows."""
    seen = []

    def loss_fn(logprobs, entropy, rows):
        seen.append(logprobs.detach())
        return logprobs.sum()

    flce.linear_loss(x.requires_grad_(), w, y, loss_fn, rows=part, entropy=None)
    return torch.cat(seen)


def compared(change, name, made, expected):
    bits = BITS.get(made.dtype, made.dtype)
    made, expected = (each.reshape(len(each), -1) for each in (made, expected))
    differs = (made.view(bits) != expected.view(bits)).any(-1)
    gap = (made.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    largest = gap[differs].max().item() if differs.any() else 0.0
    return Finding(change.name, change.case, name, len(made), int(differs.sum()), largest)


def findings(batch, wanted=lambda change: True):
    """A Finding for each result under each change that is `wanted`."""
    bases = {}
    for change in changes(batch):
        if not wanted(change):
            continue
        key = tuple(change.base.items())
        if key not in bases:
            whole = Change("base", "", torch.arange(batch.tokens))
            bases[key] = results(batch, whole, change.base)
        rows = change.rows[change.kept].to(batch.y.device)
        # Of "other rows" those kept are rows of the base, at the same positions.
        for name, made in results(batch, change, change.options).items():
            yield compared(change, name, made[change.kept], bases[key][name][rows])


def results_of_logits(batch, rows):
    """{result: its rows} of flce.cross_entropy of given logits; `x` of the Batch has them."""
    z = batch.x[rows].requires_grad_()
    returned = {"return_lse": True, "return_entropy": True, "return_predictions": True}
    made = flce.cross_entropy(z, batch.y[rows], reduction="none", **returned)
    (dz,) = torch.autograd.grad(made.loss, z, batch.upstream[rows].to(made.loss.dtype))
    found = {name: getattr(made, name).detach() for name in ("loss", "lse", "entropy")}
    return {**found, "predictions": made.predictions, "dz": dz}


def findings_of_logits(tokens, vocab, dtype, device):
    """A Finding for each result of flce.cross_entropy of given logits under each change of the
    batch."""
    batch = draw(tokens, vocab, 1, dtype, device)
    random = torch.Generator(device=device).manual_seed(1)
    batch = batch._replace(y=torch.randint(vocab, batch.y.shape, generator=random, device=device))
    base = results_of_logits(batch, torch.arange(tokens, device=device))
    for change in changes(batch):
        if change.ignores_others or change.options != change.base:
            continue
        made = results_of_logits(batch, change.rows.to(device))
        rows = change.rows[change.kept].to(device)
        for name, value in made.items():
            yield compared(change, name, value[change.kept], base[name][rows])


def matrix_of(found):
    """{change: {result: "same bits", or what differs, over all cases of the change}}."""
    matrix = {}
    for one in found:
        matrix.setdefault(one.change, {}).setdefault(one.result, []).append(one)
    return {
        change: {result: _differences(cases) for result, cases in of_change.items()}
        for change, of_change in matrix.items()
    }


def _differences(cases):
    differing = {one.case: one.differing for one in cases if one.differing}
    if not differing:
        return "same bits"
    largest = max(one.largest for one in cases)
    return {"largest": largest, "rows": sum(one.rows for one in cases), "differing": differing}


def lines_of(matrix):
    for change, of_change in matrix.items():
        same = [result for result, found in of_change.items() if found == "same bits"]
        parts = [f"same bits: {', '.join(same)}"] if same else []
        for result, found in of_change.items():
            if result not in same:
                rows, cases = sum(found["differing"].values()), ", ".join(found["differing"])
                of_all = f"{rows} of {found['rows']} rows differ, by {found['largest']:.1e} at most"
                parts.append(f"{result}: {of_all} ({cases})")
        yield f"{change:18} {'; '.join(parts)}"


def sizes_of(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected HxV, got {text}")
    return int(match[1]), int(match[2])


def machine(device):
    facts = {"torch": torch.__version__, "flce": flce.__version__, "device": device}
    if device == "cuda":
        return facts | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    capability = torch.backends.cpu.get_cpu_capability()
    return facts | {"threads": torch.get_num_threads(), "capability": capability}


def main(arguments=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--kernel", nargs="*", default=["fused", "gemm", "auto"])
    parser.add_argument("--shape", nargs="*", type=sizes_of, help="HxV")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=5000, help="N of the largest batch")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    large = [(1024, 32064)] if options.device == "cuda" else []
    shapes = options.shape or [(64, 193), (1000, 1003), *large]
    runs = []
    for dtype in options.dtype:
        for kernel in options.kernel if options.device == "cuda" else ["cpu"]:
            os.environ["FLCE_KERNEL"] = "auto" if kernel == "cpu" else kernel
            for hidden, vocab in shapes:
                run = {"dtype": dtype, "kernel": kernel, "hidden": hidden, "vocab": vocab}
                print(", ".join(f"{key} {value}" for key, value in run.items()))
                batch = draw(options.tokens, hidden, vocab, getattr(torch, dtype), options.device)
                matrix = matrix_of(findings(batch))
                print(*lines_of(matrix), sep="\n", flush=True)
                runs.append(run | {"matrix": matrix})
    if options.json:
        record = {"machine": machine(options.device), "tokens": options.tokens, "runs": runs}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
