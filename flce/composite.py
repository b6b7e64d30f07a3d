"""A call of the loss: from its arguments to the operator of C++. Also the public operators: of
torch.ops.flce `linear_cross_entropy` and `cross_entropy`, which return the loss, their variants
`_outputs`, which return every field of LinearCrossEntropyOutput, and `linear_divergence`, which has
no variant. They have no autograd formula, as autograd records the operators that they call.
"""

import re
import typing

import torch

from . import (
    adapter,
    autograd,
    calls,
    fakes,
    mistakes,
    operators,
    sharding,
    validate,
)
from ._C import take_none_counted
from .accumulate import Accumulator
from .modes import autocast_code, has_values, is_traced
from .options import (
    OF_DIVERGENCE,
    OPTIONS,
    OUTPUTS,
    RETURNS,
    TEACHER_OPTIONS,
    LinearCrossEntropyOutput,
    LogitsOptions,
    types_of,
)
from .outputs import results
from .packing import (
    NO_DIVERGENCE,
    NO_GRADIENTS,
    CallContext,
    Shard,
    WantedGradients,
    replaced,
    split,
    split_divergence,
)
from .targets import shifted_target

# Between the seeds of one rank and the next: the draws of the ranks' classes in a row have to be
# independent. Its multiples wrap as int64, and are distinct.
_SEED_STEP = 0x9E3779B97F4A7C15 >> 1


def _rows(packed, target):
    """The operator's `rows`: None for all, calls.COUNTED to count on the CPU, else a bound."""
    bound = packed.valid_bound
    if target.is_floating_point():
        if bound is not None:
            expected = "None with probabilities, of which no row is ignored"
            validate.refuse("valid_bound", expected, repr(bound))
        return None
    if target.is_cpu and (bound is None or bound == "count"):
        return calls.COUNTED if has_values(target) else None
    if bound is None:
        return None
    if bound == "count":
        if is_traced():
            got = '"count", which waits for the device'
            validate.refuse("valid_bound", "an int or None under torch.compile", got)
        # Synchronises with the device.
        bound = int((~validate.is_equal(target, packed.ignore_index)).sum())
    # With a bound of 0 one row is still computed: its result becomes NaN if it is not ignored.
    least = 0 if target.is_cpu else 1
    return max(bound, least) if bound < target.numel() else None


def _seed(packed, tensors, device):
    """The seed of the draw, or None. It is drawn under no_grad too: a reentrant checkpoint restores
    the generator for its second forward, so without a draw in the first every step would have the
    same seed."""
    seed = tensors.get("gradient_seed")
    if packed.gradient != "sampled" and seed is None:
        return None
    return _seed_of_rank(validate.seed_tensor(seed, device), packed.rank)


def _seed_of_rank(seed, rank):
    step = (rank * _SEED_STEP + 2**63) % 2**64 - 2**63
    return seed + step if rank else seed


class LossTensors(typing.NamedTuple):
    """Tensors that scale the rows of a loss, or None: weight (V,), token_weight and temperature of
    the rows' shape, num_items 0-d."""

    weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    num_items: torch.Tensor | None = None


def _loss_tensors(packed, tensors, target, device, dtype):
    """The LossTensors, after the checks of what C cannot see. device, dtype: of input or logits."""
    for name in ("weight", "token_weight", "temperature") if tensors else ():
        if name in tensors:
            validate.check_constant(name, tensors[name])
    validate.check_constant("target", target)
    if packed.wanted.accuracy and target.is_floating_point():
        expected = "False with probabilities, which name no class to be right about"
        validate.refuse("return_accuracy", expected, True)
    if packed.wanted.tail_lse and tensors.get("classes") is None and not packed.topk:
        validate.refuse("return_tail_lse", "False without classes or topk", True)
    if not tensors:
        return _NO_TENSORS
    values = {name: tensors[name] for name in LossTensors._fields if name in tensors}
    temperature, num_items = values.get("temperature"), values.get("num_items")
    if temperature is not None and temperature.dim() == 0:
        values["temperature"] = temperature.expand(fakes.rows_shape(target))
    if num_items is not None:
        values["num_items"] = validate.num_items_tensor(num_items, packed.reduction, device, dtype)
    return LossTensors(**values)


_NO_TENSORS = LossTensors()


def check_options(options, rows, **sizes):
    """The checks of options that need no tensor; `rows`: of linear_weight on this rank. `sizes`:
    others that are known, by their names in the operator's schema."""
    packed, _ = split(options)
    accumulates = packed.accumulate_into is not None
    gradients = WantedGradients(grad_input=True, grad_weight=True)
    integers = packed.integers(CallContext(gradients=gradients, accumulates=accumulates))
    # Which dtypes are allowed depends on that of the operands.
    integers = replaced(integers, accum_dtype=-1, logits_dtype=-1)
    lists = packed.valid_vocab, integers, packed.numbers
    return fakes.describe_sizes(*lists, on_cpu=True, weight_rows=rows, **sizes)


def _operator_options(packed, context, divergence_settings, rows, first_token):
    """The calls.OperatorOptions with the values of packing.CallContext and
    packing.DivergenceSettings."""
    integers, numbers = packed.integers(context), packed.numbers
    if divergence_settings.divergence:
        numbers = packed.numbers_of(divergence_settings)
    options = calls.OperatorOptions(packed.valid_vocab, rows, integers, numbers, packed.group)
    return options.replaced(first_token=first_token) if first_token else options


def _tf32_is_on():
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _accumulator(packed, weight, trains_weight):
    """The Accumulator that accumulate_into asks for; None without it or without a gradient."""
    if packed.accumulate_into is None or not trains_weight:
        return None
    return Accumulator(weight, packed.accumulate_into)


def linear_cross_entropy_of(
    input,
    linear_weight,
    target,
    options,
    *,
    teacher=None,
    divergence_settings=NO_DIVERGENCE,
    first_token=0,
    caller=None,
):
    """The loss, or a LinearCrossEntropyOutput. `options`: those that the caller gave, by name; a
    missing one has its default. `teacher`: calls.Teacher of a divergence.
    `divergence_settings`: packing.DivergenceSettings. `first_token`: the number of the first row,
    where these are a part of the caller's. `caller`: see sharding.ShardedCall."""
    packed, tensors = split(options)
    if validate.transforms_are_on():
        validate.refuse_transforms(input, linear_weight, target, *tensors.values())
    # weight_in_graph: the tensor that gets dW, with an adapter its weight.
    autocast, weight_in_graph, frozen_hidden = autocast_code(input.device), linear_weight, 0
    if "adapter_input" in tensors or "adapter_weight" in tensors:
        joined = adapter.joined(input, linear_weight, tensors, packed, autocast)
        input, linear_weight, weight_in_graph, frozen_hidden = joined
    loss_tensors = _loss_tensors(packed, tensors, target, input.device, input.dtype)
    bias, wanted = tensors.get("linear_bias"), NO_GRADIENTS
    graph_inputs = input, weight_in_graph, bias
    if torch.is_grad_enabled():
        wanted = WantedGradients(*[x is not None and x.requires_grad for x in graph_inputs])
    accumulator = _accumulator(packed, linear_weight, wanted.grad_weight and frozen_hidden == 0)
    offsets = tensors.get("cu_seqlens")
    if packed.shift or offsets is not None:
        target = shifted_target(target, packed.shift, offsets, packed.ignore_index)
    classes = tensors.get("classes")
    has_class_logits = classes is not None or packed.topk > 0
    gradients = wanted
    if teacher and (packed.reduction == "none" or options.get("save") == "stats"):
        gradients = NO_GRADIENTS  # the backward makes them
    memory, traced = packed.memory(input.device), is_traced()
    # A divergence's forward makes dW. autograd._scale_saved adds it to the parameter's gradient in
    # the backward, so that the operator is not told of accumulate_into.
    accumulates = accumulator is not None and not teacher
    allow_tf32 = input.is_cuda and input.dtype is torch.float32 and _tf32_is_on()
    # The fields in their order: arguments by name take four times as long.
    context = CallContext(
        memory,
        gradients,
        autocast,
        frozen_hidden,
        accumulates,
        traced,
        has_class_logits,
        allow_tf32,
        divergence_settings.divergence,
    )
    rows = _rows(packed, target)
    operator_options = _operator_options(packed, context, divergence_settings, rows, first_token)
    operands, seed = (input, linear_weight, target, bias), None
    call = calls.ForwardCall(*operands, *loss_tensors, seed, classes, operator_options, teacher)
    if packed.ranks > 1:
        sharding.hooks().before_call(sharding.ShardedCall(call, options, caller))
    if (seed := _seed(packed, tensors, input.device)) is not None:
        call = call._replace(seed=seed)
    if traced and any(wanted):
        # The backward of the graph is fixed when it is traced, its number of rows is not: "auto" is
        # decided here, so that every run saves the same outputs.
        call = call._replace(options=fakes.with_strategy(call))
    # take_none_counted directly after the operator: a hook of saved tensors may make another call.
    outputs, none_counted = calls.run(call), take_none_counted()
    if any(wanted):
        names = _differentiable_outputs(packed, has_class_logits)
        outputs = autograd.with_forward_graph(
            call, outputs, graph_inputs, names, owned=True, accumulator=accumulator
        )
    return results(packed, outputs, target, loss_tensors, rows, none_counted)


def _differentiable_outputs(packed, has_classes=False):
    """The names of the operator's outputs that a gradient may reach."""
    count = 2 if packed.differentiates_stats else 1
    # The first ones of DIFFERENTIABLE; class_logits are the third.
    return calls.DIFFERENTIABLE[: 3 if has_classes else count]


def linear_divergence_of(input, linear_weight, target, teacher_input, options):
    """The loss. `teacher_input`: the teacher's hidden states, or its logits if there is no
    teacher_weight among the `options`."""
    divergence_settings, tensors, options = split_divergence(options)
    weight, bias = tensors.get("teacher_weight"), tensors.get("teacher_bias")
    tensors = teacher_input, weight, bias, tensors.get("teacher_temperature")
    teacher = calls.Teacher(*(None if tensor is None else tensor.detach() for tensor in tensors))
    of_divergence = {"teacher": teacher, "divergence_settings": divergence_settings}
    return linear_cross_entropy_of(input, linear_weight, target, options, **of_divergence)


def cross_entropy_of(logits, target, options):
    """As linear_cross_entropy_of, for logits that the caller has."""
    packed, tensors = split(options)
    if validate.transforms_are_on():
        validate.refuse_transforms(logits, target, *tensors.values())
    loss_tensors = _loss_tensors(packed, tensors, target, logits.device, logits.dtype)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    call = calls.LogitsCall(
        logits,
        target,
        loss_tensors.weight,
        loss_tensors.token_weight,
        loss_tensors.temperature,
        loss_tensors.num_items,
        packed.integers(CallContext(gradients=WantedGradients(grad_input=wants_gradient))),
        packed.numbers,
    )
    # take_none_counted directly after the operator: a hook of saved tensors may make another call.
    outputs, none_counted = calls.run(call), take_none_counted()
    if wants_gradient:
        outputs = autograd.with_logits_graph(call, outputs, _differentiable_outputs(packed))
    return results(packed, outputs.of_forward(), target, loss_tensors, None, none_counted)


def _kernel_of(function, names, gives_outputs):
    """`function` as the operator's kernel; an unwanted output is an empty tensor, not None.
    `names`: of the first operands, which must be tensors; torch passes None on."""

    def kernel(
        *tensors,
        token_temperature=None,
        token_teacher_temperature=None,
        detach_entropy=False,
        vocab_group=None,
        vocab_shard=None,
        **options,
    ):
        for name, tensor in zip(names, tensors, strict=False):
            validate.check_tensor(name, tensor)
        if token_temperature is not None:
            options["temperature"] = token_temperature
        if token_teacher_temperature is not None:
            options["teacher_temperature"] = token_teacher_temperature
        if detach_entropy:
            options["return_entropy"] = "detached"
        if vocab_group is not None:
            options["vocab_parallel"] = Shard.of_operator(vocab_group, vocab_shard or ())
        try:
            outputs = function(*tensors, options)
        except (TypeError, ValueError) as error:
            mistakes.add_remedy(error, {**dict(zip(names, tensors, strict=False)), **options})
            raise
        if isinstance(outputs, torch.Tensor):
            outputs = LinearCrossEntropyOutput(outputs)
        if not gives_outputs:
            return outputs.loss
        empty = outputs.loss.new_empty
        return tuple(empty(0) if output is None else output for output in outputs)

    return kernel


def _register(name, function, operands, options, has_outputs=True):
    """Registers operator `name` and its variant `_outputs`, if it has one. `operands`: of both."""
    typed = {option: row for option, row in options.items() if row.schema}
    arguments = [f"{row.schema} {option}={row.default!r}" for option, row in typed.items()]
    others = ["Tensor? token_temperature=None"]
    if "teacher_temperature" in options:
        others += ["Tensor? token_teacher_temperature=None"]
    if "vocab_parallel" in options:
        others += ["str? vocab_group=None", "int[]? vocab_shard=None"]
    schema = ", ".join((operands, "*", *arguments, *others))
    returns = ", ".join(f"bool {option}=False" for option in (*RETURNS, "detach_entropy"))
    outputs = ", ".join(f"Tensor {output}" for output in ("loss", *OUTPUTS))
    names = re.findall(r"Tensor (\w+)", operands)
    kernels = {f"{name}({schema}) -> Tensor": _kernel_of(function, names, False)}
    if has_outputs:
        schema = f"{name}_outputs({schema}, {returns}) -> ({outputs})"
        kernels[schema] = _kernel_of(function, names, True)
    for operator_schema, kernel in kernels.items():
        registered = operators.library.define(operator_schema)
        # Without this vmap would loop over the batch, one call per slice, with only a warning.
        operators.library.impl(registered, validate.refuse_vmap, "FuncTorchBatched")
        operators.library.impl(registered, kernel, "CompositeImplicitAutograd")


_of_logits = {name: row for name, row in OPTIONS.items() if name in types_of(LogitsOptions)}
_of_linear = "Tensor input, Tensor linear_weight, Tensor target"
_register("linear_cross_entropy", linear_cross_entropy_of, _of_linear, OPTIONS)
_of_divergence = {name: OPTIONS[name] for name in OF_DIVERGENCE} | TEACHER_OPTIONS
_with_teacher = f"{_of_linear}, Tensor teacher_input"
_register("linear_divergence", linear_divergence_of, _with_teacher, _of_divergence, False)
_register("cross_entropy", cross_entropy_of, "Tensor logits, Tensor target", _of_logits)
