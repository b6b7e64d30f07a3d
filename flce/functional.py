"""The public functions: loss of a linear head, loss of given logits, log-probabilities."""

import numbers

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import accumulate, composite, dtensor, parallel, validate
from .options import (
    NUMBERS,
    OPTIONS,
    RETURNS,
    LinearCrossEntropyOutput,
    Wanted,
    completed,
    defaults,
    show_options,
)
from .strategy import from_torch_options, parse_bytes

_IN_SCHEMA = (*(name for name, option in OPTIONS.items() if option.schema), "token_temperature")
_SCALARS = ("ignore_index", *NUMBERS)
_OF_LOGITS = {**defaults("of_logits"), **dict.fromkeys(RETURNS, False)}
# Neither log p nor the entropy depends on these.
_OF_LOSSES = ("weight", "reduction", "label_smoothing", "options", "z_loss", "token_weight")
_OF_LOSSES += ("num_items", "accumulate_into")
_TENSORS_OWN = torch.Tensor.__torch_function__.__func__
_OF_LOGPROBS = {name: value for name, value in defaults().items() if name not in _OF_LOSSES}


def _call(name, operands, settings):
    """The loss, or the loss with the wanted outputs: directly, or through the composite
    operator if the call is traced or transformed. `settings`: the options by name; modified here,
    and listed by the callers because torch.compile cannot trace locals() before torch 2.13."""
    if type(operands[0]) is not torch.Tensor and _has_override(operands[0]):
        public = _PUBLIC[name]
        return handle_torch_function(public, operands[:1], *operands, **settings)
    _as_numbers(settings, operands[0])
    returns = [validate.check_flag(option, settings[option]) for option in RETURNS]
    wanted = Wanted(*returns) if any(returns) else composite.NOTHING
    if settings.get("accumulate_into") is not None:
        accumulate.refuse_tracing()
        made = composite.linear_cross_entropy_untraced(wanted, *operands, settings)
    elif torch.compiler.is_compiling() or validate.function_transforms_are_on():
        made = _through_operator(name, operands, settings, wanted)
    else:
        made = getattr(composite, f"{name}_of")(wanted, *operands, settings)
    return LinearCrossEntropyOutput(*made) if any(wanted) else made[0]


def _has_override(tensor):
    """Whether its class has a __torch_function__ of its own. What Tensor's own would do, give
    results of that class, the operators do."""
    own = getattr(type(tensor).__torch_function__, "__func__", None)
    return own is not _TENSORS_OWN and has_torch_function_unary(tensor)


def _through_operator(name, operands, settings, wanted):
    if isinstance(settings["num_items"], numbers.Real):
        # The schema has one type for it: a tensor, made without synchronisation.
        settings["num_items"] = validate.num_items_tensor(
            settings["num_items"], settings["reduction"], torch.float64, operands[0]
        )
    if settings.get("gradient_seed") is not None:
        settings["gradient_seed"] = validate.seed_tensor(settings["gradient_seed"], operands[0])
    if settings.get("max_memory") is not None:
        settings["max_memory"] = parse_bytes(settings["max_memory"])
    if isinstance(bound := settings.get("valid_bound"), str):
        got = f'"{bound}", which waits for the device'
        validate.refuse("valid_bound", "an int or None under torch.compile", got)
    if settings.get("vocab_parallel") is not None:
        settings["vocab_parallel"] = parallel.text_of(settings["vocab_parallel"])
    given = {option: settings[option] for option in _IN_SCHEMA if option in settings}
    if not any(wanted):
        return (getattr(torch.ops.flce, name)(*operands, **given),)
    returns = dict(zip(RETURNS, wanted, strict=True))
    loss, *made = getattr(torch.ops.flce, f"{name}_outputs")(*operands, **given, **returns)
    return loss, *(value if want else None for value, want in zip(made, wanted, strict=True))


def _as_numbers(settings, first):
    """Converts numbers to Python's; the temperature becomes a number or a vector.

    `first`: the tensor with the rows.
    """
    settings["token_temperature"] = None
    for name in _SCALARS:
        if not isinstance(value := settings.get(name), torch.Tensor):
            continue
        is_scalar = value.dim() == 0
        is_known = is_scalar and value.device.type == "cpu" and not torch.compiler.is_compiling()
        if name != "temperature" or is_known:
            settings[name] = validate.number(name, value)
        else:
            # A GPU's or a traced value cannot become a number: each row gets the tensor.
            rows = value.expand(first.shape[:-1]) if is_scalar else value
            settings.update(temperature=1.0, token_temperature=rows)


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    adapter_input=None,
    adapter_weight=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    options=None,
    softcap=None,
    logit_scale=1.0,
    temperature=1.0,
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
    gradient="exact",
    gradient_eps=2**-6,
    vocab_parallel=None,
    gradient_seed=None,
    return_lse=False,
    return_entropy=False,
    return_accuracy=False,
    return_predictions=False,
    return_z_loss=False,
):
    """Cross entropy of `input @ linear_weight.T + linear_bias`, without all logits in memory.

    Equivalent to ``F.cross_entropy(F.linear(input, linear_weight, linear_bias).flatten(0, -2),
    target.flatten(), ...)`` with the loss in float32, except that the mean over no valid row is 0
    instead of NaN. docs/semantics.md has the formulas and the meaning of every option.

    Args:
        input: hidden states, shape (..., H); float64, float32, bfloat16 or float16, CPU or CUDA.
        linear_weight: the head's weight, shape (V, H), of input's dtype (any dtype under autocast,
            which casts as F.linear does). flce.compat.torch accepts one with more dimensions.
        target: class indices in [0, V) or `ignore_index`, shape (...), int64 or int32; or
            probabilities, shape (..., V), of any floating dtype, which must not require grad.
        linear_bias: shape (V,), of input's dtype or float32 (any under autocast), or None.
        adapter_input, adapter_weight: a low-rank term of the logits, ``adapter_input @
            adapter_weight.T``, shapes (..., r) and (V, r), dtypes as input and linear_weight (any
            under autocast), or both None. Each call copies both weights into one operand, (V,
            H + r) with H rounded up to a multiple of 8. If linear_weight does not require grad,
            only adapter_weight's gradient is computed.
        weight: a factor for each class, shape (V,), or None; it must not require grad.
        reduction: "mean" divides the sum by the sum of the valid rows' class weights (without
            `weight`: by their number; with probabilities by the number of rows), "sum" does not
            divide, "none" gives a loss for each row, 0 for ignored ones.
        ignore_index: rows with this target give no loss and no gradient, whatever they contain.
            None means -100. Does not apply to probabilities.
        label_smoothing: s in [0, 1]; the target becomes (1 - s) target + s/V.
        options: torch.nn.LinearCrossEntropyOptions, from which `accum_dtype` and `max_memory`
            are derived if they are None; its other fields have no effect here.
        softcap, logit_scale, temperature: the loss is that of the logits
            ``softcap tanh(logit_scale z / softcap) / temperature`` of ``z = x W^T + b``; softcap
            None omits the tanh. temperature: a number, or a tensor of shape (...) with one value
            for each row, which must be positive and not require grad.
        z_loss: adds z_loss lse^2 to a valid row's loss; under "mean" that term's sum is divided by
            the number of valid rows, not by class weights.
        token_weight: a factor for each row's loss, z-loss included, shape (...), any real dtype;
            it does not change the mean's denominator. It must not require grad.
        num_items: a number or 0-d tensor, which may be on the device: replaces the mean's
            denominator. 0 gives the loss 0. Only for "mean".
        shift: the target of a position is that of `shift` positions further along the last
            dimension of (...); the last ones are ignored. Requires an input of at least 3
            dimensions, or `cu_seqlens`. Outputs are not shifted, nor are `token_weight` and
            `temperature`, which belong to the rows of input.
        cu_seqlens: with a shift, offsets of packed sequences into the flattened (...), int32 or
            int64, shape (sequences + 1,): no target comes from beyond a sequence's end.
        valid_vocab: only the first `valid_vocab` classes exist; the rows of linear_weight after
            them are padding, which is never read and gets the gradient 0.
        valid_bound: an upper bound of the number of rows that are not ignored; time and memory then
            follow the bound. "count" counts the rows, with one device synchronisation. More rows
            than the bound make the loss and the gradients NaN on CUDA and a ValueError on the CPU,
            where ignored rows are always skipped. None never synchronises (docs/memory.md).
        accum_dtype: the dtype in which the weight's gradient is summed over chunks: the operands'
            own (None; its error grows with the number of chunks) or torch.float32, which takes
            4 V H more bytes for 16-bit operands.
        logits_dtype: torch.float32 (None) keeps the logits exact; the operands' own dtype lets
            them be rounded, as an eager head does. On the CPU, bfloat16 operands always give
            bfloat16 logits.
        save: what the forward keeps for the backward: "logits" (N V elements, fastest), "grads"
            (the gradients, made in the forward; mean and sum only), "stats" (seven numbers per row;
            the backward recomputes the logits), "samples" (with gradient="sampled", which has no
            other) or "auto": grads for a scalar loss on CUDA if max_memory is not given; else
            logits if they fit max_memory, grads for a scalar loss, and stats otherwise.
            docs/memory.md has the rule in full.
        max_memory: upper bound of the logits buffer in bytes, or text such as "512MiB". None: the
            variable FLCE_MAX_MEMORY, else the smaller of 1 GiB and 1/8 of the device's memory;
            then a scalar loss of 16-bit operands on CUDA takes the smallest chunks that cost at
            most 1 % of the predicted time.
        accumulate_into: "grad" or "main_grad": the backward adds linear_weight's gradient to that
            attribute of linear_weight itself, a leaf, and returns none: saves V H elements and one
            pass. "grad" is created if it is None; "main_grad" must exist and may be float32. If
            the parameter has grad_added_to_main_grad, it is set to True. Not with save="grads" or
            an adapter.
        gradient, gradient_eps: "sampled" keeps the loss exact and estimates the gradients, without
            bias, from at most 1/gradient_eps + 2 classes of each row (docs/sampled.md); 2**-12 to
            1. Not for float64 operands, probabilities, label smoothing with a softcap, or more than
            2**20 classes.
        vocab_parallel: a `flce.VocabParallel`, where each rank of a group has the rows of
            linear_weight for a part of the classes; None if linear_weight has all of them, and for
            DTensors, whose placements say it (docs/parallel.md).
        gradient_seed: the seed of the draw, an int64, as an int or a tensor of one element on
            input's device. None takes a new one from torch's default generator of that device.
        return_lse, return_entropy, return_accuracy, return_predictions, return_z_loss: more
            outputs, from the same pass. Gradients of lse or entropy use the same two GEMMs as the
            loss's; with save="grads" the backward then recomputes all gradients.

    Returns:
        The loss, float64 for float64 operands and float32 for all others; shape () or, for
        "none", (...). If a `return_*` is set, a `LinearCrossEntropyOutput`.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, by name, or
            a combination without a meaning; a tensor that `accumulate_into` cannot add to.
        IndexError: a target out of range on the CPU, or on CUDA with FLCE_CHECK=1. Without it
            such a row's loss and gradients are NaN on CUDA, where a check would synchronise.
        torch.OutOfMemoryError: names the buffer and a smaller max_memory.
        RuntimeError: double backward, forward-mode AD, vmap; `accumulate_into` under torch.compile
            or autograd.grad of linear_weight; a gradient of the entropy with gradient="sampled"; a
            collective of `vocab_parallel` that fails.
    """
    settings = dict(
        linear_bias=linear_bias, adapter_input=adapter_input, adapter_weight=adapter_weight,
        weight=weight, reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing, options=options,
        softcap=softcap, logit_scale=logit_scale, temperature=temperature, z_loss=z_loss,
        token_weight=token_weight, num_items=num_items, shift=shift, cu_seqlens=cu_seqlens,
        valid_vocab=valid_vocab, valid_bound=valid_bound, accum_dtype=accum_dtype,
        logits_dtype=logits_dtype, save=save, max_memory=max_memory,
        accumulate_into=accumulate_into, gradient=gradient, gradient_eps=gradient_eps,
        vocab_parallel=vocab_parallel, gradient_seed=gradient_seed, return_lse=return_lse,
        return_entropy=return_entropy, return_accuracy=return_accuracy,
        return_predictions=return_predictions, return_z_loss=return_z_loss,
    )  # fmt: skip
    if dtensor.has_dtensors((input, linear_weight, target), settings):
        operands, settings = dtensor.local_call((input, linear_weight, target), settings)
        input, linear_weight, target = operands
    if options is not None:
        validate.check_tensor("linear_weight", linear_weight)
        classes = parallel.share_of(settings["vocab_parallel"], linear_weight)
        for name, value in from_torch_options(options, linear_weight, classes).items():
            if settings[name] is None:
                settings[name] = value
    if accumulate_into is not None:
        validate.check_tensor("linear_weight", linear_weight)
        validate.check_choices(settings)
        if not (torch.is_grad_enabled() and linear_weight.requires_grad):
            settings["accumulate_into"] = None  # no gradient is wanted: nothing to accumulate
    return _call("linear_cross_entropy", (input, linear_weight, target), settings)


def cross_entropy(logits, target, **options):
    """Cross entropy on logits that the caller holds.

    The forward reads the logits once; the backward reads them once and writes their gradient. Saved
    between the two: the logits and seven float32 numbers per row, no log-probabilities.

    Args:
        logits: shape (..., V), classes last; float64, float32, bfloat16 or float16, CPU or CUDA.
        target: class indices, shape (...), int64 or int32, or probabilities, shape (..., V).
        **options: as in `linear_cross_entropy`, without those of the linear layer, of shifts, of
            memory and of sampled gradients; the signature lists them.

    Returns:
        The loss, float32 (float64 for float64 logits), shape () or (...) for "none"; with a
        `return_*` a `LinearCrossEntropyOutput`. The gradient has the logits' dtype.

    Raises: as `linear_cross_entropy`.
    """
    settings = completed("cross_entropy", _OF_LOGITS, options)
    if dtensor.is_dtensor(logits):
        expected = "a plain tensor, as full_tensor() makes it, or the head's loss of its labels"
        validate.refuse("logits", expected, "a DTensor", TypeError)
    return _call("cross_entropy", (logits, target), settings)


def linear_logprobs(input, linear_weight, target, **options):
    """log p_y and the entropy of each row, for policy-gradient training.

    Both are differentiable, and their gradients come from one backward pass of two GEMMs (three
    with save="stats"); with gradient="sampled" logprobs alone is, and they come from two gathers.

    Args:
        input, linear_weight: as in `linear_cross_entropy`.
        target: class indices, shape (...), int64 or int32.
        **options: those of `linear_cross_entropy` on which log p and the entropy depend, and those
            of how they are computed, as there; save="grads" requires a scalar loss and is refused
            here.

    Returns:
        (logprobs, entropy), both of shape (...), float32 (float64 for float64 operands), in nats;
        0 where the target is ignored.

    Raises: as `linear_cross_entropy`.
    """
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        expected = "class indices of dtype torch.int64 or torch.int32"
        validate.refuse("target", expected, target.dtype, TypeError)
    options = completed("linear_logprobs", _OF_LOGPROBS, options)
    output = linear_cross_entropy(
        input, linear_weight, target, reduction="none", return_entropy=True, **options
    )
    return -output.loss, output.entropy


_PUBLIC = {"linear_cross_entropy": linear_cross_entropy, "cross_entropy": cross_entropy}
show_options(cross_entropy, _OF_LOGITS)
show_options(linear_logprobs, _OF_LOGPROBS)
