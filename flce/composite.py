"""The composite operators: `torch.ops.flce.linear_cross_entropy`, `cross_entropy`, and for each one
with the suffix `_outputs`, which also gives lse, entropy, accuracy, predictions and z_loss.

They read requires_grad and autocast, resolve `save`, and call the inner operators. An inner
operator's autograd formula never sees the composite.
"""

import functools
import math
import sys

import torch

from . import ops, options
from .accumulate import Accumulator
from .signature import (
    Wanted,
    describe,
    environment,
    linear_signature,
    logits_signature,
)

_NOTHING = Wanted()
_NO_VECTORS = (None,) * 3


def _describe(target, weight, token_weight, token_temperature):
    """In the order of LossTensors."""
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


def _loss_tensors(call, target, optional):
    """Target and the optional tensors as the inner operators take them."""
    if options.checks_targets(target.device):
        options.check_target_range(target, call.vocab, call.scalars.ignore_index)
    flat = _rows_of(target) if call.has_probabilities else _indices_of(target)
    return (
        flat,
        *(
            None if tensor is None else tensor.detach().reshape(-1).to(call.stat).contiguous()
            for tensor in optional
        ),
    )


def _run(op, tensors, settings):
    """An inner operator's outputs, for a Function to be applied to."""
    try:
        return list(ops.below_autograd(op, *tensors, *settings))
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


def linear_call(
    wanted,
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    logit_scale=1.0,
    temperature=1.0,
    token_temperature=None,
    z_loss=0.0,
    token_weight=None,
    num_items=None,
    shift=0,
    cu_seqlens=None,
    valid_vocab=None,
    valid_bound=None,
    accum_dtype=None,
    logits_dtype=None,
    save="auto",
    max_memory=None,
    accumulate_into=None,
):
    """The signature of a call, and what `computed` takes beside it."""
    operands = (
        describe("input", input),
        describe("linear_weight", linear_weight),
        describe("linear_bias", linear_bias),
    )
    call = linear_signature(
        environment(input, options.is_compiling(), max_memory),
        wanted,
        operands,
        _describe(target, weight, token_weight, token_temperature),
        *(reduction, valid_vocab, accum_dtype, logits_dtype, save, max_memory, accumulate_into),
        *(ignore_index, label_smoothing, logit_scale, softcap, temperature, z_loss),
    )
    vectors = (weight, token_weight, token_temperature)
    options.refuse_transforms(input, linear_weight, linear_bias, target, *vectors, num_items)
    accumulator = Accumulator(linear_weight, accumulate_into) if call.accumulates else None
    if shift != 0 or cu_seqlens is not None:
        target = options.shifted_target(target, shift, cu_seqlens, call.scalars.ignore_index)
    num_items = options.num_items_tensor(num_items, reduction, call.stat, input)
    operands = (input, linear_weight, target, linear_bias)
    return call, (operands, vectors, num_items, valid_bound, accumulator)


def computed(call, operands, vectors=_NO_VECTORS, num_items=None, bound=None, accumulator=None):
    """The loss and the outputs of call.wanted, None for the others.

    `operands`: input, linear_weight, target, linear_bias; `vectors`: weight, token_weight,
    token_temperature; `bound`: valid_bound.
    """
    input, linear_weight, target, linear_bias = operands
    tensors = _loss_tensors(call, target, vectors)
    target = tensors[0]
    rows = options.rows_to_compute(target, bound, call.scalars.ignore_index)
    linear_bias = None if linear_bias is None else linear_bias.contiguous()
    leaves = (_rows_of(input), linear_weight.contiguous(), linear_bias)
    made = _forward(call, leaves, tensors, num_items, rows, accumulator)
    return _outputs(call, made, tensors, num_items, input.shape[:-1], rows)


def repeated(call, operands, as_given):
    """The loss of a call of flce/repeat.py. `as_given`: whether its operands, if they are
    contiguous, are the inner operator's."""
    input, linear_weight, target, linear_bias = operands
    if (
        as_given
        and input.is_contiguous()
        and linear_weight.is_contiguous()
        and target.is_contiguous()
        and (linear_bias is None or linear_bias.is_contiguous())
    ):
        leaves = (input, linear_weight, linear_bias)
        return _forward(call, leaves, (target, *_NO_VECTORS), None, None, None)[0]
    return computed(call, operands)[0]


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


def linear_cross_entropy_of(wanted, *operands, **settings):
    call, prepared = linear_call(wanted, *operands, **settings)
    return computed(call, *prepared)


@functools.cache
def _never_traced():
    return torch._disable_dynamo(linear_cross_entropy_of)


def linear_cross_entropy_untraced(*args, **options):
    """Where torch.compile breaks off at accumulate.refuse_tracing it would trace what is called
    next. Without torch.compile nothing traces, and its import would take a second."""
    call = _never_traced() if "torch._dynamo" in sys.modules else linear_cross_entropy_of
    return call(*args, **options)


def cross_entropy_of(
    wanted,
    logits,
    target,
    *,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    logit_scale=1.0,
    temperature=1.0,
    token_temperature=None,
    z_loss=0.0,
    token_weight=None,
    num_items=None,
):
    """The same for logits that the caller holds."""
    described = describe("logits", logits)
    call = logits_signature(
        environment(logits, options.is_compiling()),
        wanted,
        described,
        _describe(target, weight, token_weight, token_temperature),
        reduction,
        *(ignore_index, label_smoothing, logit_scale, softcap, temperature, z_loss),
    )
    vectors = (weight, token_weight, token_temperature)
    options.refuse_transforms(logits, target, *vectors, num_items)
    tensors = _loss_tensors(call, target, vectors)
    num_items = options.num_items_tensor(num_items, reduction, call.stat, logits)
    rows, settings = _rows_of(logits), call.settings
    arguments = (rows, *tensors, num_items)
    made = _run(ops.inner.cross_entropy_forward.default, arguments, settings)
    if call.differentiable:
        differentiable = ops.CrossEntropyForward.apply(made, call.returns, settings, tensors, rows)
        made[: len(differentiable)] = differentiable
    return _outputs(call, made, tensors, num_items, logits.shape[:-1])


def linear_cross_entropy(input, linear_weight, target, **options):
    return linear_cross_entropy_of(_NOTHING, input, linear_weight, target, **options)[0]


def linear_cross_entropy_outputs(input, linear_weight, target, **options):
    wanted = _take_wanted(options)
    return _without_none(linear_cross_entropy_of(wanted, input, linear_weight, target, **options))


def cross_entropy(logits, target, **options):
    return cross_entropy_of(_NOTHING, logits, target, **options)[0]


def cross_entropy_outputs(logits, target, **options):
    wanted = _take_wanted(options)
    return _without_none(cross_entropy_of(wanted, logits, target, **options))


def _take_wanted(options):
    return Wanted(*(options.pop(f"return_{name}", False) for name in Wanted._fields))


def _without_none(outputs):
    """The public operators give tensors alone: an empty one for an output that is not wanted."""
    return tuple(outputs[0].new_empty(0) if value is None else value for value in outputs)


_LOSS_SCHEMA = (
    "Tensor? weight=None, str reduction='mean', int? ignore_index=-100, "
    "float label_smoothing=0.0, float? softcap=None, float logit_scale=1.0, "
    "float temperature=1.0, Tensor? token_temperature=None, float z_loss=0.0, "
    "Tensor? token_weight=None, Tensor? num_items=None"
)
_SCHEMAS = {
    "linear_cross_entropy": (
        "Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
        f"{_LOSS_SCHEMA}, int shift=0, Tensor? cu_seqlens=None, SymInt? valid_vocab=None, "
        "SymInt? valid_bound=None, ScalarType? accum_dtype=None, ScalarType? logits_dtype=None, "
        "str save='auto', int? max_memory=None"
    ),
    "cross_entropy": f"Tensor logits, Tensor target, *, {_LOSS_SCHEMA}",
}
_WANTED_SCHEMA = ", ".join(f"bool return_{name}=False" for name in Wanted._fields)
_OUTPUTS_SCHEMA = ", ".join(f"Tensor {name}" for name in ("loss", *Wanted._fields))


def _register_composite(name, function, schema):
    ops.library.define(f"{name}{schema}")
    # Without this vmap would loop over the batch, one call a slice, with only a warning.
    ops.library.impl(name, options.refuse_vmap, "FuncTorchBatched")
    ops.library.impl(name, function, "CompositeImplicitAutograd")


for _name, _schema in _SCHEMAS.items():
    _register_composite(_name, globals()[_name], f"({_schema}) -> Tensor")
    _register_composite(
        f"{_name}_outputs",
        globals()[f"{_name}_outputs"],
        f"({_schema}, {_WANTED_SCHEMA}) -> ({_OUTPUTS_SCHEMA})",
    )
