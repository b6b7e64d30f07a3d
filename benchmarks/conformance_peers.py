"""torch's and other packages' losses for `python -m flce.conformance`; docs/conformance.md's table.

    python -m flce.conformance --adapters benchmarks/conformance_peers.py --impl eager,liger
    python benchmarks/conformance_peers.py --table RECORD.json ... --write docs/conformance.md

Packages that are not installed are looked for in .peers of the working directory, where wheels are
unpacked; of TRL and verl single files are loaded from there, without what their packages import.
What `rounding` says of each is from its source.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import types

import torch
import torch.nn.functional as F

from flce.conformance import FEATURES, NAMES, Adapter, Rounding

HALF = ("bfloat16", "float16")
PEERS = pathlib.Path(".peers").resolve()
MARK = "<!-- table -->"


def offering(*features, dtypes=("float32", *HALF)):
    return frozenset((*features, *dtypes))


def rounding(logits=0, early=False, **others):
    """`Adapter.rounds` of one that rounds 16-bit logits so often. early: gradients of a reduced
    loss are made in the forward, and multiplied with the upstream gradient later."""

    def rounds(case, device):
        later = early and case.reduction != "none" and case.upstream not in ("one", "zero")
        number = logits(case, device) if callable(logits) else logits
        return Rounding(int(number) * (case.dtype in HALF), results=1 + later, **others)

    return rounds


def with_bias(case, device):
    """Rounds the product, and its sum with the bias."""
    return 2 if case.bias else 1


# ---- torch ----


def eager_loss(x, w, y, bias, options):
    """F.cross_entropy of F.linear's logits in float32 (float64), softcap and z-loss composed."""
    options = dict(options)
    softcap, z_loss = options.pop("softcap", None), options.pop("z_loss", 0.0)
    logits = F.linear(x, w, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if "weight" in options:
        options["weight"] = options["weight"].to(logits.dtype)
    loss = F.cross_entropy(logits, y, **options)
    if z_loss:
        valid = y != options["ignore_index"]
        square = z_loss * logits.logsumexp(-1).square().masked_fill(~valid, 0.0)
        divisor = valid.sum() if options["reduction"] == "mean" else 1
        loss = loss + (square if options["reduction"] == "none" else square.sum() / divisor)
    return loss


def eager(name, compiled=False):
    offers, function = frozenset((*FEATURES, *NAMES)) - {"int32", "poisoned"}, eager_loss
    if compiled:
        torch._dynamo.config.recompile_limit = 256  # else it goes on without a graph, silently
        function = torch.compile(eager_loss, dynamic=True)
    return Adapter(name, function, offers, rounding(1), version=torch.__version__)


def torch_chunked(name):
    """torch.nn.functional.linear_cross_entropy with its LinearCrossEntropyOptions()."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    choices = torch.nn.LinearCrossEntropyOptions()

    def loss(x, w, y, bias, options):
        return F.linear_cross_entropy(x, w, y, linear_bias=bias, options=choices, **options)

    def logits(case, device):  # "compact", what "auto" is on CUDA, keeps float16 logits
        return case.dtype == "float16" and device.type == "cuda"

    def refuses(case):  # "retain_graph=True / double backward are not supported"
        return "a second backward" if case.call.endswith(("backward", "backwards")) else ""

    # With label smoothing it warns and computes all logits: another function.
    offers = offering("bias", "weight", "sum", "none", "ignore_index", "strided", "no rows")
    offers, rounds, version = offers | {"float64"}, rounding(logits, early=True), torch.__version__
    return Adapter(name, loss, offers, rounds, refuses, version, half_loss=True)


# ---- other packages ----


def liger(name, **settings):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Loss

    names = {"z_loss": "lse_square_scale", "weight": "ce_weight"}

    def loss(x, w, y, bias, options):
        options = {names.get(key, key): value for key, value in options.items()}
        return Loss(**options, **settings)(w, x, y, bias)

    offers = offering("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
    offers |= {"ignore_index", "strided"}
    rounds = rounding(with_bias, early=True)
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

    def refuses(case):  # it asserts so of N; TMA needs the others
        sizes = case.tokens, case.hidden, case.vocab
        return "" if all(size % 8 == 0 for size in sizes) else "sizes that are no multiples of 8"

    rounds = rounding(1, early=True, exponentials=1, factors=2)  # its scaled-exp path
    offers = offering("sum", "ignore_index", dtypes=HALF)
    return Adapter(name, loss, offers, rounds, refuses, version_of("quack-kernels"))


def fla(name):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    def loss(x, w, y, bias, options):
        options["logit_softcapping"] = options.pop("softcap", None)
        return fused_linear_cross_entropy_loss(x, y, w, bias, **options)

    offers = offering("bias", "softcap", "label_smoothing", "sum", "ignore_index", "strided")
    rounds = rounding(1, early=True)
    return Adapter(name, loss, offers, rounds, version=version_of("fla-core"))


def of_logprobs(logprobs):
    """A loss from a function (x, w, y, bias, options) -> log p: rows that are ignored get class 0
    and a factor 0, as the trainers that call these functions mask them."""

    def loss(x, w, y, bias, options):
        valid = y != options["ignore_index"]
        rows = -logprobs(x, w, y.masked_fill(~valid, 0), bias, options).masked_fill(~valid, 0.0)
        if options["reduction"] == "none":
            return rows
        return rows.sum() / (valid.sum() if options["reduction"] == "mean" else 1)

    return loss


def trl(name):
    for package in ("trl", "trl.kernels", "trl.trainer"):
        stub(package)
    stub("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    if importlib.util.find_spec("transformers") is None:
        has_triton = importlib.util.find_spec("triton") is not None
        stub("transformers")
        stub("transformers.utils", is_triton_available=lambda: has_triton)
    function = load("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def logprobs(x, w, y, bias, options):  # 32768: TRL's chunk of classes
        return function.apply(x, w, bias, y, 1.0, 32768, options.get("softcap"), 1.0, ())[0]

    offers = offering("bias", "softcap", "sum", "none", "ignore_index", "strided")
    rounds, version = rounding(with_bias), version_of("trl")
    return Adapter(name, of_logprobs(logprobs), offers, rounds, version=version)


def verl(name, kernel):
    device = {"is_cuda_available": True, "get_torch_device": lambda: torch.cuda}
    device |= {"get_device_name": lambda: "cuda"}
    device |= {"get_device_capability": torch.cuda.get_device_capability}
    for package in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.experimental"):
        stub(package)
    stub("verl.utils.device", **device)
    if kernel:
        sys.modules["verl.utils.kernel"].kernels = load("verl.utils.kernel.kernels")
        function = load("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    else:
        function = load("verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def logprobs(x, w, y, bias, options):
        return function(x, w, y, 1.0, "none")[0] if kernel else function(x, w, y)[0]

    def refuses(case):  # it asserts so
        return "H that is no multiple of 128" if kernel and case.hidden % 128 else ""

    offers = offering("sum", "none", "ignore_index")
    rounds, version = rounding(0 if kernel else 1), version_of("verl")
    return Adapter(name, of_logprobs(logprobs), offers, rounds, refuses, version)


def version_of(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def stub(name, **attributes):
    """An empty package of this name, of which submodules are loaded from files."""
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[name].__dict__.update(attributes)


def load(name):
    path = PEERS.joinpath(*name.split(".")).with_suffix(".py")
    if not path.exists():
        raise ImportError(f"no {path}: unpack the wheel there")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(PEERS))
ADAPTERS = {
    "eager": eager,
    "compile": functools.partial(eager, compiled=True),
    "torch-chunked": torch_chunked,
    "liger": liger,  # the weight's gradient is summed over chunks in the operands' dtype
    "liger-fp32": functools.partial(liger, accum_dtype=torch.float32),
    "cce": cce,
    "cce-exact": functools.partial(cce, filter_eps=None),
    "quack": quack,
    "fla": fla,
    "trl": trl,
    "verl-kernel": functools.partial(verl, kernel=True),
    "verl-chunks": functools.partial(verl, kernel=False),
}

# ---- the table ----

HEAD = "| implementation | rounds | passed | undecided | failed | by more than 4 | raised |"
HEAD += " not offered | what failed or raised |"


def table(records):
    """Markdown lines: a table for each device, of records as dictionaries."""
    for device in dict.fromkeys((one["device"], one["machine"]) for one in records):
        rows = [one for one in records if (one["device"], one["machine"]) == device]
        torches = ", ".join(dict.fromkeys(one["torch"] for one in rows))
        yield from (f"{device[0].upper()} ({device[1]}), torch {torches}:", "", HEAD)
        yield "|---" * (HEAD.count("|") - 1) + "|"
        for one in rows:
            counts = {**one["counts"], "gross": one["gross"]}
            names = ("passed", "undecided", "failed", "gross", "raised", "not offered")
            cells = [f"{one['impl']} {one['version']}".strip(), rounds_of(one["rounds"])]
            cells += [str(counts.get(name, 0)) for name in names]
            wrong = [f"{name} {number}" for name, number in one["wrong"].items()]
            wrong += [f"{counts['not run']} not run"] if counts.get("not run") else []
            yield f"| {' | '.join([*cells, '; '.join(wrong) or 'nothing'])} |"
        yield ""


def rounds_of(rounds):
    """Such as "1 0 1 1": of 16-bit operands, by dtype where they differ."""
    halves = {name: " ".join(map(str, rounds[name])) for name in rounds if name in HALF}
    if len(set(halves.values())) == 1:
        return next(iter(halves.values()))
    return ", ".join(f"{name} {numbers}" for name, numbers in halves.items())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", nargs="+", type=pathlib.Path, required=True)
    parser.add_argument("--write", type=pathlib.Path, help=f"into this file, between its {MARK}")
    given = parser.parse_args()
    lines = "\n".join(table([one for path in given.table for one in json.loads(path.read_text())]))
    if given.write is None:
        return print(lines)
    before, _, after = given.write.read_text().split(MARK)
    given.write.write_text(f"{before}{MARK}\n\n{lines}\n{MARK}{after}")


if __name__ == "__main__":
    main()
