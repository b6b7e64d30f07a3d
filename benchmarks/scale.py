#!/usr/bin/env python3
"""Times linear cross entropy with the vocabulary sharded over the GPUs of one machine.

One process for each rank. Contestants run interleaved, on fresh data in each round, several steps
in a row; a time is that of the slowest rank, by events of the device; medians are compared. Ratios
are relative to `products`, the three bare GEMMs of a rank's share. `no exchange` leaves out the
exchange of dX (reduce_input_grad=False): what the exchange costs is the difference. `all-reduce
after` sums dX by an all-reduce after the step. FLCE_PEERS=0 exchanges by NCCL instead of copy
engines. Peak bytes are those of a rank's allocator, in addition to its inputs, without symmetric
memory. Errors are relative ones of loss, dX and this rank's dW against a float32 reference.

    python benchmarks/scale.py head --ranks 2
    python benchmarks/scale.py head 16384x8192x128256 --ranks 4 --json benchmarks/results/new.json
    python benchmarks/scale.py head --ranks 2 --device cpu --rounds 2      # a dry run over gloo
    python benchmarks/scale.py head --predict      # no GPU: 2 to 1024 ranks calculated, meshes.py
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import tempfile

import measure
import meshes
import predict
import problem as problems
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flce

FLOOR = "products"
AHEAD, STEPS = 2, 4  # warm-up steps, timed steps


class Part:
    """One rank's operands: x and y are those of all ranks, w has this rank's classes."""

    def __init__(self, shape, device, rank, ranks):
        share = -(-shape.vocab // ranks)
        self.shape, self.rank, self.ranks = shape, rank, ranks
        self.first = min(rank * share, shape.vocab)
        self.last = min(self.first + share, shape.vocab)
        self.whole = problems.make_problem(shape, device, torch.bfloat16)
        self.generator = torch.Generator(device).manual_seed(1)
        self.w = self.whole.w[self.first : self.last].detach().clone().requires_grad_()
        self.x, self.y = self.whole.x, self.whole.y
        rows = slice(rank * shape.tokens // ranks, (rank + 1) * shape.tokens // ranks)
        self.own = self.x[rows].detach().clone().requires_grad_()
        self.rows = rows

    @torch.no_grad()
    def refresh(self):
        hidden = self.shape.hidden
        self.x.normal_(generator=self.generator)
        self.whole.w.normal_(0, hidden**-0.5, generator=self.generator)
        self.y.random_(0, self.shape.vocab, generator=self.generator)
        self.w.copy_(self.whole.w[self.first : self.last])
        self.own.copy_(self.x[self.rows])


# ---- contestants: part -> function of it that returns (loss, dX, dW) ----


def products(part):
    def run(p):
        with torch.no_grad():
            z = p.x @ p.w.T
            return None, z @ p.w, z.T @ p.x

    return run


def gradients(loss_of, x_of=lambda p: p.x):
    def run(p):
        loss = loss_of(p)
        return loss.detach(), *torch.autograd.grad(loss, (x_of(p), p.w))

    return run


def sharded(part, chunks=None, ways=None, **options):
    """flce. `ways`: options of VocabParallel. `chunks`: by max_memory."""
    ways = ways or {}
    vocab_parallel = flce.VocabParallel(dist.group.WORLD, vocab=part.shape.vocab, **ways)
    if chunks is not None:
        options["max_memory"] = predict.budget_of(
            *part.shape[:3], part.ranks, chunks, row_bytes=128
        )

    def x_of(p):
        return p.own if "sequence" in ways else p.x

    def loss_of(p):
        return flce.linear_cross_entropy(
            x_of(p), p.w, p.y, vocab_parallel=vocab_parallel, **options
        )

    return gradients(loss_of, x_of)


def summed_after(part):
    """dX summed by an all-reduce after the step."""
    run_terms = sharded(part, ways={"reduce_input_grad": False})

    def run(p):
        loss, dx, dw = run_terms(p)
        dist.all_reduce(dx)
        return loss, dx, dw

    return run


class SumOverRanks(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class EagerLoss(torch.autograd.Function):
    """Cross entropy of sharded logits in plain torch, with three all-reduces."""

    @staticmethod
    def forward(ctx, z, y, first):
        z = z.float()
        top = z.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        z = z.sub_(top[:, None])
        own = (y >= first) & (y < first + z.shape[1])
        column = torch.where(own, y - first, 0)
        target = torch.where(own, z.gather(1, column[:, None])[:, 0], 0.0)
        z = z.exp_()
        total = z.sum(-1)
        dist.all_reduce(target)
        dist.all_reduce(total)
        ctx.save_for_backward(z.div_(total[:, None]), own, column)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, grad):
        p, own, column = ctx.saved_tensors
        p.scatter_add_(1, column[:, None], -own.float()[:, None])
        return (p * (grad / len(p))).bfloat16(), None, None


def eager(part):
    def loss_of(p):
        return EagerLoss.apply(SumOverRanks.apply(p.x) @ p.w.T, p.y, p.first)

    return gradients(loss_of)


def local_sums(x, w, y, first, group):
    """The target's logit and the sum of exp of this rank's classes, less the maximum over ranks;
    torch.compile can trace its functional collectives."""
    from torch.distributed._functional_collectives import all_reduce

    z = (x @ w.T).float()
    top = all_reduce(z.detach().max(-1).values, "max", group)
    z = z - top[:, None]
    own = (y >= first) & (y < first + z.shape[1])
    target = torch.where(own, z.gather(1, torch.where(own, y - first, 0)[:, None])[:, 0], 0.0)
    total = z.exp().sum(-1)
    return target, total


def compiled(part):
    from torch.distributed._functional_collectives import all_reduce

    group = dist.group.WORLD.group_name

    @functools.partial(torch.compile, dynamic=False)
    def local(x, w, y):
        return local_sums(x, w, y, part.first, group)

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return all_reduce(value, "sum", group) + 0

        @staticmethod
        def backward(ctx, grad):
            return grad

    def loss_of(p):
        target, total = local(SumOverRanks.apply(p.x), p.w, p.y)
        return (Reduced.apply(total).log() - Reduced.apply(target)).mean()

    return gradients(loss_of)


def cce(part):
    from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

    options = VocabParallelOptions(part.first, part.last, dist.group.WORLD)

    def loss_of(p):
        return linear_cross_entropy(p.x, p.w, p.y, vocab_parallel_options=options)

    return gradients(loss_of)


def verl(part):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def loss_of(p):
        x = SumOverRanks.apply(p.x)
        logprobs, _ = linear_cross_entropy(x, p.w, p.y, 1.0, "none", dist.group.WORLD)
        return -logprobs.mean()

    return gradients(loss_of)


CONTESTANTS = {
    FLOOR: products,
    "flce": sharded,
    "no exchange": functools.partial(sharded, ways={"reduce_input_grad": False}),
    "all-reduce after": summed_after,
    "float32 terms": functools.partial(sharded, ways={"reduce_dtype": torch.float32}),
    "sequence": functools.partial(sharded, ways={"sequence": True}),
    "logits": functools.partial(sharded, save="logits"),
    **{f"chunks={count}": functools.partial(sharded, chunks=count) for count in (1, 2, 4)},
    **{size: functools.partial(sharded, max_memory=size) for size in ("256MiB", "64MiB", "16MiB")},
    "sampled": functools.partial(sharded, gradient="sampled"),
    "eager": eager,
    "compile": compiled,
    "cce": cce,
    "verl": verl,
}


# ---- measurement, in each rank's process ----


def slowest(seconds, device):
    """The largest of the ranks' numbers, element by element."""
    worst = torch.tensor(seconds, device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def errors_of(results, part, truth):
    """Relative errors of loss, dX and this rank's dW."""
    loss, dx, dw = results
    rows = part.rows if len(dx) < part.shape.tokens else slice(None)
    exact = truth[0], truth[1][rows], truth[2][part.first : part.last]
    return problems.errors((loss, dx, dw), exact)


def prepared(name, part, truth, device):
    """(run, row) of a contestant after two calls, or (None, the reason)."""
    try:
        run = CONTESTANTS[name](part)
        run(part)
        kept = []
        dist.barrier()
        peak = measure.peak_extra_bytes(lambda p: kept.extend(run(p)), part, device)
        row = {"contestant": name, "peak_bytes": peak}
        if truth is not None and kept[0] is not None and name != "no exchange":
            row["errors"] = errors_of(kept, part, truth)
        return run, row
    except Exception as error:  # a peer may raise anything: the others continue
        text = (str(error).strip() or repr(error)).splitlines()[0][:160]
        return None, {"contestant": name, "left out": f"{type(error).__name__}: {text}"}


def timed(run, part, device):
    """Seconds of a step in a sequence of steps, as in training: the host queues ahead, and the GPU
    has its sustained clock."""
    dist.barrier()
    if device == "cpu":
        return measure.seconds(run, part, device)
    for _ in range(AHEAD):
        run(part)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        run(part)
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / STEPS


def bench(shape, options, rank):
    device = options.device
    part = Part(shape, device, rank, options.ranks)
    part.refresh()
    truth = None if options.no_errors else problems.reference(part.whole, device)
    made = {name: prepared(name, part, truth, device) for name in options.contestants}
    del truth
    agreed = slowest([float(run is None) for run, _ in made.values()], device)
    ready = [name for name, failed in zip(made, agreed, strict=True) if not failed]
    taken = {name: [] for name in ready}
    for round_index in range(options.rounds):
        part.refresh()
        for index in measure.balanced_order(len(ready), round_index):
            taken[ready[index]].append(timed(made[ready[index]][0], part, device))
    rows = []
    for name in made:
        row = {"ranks": options.ranks, **shape._asdict(), **made[name][1]}
        if name in taken:
            row["ms"] = 1e3 * statistics.median(slowest(taken[name], device))
            row["peak_bytes"] = slowest([row["peak_bytes"]], device)[0]
        rows.append(row)
    floor = next((row["ms"] for row in rows if row["contestant"] == FLOOR), None)
    for row in rows:
        if floor and "ms" in row:
            row["ratio"] = row["ms"] / floor
    return rows


def line(row):
    text = f"{row['ranks']} ranks {row['tokens']}x{row['hidden']}x{row['vocab']} "
    text += f"{row['contestant']:12}"
    if "ms" not in row:
        return f"{text} left out: {row.get('left out', 'on another rank')}"
    shown = f"{row['ms']:8.3f} ms" + (f" {row['ratio']:6.3f}x" if "ratio" in row else "")
    return f"{text}{shown} {row['peak_bytes'] / 1e9:6.2f} GB{problems.error_columns(row)}"


def run_rank(rank, options, init):
    torch.set_num_threads(1)
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{init}", rank=rank, world_size=options.ranks
    )
    rows = []
    for _, shape in options.shapes:
        made = bench(shape, options, rank)
        rows += made
        if rank == 0:
            print(*map(line, made), sep="\n", flush=True)
    if rank == 0 and options.json:
        record = {"machine": measure.machine(options.device), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of a backend may outlive its group


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("shapes", nargs="+", type=problems.named_shape, metavar="SHAPE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME"
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--predict", action="store_true", help="calculate, for any number of ranks")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def main():
    options = parse_options()
    if options.predict:
        meshes.report(options.shapes, options.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options, f"{folder}/init"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
