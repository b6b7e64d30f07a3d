"""Whether the functions that deferred logits stand for have torch's own meaning."""

import types

import torch.nn.functional as F
from torch import nn

from .. import torch_private

_SAME = "deepspeed."  # ZeRO-3's linear layer differs in what it saves for the backward
_FORWARD = nn.Linear.forward
# Functions of torch.nn.functional that are written in Python pass what F.NAME is at that time to
# __torch_function__: a replacement in place of torch's own.
_OF_F = {name: getattr(F, name) for name in ("cross_entropy", "nll_loss", "log_softmax", "softmax")}
_OF_F["kl_div"] = F.kl_div
_REPLACED_BEFORE = [name for name, function in _OF_F.items() if function.__globals__ is not vars(F)]


def find_replacement():
    """What was replaced by somebody, in words; None if nothing was."""
    if type(F.linear) is not types.BuiltinFunctionType and not F.linear.__module__.startswith(
        _SAME
    ):
        return "F.linear was replaced"
    if nn.Linear.forward is not _FORWARD or _FORWARD.__module__ != nn.Linear.__module__:
        return "nn.Linear.forward was replaced"
    for name, function in _OF_F.items():
        if getattr(F, name) is not function or name in _REPLACED_BEFORE:
            return f"F.{name} was replaced"
    mode = torch_private.foreign_function_mode()
    return None if mode is None else f"the torch function mode {mode} is active"
