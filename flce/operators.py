"""The inner operators: how they are called, and how their failures become Python's exceptions."""

import functools
import re

import torch

from . import sharding, torch_private
from ._C import read_environment
from .validate import check_tensor, refusal

library = torch.library.Library("flce", "FRAGMENT")
inner = torch.ops.flce

# Indices in enum flce_stat_row and enum flce_scalar of csrc/backend_args.h.
STAT_LSE, STAT_ENTROPY, STAT_TAIL_LSE, STATS = 0, 4, 7, 8
SCALAR_VALID, SCALARS = 0, 7
COLLECTIVE_STATISTICS = 1  # in enum flce_collective_id of csrc/flce.h


_EXCEPTIONS = {  # by flce_status_name; any other status is a RuntimeError with the whole text
    "invalid argument": ValueError,
    "invalid type": TypeError,
    "target out of range": IndexError,
    "out of memory": torch.OutOfMemoryError,
}
_FAILURE = re.compile(f"flce: ({'|'.join(_EXCEPTIONS)}): (.*)", re.DOTALL)


def run(op, *args):
    """Calls an operator below autograd; its `graph_` variant where the first tensor
    is of a subclass, as fake tensors are."""
    if type(args[0]) not in _PLAIN:
        op = _graph_variants.get(op, op)
    return run_plain(op, *args)


def run_plain(op, *args, **kwargs):
    """Calls an operator, whose exceptions it translates. Which class an exception of C++ arrives as
    differs between versions of torch, so its text has the status (binding/errors.h: Failure)."""
    read_environment()  # while this thread has the GIL: the operator must not call getenv
    try:
        with torch_private.below_autograd():
            return op(*args, **kwargs)
    except Exception as error:
        if failure := _FAILURE.search(str(error)):
            raise refusal(_EXCEPTIONS[failure[1]](failure[2])) from None
        if "flce: exchange failed: " in str(error):
            _raise_pending(sharding.hooks().pending_error(str(error)))
        if not hasattr(error, "is_flce_refusal"):
            _refuse_operands(op, args, error)
        raise


def _raise_pending(error):
    """Raises `error`, the exception that has ended a collective, unless it is None."""
    if error is not None:
        try:
            raise error from error.__cause__
        finally:
            del error  # its traceback holds this frame, and others with the call's memory


# The option that an operator takes as this argument where it has a value for each row.
OPTION_OF = {
    "token_temperature": "temperature",
    "token_teacher_temperature": "teacher_temperature",
}


def _refuse_operands(op, args, error):
    """Names the first operand that is no dense tensor, or of a class whose __torch_dispatch__ has
    no rule for the operator, as those of quantised weights."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if "Tensor" not in str(argument.type) or type(value) in _PLAIN and _is_dense(value):
            continue
        name = OPTION_OF.get(argument.name, argument.name)
        if value is not None or "Optional" not in str(argument.type):
            check_tensor(name, value)
            if isinstance(error, (NotImplementedError, TypeError)):
                expected = f"{name}: expected a plain tensor, as dequantize() makes it, got"
                is_plain = type(value) in _PLAIN
                got = f"a tensor of {value.dtype}" if is_plain else type(value).__name__
                raise TypeError(f"{expected} {got}, which has no {op}") from error


def _is_dense(tensor):
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _define_graph_variant(name):
    """Defines `graph_<name>`, which compiled graphs call in place of the operator of C++: it
    translates the operator's exceptions, and no other Python code runs around a graph's call."""
    op, variant = getattr(inner, name).default, f"graph_{name}"
    library.define(str(op._schema).replace(f"flce::{name}", variant, 1))
    for key in ("CPU", "CUDA"):
        library.impl(variant, functools.partial(run_plain, op), key)
    _graph_variants[op] = getattr(inner, variant).default


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_graph_variants = {}
for _name in ("forward", "backward", "scaled"):
    _define_graph_variant(_name)
for _name in ("cross_entropy_forward", "cross_entropy_backward"):
    _define_graph_variant(_name)


def variants(name):
    """The operator and, unless it writes to an argument, its variant for graphs."""
    op = getattr(inner, name).default
    return (op, _graph_variants[op]) if op in _graph_variants else (op,)
