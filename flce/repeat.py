"""Calls that look like an earlier one.

The device waits for the host before the first kernel of a small step. A training step repeats its
call: the same objects as options, tensors of the same looks. What was found for the first such call
(flce/signature.py) serves the others, without the checks that could only pass again. Whatever
differs takes the long way, which is the definition.
"""

import operator

import torch

from . import options
from .signature import environment, looks_of

_KEPT = 256
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OPTIONS = (type(None), bool, int, float, str, torch.dtype)  # of values that never change

_known = {}  # the options of the last call that looked so, and what was found for it


def look(input, linear_weight, target, linear_bias, max_memory):
    """How a call's tensors and surroundings look, to `find` and `keep` what is known of it; None
    where something is not plain. `max_memory`: the option."""
    for tensor in (input, linear_weight, target):
        if type(tensor) not in _PLAIN_TENSORS:
            return None
    if linear_bias is not None and type(linear_bias) not in _PLAIN_TENSORS:
        return None
    if options.transforms_are_on():
        return None
    bias = None if linear_bias is None else looks_of(linear_bias)
    around = environment(input, max_memory)
    return looks_of(input), looks_of(linear_weight), looks_of(target), bias, around


def find(looks, given):
    """The signature of an earlier call, or None. `given`: the options, told by identity."""
    options_then, call = _known.get(looks, ((), None))
    if call is None or not all(map(operator.is_, given, options_then)):
        return None
    return call


def keep(looks, given, call):
    """Keeps a call's signature, unless an option is a tensor or may change its value."""
    if not all(isinstance(value, _PLAIN_OPTIONS) for value in given):
        return
    if len(_known) >= _KEPT and looks not in _known:
        _known.clear()
    _known[looks] = given, call
