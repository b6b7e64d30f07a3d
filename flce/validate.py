"""Checks of the options' values and of tensors, and the wording of refusals. A tensor may be
given as itself or as the metadata that signature.py caches (Meta)."""

import math
import numbers

import torch
from torch.compiler import is_compiling

from ._C import getenv
from .options import DTYPES, GRADIENT_KINDS, NUMBERS, OPTIONS, REDUCTIONS, SAVES

_SAVES = ("auto", *SAVES[1:])
_ATTRIBUTES = ("grad", "main_grad")  # attributes of a parameter that accumulate_into may name


def refuse(name, expected, got, error=ValueError):
    """Raises a refusal: it names the argument, what was expected and what came."""
    raise error(f"{name}: expected {expected}, got {got}")


def number(name, value):
    """A Python number; also from a 0-d tensor, as in torch. Reading one from a GPU synchronises."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        check_constant(name, value)
        refuse_transforms(value)
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, "a number", type(value).__name__, TypeError)
    return value


def _in_range(name, value, check, expected):
    """The number as a float, for which `check` is true."""
    value = number(name, value)
    try:
        if check(converted := float(value)):
            return converted
    except OverflowError:
        value = "a number beyond the range of float64"
    refuse(name, expected, value)


def check_flag(name, value):
    if type(value) is not bool:
        refuse(name, "True or False", repr(value), TypeError)
    return value


def check_scalars(given):
    """The checked ignore_index and NUMBERS of `given` by name; 0.0 for None."""
    scalars = {"ignore_index": check_ignore_index(given["ignore_index"])}
    for name in NUMBERS:
        option, value = OPTIONS[name], given[name]
        unset = value is None and option.default is None
        scalars[name] = 0.0 if unset else _in_range(name, value, option.check, option.expected)
    return scalars


def check_choices(given):
    """Checks the options that are one of a few texts, and whether they can be combined."""
    reduction, save, gradient = given["reduction"], given["save"], given["gradient"]
    accumulate_into = given["accumulate_into"]
    if reduction not in REDUCTIONS:
        refuse("reduction", f"one of {REDUCTIONS}", repr(reduction))
    if save not in _SAVES:
        refuse("save", f"one of {_SAVES}", repr(save))
    if accumulate_into is not None and accumulate_into not in _ATTRIBUTES:
        refuse("accumulate_into", f"one of {_ATTRIBUTES} or None", repr(accumulate_into))
    if gradient not in GRADIENT_KINDS:
        refuse("gradient", f"one of {GRADIENT_KINDS}", repr(gradient))
    if gradient == "sampled" and save not in ("auto", "samples"):
        refuse("save", '"samples" or "auto" with gradient="sampled"', repr(save))
    if gradient == "exact" and save == "samples":
        refuse("save", 'gradient="sampled" with "samples"', 'gradient="exact"')
    if save == "grads" and reduction == "none":
        expected = '"logits", "stats" or "auto" with reduction="none"'
        refuse("save", expected, '"grads", which holds the gradients of one scalar')
    if save == "grads" and accumulate_into is not None:
        expected = f'"logits", "stats" or "auto" with accumulate_into={accumulate_into!r}'
        got = '"grads", whose forward would change the parameter\'s gradient'
        refuse("save", expected, got)


def check_ignore_index(ignore_index):
    """ignore_index, -100 for None as in torch's linear_cross_entropy."""
    if ignore_index is None:
        return -100
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        refuse("ignore_index", "an int or None", repr(ignore_index), TypeError)
    if not -(2**63) <= ignore_index < 2**63:
        refuse("ignore_index", "an int64", ignore_index)
    return int(ignore_index)


def check_integer(name, value, low, high=None):
    """Checks for an int in [low, high]; bool is refused."""
    bounds = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        refuse(name, bounds, repr(value), TypeError)
    if value < low or (high is not None and value > high):
        refuse(name, bounds, value)
    return value


def seed_tensor(seed, first):
    """gradient_seed as a 0-d tensor on `first`'s device, drawn if None; does not synchronise."""
    if seed is None:
        return torch.randint(2**63 - 1, (), device=first.device)
    if not isinstance(seed, torch.Tensor):
        check_integer("gradient_seed", seed, -(2**63), 2**63 - 1)
        return torch.full((), seed, dtype=torch.int64, device=first.device)
    check_tensor("gradient_seed", seed)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        got = f"shape {tuple(seed.shape)} and dtype {seed.dtype}"
        refuse("gradient_seed", "an int, None or a torch.int64 tensor of one element", got)
    check_same_device("gradient_seed", seed, "input", first)
    return seed.reshape(())


def num_items_tensor(num_items, reduction, stat, first):
    """The mean's denominator as a 0-d tensor on `first`'s device; does not synchronise."""
    if num_items is None:
        return None
    if reduction != "mean":
        expected = f"None with reduction={reduction!r}, which divides by nothing"
        refuse("num_items", expected, num_items)
    if isinstance(num_items, torch.Tensor):
        check_tensor("num_items", num_items)
        if num_items.dim() != 0 or num_items.is_complex():
            got = f"a tensor of shape {tuple(num_items.shape)} and dtype {num_items.dtype}"
            refuse("num_items", "a number or a real 0-d tensor", got)
        check_constant("num_items", num_items)
        elsewhere = num_items.device != first.device and type(num_items) is torch.Tensor
        if not (elsewhere and num_items.is_cpu) or is_compiling():
            return num_items.detach().to(first.device, stat)
        # Reading a CPU value does not synchronise; copying it to a GPU would.
        return torch.full((), num_items.item(), dtype=stat, device=first.device)
    if isinstance(num_items, bool) or not isinstance(num_items, numbers.Real):
        refuse("num_items", "a number or a 0-d tensor", type(num_items).__name__, TypeError)
    check, expected = (lambda value: 0.0 <= value < math.inf), "a finite number of at least 0"
    value = _in_range("num_items", num_items, check, expected)
    return torch.full((), value, dtype=stat, device=first.device)


def check_float(name, dtype):
    if dtype not in DTYPES:
        refuse(name, "float64, float32, bfloat16 or float16", repr(dtype), TypeError)


def check_dtype(name, dtype, operand, stat):
    """Checks that `dtype` is None, the dtype of the GEMMs' operands or the stat dtype."""
    check_dtype_type(name, dtype)
    if dtype not in (None, operand, stat):
        refuse(name, f"{operand} or {stat}" if operand != stat else f"{operand}", dtype)
    return dtype


def check_dtype_type(name, dtype):
    """The check of accum_dtype and logits_dtype before the operands are known."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        refuse(name, "a torch.dtype or None", repr(dtype), TypeError)


def check_valid_bound(valid_bound):
    if isinstance(valid_bound, str):
        if valid_bound != "count":
            refuse("valid_bound", 'an int, "count" or None', repr(valid_bound))
    elif valid_bound is not None:
        check_integer("valid_bound", valid_bound, 0)


def compute_dtype(input, linear_weight, linear_bias, autocast):
    """The dtype of the GEMMs: `autocast` if it is on, as in F.linear, else the operands' own."""
    given = [t.dtype for t in (input, linear_weight, linear_bias) if t is not None]
    own, weight_dtype, bias_dtype = *given[:2], given[-1]
    # Autocast does not cast float64.
    if autocast is not None and torch.float64 not in given:
        return autocast
    if own != weight_dtype:
        got = f"{weight_dtype}; torch.autocast casts both"
        refuse("linear_weight", f"the dtype of input, {own}", got, TypeError)
    wide = torch.float64 if own == torch.float64 else torch.float32
    if bias_dtype not in (own, wide):
        choice = f"{own}, or {wide}" if own != wide else f"{wide}"
        got = f"{bias_dtype}; torch.autocast casts it"
        refuse("linear_bias", f"the dtype of input, {choice}", got, TypeError)
    return own


def check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        refuse(name, "a tensor", type(tensor).__name__, TypeError)
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        refuse(name, "a dense tensor", got, TypeError)


def check_shape(name, tensor, shape, meaning=""):
    """`meaning`: what the shape is, appended to it in the message."""
    if tensor.shape != shape:
        refuse(name, f"shape {tuple(shape)}{meaning}", tuple(tensor.shape))


def check_same_device(name, tensor, first_name, first):
    if tensor.device != first.device:
        refuse(name, f"the device of {first_name}, {first.device}", tensor.device)


def check_constant(name, tensor, which="a tensor that does"):
    if tensor.requires_grad:
        got = "requires_grad=True; no gradient is defined for it"
        refuse(name, f"{which} not require grad", got)


def check_rows(name, tensor):
    """Checks the tensor with the rows, shape (..., H) or (..., V)."""
    check_float(name, tensor.dtype)
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        refuse(name, "a CPU or CUDA tensor", f"device {tensor.device}")
    if len(tensor.shape) < 1:
        refuse(name, "at least one dimension", "a 0-d tensor")


def _shown_shape(parameter):
    """The shape of a parameter in a refusal, with the remedy where it is that of a partitioned
    one."""
    shape = tuple(parameter.shape)
    if shape != (0,):
        return shape
    return (
        f"{shape}, as DeepSpeed's ZeRO-3 leaves a parameter outside of its Module's hooks: call "
        "the Module (flce.LinearCrossEntropyHead, or the model after flce.fuse), or enter "
        "deepspeed.zero.GatheredParameters around forward and backward"
    )


def check_head(input, linear_weight, linear_bias, least=1):
    """Checks shapes (V, H), (V,) or None, dtypes and devices against those of input (..., H).
    `least`: of V."""
    check_float("linear_weight", linear_weight.dtype)
    if len(linear_weight.shape) != 2 or linear_weight.shape[1] != input.shape[-1]:
        expected = f"shape (V, {input.shape[-1]}) for input of shape {tuple(input.shape)}"
        refuse("linear_weight", expected, _shown_shape(linear_weight))
    vocab, hidden = linear_weight.shape
    if vocab < least or hidden < 1:
        refuse("linear_weight", "at least one row and column", tuple(linear_weight.shape))
    check_same_device("linear_weight", linear_weight, "input", input)
    if linear_bias is not None:
        check_float("linear_bias", linear_bias.dtype)
        if linear_bias.shape != (vocab,):
            refuse("linear_bias", f"shape ({vocab},)", _shown_shape(linear_bias))
        check_same_device("linear_bias", linear_bias, "input", input)


def check_target(target, vocab, ignore_index, first_name, first):
    """Checks that the target has one class index for each row of `first`, the argument
    `first_name`, or probabilities with the classes in one more dimension."""
    shape = first.shape[:-1]
    check_same_device("target", target, first_name, first)
    if target.dtype not in (*DTYPES, torch.int64, torch.int32):
        indices = "class indices of dtype torch.int64 or torch.int32"
        expected = f"{indices}, or probabilities of a floating dtype"
        refuse("target", expected, target.dtype, TypeError)
    if not target.dtype.is_floating_point:
        meaning = f", that of {first_name} without its last dimension"
        check_shape("target", target, shape, meaning)
        return
    check_shape("target", target, (*shape, vocab), " for probabilities, a number for each class")
    check_constant("target", target, "probabilities that do")
    if ignore_index not in (None, -100):
        expected = "None or -100 with probabilities, which have no index to ignore"
        refuse("ignore_index", expected, ignore_index)


def check_vector(name, tensor, shape, each, first_name, first, which="a tensor that does"):
    """Checks a tensor with a real number for `each` row or class, or None."""
    if tensor is None:
        return
    if tensor.dtype.is_complex:
        refuse(name, "real numbers", tensor.dtype, TypeError)
    check_shape(name, tensor, shape, f", {each}")
    check_constant(name, tensor, which)
    check_same_device(name, tensor, first_name, first)


def checks_more():
    """FLCE_CHECK=1: checks that cost a synchronisation of the device, or of the ranks."""
    return getenv("FLCE_CHECK") not in (None, "", "0")


def checks_targets(device):
    """Whether the range is checked: on the CPU (in C); on CUDA with FLCE_CHECK=1, synchronising."""
    return device.type == "cuda" and checks_more()


def check_target_range(target, vocab, ignore_index):
    """IndexError as from the CPU backend, for other devices. Only class indices have a range."""
    if not checks_targets(target.device) or target.is_floating_point():
        return
    flat = target.reshape(-1)
    rows = (((flat < 0) | (flat >= vocab)) & (flat != ignore_index)).nonzero()
    if rows.numel():
        row = int(rows[0])
        raise IndexError(
            f"target[{row}] is {int(flat[row])}: expected 0 <= target < {vocab} "
            f"or ignore_index {ignore_index}"
        )


def refuse_vmap(*args, **kwargs):
    """Registered as the batching rule of an operator, to refuse vmap."""
    raise RuntimeError(
        "flce: vmap is not supported; use the leading dimensions of input and target as the batch, "
        "and instead of is_grads_batched or vectorize=True one backward for each grad_output"
    )


function_transforms_are_on = torch._C._are_functorch_transforms_active  # torch.func's
_forward_ad = torch.autograd.forward_ad


def transforms_are_on():
    """Whether a transform of torch.func, forward-mode AD or torch.jit.trace is active."""
    differentiates = getattr(_forward_ad, "_current_level", 0) >= 0 or function_transforms_are_on()
    return differentiates or torch._C._is_tracing()


def refuse_transforms(*tensors):
    """Refuses forward-mode AD, torch.func's transforms and torch.jit.trace, for which the operators
    have no rule, and names an alternative. Skips arguments that are not tensors."""
    if not transforms_are_on() or is_compiling():
        return
    if torch._C._is_tracing():
        raise RuntimeError(
            "flce: torch.jit.trace is not supported; use torch.export.export or torch.compile"
        )
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
