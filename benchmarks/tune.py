#!/usr/bin/env python3
"""Times every cuBLASLt algorithm of each GEMM that a call of these sizes runs, on this GPU.

    python benchmarks/tune.py 8192 4096 128256 --options '{"max_memory": "512MiB"}' --out gemms.txt

One forward and backward on random data records the GEMMs. The candidates of each are timed in
interleaved rounds, which takes seconds; the fastest is selected where it gains more than noise, and
appended to the file. It may sum in another order. A process uses the choices of a file from

    torch.ops.flce.gemm_use(open("gemms.txt").read())

on, if its GPU and its cuBLASLt are those of the file; nothing in flce does so by itself.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics

import torch

import flce
from flce.options import DTYPES

# The numbers at the start of a GEMM's line, in the order of csrc/cuda/gemm/gemm.cuh: the library's
# version and gemm_key. The GPU's name follows. A dtype is its index in DTYPES.
PRODUCT = (
    *("cublaslt", "m", "n", "k", "pitch_a", "pitch_b", "pitch_c", "workspace_bytes"),
    *("dtype", "c_dtype", "align_a", "align_b", "align_c", "align_d"),
    *("transpose_a", "transpose_b", "accumulate", "tf32", "bias"),
)
ROUNDS = 9
SAMPLE_MS = 1.0  # a shorter GEMM is timed several times in a row
# Time ratio below which a candidate replaces the default; a smaller gain is noise.
WORTH = 0.99


@dataclasses.dataclass(frozen=True)
class TunedGemm:
    """A GEMM and its fastest candidate; times are medians in milliseconds."""

    gemm: str  # the numbers of PRODUCT and the GPU's name
    algorithm: str  # the numbers of the selected algorithm
    candidates: int  # how many were timed
    shipped_ms: float  # time of the algorithm without tuning
    best_ms: float  # time of the selected algorithm

    def choice(self):
        """The line that torch.ops.flce.gemm_use takes."""
        *numbers, gpu = self.gemm.split(" ", len(PRODUCT))
        return " ".join((*numbers, self.algorithm, gpu))

    def __str__(self):
        p, gain = numbers_of(self.gemm), self.shipped_ms / self.best_ms
        name = f"{name_of(p)}{' added' if p['accumulate'] else ''}"
        types = " to ".join(str(DTYPES[p[key]])[6:] for key in ("dtype", "c_dtype"))
        times = f"{self.shipped_ms:9.4f} -> {self.best_ms:9.4f} ms {gain:7.3f}x"
        sizes = f"{p['m']} x {p['n']} x {p['k']}"
        return f"{name:<17} {sizes:<23} {types:<20} {times} of {self.candidates}  {self.algorithm}"


def tune(sizes, types, bias, device, options):
    """The TunedGemms of a step, one for each GEMM; selects nothing. `sizes`: N, H, V; `types`: of
    the GEMMs, input, linear_weight; `options`: of flce.linear_cross_entropy."""
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device to tune for, got {device}")
    with torch.cuda.device(device):
        device = torch.device("cuda", torch.cuda.current_device())
        return [_tune_gemm(line, device) for line in gemms_of(sizes, types, bias, device, options)]


def gemms_of(sizes, types, bias, device, options):
    """The lines of the GEMMs that one step runs."""
    tokens, hidden, vocab = sizes
    dtype, input_dtype, weight_dtype = types
    generator = torch.Generator(device).manual_seed(0)
    given = {"device": device, "generator": generator}
    x = torch.randn(tokens, hidden, dtype=input_dtype, **given).requires_grad_()
    w = torch.randn(vocab, hidden, dtype=weight_dtype, **given)
    w = w.div_(math.sqrt(hidden)).requires_grad_()
    b = torch.zeros(vocab, dtype=weight_dtype, device=device).requires_grad_() if bias else None
    y = torch.randint(options.get("valid_vocab") or vocab, (tokens,), **given)
    # An existing .grad, as every step but the first finds it.
    if attribute := options.get("accumulate_into"):
        held = weight_dtype if attribute == "grad" else torch.float32
        setattr(w, attribute, torch.zeros_like(w, dtype=held))
    torch.ops.flce.gemm_record(device.index)
    try:
        with torch.autocast("cuda", dtype=dtype, enabled=len(set(types)) > 1):
            options = {"linear_bias": b, "gradient_seed": 0, **options}  # draws none
            made = flce.linear_cross_entropy(x, w, y, **options)
        getattr(made, "loss", made).sum().backward()
    finally:
        lines = torch.ops.flce.gemm_recorded(device.index).splitlines()
    return lines


def numbers_of(gemm):
    """The numbers of PRODUCT in a GEMM's line, by name."""
    return dict(zip(PRODUCT, map(int, gemm.split(" ")[: len(PRODUCT)]), strict=True))


def name_of(p):
    if p["transpose_a"]:
        return "grad_weight"
    return "logits" if p["transpose_b"] else "grad_input"


def candidates_of(line, device):
    """(default candidate, current candidate) as indices, and the algorithm of each candidate."""
    first, *rows = torch.ops.flce.gemm_candidates(device.index, line).splitlines()
    # A row ends with the candidate's workspace size in bytes.
    return tuple(map(int, first.split())), [row.rsplit(" ", 1)[0] for row in rows]


def _tune_gemm(line, device):
    """Times the candidates of one GEMM: medians over rounds whose order changes."""
    (shipped, _), algorithms = candidates_of(line, device)
    memory, count = operands_of(line, device), len(algorithms)
    repeats, samples = 1, [[] for _ in algorithms]
    for iteration in range(ROUNDS + 1):
        for i in range(count):
            candidate = (i + iteration) % count
            milliseconds = torch.ops.flce.gemm_time(*memory, line, candidate, repeats)
            samples[candidate].append(milliseconds)
        if iteration == 0:  # a warm-up: a kernel is loaded at its first launch
            fastest = max(min(sample.pop() for sample in samples), 1e-3)
            repeats = min(math.ceil(SAMPLE_MS / fastest), 100)
    times = [statistics.median(sample) for sample in samples]
    best = min(range(count), key=times.__getitem__)
    if times[best] > WORTH * times[shipped]:
        best = shipped
    return TunedGemm(line, algorithms[best], count, times[shipped], times[best])


def operands_of(line, device):
    """a, b, c, bias or None, workspace: random data, aligned as the GEMM's line says."""
    p = numbers_of(line)
    dtype, c_dtype = DTYPES[p["dtype"]], DTYPES[p["c_dtype"]]
    generator = torch.Generator(device).manual_seed(0)

    def memory(count, dtype, alignment):
        shift = alignment % 256 // dtype.itemsize  # torch's own memory is aligned to 512 bytes
        data = torch.randn(count + shift, dtype=dtype, device=device, generator=generator)
        return data[shift:]

    a = memory((p["k"] if p["transpose_a"] else p["m"]) * p["pitch_a"], dtype, p["align_a"])
    if name_of(p) != "logits":
        # Like exp(logit - row maximum): zeros, or numbers of both signs, draw another power.
        a.sub_(4.0).exp_().clamp_(max=1.0)
    b = memory((p["n"] if p["transpose_b"] else p["k"]) * p["pitch_b"], dtype, p["align_b"])
    c = memory(p["m"] * p["pitch_c"], c_dtype, p["align_c"])
    bias = memory(p["n"], c_dtype, p["align_d"]) if p["bias"] else None
    workspace = torch.empty(p["workspace_bytes"], dtype=torch.uint8, device=device)
    return a, b, c, bias, workspace


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tokens", "hidden", "vocab"):
        parser.add_argument(name, type=int)
    parser.add_argument("--dtype", default="bfloat16", help="of the GEMMs (autocast's)")
    parser.add_argument("--input-dtype", help="of the input as given; --dtype")
    parser.add_argument("--weight-dtype", help="of the weight as given; --dtype")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--options", type=json.loads, default={}, help="of the calls, in JSON")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--out", type=pathlib.Path, help="the file to append the choices to")
    o = parser.parse_args(arguments)
    names = (o.dtype, o.input_dtype or o.dtype, o.weight_dtype or o.dtype)
    types = tuple(getattr(torch, name) for name in names)
    tuned = tune((o.tokens, o.hidden, o.vocab), types, o.bias, o.device, o.options)
    print(*tuned, sep="\n")
    if o.out:
        with open(o.out, "a", encoding="utf-8") as file:
            file.writelines(f"{one.choice()}\n" for one in tuned)


if __name__ == "__main__":
    main()
