"""The public functions of one call: loss of a linear head, loss of given logits."""

import numbers
import typing
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from typing_extensions import Never, Unpack, overload

from . import (
    accumulate,
    class_losses,
    composite,
    mistakes,
    operators,
    overloads,
    packing,
    sharding,
    validate,
)
from . import options as table
from .modes import autocast_code
from .options import LinearCrossEntropyOutput, show_options

_ALL = table.defaults(table.Options)
_OF_LOGITS = table.defaults(table.LogitsOptions)
_DEFAULT_TORCH_FUNCTION = torch.Tensor.__torch_function__.__func__
_SCHEMAS = {**table.OPTIONS, **table.TEACHER_OPTIONS}
_IN_SCHEMA = {name for name, option in _SCHEMAS.items() if option.schema}
# {an option that may be a tensor with a value for each row: the operators' argument for that}
_ARGUMENT_OF = {option: argument for argument, option in operators.OPTION_OF.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
OF_LINEAR = ("input", "linear_weight", "target")
A_BIAS = ("linear_bias", "a bias")  # what a tensor after these is likely meant for
# What has to be a tensor where it is not None; num_items and gradient_seed may be numbers.
_OPTIONAL = {"teacher_weight", "teacher_bias"}
_OPTIONAL |= packing.TENSORS - {"num_items", "gradient_seed"}


class PublicFunction(typing.NamedTuple):
    """A public function whose call is one call of the core.

    public: the function. operands: the names of the tensors before its options. options: those that
    it has, with their defaults. run: the function of composite that computes it. operator: that of
    torch.ops.flce, for calls that are traced or transformed.
    """

    public: typing.Callable
    operands: tuple
    options: dict
    run: typing.Callable
    operator: str

    def named(self, operands, options):
        """The operands by name. Without a teacher_weight teacher_input is named teacher_logits."""
        tensors = dict(zip(self.operands, operands, strict=True))
        if "teacher_input" in tensors and options.get("teacher_weight") is None:
            tensors["teacher_logits"] = tensors.pop("teacher_input")
        return tensors


def _call(function, operands, options, caller=None):
    """The loss, or the loss with the wanted outputs. `function`: a PublicFunction; `caller`: of the
    public function that is composed of this call, see sharding.ShardedCall, or None. A call whose
    operands and options are all plain tensors runs none of the helpers below. A number among the
    options takes _check_tensors."""
    if not function.options.keys() >= options.keys():
        table.check_names(function.operator, function.options, options)
    kinds = (*map(type, operands), *map(type, options.values()))
    if not_plain := [kind for kind in kinds if kind not in _PLAIN]:
        has_subclass = any(issubclass(kind, torch.Tensor) for kind in not_plain)
        if has_subclass and _has_override(operands[0]):
            return handle_torch_function(function.public, operands[:1], *operands, **options)
        _check_tensors(function, operands, options)
        if has_subclass:
            operands, options = _local(function, operands, options)
    if options.get("options") is not None:
        options = with_torch_options(operands[1], options)
    run = function.run
    if options.get("accumulate_into") is not None and _trains(operands[1]):
        run = _untraced_run(function)
    elif torch.compiler.is_compiling() or validate.function_transforms_are_on():
        return _through_operator(function, operands, options)
    try:
        if caller is None:
            return run(*operands, options)
        return run(*operands, options, caller=caller)
    except (TypeError, ValueError) as error:
        mistakes.add_remedy(error, {**function.named(operands, options), **options})
        raise


def _local(function, operands, options):
    """(operands, options) with the shards that this rank has in place of DTensors."""
    if any(map(validate.is_dtensor, (*operands, *options.values()))):
        return sharding.hooks().local_call(function, operands, options)
    return operands, options


def _untraced_run(function):
    """`run` of a call that adds to a parameter's gradient, which no graph may do."""
    accumulate.refuse_tracing()
    # Without fullgraph=True the error of refuse_tracing, which torch.compile meets while it traces,
    # does not reach the user: torch.compile runs the frames that raise it uncompiled, where
    # refuse_tracing passes, and would compile `run`, called from there, as a frame of its own.
    return validate.untraced(function.run)


def _trains(weight):
    return torch.is_grad_enabled() and weight.requires_grad


def part_from(first_token):
    """linear_cross_entropy of a part of a call's rows, from row `first_token` on: draws and
    messages have the rows' numbers in that call. Of plain tensors, outside of graphs and
    transforms."""

    def call(*operands, caller=None, **options):
        of_part = {"first_token": first_token, "caller": caller}
        return composite.linear_cross_entropy_of(*operands, options, **of_part)

    return call


def _check_tensors(function, operands, options):
    """TypeError for an operand, or an option of _OPTIONAL, that is no tensor. A plain tensor
    that is not dense is refused where an operator fails (operators.py)."""
    if not all(type(value) in _PLAIN for value in operands):
        for name, value in function.named(operands, options).items():
            _check_tensor(name, value)
    for name, value in options.items():
        if name in _OPTIONAL:
            _check_tensor(name, value)


def _check_tensor(name, value):
    is_absent = value is None and name in _OPTIONAL
    if not is_absent and type(value) not in _PLAIN:
        validate.check_tensor(name, value)


def _has_override(value):
    """Whether it is a tensor whose class overrides __torch_function__. Tensor's default needs no
    call: it only gives results the class of the tensor, which the operators do themselves."""
    if not isinstance(value, torch.Tensor):
        return False
    function = getattr(type(value).__torch_function__, "__func__", None)
    return function is not _DEFAULT_TORCH_FUNCTION and has_torch_function_unary(value)


def with_torch_options(linear_weight, options):
    """`options` with accum_dtype and max_memory, unless they are given, from its `options`: a
    torch.nn.LinearCrossEntropyOptions or an object with the fields below, else TypeError.

    `accum_dtype` is `acc_dtype`, except with acc_policy="compact", which sums the weight's gradient
    in the operands' own dtype, in torch too. `max_memory` is the size in bytes of
    `batch_chunk_size` rows of logits in float32 (float64 for a float64 weight). `chunking_method`
    and `allow_retain_graph` have no effect: max_memory decides, and any backward may be repeated.
    """
    validate.check_tensor("linear_weight", linear_weight)
    options = dict(options)
    torch_options = options.pop("options")
    fields = ("acc_dtype", "acc_policy", "batch_chunk_size")
    if not all(hasattr(torch_options, name) for name in fields):
        expected = f"torch.nn.LinearCrossEntropyOptions or an object with the fields {fields}"
        validate.refuse("options", expected, type(torch_options).__name__, TypeError)
    if options.get("accum_dtype") is None and torch_options.acc_policy != "compact":
        options["accum_dtype"] = torch_options.acc_dtype
    elif options.get("accum_dtype") is None:
        packing.code_of("linear_weight", linear_weight.dtype)
        autocast = autocast_code(linear_weight.device)
        options["accum_dtype"] = packing.gemm_dtype(autocast, linear_weight.dtype)
    if (rows := torch_options.batch_chunk_size) is not None:
        validate.check_integer("options.batch_chunk_size", rows, 1)
        classes, ranks = packing.all_classes(options.get("vocab_parallel"), len(linear_weight))
        size = 8 if linear_weight.dtype == torch.float64 else 4
        alignment = 64 if linear_weight.is_cpu else 128
        if options.get("max_memory") is None:
            row = -(-classes // ranks) * size
            options["max_memory"] = int(rows) * (-(-row // alignment) * alignment)
    return options


def _schema_options(operands, options):
    """The options that torch.ops.flce's operators take, converted to the types of their schemas."""
    in_schema = {option: value for option, value in options.items() if option in _IN_SCHEMA}
    if "divergence" in in_schema:
        # Checked here: a schema takes a tensor for a number, and refuses in words of its own.
        packing.split_divergence(in_schema)
    for option in ("ignore_index", *packing.NUMBERS):
        if isinstance(value := in_schema.get(option), torch.Tensor):
            if option in _ARGUMENT_OF:  # a traced value cannot become a number
                in_schema[_ARGUMENT_OF[option]] = in_schema.pop(option)
            else:
                in_schema[option] = value.item()
    if isinstance(in_schema.get("num_items"), numbers.Real):
        reduction = in_schema.get("reduction", "mean")
        in_schema["num_items"] = validate.num_items_tensor(
            in_schema["num_items"], reduction, operands[0].device, operands[0].dtype
        )
    if in_schema.get("gradient_seed") is not None:
        in_schema["gradient_seed"] = validate.seed_tensor(
            in_schema["gradient_seed"], operands[0].device
        )
    if in_schema.get("max_memory") is not None:
        in_schema["max_memory"] = packing.parse_bytes(in_schema["max_memory"])
    if isinstance(bound := in_schema.get("valid_bound"), str):
        got = f'"{bound}", which waits for the device'
        validate.refuse("valid_bound", "an int or None under torch.compile", got)
    if options.get("vocab_parallel") is not None:
        shard = packing.shard_of(options["vocab_parallel"])
        in_schema["vocab_group"] = shard.group
        in_schema["vocab_shard"] = list(shard.integers().values())
    return in_schema


def _through_operator(function, operands, options):
    """The outputs of torch.ops.flce's operator."""
    in_schema = _schema_options(operands, options)
    returns = {name: options.get(name, False) for name in table.RETURNS}
    if returns["return_entropy"] == "detached":
        returns["return_entropy"] = in_schema["detach_entropy"] = True
    for option, value in returns.items():
        validate.check_flag(option, value)
    topk, has_classes = in_schema.get("topk", 0), in_schema.get("classes") is not None
    wanted = *returns.values(), has_classes or topk, topk
    if not any(wanted):
        return getattr(torch.ops.flce, function.operator)(*operands, **in_schema)
    operator = getattr(torch.ops.flce, f"{function.operator}_outputs")
    loss, *outputs = operator(*operands, **in_schema, **returns)
    pairs = zip(outputs, wanted, strict=True)
    return LinearCrossEntropyOutput(loss, *(value if want else None for value, want in pairs))


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: table.Target,
    **options: Unpack[overloads.LossOptions],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: table.Target,
    *,
    return_lse: Literal[True],
    **options: Unpack[overloads.LseOptions],
) -> overloads.LseOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: table.Target,
    **options: Unpack[overloads.OutputOptions],
) -> LinearCrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: table.Target, **options: Unpack[table.Options]
) -> Tensor | LinearCrossEntropyOutput: ...
@show_options
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: table.Target,
    *others: Never,
    **options: Unpack[table.Options],
) -> Tensor | LinearCrossEntropyOutput:
    """Cross entropy of `input @ linear_weight.T + linear_bias`, without all logits in memory.

    Equivalent to ``F.cross_entropy(F.linear(input, linear_weight, linear_bias).flatten(0, -2),
    target.flatten(), ...)`` with the loss in float32, except that the mean over no valid row is 0
    instead of NaN. docs/semantics.md has the formulas and the meaning of every option.

    Args:
        input: hidden states, shape (..., H); float64, float32, bfloat16 or float16, CPU or CUDA.
        linear_weight: the head's weight, shape (V, H), of input's dtype (any dtype under autocast,
            which casts as F.linear does).
        target: class indices in [0, V) or `ignore_index`, shape (...), int64 or int32; or
            probabilities, shape (..., V), of any floating dtype, which must not require grad; or a
            tuple (ids, probabilities), both (..., K), of K classes of each row; an id of
            `ignore_index` counts as none, and a row without a class is ignored.
        linear_bias: shape (V,), of input's dtype or float32 (any under autocast), or None.
        adapter_input, adapter_weight: a low-rank term of the logits, ``adapter_input @
            adapter_weight.T``, shapes (..., r) and (V, r), dtypes as input and linear_weight (any
            under autocast), or both None. If linear_weight does not require grad, only
            adapter_weight's gradient is computed.
        weight: a factor for each class, shape (V,), or None; it must not require grad.
        reduction: "mean" divides the sum by that of the valid rows' class weights, each 1 without
            `weight` (probabilities: by the number of rows); "sum" does not; "none" gives a loss for
            each row, 0 if ignored.
        ignore_index: rows with this target give no loss and no gradient, whatever they contain.
            None means -100. Does not apply to probabilities.
        label_smoothing: s in [0, 1]; the target becomes (1 - s) target + s/V.
        options: torch.nn.LinearCrossEntropyOptions, from which `accum_dtype` and `max_memory`
            are derived if they are None; its other fields have no effect here.
        softcap, logit_scale, temperature: the logits are ``softcap tanh(logit_scale z / softcap) /
            temperature`` of ``z = x W^T + b``; softcap None omits the tanh. temperature: positive,
            a number, or a tensor (...) with one for each row, which must not require grad.
        z_loss: adds z_loss lse^2 to a valid row's loss; under "mean" that term's sum is divided by
            the number of valid rows, not by class weights.
        token_weight: a factor for each row's loss, z-loss included, shape (...), any real dtype;
            it does not change the mean's denominator. It must not require grad.
        num_items: a number or 0-d tensor, which may be on the device: replaces the mean's
            denominator. 0 is for no valid rows, of which the loss is 0: with valid rows a
            ValueError on the CPU, NaN on CUDA. Only for "mean".
        shift: the target of a position is that of `shift` positions further along the last
            dimension of (...); the last ones are ignored. Nothing else is shifted. Requires an
            input of at least 3 dimensions, or `cu_seqlens`.
        cu_seqlens: with a shift, offsets of packed sequences into the flattened (...), int32 or
            int64, shape (sequences + 1,): no target comes from beyond a sequence's end.
        valid_vocab: only the first `valid_vocab` classes exist; the rows of linear_weight after
            them are padding, which is never read and gets the gradient 0.
        valid_bound: an upper bound of the number of rows that are not ignored, which time and
            memory then follow, or "count", which synchronises with the device. More such rows make
            the loss and the gradients NaN on CUDA and a ValueError on the CPU (docs/memory.md).
        accum_dtype: the dtype in which the weight's gradient is summed over chunks: the operands'
            own, or torch.float32, which with 16-bit operands takes 4 V H more bytes. None: the
            operands' own below 16 chunks, and float32 from there on (docs/memory.md).
        logits_dtype: torch.float32 (None) keeps the logits exact; the operands' own dtype lets
            them be rounded, as an eager head does, and as bfloat16 on the CPU always does.
        save: what the forward keeps for the backward: "logits" (N V elements, fastest), "grads"
            (the gradients, made in the forward; mean and sum only), "stats" (eight numbers per row;
            the backward recomputes the logits) or "auto", one of these (docs/memory.md).
        max_memory: upper bound of the logits buffer in bytes, or text such as "512MiB". None: the
            variable FLCE_MAX_MEMORY, else the smaller of 1 GiB and 1/8 of the device's memory, of
            which 16-bit operands on CUDA take less where that costs little time (docs/memory.md).
        accumulate_into: "grad" or "main_grad": the backward adds linear_weight's gradient to that
            attribute of linear_weight itself, a leaf, and returns none: saves V H elements and one
            pass. "grad" is created if it is None; "main_grad" must exist and may be float32. Not
            with save="grads" or an adapter. docs/semantics.md has what becomes of hooks.
        gradient, gradient_eps: "sampled" keeps the loss exact and estimates the gradients, without
            bias, from at most 1/gradient_eps + 2 classes of each row; gradient_eps from 2**-12 to
            1. docs/sampled.md has what excludes it.
        vocab_parallel: a `flce.VocabParallel` where each rank of a group has the rows of
            linear_weight for a part of the classes; None with DTensors, too (docs/parallel.md).
        classes: classes of each row whose final logits are an output, shape (..., K), int64 or
            int32; `ignore_index` for none.
        topk: the number of classes, at most 1024, whose final logits are an output with the
            classes themselves: the largest, but for the rounding of the logits that are compared
            (docs/logprobs.md).
        gradient_seed: the seed of the draw, an int64, as an int or a tensor of one element on
            input's device. None takes a new one from torch's default generator of that device.
        return_lse, return_entropy, return_accuracy, return_predictions, return_z_loss: more
            outputs, from the same pass. Gradients of lse or entropy use the same two GEMMs as the
            loss's; with save="grads" the backward then recomputes all gradients.
        return_tail_lse: requires `classes` or `topk`: tail_lse, shape (...), of the loss's dtype,
            the logsumexp of the row's final logits over the classes that are not in class_logits,
            -inf if there are none. Differentiable; not with gradient="sampled".

    Returns:
        The loss, float64 for float64 operands and float32 for all others; shape () or, for
        "none", (...). If a `return_*` is set, a `LinearCrossEntropyOutput`.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, by name, or
            options that exclude each other; a tensor that `accumulate_into` cannot add to.
        IndexError: a target out of range on the CPU, or on CUDA with FLCE_CHECK=1. Without it
            such a row's loss and gradients are NaN on CUDA, where a check would synchronise.
        torch.OutOfMemoryError: names the buffer and a smaller max_memory.
        RuntimeError: double backward, forward-mode AD, vmap; `accumulate_into` under torch.compile
            or autograd.grad of linear_weight; a collective of `vocab_parallel` that fails.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> loss = flce.linear_cross_entropy(x, W, y, softcap=30.0)
    >>> eager = torch.nn.functional.cross_entropy(30 * torch.tanh(x @ W.T / 30), y)
    >>> torch.testing.assert_close(loss, eager)
    """
    if others:
        mistakes.refuse_positional("linear_cross_entropy", OF_LINEAR, others, A_BIAS)
    if isinstance(target, tuple) and len(target) == 2:
        target = [validate.local_replica("target", tensor) for tensor in target]
        options = table.completed("linear_cross_entropy", _ALL, with_local_factors(options))
        return class_losses.of_sparse_target(
            call_by_composed_function, input, linear_weight, *target, options
        )
    return _call(_LINEAR_CROSS_ENTROPY, (input, linear_weight, target), options)


def call_by_composed_function(input, linear_weight, target, *, caller, **options):
    """linear_cross_entropy of a class target, called by a function that is composed of it. `caller`
    says which one: see sharding.ShardedCall."""
    return _call(_LINEAR_CROSS_ENTROPY, (input, linear_weight, target), options, caller)


def with_local_factors(options):
    """`options` with local tensors in place of replicated DTensors as token_weight, num_items."""
    names = [name for name in ("token_weight", "num_items") if name in options]
    return options | {name: validate.local_replica(name, options[name]) for name in names}


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[overloads.LogitsLossOptions]
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[overloads.LogitsLseOptions],
) -> overloads.LseOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[overloads.LogitsOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[table.LogitsOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
@show_options
def cross_entropy(
    logits: Tensor, target: Tensor, *others: Never, **options: Unpack[table.LogitsOptions]
) -> Tensor | LinearCrossEntropyOutput:
    """Cross entropy on logits that the caller holds.

    The forward reads the logits once; the backward reads them once and writes their gradient. Saved
    between the two: the logits and eight float32 numbers per row, no log-probabilities.

    Args:
        logits: shape (..., V), classes last; float64, float32, bfloat16 or float16, CPU or CUDA.
        target: class indices, shape (...), int64 or int32, or probabilities, shape (..., V).
        **options: as in `linear_cross_entropy`, without those of the linear layer, of shifts, of
            memory and of sampled gradients; the signature lists them.

    Returns:
        The loss, float32 (float64 for float64 logits), shape () or (...) for "none"; with a
        `return_*` a `LinearCrossEntropyOutput`. The gradient has the logits' dtype.

    Raises: as `linear_cross_entropy`.

    >>> flce.cross_entropy(torch.zeros(3, 8), torch.tensor([1, -100, 7])).exp()
    tensor(8.)
    """
    if others:
        class_weights = "weight", "a factor for each class"
        mistakes.refuse_positional("cross_entropy", _CROSS_ENTROPY.operands, others, class_weights)
    return _call(_CROSS_ENTROPY, (logits, target), options)


def divergence_of(*operands, **options):
    """flce.linear_divergence of the operands and options that its operator takes."""
    return _call(_LINEAR_DIVERGENCE, operands, options)


_LINEAR_CROSS_ENTROPY = PublicFunction(
    linear_cross_entropy,
    OF_LINEAR,
    _ALL,
    composite.linear_cross_entropy_of,
    "linear_cross_entropy",
)
_LINEAR_DIVERGENCE = PublicFunction(
    divergence_of,
    (*OF_LINEAR, "teacher_input"),
    table.OF_DIVERGENCE | table.OF_TEACHER,
    composite.linear_divergence_of,
    "linear_divergence",
)
_CROSS_ENTROPY = PublicFunction(
    cross_entropy, ("logits", "target"), _OF_LOGITS, composite.cross_entropy_of, "cross_entropy"
)
