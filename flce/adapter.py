"""A head with a low-rank term: input @ linear_weight.T + adapter_input @ adapter_weight.T."""

import torch

from . import fakes, validate
from .options import DTYPES

_ALIGNMENT = 8  # columns: flce_problem.frozen_hidden is a multiple of it


def joined(input, linear_weight, tensors, packed, autocast):
    """The operands of the logits' GEMM, [input, adapter_input] and [linear_weight, adapter_weight];
    the tensor that gets the second one's gradient; and how many of its columns get none.

    The logsumexp is computed in the epilogue of one GEMM, so both terms have to be in one GEMM. If
    linear_weight does not require grad, only adapter_weight's gradient is computed. autocast: the
    index in DTYPES of the dtype to which autocast casts the operands, or -1.
    """
    gets_gradient = torch.is_grad_enabled() and getattr(linear_weight, "requires_grad", False)
    if packed.accumulate_into is not None and gets_gradient:
        got = repr(packed.accumulate_into)
        validate.refuse("accumulate_into", "None with an adapter_weight", got)
    given = {"input": input, "linear_weight": linear_weight}
    given |= {name: tensors.get(name) for name in ("adapter_input", "adapter_weight")}
    for name, tensor in given.items():
        validate.check_tensor(name, tensor)
        fakes.code_of(name, tensor)
    _check_shapes(**given)
    if autocast >= 0 and all(tensor.dtype != torch.float64 for tensor in given.values()):
        given = {name: tensor.to(DTYPES[autocast]) for name, tensor in given.items()}
    else:
        _check_dtypes(given, autocast)
    x, w, u, low_rank = given.values()
    padding = -x.shape[-1] % _ALIGNMENT
    rows = torch.cat((x, x.new_zeros((*x.shape[:-1], padding)), u), dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and linear_weight.requires_grad):
        weight = torch.cat((w, w.new_zeros((w.shape[0], padding)), low_rank), dim=1)
    if linear_weight.requires_grad:
        return rows, weight, weight, 0
    return rows, weight, tensors["adapter_weight"], x.shape[-1] + padding


def _check_dtypes(given, autocast):
    """Of operands that are not cast: autocast leaves all alone where one is float64."""
    casts = "torch.autocast casts it"
    if autocast >= 0:
        casts = "torch.autocast casts none where one operand is torch.float64"
    pairs = (
        ("adapter_input", "input", "the operand it joins"),
        ("adapter_weight", "linear_weight", "the operand it joins"),
        ("linear_weight", "input", "input"),
    )
    for name, first, which in pairs:
        if given[name].dtype != given[first].dtype:
            expected = f"the dtype of {which}, {given[first].dtype}"
            validate.refuse(name, expected, f"{given[name].dtype}; {casts}", TypeError)


def _check_shapes(input, linear_weight, adapter_input, adapter_weight):
    fakes.check_operands(input, linear_weight)
    validate.check_same_device("adapter_input", adapter_input, "input", input)
    validate.check_same_device("adapter_weight", adapter_weight, "input", input)
    if adapter_weight.dim() != 2 or adapter_weight.shape[0] != linear_weight.shape[0]:
        expected = f"shape ({linear_weight.shape[0]}, r)"
        validate.refuse("adapter_weight", expected, tuple(adapter_weight.shape))
    if adapter_weight.shape[1] < 1:
        validate.refuse("adapter_weight", "at least one column", tuple(adapter_weight.shape))
    shape = (*input.shape[:-1], adapter_weight.shape[1])
    validate.check_shape("adapter_input", adapter_input, shape)
