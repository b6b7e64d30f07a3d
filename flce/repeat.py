"""Calls that look like an earlier one.

The device waits for the host before the first kernel of a small step. A training step repeats its
call: the same objects as options, tensors of the same looks. What was found for the first such call
(flce/signature.py) serves the others, without the checks that could only pass again. Whatever
differs takes the long way, which is the definition.
"""

import typing

import torch

from . import options
from .compiled import same_objects
from .signature import LinearSignature, Meta, environment, looks_of

_KEPT = 256
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OPTIONS = (type(None), bool, int, float, str, torch.dtype)  # of values that never change


class Known(typing.NamedTuple):
    """The options of the last call that looked so, and what was found for it. `as_given`: whether
    its operands need no other shape or dtype, no check and no count of rows."""

    options: tuple
    call: LinearSignature
    as_given: bool


_known = {}


def look(input, linear_weight, target, linear_bias, max_memory):
    """How the tensors and surroundings of a call that is not compiled look, to `find` and `keep`
    what is known of it; None where something is not plain. `max_memory`: the option."""
    if (
        type(input) not in _PLAIN_TENSORS
        or type(linear_weight) not in _PLAIN_TENSORS
        or type(target) not in _PLAIN_TENSORS
        or (linear_bias is not None and type(linear_bias) not in _PLAIN_TENSORS)
        or options.transforms_are_on()
    ):
        return None
    return (
        looks_of(input),
        looks_of(linear_weight),
        looks_of(target),
        None if linear_bias is None else looks_of(linear_bias),
        environment(input, False, max_memory),
        options.given_check(),
    )


def find(looks, given):
    """What is `Known` of an earlier call, or None. `given`: the options, told by identity."""
    known = _known.get(looks)
    return known if known is not None and same_objects(given, known.options) else None


def keep(looks, given, call):
    """Keeps a call's signature, unless an option is a tensor or may change its value."""
    if not all(isinstance(value, _PLAIN_OPTIONS) for value in given):
        return
    if len(_known) >= _KEPT and looks not in _known:
        _known.clear()
    input, target = Meta(*looks[0]), Meta(*looks[2])
    as_given = (
        input.device.type == "cuda"
        and not options.checks_targets(input.device)
        and input.dim() == 2
        and target.dim() == 1
        and target.dtype == torch.int64
    )
    _known[looks] = Known(given, call, as_given)
