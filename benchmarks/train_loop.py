#!/usr/bin/env python3
"""Many training steps of the head alone: does memory grow, does the device allocate, is time even?

Each step draws new hidden states and targets, takes loss and gradients of hidden states and weight
with flce, and updates the weight. Exit status 1 if a bar is missed: memory held after a step grows,
torch's allocator asks the device for memory after step 3 (CUDA), or the spread of the step times,
(p95 - p5) / median behind the warm-up, is too wide.

    python benchmarks/train_loop.py head --steps 200 --json benchmarks/results/loop.json
    python benchmarks/train_loop.py cpu-small --device cpu --steps 20 --max-spread 10
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import time

import measure
import problem as problems
import torch

import flce

SETTLED = 3  # steps after which nothing may be allocated any more


def make_optimizer(name, weight, device):
    if name == "sgd":
        return torch.optim.SGD([weight], lr=1e-5)
    # A small rate: the logits keep their spread, so that every step is the same work.
    return torch.optim.AdamW([weight], lr=1e-6, fused=device == "cuda")


def draw(problem):
    """New hidden states and targets; the weight is the optimizer's."""
    with torch.no_grad():
        problem.x.normal_(0.0, problem.std**0.5)
        problem.y.random_(0, len(problem.w))


def step(problem, optimizer, settings):
    loss = flce.linear_cross_entropy(
        problem.x, problem.w, problem.y, linear_bias=problem.b, **settings
    )
    loss.backward()
    optimizer.step()
    for leaf in problem.leaves:
        leaf.grad = None
    return loss.detach()


def memory(device):
    """Bytes held, bytes reserved, allocations from the device and retries since the start."""
    if device == "cpu":
        resident = re.search(r"VmRSS:\s*(\d+)", pathlib.Path("/proc/self/status").read_text())
        return {"held": 1024 * int(resident[1])}
    facts = torch.cuda.memory_stats()
    return {
        "held": facts["allocated_bytes.all.current"],
        "reserved": facts["reserved_bytes.all.current"],
        "device_allocs": facts["num_device_alloc"],
        "alloc_retries": facts["num_alloc_retries"],
    }


class Clock:
    """Times of steps in ms without a wait in between: CUDA events, or the CPU's own clock."""

    def __init__(self, device):
        self.cuda, self.marks = device == "cuda", []

    def mark(self):
        if not self.cuda:
            self.marks.append(1e3 * time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def steps(self):
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        if not self.cuda:
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def loop(problem, optimizer, settings, options):
    """Times of all steps in ms, memory after the settled step and after the last, last loss."""
    clock, settled, loss = Clock(options.device), None, None
    for index in range(options.steps):
        draw(problem)
        clock.mark()
        loss = step(problem, optimizer, settings)
        clock.mark()
        if index + 1 == SETTLED:
            settled = memory(options.device)
    times = clock.steps()
    return times, settled, memory(options.device), loss.item()


def figures(times, settled, last, loss, warmup):
    """What is reported; `growth` and `new_allocs` are those behind the settled step."""
    behind = times[warmup:]
    percent = statistics.quantiles(behind, n=20, method="inclusive")
    median = statistics.median(behind)
    row = {
        "steps": len(times),
        "warmup": warmup,
        "ms": median,
        "p5_ms": percent[0],
        "p95_ms": percent[-1],
        "spread": (percent[-1] - percent[0]) / median,
        "growth_bytes": last["held"] - settled["held"],
        "loss": loss,
        "memory": last,
    }
    if "device_allocs" in last:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_growth_bytes"] = last["reserved"] - settled["reserved"]
        row["new_device_allocs"] = last["device_allocs"] - settled["device_allocs"]
        row["new_alloc_retries"] = last["alloc_retries"] - settled["alloc_retries"]
    return row


def missed_bars(row, options):
    """Sentences, one for each bar that is missed; a NaN misses its bar."""
    missed = []
    if not row["growth_bytes"] <= options.max_growth:
        missed.append(f"memory grew by {row['growth_bytes']} bytes, bar {options.max_growth}")
    for name in ("new_device_allocs", "new_alloc_retries"):
        if row.get(name, 0) != 0:
            missed.append(f"{name} after step {SETTLED}: {row[name]}, bar 0")
    if not row["spread"] < options.max_spread:
        missed.append(f"spread of step times {row['spread']:.4f}, bar {options.max_spread}")
    if not abs(row["loss"]) < float("inf"):
        missed.append(f"the last loss is {row['loss']}")
    return missed


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "shape",
        nargs="?",
        type=problems.named_shape,
        default=problems.named_shape("head" if cuda else "cpu-small"),
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="steps whose times do not count")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--save", default="auto")
    parser.add_argument("--budget", help="max_memory; default: flce's")
    parser.add_argument("--max-spread", type=float, default=0.03)
    parser.add_argument("--max-growth", type=int, help="bytes; default 0, on the CPU 64 MiB of RSS")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if not options.steps >= options.warmup + 2 or not options.steps > SETTLED:
        parser.error(f"steps: expected more than {SETTLED} and warmup + 1, got {options.steps}")
    if options.max_growth is None:
        options.max_growth = 0 if options.device == "cuda" else 64 << 20
    return options


def main(arguments=None):
    options = parse_options(arguments)
    torch.manual_seed(0)
    name, shape = options.shape
    facts = measure.machine(options.device)
    print(measure.described(facts))
    problem = problems.make_problem(shape, options.device, getattr(torch, options.dtype))
    problem.refresh()
    optimizer = make_optimizer(options.optimizer, problem.w, options.device)
    settings = {"save": options.save, "max_memory": options.budget}
    row = {"shape": name, **shape._asdict(), "dtype": options.dtype}
    row |= settings | {"optimizer": options.optimizer}
    row |= figures(*loop(problem, optimizer, settings, options), options.warmup)
    missed = missed_bars(row, options)
    for key, value in row.items():
        print(f"{key:22} {value}")
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    if options.json:
        record = {"machine": facts, "row": row, "missed": missed}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
