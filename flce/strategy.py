"""What a call keeps and how much memory it may take: decisions from options and sizes.

What csrc/plan.c also decides is repeated for the fakes, whose sizes may be symbolic.
"""

import functools
import numbers
import os
import re

import torch

from .compiled import getenv

_DEFAULT_MAX_MEMORY = 1 << 30
# Bytes (csrc/cpu/backend.c and csrc/cuda/backend.cu: row_alignment).
_ROW_ALIGNMENT = {"cpu": 64, "cuda": 128, "meta": 128}
# An H200 scales the gradient of such a weight in less time than the backward's first launch takes
# to come: there the forward makes the gradients although the logits fit (benchmarks/NOTES.md).
_SMALL_WEIGHT_BYTES = 128 << 20
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


# ---- memory ----


def parse_bytes(value, name="max_memory"):
    """Bytes from a number or text such as "512MiB", "1.5 GB" (units of 1000 or 1024).

    Raises TypeError for other types and ValueError for less than one byte, NaN or infinity.
    """
    expected = f'{name}: expected a positive number of bytes or text such as "512MiB"'
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        raise TypeError(f"{expected}, got {type(value).__name__}")
    number, factor = value, 1
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        if not match or match[2].lower() not in _UNITS:
            raise ValueError(f"{expected}, got {value!r}")
        number, factor = float(match[1]), _UNITS[match[2].lower()]
    if not 1 <= number * factor < 2**62:  # false for NaN as well
        raise ValueError(f"{expected}, got {value!r}")
    return int(number * factor)


@functools.cache
def _device_memory(device_type, index):
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(index).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def given_max_memory():
    """The text of FLCE_MAX_MEMORY, or None."""
    return getenv("FLCE_MAX_MEMORY")


def default_max_memory(device, text):
    """That of FLCE_MAX_MEMORY, else the smaller of 1 GiB and an eighth of the device's memory."""
    if text:
        return parse_bytes(text, "FLCE_MAX_MEMORY")
    return min(_DEFAULT_MAX_MEMORY, _device_memory(device.type, device.index) // 8)


def resolve_max_memory(max_memory, device):
    if max_memory is None:
        return default_max_memory(device, given_max_memory())
    return parse_bytes(max_memory)


# ---- what save="logits" keeps ----


def stat_dtype(dtype):
    """The dtype of losses and row statistics: float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gemm_dtype(device_type, dtype):
    """The dtype of the GEMMs' operands: the CPU widens float16 to float32."""
    return torch.float32 if dtype == torch.float16 and device_type == "cpu" else dtype


def row_pitch(vocab, dtype, device_type):
    """Elements from one row of saved logits to the next."""
    per_unit = _ROW_ALIGNMENT[device_type] // dtype.itemsize
    return (vocab + per_unit - 1) // per_unit * per_unit


def is_dz_form(operand, scalars, has_probabilities, differentiates_entropy):
    """Whether the gradient GEMMs read dz rather than E (plan.c: choose_form)."""
    both = scalars.softcap > 0.0 and scalars.label_smoothing > 0.0
    return operand == torch.float16 or has_probabilities or both or differentiates_entropy


def saved_dtype(dtypes, scalars, has_probabilities, differentiates_entropy):
    """The dtype of what save="logits" keeps: E, or z where dz needs it (plan.c: choose_saved).

    `dtypes` are those of the products' operands and of the logits.
    """
    operand, logits = dtypes
    dz = is_dz_form(operand, scalars, has_probabilities, differentiates_entropy)
    needs_logits = has_probabilities or scalars.softcap > 0.0 or differentiates_entropy
    return logits if dz and needs_logits else operand


# ---- save="auto" ----


def resolve_save(
    save, device_type, sizes, dtypes, kept, reduction, max_memory, saves_memory, late=False
):
    """The strategy: an explicit one stands, "auto" is decided.

    `sizes` are the rows to compute, H, V; `dtypes` those of the products' operands and of the
    logits, `kept` that of what save="logits" keeps; `saves_memory`: max_memory is the
    default, and less is better; `late`: whether no gradient may be made in the forward.

    It is resolved here and nowhere else: the comparisons also have to be made of symbolic sizes.
    """
    if save != "auto":
        return save
    rows, hidden, vocab = sizes
    operand, logits_dtype = dtypes
    can_keep_gradients = reduction != "none" and not late
    if device_type == "cuda" and saves_memory and can_keep_gradients:
        return "grads"
    # Divided, not multiplied: torch.export can then name the bound of a dynamic row count.
    if rows > max_memory // (row_pitch(vocab, kept, device_type) * kept.itemsize):
        return "grads" if can_keep_gradients else "stats"
    small = vocab * hidden * operand.itemsize <= _SMALL_WEIGHT_BYTES
    logits_row = row_pitch(vocab, logits_dtype, device_type) * logits_dtype.itemsize
    one_chunk = rows <= max_memory // logits_row
    if device_type == "cuda" and can_keep_gradients and small and one_chunk:
        return "grads"
    return "logits"


# ---- torch's options ----

_TORCH_FIELDS = ("acc_dtype", "acc_policy", "batch_chunk_size")


def from_torch_options(options, linear_weight):
    """What torch's `options` mean here, as keyword arguments of `flce.linear_cross_entropy`.

    Args:
        options: torch.nn.LinearCrossEntropyOptions, an object with its fields acc_dtype, acc_policy
            and batch_chunk_size, or None.
        linear_weight: the head's weight, shape (V, H) or (C, d1, ..., dK, H), read for its sizes
            and dtype.

    Returns:
        A dict with those of these keys that `options` decide:
        accum_dtype: `acc_dtype` where one is given, except under acc_policy="compact", which in
            torch too sums the weight's gradient in the weight's own dtype.
        max_memory: bytes of `batch_chunk_size` rows of logits in float32 (float64 for a float64
            weight). It bounds a chunk; where all logits fit they are kept whole.

    `chunking_method` has no effect (max_memory decides), nor has `allow_retain_graph`: a backward
    that keeps the graph may always be repeated.

    Raises:
        TypeError: `options` is no such object.
        ValueError: batch_chunk_size is no positive int.
    """
    if options is None:
        return {}
    if not all(hasattr(options, name) for name in _TORCH_FIELDS):
        raise TypeError(
            "options: expected torch.nn.LinearCrossEntropyOptions or an object with the fields "
            f"{', '.join(_TORCH_FIELDS)}, got {type(options).__name__}"
        )
    found = {}
    if options.acc_dtype is not None and options.acc_policy != "compact":
        found["accum_dtype"] = options.acc_dtype
    rows = options.batch_chunk_size
    if rows is not None:
        if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1:
            raise ValueError(
                f"options: expected a positive int or None as batch_chunk_size, got {rows!r}"
            )
        dtype = torch.float64 if linear_weight.dtype == torch.float64 else torch.float32
        pitch = row_pitch(linear_weight.shape[0], dtype, linear_weight.device.type)
        found["max_memory"] = int(rows) * pitch * dtype.itemsize
    return found
