"""Decisions from options, sizes and the number of ignored rows: what a call computes and saves, and
how much memory it may use.

Decisions of csrc/core/plan.c that the fakes need are repeated here, because sizes may be symbolic.
"""

import math
import numbers
import os
import re

import torch
from torch.compiler import is_compiling

from ._C import getenv
from .options import CAPS
from .validate import check_valid_bound, checks_targets, refuse

# Alignment of a row of logits in bytes (csrc/*/backend.*: row_alignment).
_ROW_ALIGNMENT = {"cpu": 64, "cuda": 128, "meta": 128}
# Up to this size of the weight "auto" makes the gradients in the forward even if the logits fit: an
# H200 scales such a gradient faster than the backward launches a kernel (benchmarks/NOTES.md).
_SMALL_WEIGHT_BYTES = 128 << 20
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}


def parse_bytes(value, name="max_memory"):
    """Bytes from a number or text such as "512MiB", "1.5 GB" (units of 1000 or 1024 bytes).

    Raises TypeError for other types and ValueError for less than one byte, NaN or infinity.
    """
    expected = 'a positive number of bytes or text such as "512MiB"'
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        refuse(name, expected, type(value).__name__, TypeError)
    size = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        size = float(match[1]) * unit if unit else math.nan
    if not 1 <= size < 2**62:  # also refuses NaN
        refuse(name, expected, repr(value))
    return int(size)


def resolve_max_memory(max_memory, device):
    """In bytes: the argument, else FLCE_MAX_MEMORY, else 1 GiB or 1/8 of the memory, if smaller."""
    if max_memory is not None:
        return parse_bytes(max_memory)
    if text := getenv("FLCE_MAX_MEMORY"):
        return parse_bytes(text, "FLCE_MAX_MEMORY")
    if device.type == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device.index).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(1 << 30, memory // 8)


def stat_dtype(dtype):
    """The dtype of losses and row statistics: float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gemm_dtype(device_type, dtype):
    """The dtype of the GEMMs' operands: the CPU converts float16 to float32."""
    return torch.float32 if dtype == torch.float16 and device_type == "cpu" else dtype


def _logits_dtype(settings, device_type):
    """The dtype of the logits: CPU GEMMs write their operands' dtype, whatever logits_dtype is."""
    return gemm_dtype("cpu", settings.dtype) if device_type == "cpu" else settings.logits_dtype


def row_pitch(vocab, dtype, device_type):
    """The leading dimension of saved logits, in elements."""
    per_unit = _ROW_ALIGNMENT[device_type] // dtype.itemsize
    return (vocab + per_unit - 1) // per_unit * per_unit


def _row_bytes(vocab, dtype, device_type):
    return row_pitch(vocab, dtype, device_type) * dtype.itemsize


def sample_pitch(eps):
    """The width of a row of what save="samples" keeps, in int32 (flce.h: flce_sample_pitch)."""
    return (2 * (math.floor(1.00390625 / eps) + 3) + 31) // 32 * 32


def saved_dtype(settings, device_type, has_probabilities):
    """The dtype of what save="logits" keeps: E, or z if dz is no row factor times E and cannot
    be computed from E (plan.c: choose_form, choose_saved)."""
    operand = gemm_dtype(device_type, settings.dtype)
    caps = any(getattr(settings, name) > 0.0 for name in CAPS)  # loss.h: flce_caps_logits
    keeps_logits = has_probabilities or (settings.wants_entropy and any(settings.gradients))
    keeps_logits |= caps and (settings.label_smoothing > 0.0 or operand == torch.float16)
    return _logits_dtype(settings, device_type) if keeps_logits else operand


def _fits(rows, limit):
    """Whether rows <= limit. torch.export needs one result for all sizes of a dynamic shape."""
    if isinstance(rows, int) or not torch.compiler.is_exporting():
        return rows <= limit
    return torch.fx.experimental.symbolic_shapes.statically_known_true(rows <= limit)


def resolve_save(call, rows):
    """The strategy of `call`, a Signature, for `rows` computed rows: an explicit `save` is kept,
    "auto" is decided, nowhere else than here."""
    settings, device_type = call.settings, call.rows.device.type
    if not call.differentiable:
        return "nothing"
    if settings.gradient == "sampled":
        return "samples"
    if settings.save != "auto":
        return settings.save
    operand, logits = gemm_dtype(device_type, settings.dtype), _logits_dtype(settings, device_type)
    # The forward must not make gradients in three cases: the backward accumulates into the caller's
    # .grad; a compiled backward gets zeros instead of no gradient for lse or entropy, and would
    # recompute everything; float16 cannot hold the gradients of probabilities that are not
    # normalized (plan.c: kept_dtype).
    makes_late = (
        call.accumulates
        or (call.compiling and call.differentiates_outputs)
        or (call.has_probabilities and operand == torch.float16)
    )
    can_keep_gradients = settings.reduction != "none" and not makes_late
    prefers_gradients = device_type == "cuda" and can_keep_gradients
    # Gradients of lse or entropy would make save="grads" recompute the logits.
    if prefers_gradients and settings.saves_memory and not call.differentiates_outputs:
        return "grads"
    kept = saved_dtype(settings, device_type, call.has_probabilities)
    if not _fits(rows, settings.max_memory // _row_bytes(call.share, kept, device_type)):
        return "grads" if can_keep_gradients else "stats"
    small = call.share * call.rows.shape[-1] * operand.itemsize <= _SMALL_WEIGHT_BYTES
    one_chunk = _fits(rows, settings.max_memory // _row_bytes(call.share, logits, device_type))
    return "grads" if prefers_gradients and small and one_chunk else "logits"


def _is_traced():
    """By torch.compile, torch.export or make_fx."""
    return is_compiling() or torch._C._get_dispatch_mode(_PROXY_MODE) is not None


def rows_to_compute(target, valid_bound, ignore_index):
    """The number of rows to compute, None for all.

    On the CPU the rows that are not ignored, which are counted; on CUDA `valid_bound`.
    """
    check_valid_bound(valid_bound)
    if target.is_floating_point():
        if valid_bound is not None:
            expected = "None with probabilities, of which no row is ignored"
            refuse("valid_bound", expected, repr(valid_bound))
        return None
    # Without values to count (compile, export) the operator counts them itself.
    counts = target.is_cpu and type(target) is torch.Tensor and not _is_traced()
    if valid_bound is None and not counts:
        return None
    if counts or isinstance(valid_bound, str) or checks_targets(target.device):
        valid = int((target != ignore_index).sum())  # synchronises with the device
        if isinstance(valid_bound, str):
            valid_bound = valid
        elif valid_bound is not None and valid > valid_bound:
            expected = f"at least {valid}, the number of rows that are not ignored"
            refuse("valid_bound", expected, valid_bound)
    # With a bound of 0 one row is still computed: its result becomes NaN if it is not ignored.
    rows = valid if counts else max(valid_bound, 1)
    return rows if rows < target.shape[0] else None


def from_torch_options(options, linear_weight, classes=None):
    """A dict with those of accum_dtype and max_memory that torch's `options` determine.

    `accum_dtype` is `acc_dtype` if given, except with acc_policy="compact", which sums the weight's
    gradient in the weight's own dtype, in torch too. `max_memory` is the size in bytes of
    `batch_chunk_size` rows of logits in float32 (float64 for a float64 weight): it bounds a chunk;
    if all logits fit, they are one chunk. `chunking_method` has no effect (max_memory decides), nor
    has `allow_retain_graph`: a backward that keeps the graph may always be repeated.

    `options`: torch.nn.LinearCrossEntropyOptions, an object with these fields (else TypeError), or
    None; `linear_weight`: (V, H) or (C, d1, ..., dK, H), of which sizes and dtype are used;
    `classes`: of a row of logits, None for linear_weight.shape[0].
    """
    if options is None:
        return {}
    fields = ("acc_dtype", "acc_policy", "batch_chunk_size")
    if not all(hasattr(options, name) for name in fields):
        expected = f"torch.nn.LinearCrossEntropyOptions or an object with the fields {fields}"
        refuse("options", expected, type(options).__name__, TypeError)
    found = {}
    if options.acc_dtype is not None and options.acc_policy != "compact":
        found["accum_dtype"] = options.acc_dtype
    rows = options.batch_chunk_size
    if rows is not None:
        if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1:
            refuse("options", "a positive int or None as batch_chunk_size", repr(rows))
        classes = linear_weight.shape[0] if classes is None else classes
        row = classes, stat_dtype(linear_weight.dtype), linear_weight.device.type
        found["max_memory"] = int(rows) * _row_bytes(*row)
    return found
