#!/usr/bin/env python3
"""Times forward+backward of flce against eager PyTorch and the three bare GEMMs.

All contestants run in one process, interleaved round by round on fresh random data, so that clocks
and neighbours touch them alike; medians are compared. Errors are those of loss, dX and dW against a
reference in row chunks (float32 on CUDA, float64 on the CPU).

    python benchmarks/bench.py head half --save auto logits --max-memory 1GiB 256MiB
    python benchmarks/bench.py cpu 1000x64x5000 --device cpu --dtype float32 --json out.json
"""

import argparse
import contextlib
import datetime
import json
import math
import pathlib
import platform
import re
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import flce

# Tokens, hidden, vocabulary, bias.
SHAPES = {
    "head": (8192, 4096, 128256, False),
    "half": (4096, 4096, 128256, False),
    "small": (2048, 1024, 32000, False),
    "gist": (32768, 768, 128256, True),
    "gemma": (8192, 2304, 256000, False),
    "mid": (16384, 2048, 151936, False),
    "cpu": (1024, 768, 50257, False),
    "cpu-wide": (512, 2048, 128256, False),
    "cpu-small": (128, 128, 8192, False),
}
REFERENCE_BYTES = 1 << 30  # of a chunk of reference logits


@dataclass
class Problem:
    """One shape's tensors; `refresh` draws new values into the same memory."""

    x: torch.Tensor  # (N, H)
    w: torch.Tensor  # (V, H)
    b: torch.Tensor | None  # (V,)
    y: torch.Tensor  # (N,)
    std: float

    def refresh(self):
        hidden = self.x.shape[1]
        with torch.no_grad():
            self.x.normal_(0.0, math.sqrt(self.std))
            self.w.normal_(0.0, math.sqrt(self.std / hidden))
            if self.b is not None:
                self.b.normal_()
            self.y.random_(0, self.w.shape[0])

    @property
    def leaves(self):
        return [leaf for leaf in (self.x, self.w, self.b) if leaf is not None]


def make_problem(shape, device, dtype, std):
    tokens, hidden, vocab, bias = shape

    def leaf(*size):
        return torch.empty(*size, device=device, dtype=dtype, requires_grad=True)

    target = torch.empty(tokens, device=device, dtype=torch.int64)
    b = leaf(vocab) if bias else None
    return Problem(leaf(tokens, hidden), leaf(vocab, hidden), b, target, std)


def named_shape(text):
    if text in SHAPES:
        return text, SHAPES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(\+bias)?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(SHAPES)} or NxHxV, got {text}"
        )
    return text, (int(match[1]), int(match[2]), int(match[3]), match[4] is not None)


# ---- contestants: each returns what a training step would hold at its end ----


def three_gemms(problem):
    with torch.no_grad():
        z = problem.x @ problem.w.T
        return z @ problem.w, z.T @ problem.x


def eager(problem):
    loss = F.cross_entropy(F.linear(problem.x, problem.w, problem.b), problem.y)
    return loss.detach(), *torch.autograd.grad(loss, problem.leaves)


def fused(save, max_memory):
    def run(problem):
        loss = flce.linear_cross_entropy(
            problem.x,
            problem.w,
            problem.y,
            linear_bias=problem.b,
            save=save,
            max_memory=max_memory,
        )
        return loss.detach(), *torch.autograd.grad(loss, problem.leaves)

    return run


def contestants(options):
    entries = {"gemms": three_gemms}
    if not options.no_eager:
        entries["eager"] = eager
    for save in options.save:
        for budget in options.max_memory:
            name = f"flce {save}" + (f" {budget}" if budget else "")
            entries[name] = fused(save, budget)
    return entries


# ---- measures ----


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run, problem, device):
    synchronize(device)
    begin = time.perf_counter()
    results = run(problem)
    synchronize(device)
    elapsed = time.perf_counter() - begin
    del results
    return elapsed


def peak_extra_bytes(run, problem, device):
    """The most bytes held at one time over the inputs."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(problem)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run(problem)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def exact_products():
    """No TF32 in the reference, whatever the contestants may use."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def reference(problem, device):
    """Mean loss, dX, dW (and db) in a wide dtype, never more than a chunk of logits at a time."""
    wide = torch.float32 if device == "cuda" else torch.float64
    tokens, vocab = problem.y.numel(), problem.w.shape[0]
    rows = max(1, REFERENCE_BYTES // (3 * vocab * wide.itemsize))
    w = problem.w.to(wide)
    b = None if problem.b is None else problem.b.to(wide)
    loss, dx, dw, db = 0.0, torch.empty_like(problem.x, dtype=wide), torch.zeros_like(w), 0.0
    with exact_products():
        for begin in range(0, tokens, rows):
            part = slice(begin, begin + rows)
            x, y = problem.x[part].to(wide), problem.y[part]
            z = F.linear(x, w, b).log_softmax(-1)
            index = torch.arange(len(y), device=y.device)
            loss = loss - z[index, y].double().sum()
            z.exp_()
            z[index, y] -= 1
            dx[part] = z @ w / tokens
            dw.addmm_(z.T, x, alpha=1 / tokens)
            db = db + z.sum(0) / tokens
    results = (loss / tokens, dx, dw)
    return results if problem.b is None else (*results, db)


def errors(results, truth):
    """Relative errors of loss, dX, dW, db by name."""
    names = ("loss", "dx", "dw", "db")
    return {
        name: ((value.to(true.dtype) - true).norm() / true.norm()).item()
        for name, value, true in zip(names, results, truth, strict=False)
    }


def attempt(run, problem):
    """Warm-up; a contestant that does not fit the device leaves the table with its reason."""
    try:
        run(problem)
        run(problem)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


# ---- one shape ----


def bench_shape(name, shape, options):
    problem = make_problem(shape, options.device, options.dtype, options.std)
    problem.refresh()
    entries, rows = contestants(options), []
    for label in list(entries):
        reason = attempt(entries[label], problem)
        if reason:
            print(f"{name:10} {label:22} left out: {reason}")
            del entries[label]
    times = {label: [] for label in entries}
    for _ in range(options.rounds):
        problem.refresh()
        for label, run in entries.items():
            times[label].append(seconds(run, problem, options.device))
    truth = None if options.no_errors else reference(problem, options.device)
    floor = statistics.median(times["gemms"])
    for label, run in entries.items():
        median = statistics.median(times[label])
        row = {
            "shape": name,
            "tokens": shape[0],
            "hidden": shape[1],
            "vocab": shape[2],
            "bias": shape[3],
            "contestant": label,
            "ms": 1e3 * median,
            "fastest_ms": 1e3 * min(times[label]),
            "ratio": median / floor,
            "tflops": 6e-12 * math.prod(shape[:3]) / median,
            "peak_bytes": peak_extra_bytes(run, problem, options.device),
        }
        if truth is not None and label != "gemms":
            row["errors"] = errors(run(problem), truth)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row):
    text = (
        f"{row['shape']:10} {row['contestant']:22} {row['ms']:9.2f} ms {row['ratio']:6.3f}x"
        f" {row['tflops']:7.2f} TFLOP/s {row['peak_bytes'] / 1e6:9.1f} MB"
    )
    return text + error_columns(row)


def error_columns(row):
    return "".join(f"  {name} {error:.1e}" for name, error in row.get("errors", {}).items())


def machine(options):
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flce": flce.__version__,
        "threads": torch.get_num_threads(),
        "device": options.device,
        "dtype": str(options.dtype).removeprefix("torch."),
        "std": options.std,
        "rounds": options.rounds,
    }
    if options.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        return facts
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    facts["cpu"] = model[1] if model else platform.processor()
    return facts


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "shapes",
        nargs="*",
        type=named_shape,
        default=[
            named_shape(name) for name in (("small", "head") if cuda else ("cpu-small", "cpu"))
        ],
        help=f"{', '.join(SHAPES)} or NxHxV, NxHxV+bias",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        default="bfloat16" if cuda else "float32",
    )
    parser.add_argument("--save", nargs="+", default=["auto"], help="auto logits grads stats")
    parser.add_argument(
        "--max-memory", nargs="+", default=[None], help="budgets, such as 32MiB; default: flce's"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--std", type=float, default=1.0, help="of the logits")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="file for machine, versions and figures")
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    return options


def main():
    options = parse_options()
    torch.manual_seed(0)
    facts = machine(options)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    rows = []
    for name, shape in options.shapes:
        rows += bench_shape(name, shape, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
