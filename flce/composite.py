"""The composite operators `torch.ops.flce.linear_cross_entropy` and `cross_entropy`, and for each a
variant `_outputs`, which also returns lse, entropy, accuracy, predictions and z_loss.

They read requires_grad and autocast, resolve `save`, and call the inner operators. They have no
autograd formula: autograd records the inner operators.
"""

import math
import operator
import sys

import torch

from . import adapter, autograd, parallel, strategy, validate
from .accumulate import Accumulator
from .options import OPTIONS, OUTPUTS, RETURNS, SHARDS, Wanted, defaults
from .signature import (
    autocast_dtype,
    describe,
    environment,
    linear_signature,
    linear_values,
    logits_signature,
    logits_values,
)
from .targets import shifted_target

NOTHING = Wanted()
# Each rank draws with a key of its own, because the draws of the ranks' classes in a row have to be
# independent. Its multiples wrap as int64, and differ.
_SEED_STEP = 0x9E3779B97F4A7C15 >> 1
_DEFAULTS = {**defaults(), "token_temperature": None}
_vectors = operator.itemgetter("weight", "token_weight", "token_temperature")
_OPERANDS = ("input", "linear_weight", "linear_bias")
_LOSS_TENSORS = ("target", "weight", "token_weight", "temperature")


def _rows_of(tensor):
    """Flattens all leading dimensions into one."""
    return (tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])).contiguous()


def _loss_tensors(call, target, vectors):
    """Target and optional tensors in the form that the inner operators take."""
    validate.check_target_range(target, call.vocab, call.settings.ignore_index)
    if call.has_probabilities:
        flat = _rows_of(target)
    else:
        flat = target if target.dim() == 1 else target.reshape(-1)
        flat = (flat if flat.dtype == torch.int64 else flat.to(torch.int64)).contiguous()
    weight, token_weight, token_temperature = vectors
    if weight is None and token_weight is None and token_temperature is None:
        return flat, *vectors
    vectors = (None if one is None else one.detach().reshape(-1) for one in vectors)
    return flat, *(None if one is None else one.to(call.stat).contiguous() for one in vectors)


def _outputs(call, made, tensors, num_items, shape, bound=None):
    """The loss and the wanted outputs, of the rows' `shape`, from those of an inner operator.

    `bound`: how many rows were computed; with more valid rows the accuracy is NaN, as the loss is.
    """
    wanted, settings, (loss, stats, sums, predictions, *_) = call.wanted, call.settings, made
    outputs = [loss.reshape(shape) if settings.reduction == "none" else loss]
    outputs += [None] * len(wanted)
    if not any(wanted):
        return outputs
    target, _, token_weight, _ = tensors
    ignored = None if call.has_probabilities else target == settings.ignore_index
    if wanted.lse:
        outputs[1] = stats[autograd.STAT_LSE].reshape(shape)
    if wanted.entropy:
        outputs[2] = stats[autograd.STAT_ENTROPY].reshape(shape)
        if settings.gradient == "sampled" and outputs[2].requires_grad:
            outputs[2].register_hook(autograd.refuse_entropy_gradient)
    if wanted.accuracy:
        # An ignored row never counts as right: its prediction is -1, which may equal ignore_index.
        right = ((predictions == target) & ~ignored).sum().to(sums.dtype)
        outputs[3] = right / sums[autograd.SCALAR_VALID].clamp(min=1.0)
        if bound is not None:
            outputs[3] = outputs[3].masked_fill(sums[autograd.SCALAR_VALID] > bound, math.nan)
    if wanted.predictions:
        outputs[4] = predictions.reshape(shape)
    if wanted.z_loss:
        rows = settings.z_loss * stats[autograd.STAT_LSE].detach().square()
        if token_weight is not None:
            rows = rows * token_weight
            rows = rows if ignored is None else rows.masked_fill(ignored, 0.0)
        count = sums[autograd.SCALAR_VALID] if num_items is None else num_items
        if settings.reduction == "none":
            outputs[5] = rows.reshape(shape)
        elif settings.reduction == "sum":
            outputs[5] = rows.sum()
        else:
            outputs[5] = (rows.sum() / count).masked_fill(count == 0, 0.0)
    return outputs


def _joined_operands(input, linear_weight, settings):
    """The operands of the logits' GEMM, as adapter.Operands."""
    low_rank = settings["adapter_input"], settings["adapter_weight"]
    if all(tensor is None for tensor in low_rank):
        return adapter.Operands(input, linear_weight, linear_weight)
    if settings["accumulate_into"] is not None:
        got = repr(settings["accumulate_into"])
        validate.refuse("accumulate_into", "None with an adapter_weight", got)
    has_autocast = torch._C._is_any_autocast_enabled() and isinstance(input, torch.Tensor)
    autocast = autocast_dtype(input.device.type) if has_autocast else None
    least = 1 if settings["vocab_parallel"] is None else 0
    return adapter.joined(input, linear_weight, *low_rank, autocast, least)


def _resolve_vocab_parallel(settings, vectors, linear_weight):
    """(settings, vectors, shard) where vocab_parallel is given: the settings have its text, or None
    for a group of one rank. `shard` is the VocabShard if the class weights are this rank's only,
    so that the ranks have to exchange them, else None."""
    text = parallel.text_of(settings["vocab_parallel"])
    shard = parallel.shard_of(text)
    validate.check_tensor("linear_weight", linear_weight)
    if linear_weight.dim() == 0:  # which linear_signature refuses
        return {**settings, "vocab_parallel": None}, vectors, None
    rows = linear_weight.shape[0]
    if shard.ranks == 1:
        classes = shard.class_range(rows)[1]
        if rows != classes:
            validate.refuse("linear_weight", f"all {classes} rows in a group of one rank", rows)
        return {**settings, "vocab_parallel": None}, vectors, None
    from . import collectives  # also implements the operators that the call needs

    if not torch.compiler.is_compiling():
        collectives.check_group(shard)
        if not shard.fits(rows):  # in a group's first call all ranks then refuse
            collectives.compare(shard, linear_weight, None)
    weight, sharded = parallel.class_weight_of_rank(vectors[0], shard, rows)
    vectors = weight, *vectors[1:]
    return {**settings, "vocab_parallel": text}, vectors, shard if sharded else None


def _describe_loss_tensors(target, vectors, shard, linear_weight):
    """The fields of _LOSS_TENSORS, with class weights of all ranks, which are exchanged once all
    arguments have been checked. `shard`: None if they are whole."""
    described = list(map(describe, _LOSS_TENSORS, (target, *vectors)))
    if shard is not None:
        dtype, device, _, requires_grad = described[1]
        described[1] = dtype, device, shard.class_range(len(linear_weight))[1:], requires_grad
    return tuple(described)


def _common_options(call, rows, operands, tensors, num_items, shard, weight_shard):
    """Pairs of a name and a value: what the calls of all ranks have to have in common."""
    input, *others = operands
    pairs = [("input", (input.dtype, tuple(call.rows.shape))), ("valid_vocab", call.vocab)]
    names = *_OPERANDS[1:], *_LOSS_TENSORS, "num_items"
    for name, tensor in zip(names, (*others, *tensors, num_items), strict=True):
        pairs.append((name, None if tensor is None else tensor.dtype))
    own = (*SHARDS, "group")
    pairs += (pair for pair in call.settings._asdict().items() if pair[0] not in own)
    pairs += (("sequence", shard.sequence), ("reduce_input_grad", shard.reduce_input_grad))
    pairs += (("reduce_dtype", torch.float32 if shard.wide else None),)
    pairs += (("weight", "sharded" if weight_shard else "whole, or none"),)
    return [*pairs, ("accumulate_into", call.accumulates), ("rows that are not ignored", rows)]


def _exchange_first(call, rows, operands, tensors, num_items, vocab_parallel, weight_shard):
    """What the ranks exchange before the operator runs, once all arguments have been checked: their
    class ranges, in a group's first call; their options, with FLCE_CHECK=1; their class weights,
    where `weight_shard` is given. Returns `tensors` with the class weights of all ranks, and
    without those of padding."""
    if not torch.compiler.is_compiling():
        from . import collectives

        shard, options = parallel.shard_of(vocab_parallel), None
        if validate.checks_more():
            given = operands, tensors, num_items, shard, weight_shard
            options = _common_options(call, rows, *given)
        collectives.compare(shard, operands[1], options)
    target, weight, *vectors = tensors
    if weight is None:
        return tensors
    if weight_shard is not None:
        weight = parallel.whole_class_weight(weight, weight_shard, len(operands[1]))
    return target, weight[: call.vocab], *vectors


def _seed_of_rank(seed, rank):
    step = (rank * _SEED_STEP + 2**63) % 2**64 - 2**63
    return seed + step if rank else seed


def linear_cross_entropy_of(wanted, input, linear_weight, target, settings):
    """The loss and the outputs in `wanted`, None for the others. `settings`: the values of
    OPTIONS and of token_temperature, a vector of temperatures."""
    linear_bias, num_items = settings["linear_bias"], settings["num_items"]
    vectors = _vectors(settings)
    joined = _joined_operands(input, linear_weight, settings)
    input, linear_weight = joined.input, joined.weight
    weight_shard = None
    if settings["vocab_parallel"] is not None:
        settings, vectors, weight_shard = _resolve_vocab_parallel(settings, vectors, linear_weight)
    operands = list(map(describe, _OPERANDS, (input, linear_weight, linear_bias)))
    if joined.frozen_hidden > 0:
        # The joined weight was made without a graph; adapter_weight is what may want a gradient.
        operands[1] = *operands[1][:-1], joined.differentiated.requires_grad
    call = linear_signature(
        environment(input, settings["max_memory"]),
        wanted,
        tuple(operands),
        _describe_loss_tensors(target, vectors, weight_shard, linear_weight),
        joined.frozen_hidden,
        *linear_values(settings),
    )
    if validate.transforms_are_on():
        validate.refuse_transforms(input, linear_weight, linear_bias, target, *vectors, num_items)
    attribute = settings["accumulate_into"]
    accumulator = Accumulator(linear_weight, attribute) if call.accumulates else None
    ignore_index = call.settings.ignore_index
    shift, cu_seqlens = settings["shift"], settings["cu_seqlens"]
    if shift != 0 or cu_seqlens is not None:
        target = shifted_target(target, shift, cu_seqlens, ignore_index)
    if num_items is not None:
        num_items = validate.num_items_tensor(num_items, call.settings.reduction, call.stat, input)
    tensors = _loss_tensors(call, target, vectors)
    rows = strategy.rows_to_compute(tensors[0], settings["valid_bound"], ignore_index)
    linear_bias = None if linear_bias is None else linear_bias.contiguous()
    leaves = (_rows_of(input), linear_weight.contiguous(), linear_bias)
    resolved, arguments = call.resolved(rows)
    if call.settings.ranks:
        given = leaves, tensors, num_items, settings["vocab_parallel"], weight_shard
        tensors = _exchange_first(call, rows, *given)
    seed, samples = settings["gradient_seed"], resolved.save == "samples"
    # Drawn under no_grad too: a reentrant checkpoint restores the generator for its second forward,
    # so without a draw in the first every step would have the same seed.
    if call.settings.gradient == "sampled" or seed is not None:
        seed = validate.seed_tensor(seed, input)
        seed = _seed_of_rank(seed, call.settings.rank)
    seed = seed if samples else None
    operands = (*leaves[:2], tensors[0], linear_bias, *tensors[1:], num_items, seed)
    made = list(autograd.run(autograd.inner.forward.default, *operands, *arguments))
    if call.differentiable:
        count = 1 + call.differentiates_outputs
        gemm_weight = None
        if joined.frozen_hidden > 0:
            gemm_weight, leaves = leaves[1], (leaves[0], joined.differentiated, leaves[2])
        rest = made, count, resolved, tensors, accumulator, gemm_weight
        made[:count] = autograd.LinearCrossEntropy.apply(*leaves, *rest)
    return _outputs(call, made, tensors, num_items, call.rows.shape[:-1], rows)


def linear_cross_entropy_untraced(*args):
    """Not traced: after a graph break at accumulate.refuse_tracing torch.compile would trace it.
    Without torch.compile nothing traces, and importing it would take a second."""
    if "torch._dynamo" not in sys.modules:
        return linear_cross_entropy_of(*args)
    return torch._disable_dynamo(linear_cross_entropy_of)(*args)


def cross_entropy_of(wanted, logits, target, settings):
    """As linear_cross_entropy_of, for given logits."""
    num_items, vectors = settings["num_items"], _vectors(settings)
    described = describe("logits", logits)
    call = logits_signature(
        environment(logits),
        wanted,
        described,
        tuple(map(describe, _LOSS_TENSORS, (target, *vectors))),
        *logits_values(settings),
    )
    if validate.transforms_are_on():
        validate.refuse_transforms(logits, target, *vectors, num_items)
    tensors = _loss_tensors(call, target, vectors)
    num_items = validate.num_items_tensor(num_items, call.settings.reduction, call.stat, logits)
    rows = _rows_of(logits)
    forward = autograd.inner.cross_entropy_forward.default
    made = list(autograd.run(forward, rows, *tensors, num_items, *call.lists))
    if call.differentiable:
        count = 1 + call.differentiates_outputs
        made[:count] = autograd.CrossEntropy.apply(rows, made, count, call.lists, tensors)
    return _outputs(call, made, tensors, num_items, logits.shape[:-1])


def _kernel_of(function, gives_outputs):
    """Returns tensors only, as the schema requires: an empty one for an unwanted output."""

    def kernel(*tensors, **given):
        wanted = Wanted(*(given.pop(name, False) for name in RETURNS))
        loss, *outputs = function(wanted, *tensors, {**_DEFAULTS, **given})
        if not gives_outputs:
            return loss
        return loss, *(loss.new_empty(0) if value is None else value for value in outputs)

    return kernel


def _register(name, function, operands, options):
    """Registers operator `name` and its `_outputs` variant. `operands`: those of both schemas."""
    typed = {option: row for option, row in options.items() if row.schema}
    arguments = [f"{row.schema} {option}={row.default!r}" for option, row in typed.items()]
    schema = ", ".join((operands, "*", *arguments, "Tensor? token_temperature=None"))
    returns = ", ".join(f"bool {option}=False" for option in RETURNS)
    outputs = ", ".join(f"Tensor {output}" for output in ("loss", *OUTPUTS))
    for operator_schema, kernel in (
        (f"{name}({schema}) -> Tensor", _kernel_of(function, False)),
        (f"{name}_outputs({schema}, {returns}) -> ({outputs})", _kernel_of(function, True)),
    ):
        registered = autograd.library.define(operator_schema)
        # Without this vmap would loop over the batch, one call per slice, with only a warning.
        autograd.library.impl(registered, validate.refuse_vmap, "FuncTorchBatched")
        autograd.library.impl(registered, kernel, "CompositeImplicitAutograd")


_of_logits = {name: option for name, option in OPTIONS.items() if option.of_logits}
_operands = "Tensor input, Tensor linear_weight, Tensor target"
_register("linear_cross_entropy", linear_cross_entropy_of, _operands, OPTIONS)
_register("cross_entropy", cross_entropy_of, "Tensor logits, Tensor target", _of_logits)
