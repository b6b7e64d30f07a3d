#!/usr/bin/env python3
"""Times flce, its peers and the bare GEMMs, forward alone and with the backward.

All contestants run in one process, interleaved round by round on fresh random data in an order that
changes every round, so that the GPU's clock and other processes affect them alike; medians are
compared. Ratios are relative to the bare GEMMs in the operands' dtype: `x @ W.T` for the forward
under no_grad, and also `z @ W`, `z.T @ x` for forward + backward. Peak bytes are in addition to the
inputs, gradients included. Errors are relative ones of loss, dX, dW (and db) against a reference in
row chunks (float32 on CUDA, float64 on the CPU), measured for each contestant before it is timed. A
peer that is not installed or cannot run is omitted, with the reason (benchmarks/peers.py).

--clock wall: the host's clock between two synchronisations, so that the host's time before the
first kernel counts. --clock device (CUDA): each contestant is queued behind work that keeps the
device busy and timed by two events of the device. That hides the host's time, as a training step
does whose earlier layers still run; a synchronisation inside a contestant still shows. Rounds that
the host did not queue in time are counted as unhidden.

    python benchmarks/bench.py head half --save auto logits --budget default 256MiB
    python benchmarks/bench.py small --clock device
    python benchmarks/bench.py head --std 8 --targets model --ignored 0.3 --peers eager liger
    python benchmarks/bench.py cpu 1000x64x5000 --device cpu --json benchmarks/results/new.json
"""

import argparse
import functools
import gc
import json
import math
import pathlib
import sys

import measure
import peers
import problem as problems
import torch
from problem import SHAPES, named_shape

import flce

PASSES = ("forward", "step")
FLOOR = "gemms"


# ---- contestants: (run, facts) by label; a run returns what a training step holds at its end ----


def run_pass(loss_of, problem, pass_name):
    if pass_name == "forward":
        with torch.no_grad():
            return (loss_of(problem),)
    loss = loss_of(problem)
    return loss.detach(), *torch.autograd.grad(loss, problem.leaves)


def fused(**settings):
    """flce with these settings, as a function of the problem."""

    def loss_of(p):
        reduction = "mean" if p.upstream is None else "none"
        made = flce.linear_cross_entropy(
            p.x, p.w, p.y, linear_bias=p.b, reduction=reduction, **settings
        )
        return made if p.upstream is None else made @ p.upstream

    return loss_of


def fused_contestants(problem, options):
    """Each save with each budget and logits dtype; with ignored tokens also with a valid_bound."""
    entries = {}
    for save in options.save:
        # An explicit "logits" saves them all, whatever the budget.
        for budget in options.budget if save != "logits" else ["default"]:
            for dtype in options.logits_dtype:
                facts = {"kind": "flce", "save": save, "budget": budget, "logits_dtype": dtype}
                settings = {"save": save}
                if budget != "default":
                    settings["max_memory"] = budget
                if dtype != "float32":
                    settings["logits_dtype"] = getattr(torch, dtype)
                label = f"flce {save}" + (f" {budget}" if budget != "default" else "")
                label += f" {dtype}" if dtype != "float32" else ""
                entries[label] = fused(**settings), facts
                if problem.valid < len(problem.y):
                    bound = {"valid_bound": problem.valid}
                    entries[f"{label} bound"] = fused(**settings, **bound), {**facts, **bound}
    return entries


def sampled_contestants(options):
    """gradient="sampled" with each eps and budget."""
    entries = {}
    for text in options.sampled:
        for budget in options.budget:
            settings = {"gradient": "sampled", "gradient_eps": power(text)}
            label = f"flce sampled {text}" + (f" {budget}" if budget != "default" else "")
            facts = {"kind": "flce", "gradient_eps": settings["gradient_eps"], "budget": budget}
            if budget != "default":
                settings["max_memory"] = budget
            entries[label] = fused(**settings), facts
    return entries


def power(text):
    """The number that "2^-6" or "0.1" says."""
    base, caret, exponent = text.partition("^")
    return float(base) ** float(exponent) if caret else float(text)


def peer_contestants(problem, options, fail):
    entries = {}
    for name in options.peers:
        try:
            entries[name] = peers.PEERS[name](problem, options), {"kind": "peer"}
        except Exception as error:  # an import error, a refusal
            fail("both", name, error)
    return entries


def contestants(problem, options, fail):
    """(function of (problem, pass), facts) by label: the bare GEMMs, flce, the peers."""
    entries = {FLOOR: (problems.bare_products, {"kind": "floor"})}
    losses = fused_contestants(problem, options) | sampled_contestants(options)
    losses |= peer_contestants(problem, options, fail)
    for label, (loss_of, facts) in losses.items():
        entries[label] = functools.partial(run_pass, loss_of), facts
    return entries


# ---- one shape ----


class LeftOut(list):
    """Which contestants are left out of which pass of a shape, and why; printed immediately."""

    def add(self, shape, pass_name, label, error):
        text = (str(error).strip() or repr(error)).splitlines()[0][:160]
        reason = f"{type(error).__name__}: {text}"
        self.append({"shape": shape, "pass": pass_name, "contestant": label, "reason": reason})
        print(f"{shape:10} {pass_name:7} {label:26} left out: {reason}", flush=True)


def release(device):
    """Frees what a failed contestant or the last shape held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def prepare(run, problem, device, truth):
    """(estimated seconds, peak bytes, errors), after a first call that triggers compilers and
    tuners."""
    run(problem)
    estimate = measure.seconds(run, problem, device)
    results = []
    peak = measure.peak_extra_bytes(lambda p: results.extend(run(p)), problem, device)
    return estimate, peak, problems.errors(results, truth) if truth is not None else None


def prepared(entries, pass_name, problem, truth, options, fail):
    """Label -> (run, estimate, peak, errors); failures are passed to `fail`."""
    ready = {}
    for label, (entry, facts) in entries.items():
        run = functools.partial(entry, pass_name=pass_name)
        checked = None if facts["kind"] == "floor" else truth
        try:
            with measure.patience(options.patience):
                ready[label] = run, *prepare(run, problem, options.device, checked)
        except (Exception, measure.OutOfPatience) as error:  # a peer may raise anything: continue
            fail(pass_name, label, error)
        if label not in ready:
            release(options.device)
    return ready


def bench_shape(name, shape, options, left_out):
    """The result rows of one shape."""
    dtype = options.dtype or shape.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    draw = {"std": options.std, "ignored": options.ignored, "targets": options.targets}
    problem = problems.make_problem(shape, options.device, getattr(torch, dtype), **draw)
    if options.operands:
        problem.given = problems.load_operands(options.operands, shape, options.device)
        draw = {"operands": options.operands.name}
    if options.upstream:
        problem.upstream = torch.empty(shape.tokens, device=options.device)
        draw["upstream"] = True
    problem.refresh()
    fail = functools.partial(left_out.add, name)
    entries, rows = contestants(problem, options, fail), []
    truth = None if options.no_errors else problems.reference(problem, options.device)
    ready = {p: prepared(entries, p, problem, truth, options, fail) for p in options.passes}
    del truth  # frees gigabytes
    for pass_name, made in ready.items():
        runs = {label: one[:2] for label, one in made.items()}
        limits = options.rounds, options.seconds
        taken, failed = measure.interleaved(runs, problem, options.device, *limits, options.clock)
        for label, error in failed.items():
            fail(pass_name, label, error)
        for label in taken if FLOOR in taken else ():
            facts = {"shape": name, **shape._asdict(), "dtype": dtype, **draw, "pass": pass_name}
            row = facts | {"clock": options.clock, "contestant": label} | entries[label][1]
            row |= figures(taken[label], taken[FLOOR], shape, pass_name, *made[label][2:])
            rows.append(row)
            print(line(row), flush=True)
    return rows


def figures(taken, floor_taken, shape, pass_name, peak, errors):
    times, floor_times = ([one.seconds for one in some] for some in (taken, floor_taken))
    lower, median, upper = measure.quartiles(times)
    products = 1 if pass_name == "forward" else 3
    row = {
        "ms": 1e3 * median,
        "ms_quartiles": [1e3 * lower, 1e3 * upper],
        "fastest_ms": 1e3 * min(times),
        "rounds": len(times),
        "ratio": median / measure.quartiles(floor_times)[1],
        "tflops": 2e-12 * products * math.prod(shape[:3]) / median,
        "peak_bytes": peak,
    }
    if taken[0].hidden is not None:
        row["unhidden_rounds"] = sum(not one.hidden for one in taken)
    return row if errors is None else row | {"errors": errors}


def line(row):
    lower, upper = row["ms_quartiles"]
    text = (
        f"{row['shape']:10} {row['pass']:7} {row['contestant']:26} {row['ms']:9.2f} ms"
        f" [{lower:.2f} {upper:.2f}] {row['ratio']:6.3f}x"
        f" {row['tflops']:7.2f} TFLOP/s {row['peak_bytes'] / 1e6:9.1f} MB"
    )
    if row.get("unhidden_rounds"):
        text += f"  {row['unhidden_rounds']} of {row['rounds']} rounds unhidden"
    if "errors" not in row and row["kind"] != "floor":
        return text + "  unchecked"
    return text + problems.error_columns(row)


# ---- all shapes ----


def add_contestants(parser):
    """Arguments that select the contestants."""
    parser.add_argument("--save", nargs="+", default=["auto"], help="auto logits grads stats")
    parser.add_argument(
        "--budget", nargs="+", default=["default"], help="max_memory, such as 32MiB; or default"
    )
    parser.add_argument(
        "--sampled", nargs="+", default=[], metavar="EPS", help="sampled gradients, such as 2^-6"
    )
    parser.add_argument(
        "--logits-dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        default=["float32"],
        help="float32: exact; the operands' own: rounded, as eager's",
    )
    parser.add_argument(
        "--peers", nargs="*", choices=list(peers.PEERS), default=list(peers.PEERS), metavar="NAME"
    )
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="peers left out")
    parser.add_argument(
        "--torch-chunked", metavar="DIR", help="folder of torch 2.13's linear_cross_entropy files"
    )


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    default = ("small", "head") if cuda else ("cpu-small", "cpu")
    parser.add_argument(
        "shapes",
        nargs="*",
        type=named_shape,
        default=[named_shape(name) for name in default],
        help=f"{', '.join(SHAPES)} or NxHxV, NxHxV+bias",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "float64"],
        help="default: the shape's own, else bfloat16 on CUDA and float32 on the CPU",
    )
    add_contestants(parser)
    parser.add_argument("--clock", choices=measure.CLOCKS, default="wall", help="device: CUDA only")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a contestant's rounds; slow ones get fewer"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds for a contestant to get ready"
    )
    parser.add_argument("--std", type=float, default=1.0, help="of the logits")
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of the tokens")
    parser.add_argument("--targets", choices=["random", "model"], default="random")
    parser.add_argument(
        "--operands",
        type=pathlib.Path,
        help="file of sampled_training.py --save-operands, instead of random tensors",
    )
    parser.add_argument(
        "--upstream",
        action="store_true",
        help='reduction="none" and random gradients of the losses; for flce alone',
    )
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="file for machine, versions and figures")
    options = parser.parse_args(arguments)
    if options.clock == "device" and options.device != "cuda":
        parser.error(f"argument --clock: device needs --device cuda, got {options.device}")
    if options.upstream and options.peers:
        parser.error("argument --upstream: expected an empty --peers")
    options.peers = [name for name in options.peers if name not in options.skip]
    return options


def main(arguments=None):
    """Exit status 1 if a shape has no figures of flce."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    facts = measure.machine(options.device) | {"peers": peers.versions()}
    print(measure.described(facts))
    rows, left_out, missing = [], LeftOut(), []
    for name, shape in options.shapes:
        made = bench_shape(name, shape, options, left_out)
        release(options.device)
        rows += made
        if not any(row["kind"] == "flce" for row in made):
            missing.append(name)
        if options.json:  # after each shape: a later one may kill the process
            record = {"machine": facts, "rows": rows, "left_out": left_out}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    if missing:
        print(f"no figures of flce for {', '.join(missing)}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
