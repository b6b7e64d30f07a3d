"""The composite operators: `torch.ops.flce.linear_cross_entropy`, `cross_entropy`, and for each one
with the suffix `_outputs`, which also gives lse, entropy, accuracy, predictions and z_loss.

They read requires_grad and autocast, resolve `save`, and call the inner operators. An inner
operator's autograd formula never sees the composite.
"""

import functools
import math
import operator
import sys

import torch

from . import ops, targets, validate
from .accumulate import Accumulator
from .options import OPTIONS, OUTPUTS, RETURNS, defaults
from .signature import (
    LINEAR_VALUES,
    LOGITS_VALUES,
    Wanted,
    describe,
    environment,
    linear_signature,
    logits_signature,
)

NOTHING = Wanted()
_DEFAULTS = {**defaults(), "token_temperature": None}
_linear_values = operator.itemgetter(*LINEAR_VALUES)
_logits_values = operator.itemgetter(*LOGITS_VALUES)
_vectors = operator.itemgetter("weight", "token_weight", "token_temperature")


def _describe(target, vectors):
    """In the order of LossTensors."""
    weight, token_weight, token_temperature = vectors
    return (
        describe("target", target),
        describe("weight", weight),
        describe("token_weight", token_weight),
        describe("temperature", token_temperature),
    )


def _rows_of(tensor):
    """All leading dimensions as one."""
    return (tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])).contiguous()


def _indices_of(target):
    flat = target if target.dim() == 1 else target.reshape(-1)
    return (flat if flat.dtype == torch.int64 else flat.to(torch.int64)).contiguous()


def _vector_of(tensor, dtype):
    return tensor.detach().reshape(-1).to(dtype).contiguous()


def _loss_tensors(call, target, vectors):
    """Target and the optional tensors as the inner operators take them."""
    if validate.checks_targets(target.device):
        validate.check_target_range(target, call.vocab, call.scalars.ignore_index)
    flat = _rows_of(target) if call.has_probabilities else _indices_of(target)
    weight, token_weight, token_temperature = vectors
    if weight is None and token_weight is None and token_temperature is None:
        return flat, *vectors
    return flat, *(None if one is None else _vector_of(one, call.stat) for one in vectors)


def _run(op, tensors, settings):
    """An inner operator's outputs, for a Function to be applied to."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return list(op(*tensors, *settings))
    except MemoryError as error:
        ops.raise_out_of_memory(error)


def _outputs(call, made, tensors, num_items, rows, bound=None):
    """The loss and what is wanted beside it, in the shape `rows`, from an inner operator's outputs.

    `bound`: how many rows were computed; more valid ones make the accuracy NaN, as the loss is.
    """
    wanted, (loss, stats, sums, predictions, *_) = call.wanted, made
    outputs = [loss.reshape(rows) if call.reduction == "none" else loss, *(None,) * len(wanted)]
    if not any(wanted):
        return outputs
    target, _, token_weight, _ = tensors
    ignored = None if call.has_probabilities else target == call.scalars.ignore_index

    def shaped(vector):
        return vector.reshape(rows)

    if wanted.lse:
        outputs[1] = shaped(stats[ops.STAT_LSE])
    if wanted.entropy:
        outputs[2] = shaped(stats[ops.STAT_ENTROPY])
    if wanted.accuracy:
        # No ignored row is right: its prediction is -1, which may be ignore_index.
        right = ((predictions == target) & ~ignored).sum().to(sums.dtype)
        outputs[3] = right / sums[ops.SCALAR_VALID].clamp(min=1.0)
        if bound is not None:
            outputs[3] = outputs[3].masked_fill(sums[ops.SCALAR_VALID] > bound, math.nan)
    if wanted.predictions:
        outputs[4] = shaped(predictions)
    if wanted.z_loss:
        parts = _z_losses(stats.detach(), token_weight, ignored, call.scalars.z_loss)
        count = sums[ops.SCALAR_VALID] if num_items is None else num_items
        reduce = {"none": shaped, "sum": torch.sum, "mean": _mean_over(count)}
        outputs[5] = reduce[call.reduction](parts)
    return outputs


def _z_losses(stats, token_weight, ignored, factor):
    rows = factor * stats[ops.STAT_LSE].square()
    if token_weight is None:
        return rows
    rows = rows * token_weight
    return rows if ignored is None else rows.masked_fill(ignored, 0.0)


def _mean_over(count):
    """Sum over `count`, 0 where that is 0."""
    return lambda values: (values.sum() / count).masked_fill(count == 0, 0.0)


def linear_cross_entropy_of(wanted, input, linear_weight, target, settings):
    """The loss and the outputs of `wanted`, None for the others. `settings`: the value of each of
    OPTIONS, and of token_temperature, a vector of temperatures."""
    linear_bias, num_items = settings["linear_bias"], settings["num_items"]
    operands = (
        describe("input", input),
        describe("linear_weight", linear_weight),
        describe("linear_bias", linear_bias),
    )
    vectors = _vectors(settings)
    call = linear_signature(
        environment(input, torch.compiler.is_compiling(), settings["max_memory"]),
        wanted,
        operands,
        _describe(target, vectors),
        *_linear_values(settings),
    )
    if validate.transforms_are_on():
        validate.refuse_transforms(input, linear_weight, linear_bias, target, *vectors, num_items)
    accumulator = None
    if call.accumulates:
        accumulator = Accumulator(linear_weight, settings["accumulate_into"])
    ignore_index = call.scalars.ignore_index
    if settings["shift"] != 0 or settings["cu_seqlens"] is not None:
        offsets = settings["shift"], settings["cu_seqlens"]
        target = targets.shifted_target(target, *offsets, ignore_index)
    if num_items is not None:
        num_items = validate.num_items_tensor(num_items, call.reduction, call.stat, input)
    tensors = _loss_tensors(call, target, vectors)
    rows = targets.rows_to_compute(tensors[0], settings["valid_bound"], ignore_index)
    linear_bias = None if linear_bias is None else linear_bias.contiguous()
    leaves = (_rows_of(input), linear_weight.contiguous(), linear_bias)
    made = _forward(call, leaves, tensors, num_items, rows, accumulator)
    return _outputs(call, made, tensors, num_items, input.shape[:-1], rows)


def _forward(call, leaves, tensors, num_items, rows, accumulator):
    """The inner operator's outputs, differentiable where the call is. `tensors`: target, weight,
    token_weight, token_temperature."""
    settings, behind_tensors = call.settings(rows)
    arguments = (*leaves[:2], tensors[0], leaves[2], *tensors[1:], num_items)
    made = _run(ops.inner.forward.default, arguments, behind_tensors)
    if call.differentiable:
        returned = ops.Forward.apply(made, call.returns, settings, tensors, accumulator, *leaves)
        made[: len(returned)] = returned
    return made


@functools.cache
def _never_traced():
    return torch._disable_dynamo(linear_cross_entropy_of)


def linear_cross_entropy_untraced(*args):
    """Where torch.compile breaks off at accumulate.refuse_tracing it would trace what is called
    next. Without torch.compile nothing traces, and its import would take a second."""
    call = _never_traced() if "torch._dynamo" in sys.modules else linear_cross_entropy_of
    return call(*args)


def cross_entropy_of(wanted, logits, target, settings):
    """The same for logits that the caller holds."""
    num_items = settings["num_items"]
    described, vectors = describe("logits", logits), _vectors(settings)
    call = logits_signature(
        environment(logits, torch.compiler.is_compiling()),
        wanted,
        described,
        _describe(target, vectors),
        *_logits_values(settings),
    )
    if validate.transforms_are_on():
        validate.refuse_transforms(logits, target, *vectors, num_items)
    tensors = _loss_tensors(call, target, vectors)
    num_items = validate.num_items_tensor(num_items, call.reduction, call.stat, logits)
    rows, lists = _rows_of(logits), call.settings
    arguments = (rows, *tensors, num_items)
    made = _run(ops.inner.cross_entropy_forward.default, arguments, lists)
    if call.differentiable:
        differentiable = ops.CrossEntropyForward.apply(made, call.returns, lists, tensors, rows)
        made[: len(differentiable)] = differentiable
    return _outputs(call, made, tensors, num_items, logits.shape[:-1])


# ---- registration ----


def _kernel_of(function):
    def kernel(*tensors, **given):
        return function(NOTHING, *tensors, {**_DEFAULTS, **given})[0]

    return kernel


def _kernel_of_outputs(function):
    def kernel(*tensors, **given):
        wanted = _take_wanted(given)
        return _without_none(function(wanted, *tensors, {**_DEFAULTS, **given}))

    return kernel


def _take_wanted(given):
    return Wanted(*(given.pop(name, False) for name in RETURNS))


def _without_none(outputs):
    """The public operators give tensors alone: an empty one for an output that is not wanted."""
    return tuple(outputs[0].new_empty(0) if value is None else value for value in outputs)


def _schema_of(options):
    typed = {name: option for name, option in options.items() if option.schema}
    arguments = [f"{option.schema} {name}={option.default!r}" for name, option in typed.items()]
    return ", ".join((*arguments, "Tensor? token_temperature=None"))


_FUNCTIONS = {
    "linear_cross_entropy": (
        linear_cross_entropy_of,
        f"Tensor input, Tensor linear_weight, Tensor target, *, {_schema_of(OPTIONS)}",
    ),
    "cross_entropy": (
        cross_entropy_of,
        "Tensor logits, Tensor target, *, "
        + _schema_of({name: option for name, option in OPTIONS.items() if option.of_logits}),
    ),
}
_RETURNS_SCHEMA = ", ".join(f"bool {name}=False" for name in RETURNS)
_OUTPUTS_SCHEMA = ", ".join(f"Tensor {name}" for name in ("loss", *OUTPUTS))


def _register_composite(name, function, schema):
    ops.library.define(f"{name}{schema}")
    # Without this vmap would loop over the batch, one call a slice, with only a warning.
    ops.library.impl(name, validate.refuse_vmap, "FuncTorchBatched")
    ops.library.impl(name, function, "CompositeImplicitAutograd")


for _name, (_function, _schema) in _FUNCTIONS.items():
    _register_composite(_name, _kernel_of(_function), f"({_schema}) -> Tensor")
    _register_composite(
        f"{_name}_outputs",
        _kernel_of_outputs(_function),
        f"({_schema}, {_RETURNS_SCHEMA}) -> ({_OUTPUTS_SCHEMA})",
    )
