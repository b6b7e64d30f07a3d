"""Times the cuBLASLt algorithms of a problem's GEMMs; selects and saves the fastest.

A GEMM is a line of text that the operators return and take (csrc/tuning.h); an algorithm is the
list of numbers in such a line. Only what the timing needs is parsed here.
"""

import json
import math
import os
import re
import stat
import statistics
import tempfile
from dataclasses import dataclass

import torch

from .autograd import inner, run
from .functional import linear_cross_entropy
from .options import DTYPES
from .validate import refuse

# The numbers at the start of a GEMM's line, in the order of csrc/cuda/gemm/gemm.cuh: the library's
# version and gemm_key. The GPU's name follows. A dtype is its index in DTYPES.
PRODUCT = (
    *("cublaslt", "m", "n", "k", "pitch_a", "pitch_b", "pitch_c", "workspace_bytes"),
    *("dtype", "c_dtype", "align_a", "align_b", "align_c", "align_d"),
    *("transpose_a", "transpose_b", "accumulate", "tf32", "bias"),
)
_ENVIRONMENT = "FLCE_TUNE_FILE"
_FORMAT = "flce products 2"
_NUMBER = "-?[0-9]{1,18}"
_PRODUCT = re.compile(rf"({_NUMBER} ){{{len(PRODUCT)}}}[!-~][ -~]*")
_ALGORITHM = re.compile(rf"{_NUMBER}( {_NUMBER}){{9}}")  # the fields of gemm_algorithm
_ROUNDS = 9
_SAMPLE_MS = 1.0  # a shorter GEMM is timed several times in a row
# Time ratio below which a candidate replaces the default; a smaller gain is noise.
_WORTH = 0.99


@dataclass(frozen=True)
class TunedProduct:
    """A GEMM and its fastest candidate; times are medians in milliseconds."""

    product: str  # the numbers of PRODUCT and the GPU's name, as text
    algorithm: str  # numbers of the selected algorithm
    candidates: int  # how many candidates were timed
    shipped_ms: float  # time of the algorithm without tuning
    best_ms: float  # time of the selected algorithm


@dataclass(frozen=True)
class Tuning:
    """What `tune` selected; str() formats it as a table."""

    products: tuple  # one TunedProduct for each GEMM
    path: str | None  # the file in which they were saved

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
    path=None,
    **options,
):
    """Times every cuBLASLt algorithm of each GEMM that a call of these sizes runs, on this GPU.

    One forward and backward on random data records its GEMMs. The candidates of each are timed in
    interleaved rounds, which takes seconds. The fastest is selected, in this process at once, and
    in processes that import flce with FLCE_TUNE_FILE set to the file. It may sum in another order.

    Args:
        tokens, hidden, vocab: N, H, V of the calls to come; with `valid_bound`, N is the bound.
        dtype: of the GEMMs (autocast's, where it is on).
        device: a CUDA device; None for the current one.
        input_dtype, weight_dtype: of the operands as given; None for `dtype`.
        bias: whether there is one.
        path: the file to add the choices to; None for that of FLCE_TUNE_FILE. "", or neither,
            keeps them in this process only.
        **options: the options of `linear_cross_entropy` that the calls have.

    Returns:
        A `Tuning`; `print` it for a table of the GEMMs, milliseconds before and after.

    Raises:
        ValueError: a device that is not CUDA; a file that is there and not of this format.
        RuntimeError: called during CUDA graph capture.
        OSError: the file cannot be written.
        torch.OutOfMemoryError: the step, or a GEMM's operands, do not fit.
    """
    if device is None and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device to tune for, but torch finds none")
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        refuse("device", "a CUDA device", f"{device}; the CPU's products are torch's own")
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
            write(path, {})  # checks that the file is writable and valid before the work
        lines = products_of((tokens, hidden, vocab), types, bias, device, options)
        tuned = tuple(_tune_product(line, device) for line in lines)
    choices = {one.product: one.algorithm for one in tuned}
    use(choices)
    if path is not None:
        write(path, choices)
    return Tuning(tuned, path)


def products_of(sizes, types, bias, device, options):
    """The lines of the GEMMs that one step runs. `types`: of GEMMs, input, linear_weight."""
    tokens, hidden, vocab = sizes
    dtype, input_dtype, weight_dtype = types
    generator = torch.Generator(device).manual_seed(0)  # torch's default generator is not changed
    given = {"device": device, "generator": generator}
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(tokens, hidden, dtype=input_dtype, **given).requires_grad_()
        w = torch.randn(vocab, hidden, dtype=weight_dtype, **given)
        w = w.div_(math.sqrt(hidden)).requires_grad_()
        b = torch.zeros(vocab, dtype=weight_dtype, device=device).requires_grad_() if bias else None
        y = torch.randint(options.get("valid_vocab") or vocab, (tokens,), **given)
        # An existing .grad, as every step but the first finds it.
        if attribute := options.get("accumulate_into"):
            held = weight_dtype if attribute == "grad" else torch.float32
            setattr(w, attribute, torch.zeros_like(w, dtype=held))
        run(inner.gemm_record.default, device.index)
        try:
            with torch.autocast("cuda", dtype=dtype, enabled=len(set(types)) > 1):
                options = {"linear_bias": b, "gradient_seed": 0, **options}  # draws none
                made = linear_cross_entropy(x, w, y, **options)
            getattr(made, "loss", made).sum().backward()
        finally:
            lines = run(inner.gemm_recorded.default, device.index).splitlines()
    return lines


def numbers_of(product):
    """The numbers of PRODUCT in a GEMM's line, by name."""
    return dict(zip(PRODUCT, map(int, product.split(" ")[: len(PRODUCT)]), strict=True))


def _name_of(p):
    if p["transpose_a"]:
        return "grad_weight"
    return "logits" if p["transpose_b"] else "grad_input"


def candidates_of(line, device):
    """(default candidate, current candidate) as indices, and the algorithm of each candidate."""
    first, *rows = run(inner.gemm_candidates.default, device.index, line).splitlines()
    # A row ends with the candidate's workspace size in bytes.
    return tuple(map(int, first.split())), [row.rsplit(" ", 1)[0] for row in rows]


def _tune_product(line, device):
    """Times the candidates of one GEMM: medians over rounds whose order changes."""
    (shipped, _), algorithms = candidates_of(line, device)
    memory, count = operands_of(line, device), len(algorithms)
    repeats, samples = 1, [[] for _ in algorithms]
    for iteration in range(_ROUNDS + 1):
        for i in range(count):
            candidate = (i + iteration) % count
            samples[candidate].append(
                run(inner.gemm_time.default, *memory, line, candidate, repeats)
            )
        if iteration == 0:  # a warm-up: a kernel is loaded at its first launch
            fastest = max(min(sample.pop() for sample in samples), 1e-3)
            repeats = min(math.ceil(_SAMPLE_MS / fastest), 100)
    times = [statistics.median(sample) for sample in samples]
    best = min(range(count), key=times.__getitem__)
    if times[best] > _WORTH * times[shipped]:
        best = shipped
    return TunedProduct(line, algorithms[best], count, times[shipped], times[best])


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
    if _name_of(p) != "logits":
        # Like exp(logit - row maximum): zeros, or numbers of both signs, draw another power.
        a.sub_(4.0).exp_().clamp_(max=1.0)
    b = memory((p["n"] if p["transpose_b"] else p["k"]) * p["pitch_b"], dtype, p["align_b"])
    c = memory(p["m"] * p["pitch_c"], c_dtype, p["align_c"])
    bias = memory(p["n"], c_dtype, p["align_d"]) if p["bias"] else None
    workspace = torch.empty(p["workspace_bytes"], dtype=torch.uint8, device=device)
    return a, b, c, bias, workspace


def use(choices):
    """Selects algorithms from now on. `choices`: a GEMM's line -> its algorithm's numbers."""
    lines = []
    for product, algorithm in choices.items():
        *numbers, gpu = product.split(" ", len(PRODUCT))
        lines.append(" ".join((*numbers, algorithm, gpu)))
    run(inner.gemm_use.default, "\n".join(lines))


def _file(path):
    """`path`, or the value of FLCE_TUNE_FILE; None for no file."""
    return os.fspath(os.environ.get(_ENVIRONMENT, "") if path is None else path) or None


def read(path):
    """The choices in a file, empty if there is no file. ValueError, which names the file, if it
    was not written by `tune`."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > 16 << 20:  # a device may have no end
            raise ValueError("no regular file of at most 16 MiB")
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
    """Adds choices to the file, atomically: another process sees the old file or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    content = {"format": _FORMAT, "choices": {**read(path), **choices}}
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        with open(f"{unfinished}/choices", "x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(f"{unfinished}/choices", path)


def load():
    """Selects the algorithms in FLCE_TUNE_FILE; ValueError if the file is invalid."""
    path = _file(None)
    try:
        if path and (choices := read(path)):
            use(choices)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_ENVIRONMENT}: {error}") from error


def describe():
    """One line that says what `load` found."""
    path = _file(None)
    if path is None:
        return f"none, {_ENVIRONMENT} is not set"
    return f"{len(read(path))} in {path}" if os.path.exists(path) else f"none, there is no {path}"


load()  # once, when flce is imported, so that every process makes the same choice
