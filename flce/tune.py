"""Times the algorithms of a problem's matrix products on this GPU, keeps and saves the choice.

A product is a line of text that the operators give and take (csrc/tuning.h), an algorithm its
numbers in such a line. Only what the timing needs is read from it.
"""

import json
import math
import os
import re
import statistics
import tempfile
from dataclasses import dataclass

import torch

from .autograd import inner
from .functional import linear_cross_entropy
from .options import DTYPES
from .validate import refuse

# The numbers that a product's line begins with, in the order of csrc/cuda/gemm.cuh: the library's
# version and gemm_key. The GPU's name follows. A dtype's number is its index in DTYPES.
PRODUCT = (
    *("cublaslt", "m", "n", "k", "pitch_a", "pitch_b", "pitch_c", "workspace_bytes"),
    *("dtype", "c_dtype", "align_a", "align_b", "align_c", "align_d"),
    *("transpose_a", "transpose_b", "accumulate", "tf32", "bias"),
)
_ENVIRONMENT = "FLCE_TUNE_FILE"
_FORMAT = "flce products 2"
_NUMBER = "-?[0-9]{1,18}"
_PRODUCT = re.compile(rf"({_NUMBER} ){{{len(PRODUCT)}}}[!-~][ -~]*")
_ALGORITHM = re.compile(rf"{_NUMBER}( {_NUMBER}){{9}}")  # gemm_algorithm
_ROUNDS = 9
_SAMPLE_MS = 1.0  # a product that takes less is timed several times in a row
# What another candidate has to save before it replaces the shipped choice: less is noise.
_WORTH = 0.99


@dataclass(frozen=True)
class TunedProduct:
    """A product and its fastest candidate; times are medians in milliseconds."""

    product: str  # a line of PRODUCT's numbers and the GPU's name
    algorithm: str  # the numbers of the one taken from now on
    candidates: int  # how many were timed
    shipped_ms: float  # of the one that is taken without tuning
    best_ms: float  # of the one taken from now on


@dataclass(frozen=True)
class Tuning:
    """What `tune` chose; str() is a table of it."""

    products: tuple  # of TunedProduct
    path: str | None  # of the file that holds them

    def __str__(self):
        row = "{:<17} {:<23} {:<20} {:>10} {:>10} {:>9} {:>7}  {}".format
        head = "candidates", "shipped ms", "best ms", "gain", "algorithm"
        rows = [row("product", "m x n x k", "types", *head)]
        for one in self.products:
            p, gain = numbers_of(one.product), one.shipped_ms / one.best_ms
            name = f"{_name_of(p)}{' added' if p['accumulate'] else ''}"
            types = " to ".join(str(DTYPES[p[key]])[6:] for key in ("dtype", "c_dtype"))
            times = f"{one.shipped_ms:.4f}", f"{one.best_ms:.4f}", f"{gain:.3f}x"
            sizes = f"{p['m']} x {p['n']} x {p['k']}"
            rows.append(row(name, sizes, types, one.candidates, *times, one.algorithm))
        return "\n".join(rows)


def tune(
    tokens,
    hidden,
    vocab,
    *,
    dtype=torch.bfloat16,
    device=None,
    input_dtype=None,
    weight_dtype=None,
    bias=False,
    reduction="mean",
    accum_dtype=None,
    logits_dtype=None,
    save="auto",
    max_memory=None,
    path=None,
    **others,
):
    """Times every algorithm of each matrix product that a call of these sizes runs, on this GPU.

    One forward and backward on random data shows the products: logits, the input's and the
    weight's gradient, of whole chunks and of the last. Each candidate of each is then timed in
    interleaved rounds, which takes seconds. The fastest is taken from then on, by this process at
    once, and by those that import flce with FLCE_TUNE_FILE set to the file. It may add in another
    order, so that results differ in their last bits from those before (docs/tuning.md).

    Args:
        tokens, hidden, vocab: N, H, V of the calls to come; with `valid_bound`, N is the bound.
        dtype: of the matrix products (autocast's, where it is on).
        device: a CUDA device; None for the current one.
        input_dtype, weight_dtype: of the operands as given; None for `dtype`.
        bias: whether there is one.
        reduction, accum_dtype, logits_dtype, save, max_memory: as in `linear_cross_entropy`.
        path: the file to add the choices to; None for that of FLCE_TUNE_FILE. "", or neither,
            keeps them in this process alone.
        **others: further options of `linear_cross_entropy` that the calls have.

    Returns:
        A `Tuning`; `print` it for a table of the products, milliseconds before and after.

    Raises:
        ValueError: a device that is not CUDA; a file that is there and not of this format.
        RuntimeError: in the capture of a CUDA graph.
        OSError: the file cannot be written.
        torch.OutOfMemoryError: the step, or a product's operands, do not fit.
    """
    if device is None and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device to tune for, but torch finds none")
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        refuse("device", "a CUDA device", f"{device}; the CPU's products are torch's own")
    knobs = {"reduction": reduction, "accum_dtype": accum_dtype, "logits_dtype": logits_dtype}
    knobs |= {"save": save, "max_memory": max_memory, **others}
    types = (dtype, input_dtype or dtype, weight_dtype or dtype)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "flce.tune: it waits for the device, which a CUDA graph cannot capture; call it "
                "before the capture"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        path = _file(path)
        if path is not None:
            write(path, {})  # what does not serve shows before the work
        lines = products_of((tokens, hidden, vocab), types, bias, device, knobs)
        tuned = tuple(_tune_product(line, device) for line in lines)
    choices = {one.product: one.algorithm for one in tuned}
    use(choices)
    if path is not None:
        write(path, choices)
    return Tuning(tuned, path)


def products_of(sizes, types, bias, device, knobs):
    """The products that one step runs. `types`: of the products, of input and of linear_weight."""
    tokens, hidden, vocab = sizes
    dtype, input_dtype, weight_dtype = types
    generator = torch.Generator(device).manual_seed(0)  # the caller's own is left alone
    given = {"device": device, "generator": generator}
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(tokens, hidden, dtype=input_dtype, **given).requires_grad_()
        w = torch.randn(vocab, hidden, dtype=weight_dtype, **given)
        w = w.div_(math.sqrt(hidden)).requires_grad_()
        b = torch.zeros(vocab, dtype=weight_dtype, device=device).requires_grad_() if bias else None
        y = torch.randint(knobs.get("valid_vocab") or vocab, (tokens,), **given)
        # A sum that is there already: what every step but the first adds to.
        if knobs.get("accumulate_into") == "grad":
            w.grad = torch.zeros_like(w)
        if knobs.get("accumulate_into") == "main_grad":
            w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        inner.gemm_record(device.index)
        try:
            with torch.autocast("cuda", dtype=dtype, enabled=len(set(types)) > 1):
                made = linear_cross_entropy(x, w, y, linear_bias=b, **knobs)
            getattr(made, "loss", made).sum().backward()
        finally:
            lines = inner.gemm_recorded(device.index).splitlines()
    return lines


def numbers_of(product):
    """PRODUCT's numbers by name."""
    return dict(zip(PRODUCT, map(int, product.split(" ")[: len(PRODUCT)]), strict=True))


def _name_of(p):
    if p["transpose_a"]:
        return "grad_weight"
    return "logits" if p["transpose_b"] else "grad_input"


def candidates_of(line, device):
    """(the candidate that is shipped, the one that is taken), and each one's algorithm."""
    first, *rows = inner.gemm_candidates(device.index, line).splitlines()
    # A row ends with the candidate's bytes of workspace.
    return tuple(map(int, first.split())), [row.rsplit(" ", 1)[0] for row in rows]


def _tune_product(line, device):
    """Takes medians over rounds in changing order."""
    (shipped, _), algorithms = candidates_of(line, device)
    memory, count = operands_of(line, device), len(algorithms)
    repeats, samples = 1, [[] for _ in algorithms]
    for iteration in range(_ROUNDS + 1):
        for i in range(count):
            candidate = (i + iteration) % count
            samples[candidate].append(inner.gemm_time(*memory, line, candidate, repeats))
        if iteration == 0:  # a warm-up: a kernel is loaded when it first runs
            fastest = max(min(sample.pop() for sample in samples), 1e-3)
            repeats = min(math.ceil(_SAMPLE_MS / fastest), 100)
    times = [statistics.median(sample) for sample in samples]
    best = min(range(count), key=times.__getitem__)
    if times[best] > _WORTH * times[shipped]:
        best = shipped
    return TunedProduct(line, algorithms[best], count, times[shipped], times[best])


def operands_of(line, device):
    """a, b, c, bias or None, workspace: random data, aligned as the product says."""
    p = numbers_of(line)
    dtype, c_dtype = DTYPES[p["dtype"]], DTYPES[p["c_dtype"]]
    generator = torch.Generator(device).manual_seed(0)

    def memory(count, dtype, alignment):
        shift = alignment % 256 // dtype.itemsize  # torch's own memory is aligned to 512 bytes
        data = torch.randn(count + shift, dtype=dtype, device=device, generator=generator)
        return data[shift:]

    a = memory((p["k"] if p["transpose_a"] else p["m"]) * p["pitch_a"], dtype, p["align_a"])
    if _name_of(p) != "logits":
        # As exp(logit - row maximum) is: zeros, or numbers of both signs, take other power.
        a.sub_(4.0).exp_().clamp_(max=1.0)
    b = memory((p["n"] if p["transpose_b"] else p["k"]) * p["pitch_b"], dtype, p["align_b"])
    c = memory(p["m"] * p["pitch_c"], c_dtype, p["align_c"])
    bias = memory(p["n"], c_dtype, p["align_d"]) if p["bias"] else None
    workspace = torch.empty(p["workspace_bytes"], dtype=torch.uint8, device=device)
    return a, b, c, bias, workspace


def use(choices):
    """Takes the algorithms from now on. `choices`: a product's line -> its algorithm's numbers."""
    lines = []
    for product, algorithm in choices.items():
        *numbers, gpu = product.split(" ", len(PRODUCT))
        lines.append(" ".join((*numbers, algorithm, gpu)))
    inner.gemm_use("\n".join(lines))


def _file(path):
    """The path, else that of FLCE_TUNE_FILE; None for no file."""
    return os.fspath(os.environ.get(_ENVIRONMENT, "") if path is None else path) or None


def read(path):
    """The choices in a file, none where there is none; ValueError, which names it, for what `tune`
    did not write."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        for product, algorithm in content["choices"].items():
            if not (_PRODUCT.fullmatch(product) and _ALGORITHM.fullmatch(algorithm)):
                raise ValueError(f"{algorithm!r} for {product!r}")
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
        refuse(path, f'a file that flce.tune wrote, of format "{_FORMAT}"', got)
    return content["choices"]


def write(path, choices):
    """Adds to what the file has; another process sees the old file or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    content = {"format": _FORMAT, "choices": {**read(path), **choices}}
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        with open(f"{unfinished}/choices", "x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(f"{unfinished}/choices", path)


def load():
    """Takes over what the file of FLCE_TUNE_FILE has; ValueError where it does not serve."""
    path = _file(None)
    try:
        if path and (choices := read(path)):
            use(choices)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_ENVIRONMENT}: {error}") from error


def describe():
    """What `load` has found, in a line."""
    path = _file(None)
    if path is None:
        return f"none, {_ENVIRONMENT} is not set"
    return f"{len(read(path))} in {path}" if os.path.exists(path) else f"none, there is no {path}"


load()  # once, when flce is imported: the choice is then the same in every process
