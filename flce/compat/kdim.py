"""Weights with more than two dimensions, as in torch.nn.functional.linear_cross_entropy: one
loss at each of several positions of an input row."""

import math

import torch

import flce

from ..options import default_memory, parse_bytes
from ..validate import check_tensor


def k_dimensional(input, linear_weight, target, *, linear_bias, weight, reduction, **options):
    """The loss of C classes at d1 ... dK positions.

    One call for each of the D = d1 ... dK positions, with a contiguous copy of its (C, H) slice of
    the weight; the gradient of the whole weight is assembled once. Tensors saved for the backward
    add up over positions, so each position gets 1/D of `max_memory`.

    Args:
        input: shape (N, H).
        linear_weight: shape (C, d1, ..., dK, H), K >= 1.
        target: class indices, shape (N, d1, ..., dK), or probabilities, shape (N, C, d1, ..., dK).
        linear_bias: shape (C, d1, ..., dK), or None.
        weight: a factor for each class, shape (C,), or None.
        reduction: "mean" divides the sum over all N D rows once, by what F.cross_entropy divides
            by; over no valid row it is 0.
        options: ignore_index, label_smoothing, accum_dtype and max_memory of
            `flce.linear_cross_entropy`.

    Returns:
        The loss, shape () or (N, d1, ..., dK) for "none".

    Raises:
        ValueError: a wrong shape, by name.
    """
    given = {"input": input, "target": target, "linear_bias": linear_bias, "weight": weight}
    for name, tensor in given.items():
        if tensor is not None or name in ("input", "target"):
            check_tensor(name, tensor)
    _check_shapes(input, linear_weight, target, linear_bias, weight)
    shape = (input.shape[0], *linear_weight.shape[1:-1])
    if math.prod(shape[1:]) == 0:
        return _of_no_position(input, linear_weight, shape, reduction)
    options["max_memory"] = _share_of_memory(options.get("max_memory"), linear_weight, shape)
    options |= {"weight": weight, "reduction": reduction}
    if reduction == "mean":
        stat = torch.float64 if input.dtype == torch.float64 else torch.float32
        ignore_index = options["ignore_index"]
        options["num_items"] = _denominator(target, weight, ignore_index, math.prod(shape), stat)
    losses = [
        flce.linear_cross_entropy(*operands, linear_bias=bias, **options)
        for *operands, bias in _positions(input, linear_weight, target, linear_bias, shape)
    ]
    if reduction == "none":
        return torch.stack(losses, dim=-1).reshape(shape)
    return sum(losses[1:], start=losses[0])


def _check_shapes(input, linear_weight, target, linear_bias, weight):
    if input.dim() != 2:
        raise ValueError(
            "input: expected shape (N, H) with a linear_weight of shape "
            f"{tuple(linear_weight.shape)}, got {tuple(input.shape)}"
        )
    if linear_weight.dim() < 3 or linear_weight.shape[-1] != input.shape[1]:
        raise ValueError(
            f"linear_weight: expected shape (C, d1, ..., dK, {input.shape[1]}) for input of shape "
            f"{tuple(input.shape)}, got {tuple(linear_weight.shape)}"
        )
    tokens, classes, places = input.shape[0], linear_weight.shape[0], linear_weight.shape[1:-1]
    expected, kind = (tokens, *places), "class indices"
    if target.is_floating_point():
        expected, kind = (tokens, classes, *places), "probabilities"
    if target.shape != expected:
        raise ValueError(
            f"target: expected shape {tuple(expected)} for {kind} and a linear_weight of shape "
            f"{tuple(linear_weight.shape)}, got {tuple(target.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != (classes, *places):
        raise ValueError(
            f"linear_bias: expected shape {(classes, *places)}, got {tuple(linear_bias.shape)}"
        )
    if weight is not None and weight.shape != (classes,):
        raise ValueError(
            f"weight: expected shape ({classes},), a factor for each class, got "
            f"{tuple(weight.shape)}"
        )


def _positions(input, linear_weight, target, linear_bias, shape):
    """Yields input, weight, target and bias of the call for each position."""
    count = math.prod(shape[1:])
    classes, hidden = linear_weight.shape[0], linear_weight.shape[-1]
    # unbind instead of indexing: its backward assembles the slices once, whereas indexing would
    # allocate a zero gradient of the whole weight for each position.
    parts = linear_weight.reshape(classes, count, hidden).unbind(1)
    biases = [None] * count
    if linear_bias is not None:
        biases = linear_bias.reshape(classes, count).unbind(1)
    rows = target.reshape(*target.shape[: target.dim() - len(shape) + 1], count).unbind(-1)
    for part, row, bias in zip(parts, rows, biases, strict=True):
        # One position's copy at a time: the call saves what its own backward needs.
        yield (
            input,
            part.contiguous(),
            row.contiguous(),
            None if bias is None else bias.contiguous(),
        )


def _share_of_memory(max_memory, linear_weight, shape):
    """One position's part of the memory bound, at least one row of its logits."""
    if max_memory is None and torch.compiler.is_compiling():
        return None  # cannot query memory while tracing: each position gets all of it
    whole = parse_bytes(max_memory) if max_memory else default_memory(linear_weight.device)
    row = 8 * (linear_weight.shape[0] + 15)  # bytes of float64, padded to 128 bytes
    return max(whole // math.prod(shape[1:]), row)


def _denominator(target, weight, ignore_index, rows, stat):
    """The denominator of F.cross_entropy's mean, as a 0-d tensor; sums of weights in `stat`."""
    if target.is_floating_point():
        return torch.full((), rows, dtype=torch.int64, device=target.device)
    is_valid = target != ignore_index
    count = is_valid.sum()
    if weight is None:
        return count
    # The call itself refuses a target out of range; here it must only not be read out of bounds.
    classes = target.clamp(0, len(weight) - 1)
    factors = weight.detach()[classes]
    total = factors.to(stat).masked_fill(~is_valid, 0.0).sum()
    # num_items 0 gives the loss 0, which is right if there is no valid row; class weights that sum
    # to 0 give 0/0 = NaN, as in torch.
    return total.masked_fill((total == 0) & (count > 0), math.nan)


def _of_no_position(input, linear_weight, shape, reduction):
    """The loss over no positions; its gradients are zeros."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    # Sums without elements: both operands are in the graph.
    zero = (input[:0].sum() + linear_weight.sum()).to(wide)
    return zero.expand(shape).clone() if reduction == "none" else zero
