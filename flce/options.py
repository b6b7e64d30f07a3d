"""Checks and resolution of the options: a refusal names the argument, what it expected and got."""

import numbers
import os
import re
from functools import cache

import torch

REDUCTIONS = ("none", "mean", "sum")
SAVES = ("auto", "logits", "grads", "stats")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "meta")

_DEFAULT_MAX_MEMORY = 1 << 30
_ROW_ALIGNMENT = 16  # bytes
# An H200 scales the gradient of such a weight in less time than the backward's first launch takes
# to come: there the forward makes the gradients although the logits fit (benchmarks/NOTES.md).
_SMALL_WEIGHT_BYTES = 128 << 20
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


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


@cache
def _device_memory(device_type, index):
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(index).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_max_memory(device):
    """FLCE_MAX_MEMORY, else the smaller of 1 GiB and an eighth of the device's memory. Bytes."""
    text = os.environ.get("FLCE_MAX_MEMORY")
    if text:
        return parse_bytes(text, "FLCE_MAX_MEMORY")
    return min(_DEFAULT_MAX_MEMORY, _device_memory(device.type, device.index) // 8)


def resolve_max_memory(max_memory, device):
    if max_memory is None:
        return default_max_memory(device)
    return parse_bytes(max_memory)


def row_pitch(vocab, dtype):
    """Elements from one row of saved logits to the next (plan.c: ROW_ALIGNMENT)."""
    per_unit = _ROW_ALIGNMENT // dtype.itemsize
    return (vocab + per_unit - 1) // per_unit * per_unit


def resolve_save(save, device_type, sizes, dtypes, reduction, max_memory):
    """The strategy: an explicit one stands, "auto" is decided.

    `sizes` are N, H, V and `dtypes` those of the products' operands and of the logits.

    It is resolved here and nowhere else: the comparisons also have to be made of symbolic sizes.
    """
    if save != "auto":
        return save
    tokens, hidden, vocab = sizes
    operand, logits_dtype = dtypes
    # float16 gradients would have to be kept in float32 until grad_output is known.
    can_keep_gradients = reduction != "none" and operand != torch.float16
    if tokens * row_pitch(vocab, operand) * operand.itemsize > max_memory:
        return "grads" if can_keep_gradients else "stats"
    small = vocab * hidden * operand.itemsize <= _SMALL_WEIGHT_BYTES
    one_chunk = tokens * row_pitch(vocab, logits_dtype) * logits_dtype.itemsize <= max_memory
    if device_type == "cuda" and can_keep_gradients and small and one_chunk:
        return "grads"
    return "logits"


def check_choices(reduction, label_smoothing, save="auto"):
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}")
    if save not in SAVES:
        raise ValueError(f"save: expected one of {SAVES}, got {save!r}")
    if save == "grads" and reduction == "none":
        raise ValueError(
            'save: expected "logits", "stats" or "auto" with reduction="none", got "grads", which '
            "holds the gradients of one scalar"
        )
    if not isinstance(label_smoothing, numbers.Real):
        raise TypeError(
            f"label_smoothing: expected a number in [0, 1], got {type(label_smoothing).__name__}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing: expected 0 <= label_smoothing <= 1, got {label_smoothing}"
        )


def check_ignore_index(ignore_index):
    """-100 for None, as torch's linear_cross_entropy has it."""
    if ignore_index is None:
        return -100
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise TypeError(f"ignore_index: expected an int or None, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: expected an int64, got {ignore_index}")
    return int(ignore_index)


def check_dtype(name, dtype, operand, stat):
    """`dtype`, which may be that of the products' operands or of the statistics, or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: expected a torch.dtype or None, got {dtype!r}")
    if dtype not in (None, operand, stat):
        choice = f"{operand} or {stat}" if operand != stat else f"{operand}"
        raise ValueError(f"{name}: expected {choice}, got {dtype}")
    return dtype


def compute_dtype(input, linear_weight, linear_bias):
    """The dtype of the products: autocast's where it is on, as F.linear has it, else their own."""
    device_type = input.device.type
    given = [t.dtype for t in (input, linear_weight, linear_bias) if t is not None]
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        # Autocast leaves float64 alone.
        if torch.float64 not in given:
            return torch.get_autocast_dtype(device_type)
    if input.dtype != linear_weight.dtype:
        raise TypeError(
            f"linear_weight: expected the dtype of input, {input.dtype}, got "
            f"{linear_weight.dtype}; torch.autocast casts both"
        )
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if given[-1] not in (input.dtype, wide):
        raise TypeError(
            f"linear_bias: expected the dtype of input, {input.dtype}, or {wide}, "
            f"got {given[-1]}; torch.autocast casts it"
        )
    return input.dtype


def _check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def _check_float(name, tensor):
    _check_tensor(name, tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name}: expected float64, float32, bfloat16 or float16, got {tensor.dtype}"
        )


def _check_same_device(name, tensor, first_name, first):
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
        )


def _check_target(target, shape, first_name, first):
    _check_tensor("target", target)
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected class indices of dtype torch.int64, got {target.dtype}")
    if target.shape != shape:
        raise ValueError(
            f"target: expected shape {tuple(shape)}, that of {first_name} without its last "
            f"dimension, got {tuple(target.shape)}"
        )
    _check_same_device("target", target, first_name, first)


def _check_class_weight(weight, vocab, first_name, first):
    if weight is None:
        return
    _check_float("weight", weight)
    if weight.shape != (vocab,):
        raise ValueError(
            f"weight: expected shape ({vocab},), a factor for each class, got {tuple(weight.shape)}"
        )
    if weight.requires_grad:
        raise ValueError(
            "weight: expected class weights that do not require grad, got requires_grad=True; "
            "no gradient is defined for them"
        )
    _check_same_device("weight", weight, first_name, first)


def _check_first(name, tensor):
    _check_float(name, tensor)
    if tensor.device.type not in DEVICES:
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got device {tensor.device}")
    if tensor.dim() < 1:
        raise ValueError(f"{name}: expected at least one dimension, got a 0-d tensor")


def check_linear(input, linear_weight, target, linear_bias, weight):
    _check_first("input", input)
    _check_float("linear_weight", linear_weight)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"linear_weight: expected shape (V, {input.shape[-1]}) for input of shape "
            f"{tuple(input.shape)}, got {tuple(linear_weight.shape)}"
        )
    vocab, hidden = linear_weight.shape
    if vocab < 1 or hidden < 1:
        raise ValueError(
            f"linear_weight: expected at least one row and column, got {tuple(linear_weight.shape)}"
        )
    _check_same_device("linear_weight", linear_weight, "input", input)
    _check_target(target, input.shape[:-1], "input", input)
    if linear_bias is not None:
        _check_float("linear_bias", linear_bias)
        if linear_bias.shape != (vocab,):
            raise ValueError(
                f"linear_bias: expected shape ({vocab},), got {tuple(linear_bias.shape)}"
            )
        _check_same_device("linear_bias", linear_bias, "input", input)
    _check_class_weight(weight, vocab, "input", input)


def check_logits(logits, target, weight):
    _check_first("logits", logits)
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: expected at least one class, got shape {tuple(logits.shape)}")
    _check_target(target, logits.shape[:-1], "logits", logits)
    _check_class_weight(weight, logits.shape[-1], "logits", logits)


def refuse_vmap(*args, **kwargs):
    """Stands for an operator's batching rule."""
    raise RuntimeError(
        "flce: vmap is not supported; use the leading dimensions of input and target as the batch"
    )


def refuse_transforms(*tensors):
    """Forward-mode AD and torch.func's transforms have no rule here: say so, and what to use."""
    for tensor in tensors:
        if tensor is None or torch.compiler.is_compiling():
            continue
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            raise RuntimeError(
                "flce: torch.func transforms are not supported; use torch.autograd.grad or "
                "backward()"
            )
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "flce: forward-mode AD is not supported; use reverse mode (backward, "
                "torch.autograd.grad) or torch.nn.functional.linear and cross_entropy"
            )


def checks_targets(device):
    """CPU targets are always checked (in C); CUDA ones with FLCE_CHECK=1, at the cost of a wait."""
    return device.type == "cuda" and os.environ.get("FLCE_CHECK", "0") not in ("", "0")


def check_target_range(target, vocab, ignore_index):
    flat = target.reshape(-1)
    bad = ((flat < 0) | (flat >= vocab)) & (flat != ignore_index)
    rows = bad.nonzero()
    if rows.numel():
        row = int(rows[0])
        raise IndexError(
            f"target[{row}] is {int(flat[row])}: expected 0 <= target < {vocab} "
            f"or ignore_index {ignore_index}"
        )
