"""Checks and resolution of the options: a refusal names the argument, what it expected and got."""

import math
import numbers
import os
import re
import typing
from functools import cache

import torch
from torch.compiler import is_compiling

from .compiled import getenv

REDUCTIONS = ("none", "mean", "sum")
SAVES = ("auto", "logits", "grads", "stats")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "meta")

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


class Scalars(typing.NamedTuple):
    """The numbers of the loss, in the operators' order (csrc/flce.h: flce_loss)."""

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float
    temperature: float
    z_loss: float


_DEFAULT_SCALARS = (-100, 0.0, 1.0, None, 1.0, 0.0)
_CHECKED_SCALARS = Scalars(-100, 0.0, 1.0, 0.0, 1.0, 0.0)


def number(name, value):
    """A Python number; 0-d tensors serve as one, as in torch's own functions.

    Reading one from a GPU waits for it.
    """
    if type(value) is float or type(value) is int:  # an ABC's isinstance takes longer than a check
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        _check_constant(name, value)
        refuse_transforms(value)
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return value


def check_scalars(
    ignore_index=-100,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    temperature=1.0,
    z_loss=0.0,
):
    """Each checked alone; softcap None becomes 0."""
    given = (ignore_index, label_smoothing, logit_scale, softcap, temperature, z_loss)
    if type(ignore_index) is int and given == _DEFAULT_SCALARS:
        return _CHECKED_SCALARS
    for name, value in zip(Scalars._fields[1:], given[1:], strict=True):
        if value is not None or name != "softcap":
            number(name, value)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing: expected 0 <= label_smoothing <= 1, got {label_smoothing}"
        )
    if not math.isfinite(logit_scale) or logit_scale == 0.0:
        raise ValueError(f"logit_scale: expected a finite number other than 0, got {logit_scale}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a positive finite number or None, got {softcap}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature: expected a positive finite number, got {temperature}")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss: expected a finite number of at least 0, got {z_loss}")
    return Scalars(
        check_ignore_index(ignore_index),
        float(label_smoothing),
        float(logit_scale),
        0.0 if softcap is None else float(softcap),
        float(temperature),
        float(z_loss),
    )


def check_choices(reduction, save="auto"):
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}")
    if save not in SAVES:
        raise ValueError(f"save: expected one of {SAVES}, got {save!r}")
    if save == "grads" and reduction == "none":
        raise ValueError(
            'save: expected "logits", "stats" or "auto" with reduction="none", got "grads", which '
            "holds the gradients of one scalar"
        )


def check_ignore_index(ignore_index):
    """-100 for None, as torch's linear_cross_entropy has it."""
    if ignore_index is None:
        return -100
    if type(ignore_index) is not int and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral)
    ):
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


def compute_dtype(input, linear_weight, linear_bias, autocast):
    """The dtype of the products: `autocast` where it is on, as F.linear has it, else their own."""
    given = [t.dtype for t in (input, linear_weight, linear_bias) if t is not None]
    # Autocast leaves float64 alone.
    if autocast is not None and torch.float64 not in given:
        return autocast
    if input.dtype != linear_weight.dtype:
        raise TypeError(
            f"linear_weight: expected the dtype of input, {input.dtype}, got "
            f"{linear_weight.dtype}; torch.autocast casts both"
        )
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if given[-1] not in (input.dtype, wide):
        choice = f"{input.dtype}, or {wide}" if input.dtype != wide else f"{wide}"
        raise TypeError(
            f"linear_bias: expected the dtype of input, {choice}, got {given[-1]}; torch.autocast "
            "casts it"
        )
    return input.dtype


def check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")


def check_float(name, dtype):
    if dtype not in DTYPES:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {dtype!r}")


def _check_same_device(name, tensor, first_name, first):
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
        )


# These take tensors or what signature.py keeps of them. `first`: the one with the rows.


def check_target(target, vocab, ignore_index, first_name, first):
    """Class indices, one for each row, or probabilities with the classes in a further dimension."""
    shape = first.shape[:-1]
    _check_same_device("target", target, first_name, first)
    if target.dtype in DTYPES:
        _check_probabilities(target, (*shape, vocab), ignore_index)
        return
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            "target: expected class indices of dtype torch.int64 or torch.int32, or probabilities "
            f"of a floating dtype, got {target.dtype}"
        )
    if target.shape != shape:
        raise ValueError(
            f"target: expected shape {tuple(shape)}, that of {first_name} without its last "
            f"dimension, got {tuple(target.shape)}"
        )


def _check_probabilities(target, shape, ignore_index):
    if target.shape != shape:
        raise ValueError(
            f"target: expected shape {tuple(shape)} for probabilities, a number for each class, "
            f"got {tuple(target.shape)}"
        )
    _check_constant("target", target, "probabilities that do")
    if ignore_index not in (None, -100):
        raise ValueError(
            "ignore_index: expected None or -100 with probabilities, which have no index to "
            f"ignore, got {ignore_index}"
        )


def check_row_vector(name, tensor, first_name, first):
    """A number for each row, or None."""
    if tensor is None:
        return
    shape = first.shape[:-1]
    if tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, a number for each row of {first_name}, got "
            f"{tuple(tensor.shape)}"
        )
    _check_constant(name, tensor)
    _check_same_device(name, tensor, first_name, first)


def _check_constant(name, tensor, which="a tensor that does"):
    if tensor.requires_grad:
        raise ValueError(
            f"{name}: expected {which} not require grad, got requires_grad=True; no gradient is "
            "defined for it"
        )


def num_items_tensor(num_items, reduction, stat, first):
    """The denominator of the mean as a 0-d tensor on `first`'s device, made without a wait."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise ValueError(
            f"num_items: expected None with reduction={reduction!r}, which divides by nothing, got "
            f"{num_items}"
        )
    if isinstance(num_items, torch.Tensor):
        check_tensor("num_items", num_items)
        if num_items.dim() != 0 or num_items.is_complex():
            raise ValueError(
                "num_items: expected a number or a real 0-d tensor, got a tensor of shape "
                f"{tuple(num_items.shape)} and dtype {num_items.dtype}"
            )
        _check_constant("num_items", num_items)
        if num_items.device != first.device and type(num_items) is torch.Tensor:
            # Reading a CPU value waits for nothing; copying it to a GPU would.
            if num_items.device.type == "cpu" and not is_compiling():
                return torch.full((), num_items.item(), dtype=stat, device=first.device)
        return num_items.detach().to(first.device, stat)
    if isinstance(num_items, bool) or not isinstance(num_items, numbers.Real):
        raise TypeError(
            f"num_items: expected a number or a 0-d tensor, got {type(num_items).__name__}"
        )
    if not 0 <= num_items < math.inf:
        raise ValueError(f"num_items: expected a finite number of at least 0, got {num_items}")
    return torch.full((), float(num_items), dtype=stat, device=first.device)


def check_integer(name, value, low, high=None):
    """An int of [low, high], bool excluded."""
    bounds = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if type(value) is not int and (
        isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt))
    ):
        raise TypeError(f"{name}: expected {bounds}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {bounds}, got {value}")
    return value


def shifted_target(target, shift, cu_seqlens, ignore_index):
    """The target of each position: that `shift` further on, `ignore_index` at a sequence's end.

    Sequences are the last dimension of `target` and, with `cu_seqlens`, end there too.
    """
    check_integer("shift", shift, 0)
    if shift == 0:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens: expected None without a shift, whose ends it marks, got a tensor"
            )
        return target
    if target.is_floating_point():
        raise ValueError(
            f"shift: expected 0 with probabilities, which a shift would have to copy, got {shift}"
        )
    if cu_seqlens is None and target.dim() < 2:
        raise ValueError(
            "shift: expected an input of at least 3 dimensions, or cu_seqlens, got an input of "
            f"{target.dim() + 1} dimensions"
        )
    length = target.shape[-1]
    # Of a target in int32 too: ignore_index may be any int64.
    shifted = torch.full_like(target, ignore_index, dtype=torch.int64)
    if shift < length:
        shifted[..., : length - shift] = target[..., shift:]
    if cu_seqlens is None:
        return shifted
    return shifted.masked_fill(_crosses_end(target, shift, cu_seqlens), ignore_index)


def _crosses_end(target, shift, cu_seqlens):
    """Which positions have the end of their sequence before their target, or no sequence."""
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            "cu_seqlens: expected a vector of torch.int32 or torch.int64 offsets, got shape "
            f"{tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
        )
    if cu_seqlens.shape[0] < 2:
        raise ValueError(
            "cu_seqlens: expected at least two offsets, the begin and the end of a sequence, got "
            f"{cu_seqlens.shape[0]}"
        )
    _check_same_device("cu_seqlens", cu_seqlens, "target", target)
    offsets = cu_seqlens.to(torch.int64)
    position = torch.arange(target.numel(), device=target.device)
    segment = torch.searchsorted(offsets, position, right=True)
    end = offsets[segment.clamp(max=offsets.shape[0] - 1)]
    # Before the first offset there is no sequence either.
    return ((position + shift >= end) | (segment == 0)).reshape(target.shape)


def check_bound(valid_bound, has_probabilities):
    if valid_bound is None:
        return
    check_integer("valid_bound", valid_bound, 0)
    if has_probabilities:
        raise ValueError(
            "valid_bound: expected None with probabilities, of which no row is ignored, got "
            f"{valid_bound}"
        )


def rows_to_compute(target, valid_bound, ignore_index):
    """How many rows are to be computed, None for all.

    On the CPU the rows that are not ignored, which are counted; on CUDA `valid_bound` of them.
    """
    check_bound(valid_bound, target.is_floating_point())
    if target.is_floating_point():
        return None
    # Without values to count (compile, export) the operator counts them itself.
    if target.device.type == "cpu" and type(target) is torch.Tensor and not is_compiling():
        rows = int((target != ignore_index).sum())
        _check_valid_rows(rows, valid_bound)
    elif valid_bound is None:
        return None
    else:
        if checks_targets(target.device):
            _check_valid_rows(int((target != ignore_index).sum()), valid_bound)
        # A bound of 0 still computes a row, which carries the NaN if that row is not ignored.
        rows = max(valid_bound, 1)
    return rows if rows < target.shape[0] else None


def _check_valid_rows(valid, valid_bound):
    if valid_bound is not None and valid > valid_bound:
        raise ValueError(
            f"valid_bound: expected at least {valid}, the number of rows that are not ignored, got "
            f"{valid_bound}"
        )


def check_class_weight(weight, vocab, first_name, first):
    if weight is None:
        return
    check_float("weight", weight.dtype)
    if weight.shape != (vocab,):
        raise ValueError(
            f"weight: expected shape ({vocab},), a factor for each class, got {tuple(weight.shape)}"
        )
    _check_constant("weight", weight, "class weights that do")
    _check_same_device("weight", weight, first_name, first)


def _check_first(name, tensor):
    check_float(name, tensor.dtype)
    if tensor.device.type not in DEVICES:
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got device {tensor.device}")
    if tensor.dim() < 1:
        raise ValueError(f"{name}: expected at least one dimension, got a 0-d tensor")


def check_operands(input, linear_weight, linear_bias):
    _check_first("input", input)
    check_float("linear_weight", linear_weight.dtype)
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
    if linear_bias is not None:
        check_float("linear_bias", linear_bias.dtype)
        if linear_bias.shape != (vocab,):
            raise ValueError(
                f"linear_bias: expected shape ({vocab},), got {tuple(linear_bias.shape)}"
            )
        _check_same_device("linear_bias", linear_bias, "input", input)


def check_logits(logits):
    _check_first("logits", logits)
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: expected at least one class, got shape {tuple(logits.shape)}")


def refuse_vmap(*args, **kwargs):
    """Stands for an operator's batching rule."""
    raise RuntimeError(
        "flce: vmap is not supported; use the leading dimensions of input and target as the batch"
    )


def function_transforms_are_on():
    """Whether a transform of torch.func has called."""
    return torch._C._are_functorch_transforms_active()


_forward_ad = torch.autograd.forward_ad


def transforms_are_on():
    """Whether one of torch.func's has, or forward-mode AD is on."""
    return getattr(_forward_ad, "_current_level", 0) >= 0 or function_transforms_are_on()


def refuse_transforms(*tensors):
    """Forward-mode AD and torch.func's transforms have no rule here: say so, and what to use. What
    is no tensor is passed over."""
    if not transforms_are_on() or is_compiling():
        return
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
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


def given_check():
    """The text of FLCE_CHECK, or None."""
    return getenv("FLCE_CHECK")


def checks_targets(device):
    """CPU targets are always checked (in C); CUDA ones with FLCE_CHECK=1, at the cost of a wait."""
    return device.type == "cuda" and given_check() not in (None, "", "0")


def check_target_range(target, vocab, ignore_index):
    """IndexError as on the CPU. Classes alone have a range."""
    if target.is_floating_point():
        return
    flat = target.reshape(-1)
    bad = ((flat < 0) | (flat >= vocab)) & (flat != ignore_index)
    rows = bad.nonzero()
    if rows.numel():
        row = int(rows[0])
        raise IndexError(
            f"target[{row}] is {int(flat[row])}: expected 0 <= target < {vocab} "
            f"or ignore_index {ignore_index}"
        )
