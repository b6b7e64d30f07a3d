#!/usr/bin/env python3
"""Many training steps of the head alone: does memory grow, does the allocator call the device, do
step times vary?

Each step draws new hidden states and targets, takes loss and gradients of hidden states and weight
with flce, and updates the weight. Exit status 1 if a bar is missed: memory held after a step grows,
torch's allocator asks the device for memory after step 3 (CUDA), or the spread of the step times,
(p95 - p5) / median after the warm-up, is too wide. A GPU at its power limit needs some 20 s of load
until its clock is stable (on an H200 steps 20 to 200 spread by 8.2 %, 300 to 500 by 2.8 %), which
is the default warm-up at the default shape.

The GPU's clock changes the time of every long kernel. --control therefore times the three bare
GEMMs of the shape right before each step: `control_spread` is the same measure of their times,
`ratio_spread` that of step / GEMMs in one iteration, which shows what the step itself, including
the optimizer's update, adds. The bar applies to the step's own spread. The GEMMs write N x V
logits. These come from a memory pool of their own and are freed before the step, so that held
bytes, peak and allocations are the step's; `reserved` includes the pool. `sm_clock_mhz`, where
NVML's Python package is installed, is sampled by the host when it has queued a step, and the host
runs ahead of the device.

    python benchmarks/train_loop.py head --json benchmarks/results/loop.json
    python benchmarks/train_loop.py head --control
    python benchmarks/train_loop.py cpu-small --device cpu --steps 20 --max-spread 10
"""

import argparse
import contextlib
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

SETTLED = 3  # steps after which nothing may be allocated


def make_optimizer(name, weight, device):
    if name == "sgd":
        return torch.optim.SGD([weight], lr=1e-5)
    # A small learning rate: the logits keep their spread, so that every step does the same work.
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
    """Bytes held, bytes reserved, allocations from the device, and retries since the start."""
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
    """Times of steps in ms without synchronisation in between: CUDA events, or the host's clock
    on the CPU."""

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


def sm_clock():
    """SM clock in MHz; None if NVML is not available: no package, no library, or not supported
    by this GPU."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # the class of NVML's errors is only defined in its package
        return None


class Control:
    """The bare GEMMs before each step: their times, and the step's facts that they would
    distort."""

    def __init__(self, device):
        self.cuda, self.clock = device == "cuda", Clock(device)
        # With a common pool its free blocks could satisfy a step that asks for more than the one
        # before, and the bar on allocations would miss that.
        self.pool = torch.cuda.MemPool() if self.cuda else None
        self.peak, self.sm_clocks = 0, []

    def before_step(self, problem):
        with torch.cuda.use_mem_pool(self.pool) if self.cuda else contextlib.nullcontext():
            self.clock.mark()
            products = problems.bare_products(problem, "step")
            self.clock.mark()
        del products
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def after_step(self):
        if self.cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            self.sm_clocks.append(sm_clock())

    def figures(self, times, warmup):
        """Figures reported in addition to those of the steps; `times`: of the steps."""
        products = self.clock.steps()
        ratios = [step / own for step, own in zip(times, products, strict=True)]
        row = {
            "control_ms": statistics.median(products[warmup:]),
            "control_spread": spread(products[warmup:]),
            "ratio": statistics.median(ratios[warmup:]),
            "ratio_spread": spread(ratios[warmup:]),
        }
        if self.cuda:
            row["peak_bytes"] = self.peak
        if self.sm_clocks and None not in self.sm_clocks:
            low, median, high = percentiles(self.sm_clocks[warmup:])
            row["sm_clock_mhz"] = {"p5": low, "median": median, "p95": high}
        return row


def loop(problem, optimizer, settings, options, control=None):
    """Times of all steps in ms, memory after step SETTLED and after the last, last loss."""
    clock, settled, loss = Clock(options.device), None, None
    for index in range(options.steps):
        draw(problem)
        if control:
            control.before_step(problem)
        clock.mark()
        loss = step(problem, optimizer, settings)
        clock.mark()
        if control:
            control.after_step()
        if index + 1 == SETTLED:
            settled = memory(options.device)
    times = clock.steps()
    return times, settled, memory(options.device), loss.item()


def percentiles(values):
    """The 5 %, 50 % and 95 % quantiles."""
    percent = statistics.quantiles(values, n=20, method="inclusive")
    return percent[0], statistics.median(values), percent[-1]


def spread(values):
    low, median, high = percentiles(values)
    return (high - low) / median


def figures(times, settled, last, loss, warmup):
    """The reported figures; `growth` and `new_allocs` are those after step SETTLED."""
    behind = times[warmup:]
    low, median, high = percentiles(behind)
    row = {
        "steps": len(times),
        "warmup": warmup,
        "ms": median,
        "p5_ms": low,
        "p95_ms": high,
        "spread": spread(behind),
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
    """Sentences, one for each bar that is missed; a NaN counts as missed."""
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
    parser.add_argument("--steps", type=int, help="all of them; default: 200 behind the warm-up")
    parser.add_argument(
        "--warmup", type=int, help="steps whose times do not count; default: 600, on the CPU 20"
    )
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--save", default="auto")
    parser.add_argument("--budget", help="max_memory; default: flce's")
    parser.add_argument("--control", action="store_true", help="bare products before each step")
    parser.add_argument("--max-spread", type=float, default=0.03)
    parser.add_argument("--max-growth", type=int, help="bytes; default 0, on the CPU 64 MiB of RSS")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if options.warmup is None:
        options.warmup = 600 if options.device == "cuda" else 20
    if options.steps is None:
        options.steps = options.warmup + 200
    least = max(options.warmup + 2, SETTLED + 1)
    if not options.steps >= least:
        parser.error(
            f"steps: expected at least {least} with a warm-up of {options.warmup}, "
            f"got {options.steps}"
        )
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
    control = Control(options.device) if options.control else None
    measured = loop(problem, optimizer, settings, options, control)
    row |= figures(*measured, options.warmup)
    if control:
        row |= control.figures(measured[0], options.warmup)
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
