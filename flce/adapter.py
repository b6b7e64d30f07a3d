"""A head with a low-rank term: input @ linear_weight.T + adapter_input @ adapter_weight.T."""

import torch

from . import fakes, validate
from .options import DTYPES
from .packing import code_of

_ALIGNMENT = 8  # columns: flce_problem.shape.frozen_hidden is a multiple of it


def joined(input, linear_weight, tensors, packed, autocast):
    """The operands of the logits' GEMM, [input, adapter_input] and [linear_weight, adapter_weight];
    the tensor that gets the second one's gradient; and how many of its columns get none.

    The logsumexp is computed in the epilogue of one GEMM, so both terms have to be in one GEMM. If
    linear_weight does not require grad, only adapter_weight's gradient is computed. autocast: the
    index in DTYPES of the dtype to which autocast casts the operands, or -1.
    """
    operands = {"input": input, "linear_weight": linear_weight}
    operands |= {name: tensors.get(name) for name in ("adapter_input", "adapter_weight")}
    for name, tensor in operands.items():
        validate.check_tensor(name, tensor)
        code_of(name, tensor.dtype)
    trains = torch.is_grad_enabled() and linear_weight.requires_grad
    if packed.accumulate_into is not None and trains:
        got = repr(packed.accumulate_into)
        validate.refuse("accumulate_into", "None with an adapter_weight", got)
    casts = autocast >= 0 and all(tensor.dtype != torch.float64 for tensor in operands.values())
    _check(operands, casts)
    if casts:
        operands = {name: tensor.to(DTYPES[autocast]) for name, tensor in operands.items()}
    x, w, u, low_rank = operands.values()
    padding = -x.shape[-1] % _ALIGNMENT
    rows = torch.cat((x, x.new_zeros((*x.shape[:-1], padding)), u), dim=-1)
    with torch.set_grad_enabled(trains):
        weight = torch.cat((w, w.new_zeros((w.shape[0], padding)), low_rank), dim=1)
    if linear_weight.requires_grad:
        return rows, weight, weight, 0
    return rows, weight, tensors["adapter_weight"], x.shape[-1] + padding


def _check(operands, casts):
    """`casts`: whether autocast casts the operands."""
    x, w, u, low_rank = operands.values()
    fakes.check_operands(x, w)
    if low_rank.dim() != 2 or low_rank.shape[0] != w.shape[0] or low_rank.shape[1] < 1:
        expected = f"shape ({w.shape[0]}, r) with r of at least 1"
        validate.refuse("adapter_weight", expected, tuple(low_rank.shape))
    validate.check_shape("adapter_input", u, (*x.shape[:-1], low_rank.shape[1]))
    pairs = {"adapter_input": "input", "adapter_weight": "linear_weight", "linear_weight": "input"}
    for name, first in pairs.items():
        validate.check_same_device(name, operands[name], "input", x)
        dtype, expected = operands[name].dtype, operands[first].dtype
        if dtype != expected and not casts:
            got = f"{dtype}; torch.autocast casts the operands where none is torch.float64"
            validate.refuse(name, f"the dtype of {first}, {expected}", got, TypeError)
