#!/usr/bin/env python3
"""A few training steps by frameworks, without flce and with it: do the losses agree, and what are
time and peak memory?

Cases: transformers' Trainer; PEFT's LoRA on attention and head in it; TRL's SFT, DPO, GRPO and GKD
trainers; a loop under accelerate; torchtitan's loss; FSDP2 (--ranks). Each does what its page in
docs/frameworks says, with the framework's defaults in all else. Models are Llamas with random
weights, in bfloat16 (accelerate and FSDP2: float32, cast by them): `tiny`, and `1b` in the shape of
Llama 3.2 1B. Both runs of a case have the same weights, tokens and seeds. Nothing is downloaded.

Cases run in a process of their own, which is replaced after a case that fails or takes longer than
--limit; FSDP2 in one for each rank. With --out one record, which is written again after each case.
The loss of GRPO is 0 in every first step after drawing: its comparison are the norms of gradients.

    python benchmarks/frameworks.py --size tiny 1b --out new
    python benchmarks/frameworks.py --size 1b --case fsdp2 --ranks 2 --out new
    python benchmarks/frameworks.py --size tiny --device cpu --dtype float32 --steps 3
    python benchmarks/frameworks.py --table new/frameworks.json
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import statistics
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait

import measure
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from framework_cases import CASES, LOGGED, SIZES, Run, measured

WARMUP = 2  # steps whose times do not count
BATCHES = {"tiny": (4, 64, 8), "1b": (8, 1024, 64)}  # sequences, length, completion
PACKAGES = ("transformers", "accelerate", "peft", "trl", "datasets", "torchtitan")
LAST_LINES = 3  # of a traceback that stand in the record


def planned(options):
    """(size, case) of every row."""
    return [(size, case) for size in options.size for case in options.case]


# ---- processes ----


def run_case(size, case, options, rank, folder):
    """{"plain": result, "flce": result}; a result is that of `measured`, or {"failed": text}."""
    sequences, length, completion = options.batches[size]
    ranks = options.ranks if case == "fsdp2" else 1
    results = {}
    for loss in ("plain", "flce"):
        run = Run(
            case=case,
            size=size,
            is_fused=loss == "flce",
            steps=options.steps,
            sequences=sequences,
            length=length,
            completion=completion,
            device=options.device,
            dtype=getattr(torch, options.dtype),
            folder=folder,
            rank=rank,
            ranks=ranks,
        )
        try:
            results[loss] = measured(run)
        except Exception as error:  # of any framework: the others are still measured
            lines = traceback.format_tb(error.__traceback__)[-LAST_LINES:]
            text = f"{type(error).__name__}: {error}".strip()
            results[loss] = {"failed": text, "traceback": "".join(lines)}
            error.__traceback__ = None  # its frames hold tensors
    return results


def work(rank, ranks, jobs, options, init, connection):
    """A worker's process: sends the results of one job after the other."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if init:
        if options.device == "cuda":
            torch.cuda.set_device(rank)
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # needs rights that containers may lack
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=ranks)
    elif options.device == "cuda":  # else the Trainer takes nn.DataParallel, which fuse refuses
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = first
    with tempfile.TemporaryDirectory() as folder:
        for size, case in jobs:
            connection.send(run_case(size, case, options, rank, pathlib.Path(folder)))
    if init:
        dist.destroy_process_group()


class Workers:
    """The processes that run a list of jobs: one, or one for each rank."""

    def __init__(self, jobs, ranks, options, folder):
        context = mp.get_context("spawn")
        needs_group = jobs[0][1] == "fsdp2"
        init = f"file://{tempfile.mkdtemp(dir=folder)}/init" if needs_group else None
        self.processes, self.connections = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = rank, ranks, jobs, options, init, theirs
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def results(self, limit):
        """Of the next job, from each rank; or of one that failed, for which the others may wait."""
        end, found = time.monotonic() + limit, {}
        while len(found) < len(self.connections):
            waiting = [one for one in self.connections if one not in found]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                return [_failed(f"not ready after {limit:g} s")]
            for connection in ready:
                try:
                    found[connection] = connection.recv()
                except EOFError:
                    return [_failed("the process ended")]
                if has_failed(found[connection]):
                    return [found[connection]]
        return [found[one] for one in self.connections]

    def stop(self):
        for process in self.processes:
            process.join(1.0)
            process.kill()


def _failed(text):
    return {loss: {"failed": text} for loss in ("plain", "flce")}


def has_failed(results):
    return any("failed" in result for result in results.values())


def rows_of(jobs, ranks, options, folder):
    """Yields (size, case, results of each rank). What fails may leave memory or a bad state of the
    GPU behind: the next job gets new processes."""
    workers = None
    for index, (size, case) in enumerate(jobs):
        workers = workers or Workers(jobs[index:], ranks, options, folder)
        found = workers.results(options.limit)
        yield size, case, found
        if any(map(has_failed, found)):
            workers.stop()
            workers = None
    if workers:
        workers.stop()


# ---- rows of the record ----


def merged(found):
    """The results of rank 0, with the largest peak and the slowest step of all ranks."""
    row = dict(found[0])
    for loss in row:
        results = [one[loss] for one in found]
        failed = [one for one in results if "failed" in one]
        if failed:
            row[loss] = failed[0]
            continue
        row[loss] = {**results[0]}
        steps = zip(*(one["step_ms"] for one in results), strict=True)
        row[loss]["step_ms"] = [max(times) for times in steps]
        later = row[loss]["step_ms"][WARMUP:] or row[loss]["step_ms"]
        row[loss]["ms"] = statistics.median(later)
        if "peak_bytes" in results[0]:
            row[loss]["peak_bytes"] = max(one["peak_bytes"] for one in results)
    return row


def compared(row, steps):
    """Adds whether flce computed every loss, and the largest differences between the two runs; of
    gradient norms relative to them."""
    plain, ours = row["plain"], row["flce"]
    if "use" in ours:
        row["in_use"] = ours["use"]["by_flce"] >= steps and not ours["use"]["left"]
    if "failed" in plain or "failed" in ours:
        return row
    for name in sorted({*LOGGED} & plain.keys() & ours.keys()):
        pairs = list(zip(ours[name], plain[name], strict=True))
        scales = [abs(b) if name == "grad_norm" else 1.0 for _, b in pairs]
        each = [abs(a - b) / scale for (a, b), scale in zip(pairs, scales, strict=True)]
        row[f"{name}_difference"] = max(each)
    return row


def versions():
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def line(row):
    text = f"{row['size']:4} {row['case']:10}"
    for loss in ("plain", "flce"):
        one = row[loss]
        if "failed" in one:
            text += f"  {loss}: {one['failed'].splitlines()[0]}"
            continue
        text += f"  {loss} {one['loss'][0]:.4f} to {one['loss'][-1]:.4f} {one['ms']:.1f} ms"
        text += f" {one['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in one else ""
    if "loss_difference" in row:
        text += f"  differ by {row['loss_difference']:.1e}"
    return text + (f"  {row['flce']['use']}" if "use" in row["flce"] else "")


def run_all(options):
    record = {"machine": measure.machine(options.device), "versions": versions()}
    record |= {name: getattr(options, name) for name in ("dtype", "steps", "ranks", "batches")}
    record["rows"] = []
    alone = [job for job in planned(options) if job[1] != "fsdp2"]
    divided = [job for job in planned(options) if job[1] == "fsdp2"]
    with tempfile.TemporaryDirectory() as folder:
        for jobs, ranks in ((alone, 1), (divided, options.ranks)):
            for size, case, found in rows_of(jobs, ranks, options, folder):
                row = {"size": size, "case": case, "ranks": ranks, **merged(found)}
                record["rows"].append(compared(row, options.steps))
                print(line(row), flush=True)
                if options.out:
                    options.out.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(record, indent=1) + "\n"
                    (options.out / "frameworks.json").write_text(text)
    return record


# ---- table ----

HEADINGS = ("", "model", "loss, first to last", "losses differ by", "norms of gradients by")
HEADINGS += ("ms a step, without to with flce", "peak GB, without to with flce")


def cells(row, found):
    case, plain, ours = CASES[row["case"]], row["plain"], row["flce"]
    version = found.get(case.package, "").partition("+")[0]
    title = f"{case.title} ({' '.join(filter(None, (case.package, version)))})"
    title += f", {row['ranks']} ranks" if row["ranks"] > 1 else ""
    failed = [
        f"{name}: {one['failed'].splitlines()[0]}"
        for name, one in (("without flce", plain), ("with flce", ours))
        if "failed" in one
    ]
    if failed:
        return [title, row["size"], "; ".join(failed), "", "", "", ""]
    losses = f"{plain['loss'][0]:.4f} to {plain['loss'][-1]:.4f}"
    difference = f"{row['loss_difference']:.1e}" + ("" if row["in_use"] else ", flce not in use")
    norms = f"{100 * row['grad_norm_difference']:.2g} %"
    peaks = [one.get("peak_bytes") for one in (plain, ours)]
    memory = "" if None in peaks else " to ".join(f"{peak / 1e9:.1f}" for peak in peaks)
    times = f"{plain['ms']:.0f} to {ours['ms']:.0f}"
    return [title, row["size"], losses, difference, norms, times, memory]


def table(record):
    """Markdown."""
    found = {**record["versions"], "torch": record["machine"]["torch"]}
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row, found) for row in record["rows"])]
    escaped = ([cell.replace("|", "\\|") for cell in one] for one in lines)
    return "\n".join(f"| {' | '.join(one)} |" for one in escaped)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sequences", type=int, help="of a step, on each rank")
    parser.add_argument("--length", type=int, help="of a sequence, a multiple of 8")
    parser.add_argument("--completion", type=int, help="tokens that GRPO generates")
    parser.add_argument("--ranks", type=int, help="of FSDP2; default: as many as there are GPUs")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a case")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument(
        "--table", type=pathlib.Path, metavar="RECORD", help="print it, run nothing"
    )
    options = parser.parse_args()
    if options.length and options.length % 8 > 0:
        parser.error(f"--length: expected a multiple of 8, got {options.length}")
    chosen = options.sequences, options.length, options.completion
    options.batches = {
        size: [own or default for own, default in zip(chosen, BATCHES[size], strict=True)]
        for size in options.size
    }
    options.ranks = options.ranks or max(1, torch.cuda.device_count())
    return options


def main():
    options = parse_options()
    if options.table:
        print(table(json.loads(options.table.read_text())))
    else:
        run_all(options)


if __name__ == "__main__":
    main()
