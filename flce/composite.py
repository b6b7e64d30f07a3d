"""The composite operators: `torch.ops.flce.linear_cross_entropy`, `cross_entropy`, and for each one
with the suffix `_outputs`, which also gives lse, entropy, accuracy, predictions and z_loss.

They read requires_grad and autocast, resolve `save`, and call the inner operators. An inner
operator's autograd formula never sees the composite.
"""

import math
import typing

import torch

from . import ops, options


def _wants(tensor):
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _call(op, function, differentiable, outputs, settings, *tensors):
    """The operator through its Function at once, past the dispatcher's way to the same Function."""
    try:
        if differentiable:
            return function.apply(op, True, outputs, settings, *tensors)
        return op(*tensors, *settings)
    except MemoryError as error:
        ops.raise_out_of_memory(error)


def _allow_tf32(device_type, dtype):
    if device_type != "cuda" or dtype != torch.float32:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


class Wanted(typing.NamedTuple):
    """Which outputs a call gives beside the loss, in the order of LinearCrossEntropyOutput."""

    lse: bool = False
    entropy: bool = False
    accuracy: bool = False
    predictions: bool = False
    z_loss: bool = False

    @property
    def differentiable(self):
        return self.lse or self.entropy


_NOTHING = Wanted()


def _loss_tensors(target, weight, token_weight, token_temperature, num_items, loss, first):
    """Target and the optional tensors as the inner operators take them.

    `loss`: name of the tensor with the rows, reduction, scalars and dtype of the statistics.
    """
    name, reduction, stat = loss
    rows = first.shape[:-1]
    if target.is_floating_point():
        flat = target.reshape(-1, target.shape[-1])
    else:
        flat = target.reshape(-1).to(torch.int64)
    return (
        flat.contiguous(),
        None if weight is None else weight.detach().to(stat).contiguous(),
        options.row_vector("token_weight", token_weight, rows, stat, name, first),
        options.row_vector("temperature", token_temperature, rows, stat, name, first),
        options.num_items_tensor(num_items, reduction, stat, first),
    )


def _check_accuracy(wanted, target):
    if wanted.accuracy and target.is_floating_point():
        raise ValueError(
            "return_accuracy: expected False with probabilities, which name no class to be right "
            "about, got True"
        )


def _outputs(wanted, made, tensors, reduction, scalars, rows, bound=None):
    """The loss and what is wanted beside it, from an inner operator's first four outputs.

    `bound`: how many rows were computed; more valid ones make the accuracy NaN, as the loss is.
    """
    loss, stats, sums, predictions = made
    if wanted is _NOTHING:
        return (loss.reshape(rows) if reduction == "none" else loss,)
    given = [loss.reshape(rows) if reduction == "none" else loss, *(None,) * len(wanted)]
    target, _, token_weight, _, num_items = tensors
    ignored = None if target.is_floating_point() else target == scalars.ignore_index

    def shaped(vector):
        return vector.reshape(rows)

    if wanted.lse:
        given[1] = shaped(stats[ops.STAT_LSE])
    if wanted.entropy:
        given[2] = shaped(stats[ops.STAT_ENTROPY])
    if wanted.accuracy:
        # No ignored row is right: its prediction is -1, which may be ignore_index.
        right = ((predictions == target) & ~ignored).sum().to(sums.dtype)
        given[3] = right / sums[ops.SCALAR_VALID].clamp(min=1.0)
        if bound is not None:
            given[3] = given[3].masked_fill(sums[ops.SCALAR_VALID] > bound, math.nan)
    if wanted.predictions:
        given[4] = shaped(predictions)
    if wanted.z_loss:
        parts = _z_losses(stats.detach(), token_weight, ignored, scalars.z_loss)
        count = sums[ops.SCALAR_VALID] if num_items is None else num_items
        given[5] = {"none": shaped, "sum": torch.sum}.get(reduction, _mean_over(count))(parts)
    return given


def _z_losses(stats, token_weight, ignored, factor):
    rows = factor * stats[ops.STAT_LSE].square()
    if token_weight is None:
        return rows
    rows = rows * token_weight
    return rows if ignored is None else rows.masked_fill(ignored, 0.0)


def _mean_over(count):
    """Sum over `count`, 0 where that is 0."""
    return lambda values: (values.sum() / count).masked_fill(count == 0, 0.0)


def product_dtypes(dtype, accum_dtype, logits_dtype):
    """Those of the products' operands, of dW's sum and of the logits, None replaced."""
    stat = ops.stat_dtype(dtype)
    accum_dtype = options.check_dtype("accum_dtype", accum_dtype, dtype, stat) or dtype
    logits_dtype = options.check_dtype("logits_dtype", logits_dtype, dtype, stat) or stat
    return dtype, accum_dtype, logits_dtype


def _linear(
    wanted,
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    token_weight=None,
    token_temperature=None,
    num_items=None,
    shift=0,
    cu_seqlens=None,
    valid_vocab=None,
    valid_bound=None,
    accum_dtype=None,
    logits_dtype=None,
    save="auto",
    max_memory=None,
    **numbers,
):
    """The loss and the outputs of `wanted`, None for the others; `numbers` as check_scalars."""
    options.check_choices(reduction, save)
    scalars = options.check_scalars(**numbers)
    options.check_linear(input, linear_weight, target, linear_bias, weight, scalars.ignore_index)
    options.refuse_transforms(input, linear_weight, linear_bias)
    _check_accuracy(wanted, target)
    if shift != 0 or cu_seqlens is not None:
        target = options.shifted_target(target, shift, cu_seqlens, scalars.ignore_index)
    if valid_vocab is not None:
        options.check_integer("valid_vocab", valid_vocab, 1, linear_weight.shape[0])
    vocab = linear_weight.shape[0] if valid_vocab is None else valid_vocab
    if options.checks_targets(input.device):
        options.check_target_range(target, vocab, scalars.ignore_index)
    dtype = options.compute_dtype(input, linear_weight, linear_bias)
    types = product_dtypes(dtype, accum_dtype, logits_dtype)
    loss = ("input", reduction, ops.stat_dtype(dtype))
    tensors = _loss_tensors(target, weight, token_weight, token_temperature, num_items, loss, input)
    rows = options.rows_to_compute(tensors[0], valid_bound, scalars.ignore_index)
    max_memory = options.resolve_max_memory(max_memory, input.device)
    grads = (_wants(input), _wants(linear_weight), _wants(linear_bias))
    sizes = (tensors[0].shape[0] if rows is None else rows, linear_weight.shape[1], vocab)
    if any(grads):
        loss = (scalars, target.is_floating_point(), reduction)
        save = resolve_save(save, input.device.type, sizes, types, loss, wanted, max_memory)
    else:
        save = "nothing"
    outputs = (wanted.entropy, wanted.accuracy or wanted.predictions)
    settings = (reduction, *scalars, valid_vocab, rows, *outputs, *types, save, max_memory)
    made = _call(
        ops.inner.forward.default,
        ops.Forward,
        any(grads),
        wanted.differentiable,
        (*settings, *grads, _allow_tf32(input.device.type, dtype)),
        input.reshape(-1, input.shape[-1]).contiguous(),
        linear_weight.contiguous(),
        tensors[0],
        None if linear_bias is None else linear_bias.contiguous(),
        *tensors[1:],
    )
    return _outputs(wanted, made[:4], tensors, reduction, scalars, input.shape[:-1], rows)


def resolve_save(save, device_type, sizes, types, loss, wanted, max_memory):
    """`loss`: its scalars, whether its targets are probabilities, its reduction."""
    dtype, _, logits_dtype = types
    scalars, has_probabilities, reduction = loss
    operand = ops.gemm_dtype(device_type, dtype)
    dtypes = (operand, logits_dtype if device_type != "cpu" else operand)
    kept = options.saved_dtype(dtypes, scalars, has_probabilities, wanted.entropy)
    return options.resolve_save(
        save, device_type, sizes, dtypes, kept, reduction, max_memory, wanted.differentiable
    )


def _logits(
    wanted,
    logits,
    target,
    *,
    weight=None,
    reduction="mean",
    token_weight=None,
    token_temperature=None,
    num_items=None,
    **numbers,
):
    """`_linear` for logits that the caller holds."""
    options.check_choices(reduction)
    scalars = options.check_scalars(**numbers)
    options.check_logits(logits, target, weight, scalars.ignore_index)
    options.refuse_transforms(logits)
    _check_accuracy(wanted, target)
    vocab = logits.shape[-1]
    if options.checks_targets(logits.device):
        options.check_target_range(target, vocab, scalars.ignore_index)
    loss = ("logits", reduction, ops.stat_dtype(logits.dtype))
    tensors = _loss_tensors(
        target, weight, token_weight, token_temperature, num_items, loss, logits
    )
    made = _call(
        ops.inner.cross_entropy_forward.default,
        ops.CrossEntropyForward,
        _wants(logits),
        wanted.differentiable,
        (reduction, *scalars, wanted.entropy, wanted.accuracy or wanted.predictions),
        logits.reshape(-1, vocab).contiguous(),
        *tensors,
    )
    return _outputs(wanted, made, tensors, reduction, scalars, logits.shape[:-1])


def linear_cross_entropy(input, linear_weight, target, **options):
    return _linear(_NOTHING, input, linear_weight, target, **options)[0]


def linear_cross_entropy_outputs(input, linear_weight, target, **options):
    wanted = _take_wanted(options)
    return _without_none(_linear(wanted, input, linear_weight, target, **options))


def cross_entropy(logits, target, **options):
    return _logits(_NOTHING, logits, target, **options)[0]


def cross_entropy_outputs(logits, target, **options):
    wanted = _take_wanted(options)
    return _without_none(_logits(wanted, logits, target, **options))


def _take_wanted(options):
    return Wanted(*(options.pop(f"return_{name}", False) for name in Wanted._fields))


def _without_none(outputs):
    """An operator cannot give None: an empty tensor stands for an output that is not wanted."""
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
