"""Divergences of a student's head from a teacher's: time of a step as a ratio to the four bare
GEMMs (both logits, dX, dW), peak memory in addition to the operands, and errors against float32
logits (CUDA) or float64.

    python benchmarks/distill.py head --json record.json
    python benchmarks/distill.py 8192x2048x128256 --teacher 8192
    python benchmarks/distill.py head --near 1e-3     # logits that differ by about so much
    python benchmarks/distill.py head --peers FOLDER  # Liger's too, from its unpacked wheel
    python benchmarks/distill.py head --sweep --kinds forward_kl --rounds 3 --json record.json

--sweep: time and peak memory over the number of tokens, without errors. A contestant is left out
where its peak, in proportion to that of the length before, would exceed the device's memory.
"""

import argparse
import functools
import gc
import importlib
import json
import math
import os
import pathlib
import sys
from dataclasses import dataclass

import measure
import problem as problems
import torch
import torch.nn.functional as F

import flce
from flce.packing import parse_bytes

KINDS = ("forward_kl", "reverse_kl", "jsd")
LIGER_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # its jsd_beta
REFERENCE_ROWS = 256
SWEEP = tuple(2**power for power in range(11, 17))  # tokens
KEPT_FREE = 0.05  # of the device's memory: for CUDA's context and what the allocator cannot use


@dataclass
class Distillation(problems.Problem):
    """A student's Problem and its teacher."""

    teacher_x: torch.Tensor | None = None  # (N, H')
    teacher_w: torch.Tensor | None = None  # (V, H')
    near: float | None = None  # about the standard deviation of the logits' difference; H' = H

    @torch.no_grad()
    def refresh(self):
        super().refresh()
        if self.near is None:
            self.teacher_x.normal_(0.0, math.sqrt(self.std))
            self.teacher_w.normal_(0.0, math.sqrt(self.std / self.teacher_x.shape[1]))
            return
        # Some elements of W change by 2**-7 of their size, which every dtype holds.
        share = (self.near * 2**7) ** 2
        self.teacher_x.copy_(self.x)
        changed = torch.rand(self.w.shape, device=self.w.device) < share
        self.teacher_w.copy_(torch.where(changed, self.w * (1 + 2**-7), self.w))


def rows_of(log_p, log_q, kind):
    """The mean over the rows of the divergence, p the student's."""
    if kind != "jsd":
        given = (log_p, log_q) if kind == "forward_kl" else (log_q, log_p)
        return F.kl_div(*given, reduction="batchmean", log_target=True)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    both = (F.kl_div(log_m, one, reduction="batchmean", log_target=True) for one in (log_p, log_q))
    return 0.5 * sum(both)


def eager(x, w, teacher_x, teacher_w, kind):
    with torch.no_grad():
        log_q = F.linear(teacher_x, teacher_w).float().log_softmax(-1)
    return rows_of(F.linear(x, w).float().log_softmax(-1), log_q, kind)


def liger(folder, kind):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    function = importlib.import_module("liger_kernel.ops.fused_linear_jsd")
    function = function.LigerFusedLinearJSDFunction.apply

    def loss(x, w, teacher_x, teacher_w):
        return function(x, w, teacher_x, teacher_w, None, LIGER_BETA[kind], -100, 1.0)

    return loss


def contestants(kind, options):
    torch.compiler.reset()  # a function that was compiled for eight sizes runs eagerly for a ninth
    made = {
        "eager": functools.partial(eager, kind=kind),
        "compile": functools.partial(torch.compile(eager, dynamic=False), kind=kind),
    }
    for memory in options.max_memory:
        name = "flce" if memory is None else f"flce {memory}"
        how = {"divergence": kind, "max_memory": memory}
        made[name] = functools.partial(flce.linear_divergence, **how)
    sampled = {"divergence": kind, "gradient": "sampled"}
    made["sampled"] = functools.partial(flce.linear_divergence, **sampled)
    if options.peers:
        made["Liger"] = liger(options.peers, kind)
    return {name: made[name] for name in made if name not in options.without}


def operands(problem):
    return problem.x, problem.w, problem.teacher_x, problem.teacher_w


def step(loss_of):
    def run(problem):
        loss = loss_of(*operands(problem))
        return loss.detach(), *torch.autograd.grad(loss, (problem.x, problem.w))

    return run


@torch.no_grad()
def bare_products(problem):
    z = problem.teacher_x @ problem.teacher_w.T
    torch.mm(problem.x, problem.w.T, out=z)
    return z @ problem.w, z.T @ problem.x


def truth(problem, kind, wide):
    loss, dx = 0.0, torch.empty_like(problem.x, dtype=wide)
    w = problem.w.detach().to(wide).requires_grad_()
    dw, teacher_w = torch.zeros_like(w), problem.teacher_w.to(wide)
    with problems.exact_products():
        for begin in range(0, len(dx), REFERENCE_ROWS):
            rows = slice(begin, begin + REFERENCE_ROWS)
            x = problem.x.detach()[rows].to(wide).requires_grad_()
            # In float64: in float32 p - q would cancel where student and teacher are near.
            z, other = F.linear(x, w), F.linear(problem.teacher_x[rows].to(wide), teacher_w)
            logs = z.double().log_softmax(-1), other.double().log_softmax(-1)
            part = rows_of(*logs, kind) * (len(x) / len(dx))
            dx[rows], grad_w = torch.autograd.grad(part, (x, w))
            dw += grad_w
            loss += part.detach()
    return loss, dx, dw


def make_problem(shape, options):
    hidden = options.teacher or shape.hidden
    sizes = {"device": options.device, "dtype": options.dtype}
    teacher_x = torch.empty(shape.tokens, hidden, **sizes)
    teacher_w = torch.empty(shape.vocab, hidden, **sizes)
    plain = problems.make_problem(shape, options.device, options.dtype)
    problem = Distillation(plain.x, plain.w, None, plain.y)
    problem.teacher_x, problem.teacher_w, problem.near = teacher_x, teacher_w, options.near
    problem.refresh()
    return problem


def make_runs(kind, options):
    """{contestant: function of the problem}, the bare GEMMs first."""
    losses = contestants(kind, options)
    return {"GEMMs": bare_products, **{label: step(loss) for label, loss in losses.items()}}


def memory_of(device):
    """Bytes that operands and contestants may take."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (1 - KEPT_FREE) * total


def sweep(name, shape, kind, options):
    """The rows of all lengths; one that is left out has the bytes that it would take."""
    limit, rows, last = options.memory or memory_of(options.device), [], {}
    for tokens in sorted(options.sweep):
        problem = make_problem(shape._replace(tokens=tokens), options)
        runs, made = make_runs(kind, options), []
        room = limit - sum(operand.nbytes for operand in operands(problem))
        facts = {"shape": name, "kind": kind, "tokens": tokens, "hidden": shape.hidden}
        facts |= {"vocab": shape.vocab, "teacher": problem.teacher_x.shape[1]}
        for label in list(runs):
            row = {"contestant": label, **facts}
            made.append(row)
            before, peak = last.get(label, (1, 0))
            if peak * tokens / before > room:
                row["would_take_bytes"] = peak * tokens / before
                del runs[label]
                continue
            runs[label](problem)
            row["peak_bytes"] = measure.peak_extra_bytes(runs[label], problem, options.device)
            last[label] = tokens, row["peak_bytes"]
        ready = [row for row in made if row["contestant"] in runs]
        measure.time_rows(ready, runs, problem, options.device, options.rounds)
        print(*map(swept_line, made), sep="\n", flush=True)
        rows += made
        del problem
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def swept_line(row):
    text = f"{row['tokens']:8} tokens {row['kind']:10} {row['contestant']:12}"
    if "would_take_bytes" in row:
        return f"{text} left out: {row['would_take_bytes'] / 1e9:.1f} GB"
    time = f" {row['ms']:8.2f} ms {row['over_gemms']:6.3f}x"
    return f"{text}{time} {row['peak_bytes'] / 1e9:6.2f} GB"


def bench(name, shape, kind, options):
    problem, runs = make_problem(shape, options), make_runs(kind, options)
    rows = [{"contestant": label} for label in runs]
    for row in rows:
        run = runs[row["contestant"]]
        run(problem)
        row["peak_bytes"] = measure.peak_extra_bytes(run, problem, options.device)
    exact = truth(problem, kind, problems.wide_dtype(options.device))
    for row in rows[1:]:
        row["errors"] = problems.errors(runs[row["contestant"]](problem), exact)
    del exact
    measure.time_rows(rows, runs, problem, options.device, options.rounds)
    for row in rows:
        row |= {"shape": name, "teacher": problem.teacher_x.shape[1]}
        row |= {"kind": kind, "near": options.near}
        print(line(row), flush=True)
    return rows


def line(row):
    text = f"{row['shape']:18} {row['teacher']:6} {row['kind']:10} {row['contestant']:12}"
    text += f" {row['ms']:8.2f} ms {row['over_gemms']:6.3f}x {row['peak_bytes'] / 1e9:6.2f} GB"
    return text + problems.error_columns(row)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("shapes", nargs="*", default=["head" if cuda else "cpu-small"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--teacher", type=int, help="the teacher's hidden size; default: H")
    parser.add_argument("--near", type=float, help="see above; the teacher has the student's H")
    parser.add_argument("--max-memory", nargs="*", default=[None], help="of flce, one run for each")
    parser.add_argument("--without", nargs="*", default=[], help="contestants to leave out")
    parser.add_argument("--peers", type=pathlib.Path, help="a folder with liger_kernel")
    parser.add_argument("--sweep", nargs="*", type=int, metavar="TOKENS", help="see above")
    parser.add_argument("--memory", type=parse_bytes, help="of the device, for --sweep: 140GB")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    options.dtype = getattr(torch, options.dtype)
    measured = bench
    if options.sweep is not None:
        measured, options.sweep = sweep, options.sweep or SWEEP
    torch.manual_seed(0)
    facts = measure.machine(options.device)
    facts |= {"dtype": str(options.dtype).removeprefix("torch."), "rounds": options.rounds}
    print(measure.described(facts))
    rows = []
    for text in options.shapes:
        for kind in options.kinds:
            rows += measured(*problems.named_shape(text), kind, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
