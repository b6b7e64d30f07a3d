"""Launches every kernel of csrc/cuda once or a few times, at small sizes, for compute-sanitizer:

    tests/memcheck.sh racecheck            (or memcheck, synccheck, initcheck)
    python tests/every_kernel.py --check   names the kernels that no call has launched

What the kernels give is not checked here.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import flce

CUDA = Path(__file__).parents[1] / "csrc" / "cuda"
INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # of parentheses, two levels deep
KERNEL = re.compile(rf"__global__\s+void\s+(?:__launch_bounds__\({INNER}\)\s*)?(\w+)\(")
# A shape of whole tiles, and one whose rows and columns end within every tile and vector.
SHAPES = ((256, 128, 1024), (203, 70, 1003))
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# initcheck and racecheck do not model TMA or mbarriers, which cuBLAS's 16-bit GEMMs use; initcheck
# also reports vector loads across a row's end, whose lanes are discarded.
NO_TMA = {"shapes": ((256, 128, 1024), (203, 72, 1008)), "dtypes": DTYPES[2:]}


def kernels():
    texts = (path.read_text() for path in CUDA.rglob("*.cu*"))
    return {name for text in texts for name in KERNEL.findall(text)}


def leaves_of(shape, dtype):
    tokens, hidden, vocab = shape
    x = torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, device="cuda").to(dtype).requires_grad_()
    y = torch.randint(vocab, (tokens,), device="cuda")
    y[::5] = -100
    return x, w, y


def step(x, w, y, **options):
    made = flce.linear_cross_entropy(x, w, y, **options)
    if isinstance(made, torch.Tensor):
        made = (made,)
    parts = [part for part in made if isinstance(part, torch.Tensor) and part.requires_grad]
    sum(part.double().sum() for part in parts).backward()


def by_blocks(x, w, y):
    """Gradients by blocks of rows and classes."""
    os.environ["FLCE_BLOCKS"] = "64x128"
    for save in ("grads", "stats"):
        step(x, w, y, save=save)
        step(x, w, y, save=save, softcap=20.0, label_smoothing=0.1)
    del os.environ["FLCE_BLOCKS"]


def rows_of(x):
    return torch.rand(len(x), device="cuda") + 0.5


def options_of(x, w, y):
    """Options, each set of which takes other kernels or other branches of them."""
    vocab, tokens = len(w), len(x)
    bias = torch.randn(vocab, device="cuda").to(x.dtype).requires_grad_()
    every = {"return_lse": True, "return_entropy": True, "return_accuracy": True}
    yield {"linear_bias": bias, "max_memory": tokens // 3 * vocab * 8}
    yield {"label_smoothing": 0.1, "weight": torch.rand(vocab, device="cuda")}
    yield {"softcap": 20.0, "z_loss": 1e-3, "token_weight": rows_of(x), "temperature": rows_of(x)}
    yield {"valid_bound": tokens - tokens // 5, "num_items": torch.tensor(100, device="cuda")}
    yield {"accum_dtype": torch.promote_types(x.dtype, torch.float32), "max_memory": 64 * vocab * 8}
    yield {"accumulate_into": "grad"}
    yield {"accumulate_into": "grad", "accum_dtype": torch.promote_types(x.dtype, torch.float32)}
    yield {"reduction": "none", **every}
    for save in ("stats", "logits"):
        yield {"softcap": 20.0, "reduction": "none", "save": save, "linear_bias": bias}
    yield {"topk": 3, "return_predictions": True}
    classes = torch.randint(vocab, (tokens, 4), device="cuda")
    yield {"classes": classes, "reduction": "sum"}
    yield {"classes": classes, "reduction": "none", "return_lse": True, "return_tail_lse": True}


def sampled(x, w, y):
    bias = torch.randn(len(w), device="cuda").to(x.dtype).requires_grad_()
    step(x, w, y, gradient="sampled", linear_bias=bias, label_smoothing=0.1)
    step(x, w, y, gradient="sampled", gradient_eps=2**-4, reduction="none", return_entropy=True)


def of_probabilities(x, w, y):
    soft = torch.softmax(torch.randn(len(x), len(w), device="cuda"), -1)
    for save in ("grads", "logits", "stats"):
        step(x, w, soft, save=save)


def divergences(x, w, y):
    teacher = torch.randn_like(x), torch.randn_like(w)
    for kind in flce.packing.DIVERGENCES:
        flce.linear_divergence(
            x, w, *teacher, divergence=kind, target=y, hard_weight=0.1
        ).backward()
        if x.dtype is not torch.float64:
            given = {"divergence": kind, "gradient": "sampled"}
            flce.linear_divergence(x, w, *teacher, **given).backward()
        given = {"teacher_logits": teacher[0] @ teacher[1].T, "teacher_softcap": 9.0}
        given |= {"divergence": kind, "reduction": "none"}
        flce.linear_divergence(x, w, **given).sum().backward()


def of_logits(x, w, y):
    logits = (x @ w.T).detach().requires_grad_()
    flce.cross_entropy(logits, y, label_smoothing=0.1).backward()
    flce.cross_entropy(logits, y, reduction="none").sum().backward()


def sharded(x, w, y):
    """One rank of two. torch's "fake" group exchanges nothing, so buffers begin as NaN."""
    vocab = len(w)
    for sequence in (False, True):
        shard = flce.VocabParallel(dist.group.WORLD, vocab=2 * vocab, sequence=sequence)
        target = torch.cat((y, y)) if sequence else y
        for save in ("grads", "stats", "logits"):
            with mock.patch.dict(os.environ, FLCE_POISON="1"):
                step(x, w, target, vocab_parallel=shard, save=save, label_smoothing=0.1)


def join_a_fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def run(kernel, shapes=SHAPES, dtypes=DTYPES):
    os.environ["FLCE_KERNEL"] = kernel
    for shape in shapes:
        for dtype in dtypes if kernel == "gemm" else dtypes[:2]:  # the fused GEMMs' dtypes
            x, w, y = leaves_of(shape, dtype)
            for save in ("grads", "logits", "stats"):
                step(x, w, y, save=save)
            for options in options_of(x, w, y):
                step(x, w, y, **options)
            by_blocks(x, w, y)
            with torch.no_grad():
                flce.linear_cross_entropy(x, w, y)
            if dtype is not torch.float64:
                sampled(x, w, y)
            of_probabilities(x, w, y)
            divergences(x, w, y)
            of_logits(x, w, y)
            if shape == SHAPES[0]:
                sharded(x, w, y)
    if torch.bfloat16 not in dtypes:
        return
    x, w, y = leaves_of(SHAPES[0], torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):  # float32 operands are cast
        step(x.detach().float().requires_grad_(), w.detach().float().requires_grad_(), y)
    # So many classes that a top-k search reads the maxima of the fused GEMM's column tiles.
    step(*leaves_of((256, 128, 4096), torch.bfloat16), topk=1)
    # More targets than are sorted in shared memory.
    step(*leaves_of((8200, 16, 1000), torch.bfloat16))
    torch.cuda.synchronize()


def missing():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for kernel in ("gemm", "fused"):
            run(kernel)
    names = " ".join({event.key for event in trace.key_averages()})
    return {name for name in kernels() if not re.search(rf"\b{name}\b", names)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="name the kernels that are not launched"
    )
    parser.add_argument("--no-tma", action="store_true", help="float32 and float64 operands alone")
    join_a_fake_group()
    torch.manual_seed(0)
    arguments = parser.parse_args()
    if arguments.check:
        names = missing()
        print(f"{len(kernels())} kernels, not launched: {', '.join(sorted(names)) or 'none'}")
        return bool(names)
    if arguments.no_tma:
        run("gemm", **NO_TMA)
        return 0
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for kernel in ("gemm", "fused") if hopper else ("gemm",):
        run(kernel)
    print(f"{len(kernels())} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
