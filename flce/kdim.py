"""Weights of more than two dimensions: a loss at each of several positions of one input row."""

import math

import torch

from . import ops
from .options import check_tensor, resolve_max_memory

_OUTPUTS = (
    "return_lse",
    "return_entropy",
    "return_accuracy",
    "return_predictions",
    "return_z_loss",
)
_PER_ROW = ("temperature", "token_weight")


def k_dimensional(
    call,
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    **rest,
):
    """The layout of torch.nn.functional.linear_cross_entropy for C classes at d1 ... dK places.

    One `call` for each of the D = d1 ... dK positions, over a contiguous copy of the (C, H) part
    of the weight that belongs to it; the whole weight's gradient is put together once. What the
    positions keep for the backward adds up: each gets a D-th of `max_memory`, and with save="grads"
    keeps an (N, H) gradient of its own.

    Args:
        call: the loss of a (C, H) weight, with the options bound that are not named here.
        input: shape (N, H).
        linear_weight: shape (C, d1, ..., dK, H), K >= 1.
        target: class indices, shape (N, d1, ..., dK), or probabilities, shape (N, C, d1, ..., dK).
        linear_bias: shape (C, d1, ..., dK), or None.
        weight: a factor for each class, shape (C,), or None.
        reduction, ignore_index, label_smoothing: as in `flce.linear_cross_entropy`. "mean" divides
            the sum over all N D places once, by what F.cross_entropy divides by; over no
            valid place it is 0.
        rest: further options of `call`. A tensor as `temperature` or `token_weight` has the shape
            of the output, (N, d1, ..., dK); a number as `valid_bound` bounds each position's rows.

    Returns:
        The loss, shape () or (N, d1, ..., dK) for "none".

    Raises:
        ValueError: a wrong shape, or an option without a meaning for this layout, by name.
    """
    given = {"input": input, "target": target, "linear_bias": linear_bias, "weight": weight}
    for name, tensor in given.items():
        if tensor is not None or name in ("input", "target"):
            check_tensor(name, tensor)
    _check_shapes(input, linear_weight, target, linear_bias, weight)
    shape = (input.shape[0], *linear_weight.shape[1:-1])
    _refuse_options(shape, rest)
    if math.prod(shape[1:]) == 0:
        return _of_no_position(input, linear_weight, shape, reduction)
    rest = {**rest, "max_memory": _share_of_memory(rest.get("max_memory"), linear_weight, shape)}
    positions = _positions(input, linear_weight, target, linear_bias, rest, shape)
    shared = {
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    if reduction == "mean" and rest.get("num_items") is None:
        stat = ops.stat_dtype(input.dtype)
        valid, denominator = _denominators(target, weight, ignore_index, math.prod(shape), stat)
        if valid is not denominator and rest.get("z_loss", 0.0):
            if rest.get("save") == "grads":
                raise ValueError(
                    'save: expected "logits", "stats" or "auto" for the mean with class weights '
                    "and z_loss over a linear_weight of more than two dimensions, whose two "
                    'denominators need the rows, got "grads"'
                )
            return _mean_of_two(call, positions, shared, valid, denominator, rest["z_loss"])
        shared["num_items"] = denominator
    losses = [call(*place, **{**options, **shared}) for place, options in positions]
    if reduction == "none":
        return torch.stack(losses, dim=-1).reshape(shape)
    return sum(losses[1:], start=losses[0])


def _check_shapes(input, linear_weight, target, linear_bias, weight):
    for name, tensor in (("input", input), ("target", target)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
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


def _refuse_options(shape, rest):
    if rest.get("accumulate_into") is not None:
        raise ValueError(
            "accumulate_into: expected None with a linear_weight of more than two dimensions, "
            f"whose gradient is put together from its positions', got {rest['accumulate_into']!r}"
        )
    if rest.get("shift", 0) != 0:
        raise ValueError(
            "shift: expected 0 with a linear_weight of more than two dimensions, whose positions "
            f"are no sequence, got {rest['shift']}"
        )
    if rest.get("cu_seqlens") is not None:
        raise ValueError(
            "cu_seqlens: expected None with a linear_weight of more than two dimensions, whose "
            "positions are no sequence, got a tensor"
        )
    for name in _OUTPUTS:
        if rest.get(name):
            raise ValueError(
                f"{name}: expected False with a linear_weight of more than two dimensions, got "
                "True; call once for each position, with linear_weight[:, d]"
            )
    for name in _PER_ROW:
        value = rest.get(name)
        if _is_per_place(value) and value.shape != shape:
            raise ValueError(
                f"{name}: expected the shape of the output, {tuple(shape)}, got "
                f"{tuple(value.shape)}"
            )


def _is_per_place(value):
    """A 0-d tensor is a number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _positions(input, linear_weight, target, linear_bias, rest, shape):
    """For each position the arguments (input, weight, target) and the options of its call."""
    tokens, count = shape[0], math.prod(shape[1:])
    classes, hidden = linear_weight.shape[0], linear_weight.shape[-1]
    # unbind, not indexing: its backward puts the parts together once, where indexing's would make
    # a zero gradient of the whole weight for each position.
    parts = linear_weight.reshape(classes, count, hidden).unbind(1)
    biases = [None] * count
    if linear_bias is not None:
        biases = linear_bias.reshape(classes, count).unbind(1)
    rows = target.reshape(*target.shape[: target.dim() - len(shape) + 1], count).unbind(-1)
    sliced = {
        name: rest[name].reshape(tokens, count).unbind(-1)
        for name in _PER_ROW
        if _is_per_place(rest.get(name))
    }
    for position, (part, row) in enumerate(zip(parts, rows, strict=True)):
        options = {**rest, **{name: values[position] for name, values in sliced.items()}}
        options["linear_bias"] = None if biases[position] is None else biases[position].contiguous()
        # One position's copy at a time: `call` keeps what its own backward needs.
        yield (input, part.contiguous(), row.contiguous()), options


def _share_of_memory(max_memory, linear_weight, shape):
    """A position's part of the budget, at least a row of its logits."""
    if max_memory is None and torch.compiler.is_compiling():
        return None  # the device's memory cannot be asked for in a trace: each position has it all
    whole = resolve_max_memory(max_memory, linear_weight.device)
    row = 8 * (linear_weight.shape[0] + 15)  # of float64, the widest, padded to 128 bytes
    return max(whole // math.prod(shape[1:]), row)


def _denominators(target, weight, ignore_index, rows, stat):
    """The number of valid places and what F.cross_entropy's mean divides by, as 0-d tensors; sums
    of weights in `stat`."""
    if target.is_floating_point():
        count = torch.full((), rows, dtype=torch.int64, device=target.device)
        return count, count
    is_valid = target != (-100 if ignore_index is None else ignore_index)
    count = is_valid.sum()
    if weight is None:
        return count, count
    # A target out of range is the call's to refuse: here it must only not be read.
    classes = target.clamp(0, len(weight) - 1)
    factors = weight.detach()[classes]
    total = factors.to(stat).masked_fill(~is_valid, 0.0).sum()
    # As num_items 0 gives 0: so it shall for no valid place, but weights of 0 are 0/0, as torch's.
    return count, total.masked_fill((total == 0) & (count > 0), math.nan)


def _mean_of_two(call, positions, shared, valid, denominator, z_loss):
    """The mean with class weights and z-loss, which has a denominator of its own.

    It is composed of rows: num_items of a call would replace both denominators by one.
    """
    ignore_index = -100 if shared["ignore_index"] is None else shared["ignore_index"]
    shared = {**shared, "reduction": "none", "return_lse": True, "z_loss": 0.0}
    total = 0.0
    for place, options in positions:
        rows = call(*place, **{**options, **shared})
        squares = rows.lse.square()
        if options.get("token_weight") is not None:
            squares = squares * options["token_weight"].to(squares.dtype)
            if not place[2].is_floating_point():
                # A weight of a row that is ignored may be anything.
                squares = squares.masked_fill(place[2] == ignore_index, 0.0)
        loss = _divided(rows.loss.sum(), denominator) + z_loss * _divided(squares.sum(), valid)
        total = total + loss
    return total


def _divided(total, count):
    """total / count, and 0 with a zero gradient where the count is 0."""
    inverse = torch.where(count == 0, 0.0, 1.0 / count.to(total.dtype))
    return total * inverse


def _of_no_position(input, linear_weight, shape, reduction):
    """The loss over no places; its gradients are zeros."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    zero = (input[:0].sum() + linear_weight.sum()).to(wide)  # sums of nothing
    return zero.expand(shape).clone() if reduction == "none" else zero
