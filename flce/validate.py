"""Refusals, and the checks of what C does not see: types of values, autograd, transforms."""

import functools
import inspect
import math
import numbers
import os
import sys
import warnings

import torch
from torch.compiler import is_compiling

from . import mistakes, torch_private
from ._C import getenv


def refuse(name, expected, got, error=ValueError):
    """Raises a refusal: it names the argument, what was expected and what came."""
    raise refusal(error(f"{name}: expected {expected}, got {got}"))


def refusal(error):
    """The error, marked as one of flce's own, which names its argument: where a call raises another
    error, the caller finds out which argument caused it."""
    if not torch.compiler.is_dynamo_compiling():  # it would refuse the attribute instead
        error.is_flce_refusal = True
    return error


def check_flag(name, value):
    if type(value) is not bool:
        refuse(name, "True or False", repr(value), TypeError)
    return value


def check_integer(name, value, low=None, high=None):
    """Checks for an int in [low, high]; bool is refused."""
    bounds = "an int" if low is None else f"an int of at least {low}"
    bounds = bounds if high is None else f"an int from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        refuse(name, bounds, repr(value), TypeError)
    if isinstance(value, numbers.Integral) and not -(2**63) <= value < 2**63:
        refuse(name, f"{bounds}, of 64 bits", value)
    if (low is not None and value < low) or (high is not None and value > high):
        refuse(name, bounds, value)
    return value


def check_number(name, value, expected="a number"):
    """The number as a float, infinity beyond its range; bool is refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, expected, type(value).__name__, TypeError)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# ---- warnings ----

# Folders whose lines are not the user's: flce's own, which need not be in site-packages, and these.
_NOT_OF_USERS = (os.path.dirname(__file__) + os.sep,)
_NOT_OF_USERS += (os.path.dirname(os.path.dirname(torch.__file__)) + os.sep,)


def warn(text):
    """A UserWarning at the innermost line outside of flce and of installed packages, if any."""
    frame = innermost = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_USERS):
        frame = frame.f_back
    frame = frame or innermost
    space = frame.f_globals
    place = frame.f_code.co_filename, frame.f_lineno, space.get("__name__")
    registry = space.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, *place, registry=registry)


@functools.cache
def warn_once(text):
    """As warn, once in a process."""
    warn(text)


# ---- tensors ----


def check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        refuse(name, "a tensor", mistakes.kind_of(tensor), TypeError)
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        refuse(name, "a dense tensor", got, TypeError)


def is_dtensor(value):
    # By name: importing DTensor imports torch.distributed.
    return type(value).__name__ == "DTensor"


def local_replica(name, value):
    """The value, or the local part of a DTensor, which has to be the same on all ranks."""
    if not is_dtensor(value):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        expected = "a plain tensor, or a DTensor with the placement Replicate()"
        refuse(name, expected, f"a DTensor with {value.placements}")
    return value.to_local()


def is_equal(indices, number):
    """indices == number, for integers of 64 bits: torch compares in the dtype of `indices`, where a
    number beyond it would stand for another."""
    range_of = torch.iinfo(indices.dtype)
    if range_of.min <= number <= range_of.max:
        return indices == number
    return torch.zeros_like(indices, dtype=torch.bool)


def check_shape(name, tensor, shape, meaning=""):
    """`meaning`: what the shape is, appended to it in the message."""
    if tensor.shape != shape:
        refuse(name, f"shape {tuple(shape)}{meaning}", tuple(tensor.shape))


def check_same_device(name, tensor, first_name, first):
    check_device(name, tensor, first_name, first.device)


def check_device(name, tensor, first_name, device):
    """`device`: of the argument `first_name`."""
    if tensor.device != device:
        refuse(name, f"the device of {first_name}, {device}", tensor.device)


def check_constant(name, tensor):
    if tensor.requires_grad:
        got = "requires_grad=True; no gradient is defined for it"
        refuse(name, "a tensor that does not require grad", got)


def check_vector(name, tensor, shape, first_name, first, meaning=""):
    """Real numbers of this shape on the device of `first`; `meaning`: as in check_shape."""
    if tensor.is_complex():
        refuse(name, "real numbers", tensor.dtype, TypeError)
    check_shape(name, tensor, shape, meaning)
    check_same_device(name, tensor, first_name, first)


def seed_tensor(seed, device):
    """gradient_seed as a 0-d tensor on input's device, drawn if None; does not synchronise."""
    if seed is None:
        return torch.randint(2**63 - 1, (), device=device)
    if not isinstance(seed, torch.Tensor):
        check_integer("gradient_seed", seed, -(2**63), 2**63 - 1)
        return torch.full((), seed, dtype=torch.int64, device=device)
    check_tensor("gradient_seed", seed)
    if seed.dtype != torch.int64 or seed.numel() != 1:
        got = f"shape {tuple(seed.shape)} and dtype {seed.dtype}"
        refuse("gradient_seed", "an int, None or a torch.int64 tensor of one element", got)
    check_device("gradient_seed", seed, "input", device)
    return seed.reshape(())


def num_items_tensor(num_items, reduction, device, dtype):
    """The mean's denominator as a 0-d tensor on the device; does not synchronise. device, dtype: of
    input or logits."""
    if reduction != "mean":
        expected = f"None with reduction={reduction!r}, which divides by nothing"
        refuse("num_items", expected, num_items)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(num_items, torch.Tensor):
        check_tensor("num_items", num_items)
        if num_items.dim() != 0 or num_items.is_complex():
            got = f"a tensor of shape {tuple(num_items.shape)} and dtype {num_items.dtype}"
            refuse("num_items", "a number or a real 0-d tensor", got)
        check_constant("num_items", num_items)
        elsewhere = num_items.device != device and type(num_items) is torch.Tensor
        if not (elsewhere and num_items.is_cpu) or is_compiling():
            return num_items.detach().to(device, dtype)
        # Reading a CPU value does not synchronise; copying it to a GPU would.
        return torch.full((), num_items.item(), dtype=dtype, device=device)
    value = check_number("num_items", num_items, "a number or a 0-d tensor")
    if not 0.0 <= value <= torch.finfo(dtype).max:
        refuse("num_items", "a finite number of at least 0", value)
    return torch.full((), value, dtype=dtype, device=device)


def checks_values():
    """Whether FLCE_CHECK asks for checks that wait for the device or for other ranks."""
    return getenv("FLCE_CHECK") not in (None, "", "0")


def check_items(items, valid):
    """As flce_check_items of csrc/core/check.c. `items`, `valid`: CPU tensors of one number."""
    if items == 0 and valid > 0:
        expected = f"a number other than 0 for {int(valid)} rows that are not ignored"
        refuse("num_items", expected, 0)


def refuse_vmap(*args, **kwargs):
    """Registered as the batching rule of an operator, to refuse vmap."""
    raise RuntimeError(
        "flce: vmap is not supported; use the leading dimensions of input and target as the batch, "
        "and instead of is_grads_batched or vectorize=True one backward for each grad_output"
    )


def untraced(function):
    """`function`, hidden from torch.compile. It does not import torch._dynamo, which is slow."""
    return torch_private.disable_dynamo(function) if "torch._dynamo" in sys.modules else function


function_transforms_are_on = torch_private.function_transforms_are_on


def transforms_are_on():
    """Whether a transform of torch.func, forward-mode AD or torch.jit.trace is active."""
    differentiates = torch_private.forward_ad_is_on() or function_transforms_are_on()
    return differentiates or torch_private.jit_traces()


def refuse_transforms(*tensors):
    """Refuses forward-mode AD, torch.func's transforms and torch.jit.trace, for which the operators
    have no rule, and names an alternative. Skips arguments that are not tensors."""
    if not transforms_are_on() or is_compiling():
        return
    if torch_private.jit_traces():
        raise RuntimeError(
            "flce: torch.jit.trace is not supported; use torch.export.export or torch.compile"
        )
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        if torch_private.is_of_torch_func(tensor):
            raise RuntimeError(
                "flce: torch.func transforms are not supported; use torch.autograd.grad or "
                "backward()"
            )
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "flce: forward-mode AD is not supported; use reverse mode (backward, "
                "torch.autograd.grad) or torch.nn.functional.linear and cross_entropy"
            )
