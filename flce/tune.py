"""Times the algorithms of a problem's matrix products on this GPU, keeps and saves the choice."""

import json
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch

from .functional import linear_cross_entropy
from .ops import inner
from .options import DTYPES

# The numbers of a product and of an algorithm, in the order of csrc/cuda/gemm.cuh: the library's
# version and gemm_key; gemm_algorithm. A dtype's number is its place in DTYPES.
PRODUCT = (
    *(
        "cublaslt",
        "m",
        "n",
        "k",
        "pitch_a",
        "pitch_b",
        "pitch_c",
        "workspace_bytes",
        "dtype",
        "c_dtype",
    ),
    *("align_a", "align_b", "align_c", "align_d"),
    *("transpose_a", "transpose_b", "accumulate", "tf32", "bias"),
)
ALGORITHM = (
    *("id", "tile", "stages", "cluster", "splits", "reduction", "swizzle", "inner", "custom"),
    "nth",
)

_ENVIRONMENT = "FLCE_TUNE_FILE"
_FORMAT = "flce products 1"
_ROUNDS = 9
_SAMPLE_MS = 1.0  # a product that takes less is timed several times in a row
# What another candidate has to save before it replaces the shipped choice: less is noise.
_WORTH = 0.99


@dataclass(frozen=True)
class TunedProduct:
    """A product and its fastest candidate; times are medians in milliseconds."""

    name: str  # "logits", "grad_input", "grad_weight"
    gpu: str
    product: dict  # PRODUCT -> int
    algorithm: dict  # ALGORITHM -> int: the one taken from now on
    candidates: int  # how many were timed
    shipped_ms: float  # of the one that is taken without tuning
    best_ms: float  # of the one taken from now on

    def __str__(self):
        p, a = self.product, self.algorithm
        types = f"{_type_name(p['dtype'])} to {_type_name(p['c_dtype'])}"
        sizes = f"{p['m']} x {p['n']} x {p['k']}"
        what = f"{self.name}{' added' if p['accumulate'] else ''}"
        taken = f"id {a['id']} tile {a['tile']} stages {a['stages']} cluster {a['cluster']}"
        return (
            f"{what:<17} {sizes:<23} {types:<20} {self.candidates:>10} {self.shipped_ms:>10.4f} "
            f"{self.best_ms:>9.4f} {self.shipped_ms / self.best_ms:>6.3f}x  {taken}"
        )


@dataclass(frozen=True)
class Tuning:
    """What `tune` chose; str() is a table of it."""

    products: tuple  # of TunedProduct
    path: str | None  # of the file that holds them

    def __str__(self):
        head = (
            f"{'product':<17} {'m x n x k':<23} {'types':<20} {'candidates':>10} "
            f"{'shipped ms':>10} {'best ms':>9} {'gain':>7}  algorithm"
        )
        return "\n".join([head, *map(str, self.products)])


def _type_name(number):
    return str(DTYPES[number]).removeprefix("torch.")


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
    once, and by those that import flce with FLCE_TUNE_FILE set to the file. Without tuning nothing
    is ever timed: the choice follows from sizes, GPU and library version. Another algorithm may add
    in another order, so that results differ in their last bits from those before tuning, and from
    those of a machine that lacks the file; with the file they are again the same from run to run.
    Where several processes are to agree, tune in one of them before the others import flce.

    Args:
        tokens, hidden, vocab: N, H, V: the sizes of the calls to come. With `valid_bound` in those
            calls, tokens is the bound.
        dtype: of the matrix products (autocast's, where it is on).
        device: a CUDA device; None for the current one.
        input_dtype, weight_dtype: of the operands as given; None for `dtype`.
        bias: whether there is one.
        reduction, accum_dtype, logits_dtype, save, max_memory: as in `linear_cross_entropy`.
        path: the file to write; None for that of FLCE_TUNE_FILE. "", or neither, keeps the choice
            in this process alone. Choices for other products in the file stay.
        **others: further options of `linear_cross_entropy` that the calls have.

    Returns:
        A `Tuning`; `print` it for a table of the products, milliseconds before and after.

    Raises:
        ValueError: a device that is not CUDA; a file that is there and not of this format.
        RuntimeError: in the capture of a CUDA graph.
        OSError: the file cannot be written.
        torch.OutOfMemoryError: the step, or a product's operands, do not fit.
    """
    device = _cuda_device(device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "flce.tune: it waits for the device, which a CUDA graph cannot capture; call it "
                "before the capture"
            )
        path = _prepare_file(path)
        knobs = {
            "reduction": reduction,
            "accum_dtype": accum_dtype,
            "logits_dtype": logits_dtype,
            "save": save,
            "max_memory": max_memory,
            **others,
        }
        types = (dtype, input_dtype or dtype, weight_dtype or dtype)
        lines = _products_of((tokens, hidden, vocab), types, bias, device, knobs)
        tuned = tuple(_tune_product(line, device) for line in lines)
    _use(tuned)
    if path is not None:
        _write(path, tuned)
    return Tuning(tuned, path)


def _cuda_device(device):
    if device is None and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device to tune for, but torch finds none")
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(
            f"device: expected a CUDA device, got {device}; the CPU's products are torch's own"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


# ---- the products of a call ----


def _products_of(sizes, types, bias, device, knobs):
    """The products that one step runs, each as a line for the operators."""
    inner.gemm_record(device.index)
    try:
        _step(sizes, types, bias, device, knobs)
    finally:
        lines = inner.gemm_recorded(device.index).splitlines()
    return lines


def _step(sizes, types, bias, device, knobs):
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
        with torch.autocast("cuda", dtype=dtype, enabled=len(set(types)) > 1):
            made = linear_cross_entropy(x, w, y, linear_bias=b, **knobs)
        getattr(made, "loss", made).sum().backward()


# ---- time ----


def _tune_product(line, device):
    fields = line.split(" ", len(PRODUCT))
    product, gpu = dict(zip(PRODUCT, map(int, fields[:-1]), strict=True)), fields[-1]
    (shipped, _), algorithms = candidates_of(line, device)
    times = time_candidates(line, product, len(algorithms), device)
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] > _WORTH * times[shipped]:
        best = shipped
    return TunedProduct(
        _name_of(product),
        gpu,
        product,
        algorithms[best],
        len(algorithms),
        times[shipped],
        times[best],
    )


def candidates_of(line, device):
    """(the candidate that is shipped, the one that is taken), and each one's ALGORITHM."""
    first, *rows = inner.gemm_candidates(device.index, line).splitlines()
    numbers = [list(map(int, row.split()))[: len(ALGORITHM)] for row in rows]
    algorithms = [dict(zip(ALGORITHM, row, strict=True)) for row in numbers]
    return tuple(map(int, first.split())), algorithms


def time_candidates(line, product, count, device, rounds=_ROUNDS):
    """Median milliseconds of each of `count` candidates, over rounds that run all in turn."""
    memory = _operands(product, device)
    repeats, samples = 1, [[] for _ in range(count)]
    for turn in range(rounds + 1):
        for i in range(count):
            candidate = (i + turn) % count
            samples[candidate].append(inner.gemm_time(*memory, line, candidate, repeats))
        if turn == 0:  # a warm-up: a kernel is loaded when it first runs
            fastest = max(min(sample.pop() for sample in samples), 1e-3)
            repeats = min(math.ceil(_SAMPLE_MS / fastest), 100)
    return [statistics.median(sample) for sample in samples]


def _name_of(product):
    if product["transpose_a"]:
        return "grad_weight"
    return "logits" if product["transpose_b"] else "grad_input"


def _operands(product, device):
    """a, b, c, bias or None, workspace: random data, aligned as the product says."""
    p = product
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


# ---- the file ----


def _use(tuned):
    inner.gemm_use("".join(_line(t.gpu, t.product, t.algorithm) for t in tuned))


def _line(gpu, product, algorithm):
    numbers = [*(product[name] for name in PRODUCT), *(algorithm[name] for name in ALGORITHM)]
    return " ".join(map(str, numbers)) + f" {gpu}\n"


def _file(path):
    """The path, else that of FLCE_TUNE_FILE; None for no file."""
    path = os.environ.get(_ENVIRONMENT) if path is None else path
    return os.fspath(path) or None if path is not None else None


def _prepare_file(path):
    """The path, which can be read and written: what does not serve shows before the work."""
    path = _file(path)
    if path is not None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        read(path)
        if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            raise PermissionError(f"flce.tune: cannot write to the folder of {path}")
    return path


def _is_numbers(value, names):
    return (
        isinstance(value, dict)
        and set(value) == set(names)
        and all(type(number) is int and abs(number) < 2**63 for number in value.values())
    )


def _is_entry(entry):
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("gpu"), str)
        and entry["gpu"].isprintable()
        and entry["gpu"] != ""
        and _is_numbers(entry.get("product"), PRODUCT)
        and _is_numbers(entry.get("algorithm"), ALGORITHM)
    )


def read(path):
    """The entries of a file, none where there is no file.

    Raises:
        ValueError: what is there is not what `tune` writes; the text names the file.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a file that flce.tune wrote, got {error}") from None
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list) or content.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a file that flce.tune wrote, of format "{_FORMAT}"')
    for number, entry in enumerate(entries):
        if not _is_entry(entry):
            raise ValueError(f"{path}: entry {number} is not one that flce.tune wrote")
    return entries


def _key(entry):
    return entry["gpu"], *(entry["product"][name] for name in PRODUCT)


def _write(path, tuned):
    """Into the file beside what it has; another process sees the old file or the new one."""
    entries = {_key(entry): entry for entry in read(path)}
    for t in tuned:
        entry = {
            "gpu": t.gpu,
            "product": t.product,
            "algorithm": t.algorithm,
            "shipped_ms": t.shipped_ms,
            "best_ms": t.best_ms,
        }
        entries[_key(entry)] = entry
    unfinished = f"{path}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            rows = ",\n".join(json.dumps(entry) for entry in entries.values())
            file.write(f'{{"format": "{_FORMAT}", "entries": [\n{rows}\n]}}\n')
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def load():
    """Takes over what the file of FLCE_TUNE_FILE has; ValueError where it does not serve."""
    path = _file(None)
    if path is None:
        return
    try:
        entries = read(path)
        if entries:
            inner.gemm_use("".join(_line(e["gpu"], e["product"], e["algorithm"]) for e in entries))
    except (OSError, ValueError) as error:
        raise ValueError(f"{_ENVIRONMENT}: {error}") from error


def describe():
    """What `load` has found, in a line."""
    path = _file(None)
    if path is None:
        return f"none, {_ENVIRONMENT} is not set"
    if not os.path.exists(path):
        return f"none, there is no {path}"
    try:
        return f"{len(read(path))} in {path}"
    except (OSError, ValueError) as error:
        return f"none: {error}"


load()  # once, when flce is imported: the choice is then the same in every process
