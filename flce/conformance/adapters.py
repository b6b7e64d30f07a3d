"""Implementations by name, each loaded on first use: flce, torch's, and other packages', if they are
installed or unpacked under `--peers`. What `rounds` says is from each one's source or documents."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import types

import torch
import torch.nn.functional as F

from .cases import FEATURES, NAMES
from .check import Adapter
from .truth import Rounding

HALF = ("bfloat16", "float16")
LATER = ("one", "zero")  # upstream gradients that a later product with them does not round


def offering(*features, dtypes=("float32", *HALF)):
    return frozenset((*features, *dtypes))


def rounding(logits=0, made_early=False, **others):
    """`made_early`: gradients of a reduced loss are made in the forward, so rounded twice."""

    def rounds(case, device):
        narrow = case.dtype in HALF
        twice = made_early and case.reduction != "none" and case.upstream not in LATER
        number = logits(case, device) if callable(logits) else logits
        return Rounding(number * narrow, results=1 + twice, **others)

    return rounds


def with_bias(case, device):
    """Rounds the product, and its sum with the bias."""
    return 2 if case.bias else 1


# ---- flce ----


def flce(name, made_early=False, chunks=1, **settings):
    import flce

    def loss(x, w, y, bias, options):
        if chunks > 1:
            row = -(-4 * max(w.itemsize // 4, 1) * len(w) // 128) * 128
            options |= {"max_memory": row * max(1, -(-len(x) // chunks))}
            options |= {"accum_dtype": torch.float32} if w.itemsize == 2 else {}
        return flce.linear_cross_entropy(x, w, y, linear_bias=bias, **options, **settings)

    def logits(case, device):  # docs/environment.md
        return int(device.type == "cpu" and case.dtype == "bfloat16")

    lacks = {"none"} if settings.get("save") == "grads" else set()
    offers = frozenset((*FEATURES, *NAMES)) - lacks
    rounds = rounding(logits, made_early, exponentials=1)
    return Adapter(name, loss, offers, rounds, version=flce.__version__)


# ---- torch ----


def loss_of_logits(logits, y, options):
    """torch's cross entropy of float32 logits, with softcap and z-loss composed of operations."""
    options = dict(options)
    softcap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if "weight" in options:
        options["weight"] = options["weight"].to(wide.dtype)
    loss = F.cross_entropy(wide, y, **options)
    if z_loss:
        valid = y != options["ignore_index"]
        square = z_loss * wide.logsumexp(-1).square().masked_fill(~valid, 0.0)
        if options["reduction"] != "none":
            square = square.sum() / (valid.sum() if options["reduction"] == "mean" else 1)
        loss = loss + square
    return loss


def eager_loss(x, w, y, bias, options):
    return loss_of_logits(F.linear(x, w, bias), y, options)


COMPOSED = ("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
COMPOSED += ("ignore_index", "strided", "no rows")


def eager(name):
    """F.cross_entropy of F.linear's logits, cast to float32 (or float64)."""
    version, offers = torch.__version__, offering(*COMPOSED, dtypes=NAMES)
    return Adapter(name, eager_loss, offers, rounding(1), version=version)


def compiled(name):
    torch._dynamo.config.recompile_limit = 256  # else it would go on without a graph, silently
    function = torch.compile(eager_loss, dynamic=True)
    version, offers = torch.__version__, offering(*COMPOSED, dtypes=NAMES)
    return Adapter(name, function, offers, rounding(1), version=version)


def torch_chunked(name):
    """torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions()."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    choices = torch.nn.LinearCrossEntropyOptions()

    def loss(x, w, y, bias, options):
        return F.linear_cross_entropy(x, w, y, linear_bias=bias, options=choices, **options)

    # With label smoothing it warns and computes all logits: another function.
    offers = offering("bias", "weight", "sum", "none", "ignore_index", "strided", "no rows")
    # "compact", what "auto" takes on CUDA, keeps float16 logits.
    rounds = rounding(lambda case, device: case.dtype == "float16" and device.type == "cuda", True)
    return Adapter(name, loss, offers | {"float64"}, rounds, version=torch.__version__)


# ---- other packages ----


def liger(name):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Loss

    def loss(x, w, y, bias, options):
        names = {"softcap": "softcap", "z_loss": "lse_square_scale", "weight": "ce_weight"}
        options = {names.get(key, key): value for key, value in options.items()}
        return Loss(**options)(w, x, y, bias)

    offers = offering("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
    offers |= {"ignore_index", "strided"}
    rounds = rounding(with_bias, made_early=True)
    return Adapter(name, loss, offers, rounds, version=version_of("liger-kernel"))


def cce(name, **settings):
    from cut_cross_entropy import linear_cross_entropy

    def loss(x, w, y, bias, options):
        return linear_cross_entropy(x, w, y, **options, **settings)

    offers = offering("softcap", "sum", "none", "ignore_index", "poisoned", "strided", dtypes=HALF)
    return Adapter(name, loss, offers, rounding(), version=version_of("cut-cross-entropy"))


def quack(name):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x, w, y, bias, options):
        return chunked_linear_cross_entropy(x, w, y, tuned=False, **options)

    def refuses(case):  # it asserts the first; TMA needs the others
        sizes = case.tokens, case.hidden, case.vocab
        return "" if all(size % 8 == 0 for size in sizes) else "sizes that are no multiples of 8"

    offers = offering("sum", "ignore_index", dtypes=HALF)
    rounds = rounding(1, made_early=True, exponentials=1, factors=2)
    version = version_of("quack-kernels")
    return Adapter(name, loss, offers, rounds, refuses, version)


def fla(name):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    def loss(x, w, y, bias, options):
        options = dict(options)
        softcap = options.pop("softcap", None)
        return fused_linear_cross_entropy_loss(
            x, y, w, bias, logit_softcapping=softcap, **options
        )

    offers = offering("bias", "softcap", "label_smoothing", "sum", "ignore_index", "strided")
    rounds = rounding(1, made_early=True)
    return Adapter(name, loss, offers, rounds, version=version_of("fla-core"))


def of_logprobs(logprobs):
    """A loss from a function (x, w, y) -> log p: rows that are ignored get class 0 and a factor 0, as
    the trainers that call these functions mask them."""

    def loss(x, w, y, bias, options):
        valid = y != options["ignore_index"]
        rows = -logprobs(x, w, y.masked_fill(~valid, 0), bias, options).masked_fill(~valid, 0.0)
        if options["reduction"] == "none":
            return rows
        return rows.sum() / (valid.sum() if options["reduction"] == "mean" else 1)

    return loss


def trl(name, folder):
    for package in ("trl", "trl.kernels", "trl.trainer"):
        stub(package)
    stub("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    if importlib.util.find_spec("transformers") is None:
        has_triton = importlib.util.find_spec("triton") is not None
        stub("transformers")
        stub("transformers.utils", is_triton_available=lambda: has_triton)
    function = load(folder, "trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def logprobs(x, w, y, bias, options):
        return function.apply(x, w, bias, y, 1.0, 32768, options.get("softcap"), 1.0, ())[0]

    offers = offering("bias", "softcap", "sum", "none", "ignore_index", "strided")
    version = version_in(folder, "trl")
    return Adapter(name, of_logprobs(logprobs), offers, rounding(with_bias), version=version)


def verl(name, folder, kernel):
    device = {"is_cuda_available": True, "get_torch_device": lambda: torch.cuda}
    device |= {"get_device_name": lambda: "cuda"}
    device |= {"get_device_capability": torch.cuda.get_device_capability}
    for package in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.experimental"):
        stub(package)
    stub("verl.utils.device", **device)
    if kernel:
        sys.modules["verl.utils.kernel"].kernels = load(folder, "verl.utils.kernel.kernels")
        function = load(folder, "verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    else:
        function = load(folder, "verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def logprobs(x, w, y, bias, options):
        if not kernel:
            return function(x, w, y)[0]
        made, entropy = function(x, w, y, 1.0, "none")
        return made + 0.0 * entropy  # its backward takes no None, and only contiguous gradients

    def refuses(case):  # it asserts this
        return "H that is no multiple of 128" if kernel and case.hidden % 128 else ""

    offers = offering("sum", "none", "ignore_index", dtypes=("float32", *HALF))
    rounds = rounding(0 if kernel else 1)
    version = version_in(folder, "verl")
    return Adapter(name, of_logprobs(logprobs), offers, rounds, refuses, version)


# ---- loading ----


def version_of(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def version_in(folder, package):
    found = sorted(pathlib.Path(folder).glob(f"{package}-*.dist-info"))
    return found[-1].name.split("-")[1].removesuffix(".dist") if found else ""


def stub(name, **attributes):
    """An empty package of this name, of which single files are loaded without their packages."""
    if name not in sys.modules:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
    sys.modules[name].__dict__.update(attributes)


def load(folder, name):
    path = pathlib.Path(folder).joinpath(*name.split(".")).with_suffix(".py")
    if not path.exists():
        raise ImportError(f"no {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ADAPTERS = {
    "flce": functools.partial(flce, made_early=True),
    "flce-logits": functools.partial(flce, save="logits"),
    "flce-grads": functools.partial(flce, made_early=True, save="grads"),
    "flce-stats": functools.partial(flce, save="stats"),
    "flce-chunks": functools.partial(flce, made_early=True, chunks=4),
    "eager": eager,
    "compile": compiled,
    "torch-chunked": torch_chunked,
    "liger": liger,
    "cce": cce,
    "cce-exact": functools.partial(cce, filter_eps=None),
    "quack": quack,
    "fla": fla,
    "trl": trl,
    "verl-kernel": functools.partial(verl, kernel=True),
    "verl-chunks": functools.partial(verl, kernel=False),
}
ON_CPU = [name for name in ADAPTERS if name.startswith("flce")]
ON_CPU += ["eager", "compile", "torch-chunked", "trl", "verl-chunks"]
IN_FOLDER = ("trl", "verl-kernel", "verl-chunks")


def adapter(name, peers):
    """The Adapter of this name; ImportError, or what the package raises, where it cannot be loaded."""
    if name not in ADAPTERS:
        raise ValueError(f"impl: one of {', '.join(ADAPTERS)}, got {name!r}")
    if name not in IN_FOLDER:
        return ADAPTERS[name](name)
    return ADAPTERS[name](name, folder=peers)
