"""The modes of torch that a call runs in: tracing and autocast."""

import torch

from . import torch_private
from .options import DTYPES


def is_traced():
    """Whether torch.compile, torch.export or make_fx traces the call."""
    return torch.compiler.is_compiling() or torch_private.make_fx_traces()


def autocast_dtype(device_type):
    """The dtype to which autocast casts the GEMMs' operands; None if it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def autocast_code(device):
    """The index in DTYPES of the dtype to which autocast casts on this device; -1 if it is off."""
    enabled = torch_private.is_any_autocast_enabled()  # faster than the question for one device
    dtype = autocast_dtype(device.type) if enabled else None
    return -1 if dtype is None else DTYPES.index(dtype)


def has_values(target):
    """Whether it can be read without waiting: on the CPU, and neither traced nor fake."""
    is_plain = target.is_cpu and type(target) is torch.Tensor
    is_in_mode = torch_private.count_of_dispatch_modes() or torch.compiler.is_compiling()
    return is_plain and not is_in_mode
