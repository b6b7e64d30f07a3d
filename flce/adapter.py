"""A head with a low-rank term: input @ linear_weight.T + adapter_input @ adapter_weight.T."""

import typing

import torch

from . import validate

_ALIGNMENT = 8  # columns: flce_problem.frozen_hidden is a multiple of it


class Operands(typing.NamedTuple):
    """The operands of the logits' GEMM. differentiated: the tensor that gets the gradient of
    weight[:, frozen_hidden:]; weight itself where frozen_hidden is 0."""

    input: torch.Tensor
    weight: torch.Tensor
    differentiated: torch.Tensor
    frozen_hidden: int = 0


def joined(input, linear_weight, adapter_input, adapter_weight, autocast, least=1):
    """The Operands [input, adapter_input] and [linear_weight, adapter_weight].

    The logsumexp is computed in the epilogue of one GEMM, so both terms have to be in one GEMM. If
    linear_weight does not require grad, only adapter_weight's gradient is computed. autocast: the
    dtype to which autocast casts the operands, or None. least: of the rows of the weights.
    """
    _check(input, linear_weight, adapter_input, adapter_weight, least)
    given = [input, linear_weight, adapter_input, adapter_weight]
    if autocast is not None and all(tensor.dtype != torch.float64 for tensor in given):
        given = [tensor.to(autocast) for tensor in given]
    else:
        _check_dtypes(*given, autocast)
    x, w, u, low_rank = given
    padding = -x.shape[-1] % _ALIGNMENT
    rows = torch.cat((x, x.new_zeros((*x.shape[:-1], padding)), u), dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and linear_weight.requires_grad):
        weight = torch.cat((w, w.new_zeros((w.shape[0], padding)), low_rank), dim=1)
    if linear_weight.requires_grad:
        return Operands(rows, weight, weight)
    return Operands(rows, weight, adapter_weight, x.shape[-1] + padding)


def _check_dtypes(input, linear_weight, adapter_input, adapter_weight, autocast):
    """Of operands that are not cast: autocast leaves all alone where one is float64."""
    casts = "torch.autocast casts it"
    if autocast is not None:
        casts = "torch.autocast casts none where one operand is torch.float64"
    for name, first, tensor in (
        ("adapter_input", input, adapter_input),
        ("adapter_weight", linear_weight, adapter_weight),
    ):
        if tensor.dtype != first.dtype:
            expected = f"the dtype of the operand it joins, {first.dtype}"
            validate.refuse(name, expected, f"{tensor.dtype}; {casts}", TypeError)
    validate.compute_dtype(input, linear_weight, None, None)


def _check(input, linear_weight, adapter_input, adapter_weight, least):
    for name, tensor in (
        ("input", input),
        ("linear_weight", linear_weight),
        ("adapter_input", adapter_input),
        ("adapter_weight", adapter_weight),
    ):
        validate.check_tensor(name, tensor)
        validate.check_float(name, tensor.dtype)
    validate.check_rows("input", input)
    validate.check_head(input, linear_weight, None, least)
    validate.check_same_device("adapter_input", adapter_input, "input", input)
    validate.check_same_device("adapter_weight", adapter_weight, "input", input)
    if adapter_weight.dim() != 2 or adapter_weight.shape[0] != linear_weight.shape[0]:
        expected = f"shape ({linear_weight.shape[0]}, r)"
        validate.refuse("adapter_weight", expected, tuple(adapter_weight.shape))
    if adapter_weight.shape[1] < 1:
        validate.refuse("adapter_weight", "at least one column", tuple(adapter_weight.shape))
    shape = (*input.shape[:-1], adapter_weight.shape[1])
    validate.check_shape("adapter_input", adapter_input, shape)
