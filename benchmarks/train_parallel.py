#!/usr/bin/env python3
"""Training steps of a decoder on several GPUs, with plain losses and flce's: do the loss curves
agree, and what are tokens a second and peak memory?

Shapes of Llama 3.2 1B (tied, as published) and Llama 3.1 8B (untied) with random weights, in
bfloat16, every layer under activation checkpointing. All runs have the same weights and tokens: a
step has --sequences sequences of --length tokens, by default one for each rank, however they are
divided. Cases: `fsdp` (FSDP2), `tp` (tensor parallelism, the vocabulary divided), `fsdp-tp` (pairs
of ranks divide the vocabulary), `context` (each rank has a part of every sequence), `pipeline`
(1F1B, untied). Losses: `plain` is F.cross_entropy of the head's logits in float32, as transformers
has it, of gathered logits where the vocabulary is divided; `loss_parallel` torch's, of divided
logits; `flce` as docs/parallel.md says. `float32`, whose logits come from a product in float32,
runs the first --reference-steps steps: what plain differs from it is what bfloat16 does to a curve,
and what flce's difference from plain is compared with.

AdamW keeps its two moments in bfloat16: with weights and gradients 8 bytes a parameter. The 8B
shape then takes 16 GB of each of four GPUs, and 32 GB of two, in every case; with float32 weights
and moments it would be 64 GB of each of two GPUs before activations. Beta2 is 0.95: with 0.999 a
moment in bfloat16 would not change any more.

The processes and their groups are started once for all runs. With --out one record, which is
written again after every run, and a picture of it. `host_ms`: in what time the host queues a step,
with what it waits for in it. Of the 1B shape with tensor parallelism a step waits for the host:
DTensor's dispatch in Python takes 0.27 to 0.4 s a step, more than the GPUs need, and varies from
run to run by more than the losses differ.

    python benchmarks/train_parallel.py --ranks 4 --models 1b 8b --steps 100 10 --out new
    torchrun --nproc-per-node 2 benchmarks/train_parallel.py --models 1b --case context pipeline
    python benchmarks/train_parallel.py --ranks 2 --device cpu --models tiny --steps 4 --length 16
    python benchmarks/train_parallel.py --plot new/train-parallel.json --out new
"""

import argparse
import datetime
import gc
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile

import llama
import measure
import parallel_plot
import style
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_cases import CASES, LOSSES, Ranks, lacking
from scale import slowest
from torch.distributed.tensor import DTensor
from train_loop import Clock

WARMUP = 3  # steps whose times do not count
RISING = 10  # steps in which the learning rate rises
PATIENCE = datetime.timedelta(seconds=180)  # for a rank that has failed alone


def draw(steps, options, vocab):
    """(steps, sequences, length + 1) tokens, on every rank all of them. Every second one follows
    from the one before; the others are distributed like 1 / (k + 1), as words are."""
    generator = torch.Generator().manual_seed(1)
    sizes = steps, options.sequences, options.length + 1
    uniform = torch.rand(sizes, generator=generator, dtype=torch.float64)
    ids = (vocab**uniform - 1).long().clamp_(0, vocab - 1)
    follow = ids[..., 1::2]
    follow.copy_((7 * ids[..., : 2 * follow.shape[-1] : 2] + 3) % vocab)
    return ids


def make_optimizer(parameters, options):
    """A group for each mesh: torch's operators of many tensors take those of one mesh."""
    groups = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": options.device == "cuda"}
    return torch.optim.AdamW([{"params": one} for one in groups.values()], options.lr, **settings)


def train(division, tokens, options):
    """(losses, ms, the host's ms) of each step."""
    optimizer = make_optimizer(division.parameters, options)
    clock, host, losses = Clock(options.device), Clock("cpu"), []
    for step, drawn in enumerate(tokens):
        ids, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / RISING)
        clock.mark()
        host.mark()
        losses.append(division.step(ids, labels))
        optimizer.step()
        optimizer.zero_grad()
        host.mark()
        clock.mark()
    losses = torch.stack(losses).double()
    dist.all_reduce(losses)  # every rank has its term
    return losses.tolist(), clock.steps(), host.steps()


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory(device):
    """Bytes of this rank: the allocator's peak, and what the device has given away, which also has
    NCCL's buffers and symmetric memory."""
    if device == "cpu":
        return {}
    free_bytes, total = torch.cuda.mem_get_info()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "used_bytes": total - free_bytes}


def run(name, case, loss, steps, options, ranks):
    """One row."""
    sizes = llama.SIZES[name]
    row = {"model": name, "case": case, "loss": loss, "steps": steps}
    tokens = draw(steps, options, sizes.vocab).to(options.device)
    free(options.device)
    try:
        division = CASES[case].divide(sizes, loss, ranks)
        free(options.device)  # of what the whole model took
        row["losses"], *times = train(division, tokens, options)
    except torch.OutOfMemoryError:  # on all ranks: they have equal shares
        return row | {"failed": "out of memory"}
    settled = slice(min(WARMUP, steps - 1), None)
    ms, host_ms = slowest([statistics.median(one[settled]) for one in times], options.device)
    found = memory(options.device)
    found = dict(zip(found, map(int, slowest(list(found.values()), options.device)), strict=True))
    speed = options.sequences * options.length / ms * 1e3
    return row | {"ms": ms, "host_ms": host_ms, "tokens_per_s": speed, **found}


# ---- agreement of the curves ----

PAIRS = (("flce", "plain"), ("loss_parallel", "plain"))
PAIRS += (("plain", "float32"), ("flce", "float32"), ("loss_parallel", "float32"))


def agreement(rows, first):
    """For each model and case, and each pair of losses: the differences of the steps that both
    have. `largest_first`: of the `first` steps, which float32 has too."""
    curves = {(r["model"], r["case"], r["loss"]): r["losses"] for r in rows if "losses" in r}
    found = []
    for model, case in dict.fromkeys(key[:2] for key in curves):
        for loss, other in PAIRS:
            pair = [curves.get((model, case, one)) for one in (loss, other)]
            if None in pair:
                continue
            each = [abs(a - b) for a, b in zip(*pair, strict=False)]
            row = {"model": model, "case": case, "loss": loss, "to": other, "steps": len(each)}
            row |= {"largest": max(each), "at": each.index(max(each))}
            found.append({**row, "largest_first": max(each[: max(first, 1)]), "each": each})
    return found


def line(row):
    text = f"{row['model']:5} {row['case']:8} {row['loss']:13} {row['steps']:4} steps"
    if "failed" in row:
        return f"{text}  {row['failed']}"
    text += f"  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f} {row['ms']:9.1f} ms"
    text += f" {row['tokens_per_s']:9.0f} tokens/s"
    text += f", host {row['host_ms']:.1f} ms" if "host_ms" in row else ""
    return text + (f" {row['peak_bytes'] / 1e9:6.2f} GB" if "peak_bytes" in row else "")


def agreement_line(row):
    text = f"{row['model']:5} {row['case']:8} {row['loss']:13} - {row['to']:7}: at most"
    text += f" {row['largest']:.2e}, at step {row['at']} of {row['steps']};"
    return f"{text} {row['largest_first']:.2e} in the first ones"


# ---- the runs ----


def planned(options):
    """(model, case, loss, steps) of every run."""
    for name, steps in zip(options.models, options.steps, strict=True):
        for case in options.case:
            chosen = [one for one in CASES[case].losses if one in options.losses]
            found = [(one, steps) for one in chosen]
            if options.reference_steps:
                found.append(("float32", min(steps, options.reference_steps)))
            yield from ((name, case, loss, count) for loss, count in found)


def record_of(rows, facts, options):
    names = ("ranks", "sequences", "length", "dtype", "lr")
    chosen = {name: getattr(options, name) for name in names}
    found = agreement(rows, options.reference_steps)
    return {"machine": facts, **chosen, "rows": rows, "agreement": found}


def save(record, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train-parallel.json").write_text(json.dumps(record, indent=1) + "\n")
    if any("losses" in row for row in record["rows"]):
        try:
            style.save(parallel_plot.draw(record), folder / "train-parallel.svg")
        except ImportError as error:  # the record stands; --plot draws it elsewhere
            print(f"no picture: {error}", file=sys.stderr)


def run_all(options, rank):
    facts = measure.machine(options.device)
    ranks = Ranks(options.device, getattr(torch, options.dtype), rank, options.ranks)
    rows = []
    for one in planned(options):
        rows.append(run(*one, options, ranks))
        if rank == 0:
            print(line(rows[-1]), flush=True)
            if options.out:
                save(record_of(rows, facts, options), options.out)
    if rank == 0:
        found = agreement(rows, options.reference_steps)
        print(*map(agreement_line, found), sep="\n", flush=True)


def run_rank(rank, options, init):
    torch.set_num_threads(1)
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # needs rights that containers may lack
        backend = "nccl"
    named = {"rank": rank, "world_size": options.ranks, "timeout": PATIENCE}
    dist.init_process_group(backend, init_method=init, **named)
    run_all(options, rank)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of a backend may outlive its group


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", choices=llama.SIZES, default=["1b"])
    parser.add_argument("--case", nargs="+", choices=CASES, help="default: fsdp tp fsdp-tp")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[100], help="of each model, or one number for all"
    )
    parser.add_argument("--reference-steps", type=int, default=5, help="of float32; 0: none")
    parser.add_argument("--sequences", type=int, help="of a step, on all ranks together")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--plot", type=pathlib.Path, metavar="RECORD", help="draw it, run nothing")
    return completed(parser, parser.parse_args())


def completed(parser, options):
    options.sequences = options.sequences or options.ranks
    sizes = [llama.SIZES[name] for name in options.models]
    if options.case is None:
        cases = "fsdp", "tp", "fsdp-tp"
        options.case = [one for one in cases if not lacking(one, sizes[0], options.ranks)]
    for case, one in itertools.product(options.case, sizes):
        if (needed := lacking(case, one, options.ranks)) is not None:
            parser.error(f"--case {case}: expected {needed}, got {options.ranks}")
    if options.sequences % options.ranks > 0:
        parser.error(f"--sequences: expected a multiple of {options.ranks} ranks")
    if len(options.steps) == 1:
        options.steps *= len(options.models)
    if len(options.steps) != len(options.models):
        parser.error("--steps: expected one number, or one for each model")
    if options.plot and not options.out:
        parser.error("--plot: expected --out FOLDER with it")
    return options


def main():
    options = parse_options()
    if options.plot:
        save(json.loads(options.plot.read_text()), options.out)
    elif "RANK" in os.environ:  # torchrun
        run_rank(int(os.environ["RANK"]), options, "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (options, f"file://{folder}/init"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
