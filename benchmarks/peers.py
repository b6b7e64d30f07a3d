"""Other implementations, if they are installed: one small function each.

An adapter takes (problem, options) and returns a function of the problem that computes the mean
loss, with its graph if gradients are enabled. It raises if it cannot run: the import error, Refusal
with the reason, or what the package raises in its first call. A contestant that raised is left out
of the table; the others continue.
"""

import functools
import importlib.metadata
import importlib.util
import pathlib
import sys

import torch
import torch.nn.functional as F
from problem import IGNORE_INDEX


class Refusal(Exception):
    """A case that a peer is known not to support."""


def need_no_bias(problem):
    if problem.b is not None:
        raise Refusal("takes no bias")


def linear_then_cross_entropy(x, w, y, b):
    return F.cross_entropy(F.linear(x, w, b), y)


def eager(problem, options):
    return lambda p: linear_then_cross_entropy(p.x, p.w, p.y, p.b)


def compiled(problem, options):
    torch.compiler.reset()  # otherwise a later shape would be compiled with dynamic sizes
    function = torch.compile(linear_then_cross_entropy, dynamic=False)
    return lambda p: function(p.x, p.w, p.y, p.b)


# ---- torch's chunked linear_cross_entropy ----


def chunked_files(folder):
    """(options class, operator) of torch 2.13's two files, for an older torch."""
    modules = []
    for stem in ("linear_cross_entropy_options", "linear_cross_entropy"):
        name = f"torch_chunked_{stem}"
        if name not in sys.modules:  # the operator may be registered only once
            path = pathlib.Path(folder) / f"{stem}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        modules.append(sys.modules[name])
    return modules[0].LinearCrossEntropyOptions, modules[1]._linear_cross_entropy_batch_chunked


def torch_chunked(problem, options):
    if hasattr(F, "linear_cross_entropy"):
        choices = torch.nn.LinearCrossEntropyOptions()
        return lambda p: F.linear_cross_entropy(
            p.x, p.w, p.y, linear_bias=p.b, ignore_index=IGNORE_INDEX, options=choices
        )
    if not options.torch_chunked:
        raise Refusal("needs torch >= 2.13, or its two files with --torch-chunked")
    option_class, operator = chunked_files(options.torch_chunked)
    (tokens, hidden), vocab = problem.x.shape, len(problem.w)
    sizes = {"num_batches": tokens, "in_features": hidden, "num_classes": vocab}
    choices = option_class()._adjust(**sizes, dtype=problem.x.dtype, device=problem.x.device)

    def run(p):  # same arguments as torch.nn.functional
        grad = torch.is_grad_enabled()
        wanted = (grad, grad, grad and p.b is not None)
        chunks = (choices.batch_chunk_size, choices.acc_policy, choices.acc_dtype)
        rest = ("mean", IGNORE_INDEX, 0.0, *chunks, False, *wanted)
        return operator(p.x, p.w, p.y, p.b, None, *rest)[0]

    return run


# ---- liger-kernel ----


def liger(problem, options, accum_dtype=None):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    module = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, accum_dtype=accum_dtype)
    return lambda p: module(p.w, p.x, p.y, p.b)


def liger_cute(problem, options):
    """CuTe DSL for Hopper, three GEMMs."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function,
    )

    need_no_bias(problem)
    return lambda p: LigerFusedLinearCrossEntropySM90Function.apply(p.x, p.w, p.y, IGNORE_INDEX)


def liger_cute_recompute(problem, options):
    """CuTe DSL for Hopper, per-token losses, a backward that recomputes the logits."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    need_no_bias(problem)

    def run(p):
        losses = LigerFusedScaledCrossEntropySM90Function.apply(p.x, p.w, p.y, 1.0, IGNORE_INDEX)
        return losses.sum() / p.valid  # those of ignored tokens are 0

    return run


# ---- cut-cross-entropy ----


def cce(problem, options, **settings):
    from cut_cross_entropy import linear_cross_entropy

    if problem.b is not None:  # versions after 25.1.1 take one
        settings["bias"] = problem.b
    return lambda p: linear_cross_entropy(p.x, p.w, p.y, ignore_index=IGNORE_INDEX, **settings)


# ---- quack-kernels ----


def scaled_exp_chunk(tokens, hidden):
    """Its default of 4096, or a size near it: 0.6.5 fails if the chunk has as many rows as the
    hidden size."""
    return next(size for size in (4096, 8192, 2048, 1024) if min(size, tokens) != hidden)


def quack(problem, options, scaled_exp=False):
    from quack.linear_cross_entropy import (
        chunked_linear_cross_entropy,
        scaled_exp_lce_supported,
    )

    need_no_bias(problem)
    settings = {"chunk_size": 4096, "ignore_index": IGNORE_INDEX, "use_scaled_exp": scaled_exp}
    if scaled_exp:
        settings["chunk_size"] = scaled_exp_chunk(*problem.x.shape)
        if not scaled_exp_lce_supported(problem.x, problem.w, settings["chunk_size"], "mean"):
            raise Refusal("its scaled_exp_lce_supported says no")
    return lambda p: chunked_linear_cross_entropy(p.x, p.w, p.y, **settings)


PEERS = {
    "eager": eager,
    "torch.compile": compiled,
    "torch chunked": torch_chunked,
    "liger": liger,
    "liger fp32 accum": functools.partial(liger, accum_dtype=torch.float32),
    "liger cute": liger_cute,
    "liger cute recompute": liger_cute_recompute,
    "cce": cce,
    "cce exact": functools.partial(cce, filter_eps=None),
    "quack chunked": quack,
    "quack scaled-exp": functools.partial(quack, scaled_exp=True),
}
PACKAGES = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl", "triton")


def versions():
    """Versions of the peers' packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
