"""Checks of options' values and of tensors. A refusal names the argument, what was expected and
what came. Where a tensor is checked, what signature.py keeps of it serves too.
"""

import math
import numbers

import torch
from torch.compiler import is_compiling

from ._C import getenv
from .options import DTYPES, NUMBERS, OPTIONS, REDUCTIONS, SAVES

_DEVICES = ("cpu", "cuda", "meta")
_SAVES = ("auto", *SAVES[1:])


# ---- values ----


def number(name, value):
    """A Python number; 0-d tensors serve as one, as in torch's own functions.

    Reading one from a GPU waits for it.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_constant(name, value)
        refuse_transforms(value)
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return value


def check_scalars(given):
    """ignore_index and the options NUMBERS of `given` by name, each checked alone."""
    numbers = {name: _check_number(name, given[name]) for name in NUMBERS}
    return {"ignore_index": check_ignore_index(given["ignore_index"]), **numbers}


def _check_number(name, value):
    option = OPTIONS[name]
    if value is None and option.default is None:
        return 0.0
    value = number(name, value)
    if not option.check(value):
        raise ValueError(f"{name}: expected {option.expected}, got {value}")
    return float(value)


def check_choices(reduction, save="auto"):
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}")
    if save not in _SAVES:
        raise ValueError(f"save: expected one of {_SAVES}, got {save!r}")
    if save == "grads" and reduction == "none":
        raise ValueError(
            'save: expected "logits", "stats" or "auto" with reduction="none", got "grads", which '
            "holds the gradients of one scalar"
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


def check_integer(name, value, low, high=None):
    """An int of [low, high], bool excluded."""
    bounds = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected {bounds}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {bounds}, got {value}")
    return value


# ---- tensors ----


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


def check_shape(name, tensor, shape, meaning=""):
    """`meaning`: of that shape, after a comma."""
    if tensor.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}{meaning}, got {tuple(tensor.shape)}"
        )


def check_same_device(name, tensor, first_name, first):
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
        )


def check_constant(name, tensor, which="a tensor that does"):
    if tensor.requires_grad:
        raise ValueError(
            f"{name}: expected {which} not require grad, got requires_grad=True; no gradient is "
            "defined for it"
        )


# `first`: the tensor with the rows, `first_name` its argument.


def check_target(target, vocab, ignore_index, first_name, first):
    """Class indices, one for each row, or probabilities with the classes in a further dimension."""
    shape = first.shape[:-1]
    check_same_device("target", target, first_name, first)
    if target.dtype not in (*DTYPES, torch.int64, torch.int32):
        raise TypeError(
            "target: expected class indices of dtype torch.int64 or torch.int32, or probabilities "
            f"of a floating dtype, got {target.dtype}"
        )
    if not target.dtype.is_floating_point:
        meaning = f", that of {first_name} without its last dimension"
        check_shape("target", target, shape, meaning)
        return
    meaning = " for probabilities, a number for each class"
    check_shape("target", target, (*shape, vocab), meaning)
    check_constant("target", target, "probabilities that do")
    if ignore_index not in (None, -100):
        raise ValueError(
            "ignore_index: expected None or -100 with probabilities, which have no index to "
            f"ignore, got {ignore_index}"
        )


def check_row_vector(name, tensor, first_name, first):
    """A number for each row, or None."""
    if tensor is None:
        return
    if tensor.dtype.is_complex:
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    check_shape(name, tensor, first.shape[:-1], f", a number for each row of {first_name}")
    check_constant(name, tensor)
    check_same_device(name, tensor, first_name, first)


def check_class_weight(weight, vocab, first_name, first):
    """A factor for each class, or None."""
    if weight is None:
        return
    check_float("weight", weight.dtype)
    check_shape("weight", weight, (vocab,), ", a factor for each class")
    check_constant("weight", weight, "class weights that do")
    check_same_device("weight", weight, first_name, first)


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
        check_constant("num_items", num_items)
        elsewhere = num_items.device != first.device and type(num_items) is torch.Tensor
        if not (elsewhere and num_items.is_cpu) or is_compiling():
            return num_items.detach().to(first.device, stat)
        # Reading a CPU value waits for nothing; copying it to a GPU would.
        return torch.full((), num_items.item(), dtype=stat, device=first.device)
    if isinstance(num_items, bool) or not isinstance(num_items, numbers.Real):
        raise TypeError(
            f"num_items: expected a number or a 0-d tensor, got {type(num_items).__name__}"
        )
    if not 0 <= num_items < math.inf:
        raise ValueError(f"num_items: expected a finite number of at least 0, got {num_items}")
    return torch.full((), float(num_items), dtype=stat, device=first.device)


def _check_rows(name, tensor):
    """Of the tensor with the rows."""
    check_float(name, tensor.dtype)
    if tensor.device.type not in _DEVICES:
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got device {tensor.device}")
    if tensor.dim() < 1:
        raise ValueError(f"{name}: expected at least one dimension, got a 0-d tensor")


def check_operands(input, linear_weight, linear_bias):
    """Shapes (..., H), (V, H) and (V,) or None, of floating dtypes, on one device."""
    _check_rows("input", input)
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
    check_same_device("linear_weight", linear_weight, "input", input)
    if linear_bias is not None:
        check_float("linear_bias", linear_bias.dtype)
        check_shape("linear_bias", linear_bias, (vocab,))
        check_same_device("linear_bias", linear_bias, "input", input)


def check_logits(logits):
    _check_rows("logits", logits)
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: expected at least one class, got shape {tuple(logits.shape)}")


# ---- transforms ----


def refuse_vmap(*args, **kwargs):
    """Registered as the batching rule of an operator."""
    raise RuntimeError(
        "flce: vmap is not supported; use the leading dimensions of input and target as the batch"
    )


function_transforms_are_on = torch._C._are_functorch_transforms_active  # those of torch.func
_forward_ad = torch.autograd.forward_ad


def transforms_are_on():
    """Whether one of torch.func's is, or forward-mode AD."""
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
        if _forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "flce: forward-mode AD is not supported; use reverse mode (backward, "
                "torch.autograd.grad) or torch.nn.functional.linear and cross_entropy"
            )


# ---- the range of targets ----


def checks_targets(device):
    """CPU targets are always checked (in C); CUDA ones with FLCE_CHECK=1, at the cost of a wait."""
    return device.type == "cuda" and getenv("FLCE_CHECK") not in (None, "", "0")


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
