"""The calls of the inner operators as records: their arguments and outputs by name.

In this file alone they are flat tuples, in the order of the operators' schemas
(tests/core/test_calls.py compares the two).
"""

import functools
import typing

import torch

from . import operators
from .operators import inner
from .options import CHOICES
from .packing import backward_integers, replaced, value_of

MaybeTensor = torch.Tensor | None
COUNTED = -1  # csrc/binding/call.h: kCountedRows


class OperatorOptions(typing.NamedTuple):
    """What the operators take after their tensors.

    valid_vocab: the number of classes that take part; None: all. rows: how many rows are computed;
    None: all; COUNTED: those that are not ignored. integers, numbers: the values of
    packing.INTEGERS, and after them the layout, and of packing.NUMBERS. group: the name of the
    process group whose ranks divide the vocabulary.
    """

    valid_vocab: int | None
    rows: int | None
    integers: tuple
    numbers: tuple
    # group has a default because the dispatcher leaves out trailing arguments that equal their
    # defaults where it calls a Python kernel.
    group: str | None = None

    def value(self, name):
        """The integer of that name."""
        return value_of(self.integers, name)

    def choice(self, name):
        """The option of that name, which is one of options.CHOICES, as text."""
        return CHOICES[name][self.value(name)]

    def replaced(self, **values):
        """With other integers by name; a choice may be given as text."""
        return self._replace(integers=replaced(self.integers, **values))

    def for_backward(self, save, consumes_saved, wanted):
        """The options of the backward where these are the forward's. wanted: which gradients the
        backward computes."""
        integers = backward_integers(tuple(self.integers), save, consumes_saved, wanted)
        return OperatorOptions(self.valid_vocab, self.rows, integers, self.numbers, self.group)


class Teacher(typing.NamedTuple):
    """The teacher of a divergence. input: its hidden states, (..., H'), or without a linear_weight
    its logits, (..., V); temperature: of each row."""

    input: torch.Tensor
    linear_weight: MaybeTensor = None
    linear_bias: MaybeTensor = None
    temperature: MaybeTensor = None


class ForwardTensors(typing.NamedTuple):
    """What the backward needs of a forward call: its tensors, and of its outputs class_logits,
    stats, scalars and what the strategy saved. weight: the class weights, by the name of
    the operators' schemas, here and below. classes: those of class_logits."""

    input: MaybeTensor = None
    linear_weight: MaybeTensor = None
    target: MaybeTensor = None
    linear_bias: MaybeTensor = None
    weight: MaybeTensor = None
    token_weight: MaybeTensor = None
    token_temperature: MaybeTensor = None
    classes: MaybeTensor = None
    class_logits: MaybeTensor = None
    stats: MaybeTensor = None
    scalars: MaybeTensor = None
    saved: MaybeTensor = None


class ForwardCall(typing.NamedTuple):
    """flce::forward. seed: of a sampled gradient; classes: (..., K), whose logits are outputs;
    teacher: of a divergence, None for a loss."""

    input: torch.Tensor
    linear_weight: torch.Tensor
    target: torch.Tensor
    linear_bias: MaybeTensor
    weight: MaybeTensor
    token_weight: MaybeTensor
    token_temperature: MaybeTensor
    num_items: MaybeTensor
    seed: MaybeTensor
    classes: MaybeTensor
    options: OperatorOptions
    teacher: Teacher | None = None

    def kept_for_backward(self, outputs):
        """The ForwardTensors of this call and its ForwardOutputs."""
        classes = self.classes if outputs.top_classes is None else outputs.top_classes
        of_outputs = outputs.class_logits, outputs.stats, outputs.scalars, outputs.saved
        of_call = (
            self.input,
            self.linear_weight,
            self.target,
            self.linear_bias,
            self.weight,
            self.token_weight,
            self.token_temperature,
        )
        # In the order of the fields: arguments by name take more host time.
        return ForwardTensors(*of_call, classes, *of_outputs)

    def flat(self):
        *tensors, options, teacher = self
        return (*tensors, *options, *(teacher or ()))


# The outputs that may have a gradient, in the order of autograd.LinearCrossEntropy.
DIFFERENTIABLE = ("loss", "stats", "class_logits")


class ForwardOutputs(typing.NamedTuple):
    """stats: (operators.STATS, tokens) by operators.STAT_..., of all tokens, also those whose rows
    are not computed; scalars: by SCALAR_...; saved: E or z of the logits (csrc/flce.h), or the
    samples, for the backward; grad_...: with save="grads"; class_logits: of `classes`, or of the
    top_classes, the candidates for the topk largest logits."""

    loss: torch.Tensor
    stats: MaybeTensor = None
    scalars: MaybeTensor = None
    predictions: MaybeTensor = None
    saved: MaybeTensor = None
    grad_input: MaybeTensor = None
    grad_weight: MaybeTensor = None
    grad_bias: MaybeTensor = None
    class_logits: MaybeTensor = None
    top_classes: MaybeTensor = None

    def with_differentiable(self, loss, *others):
        """With `loss` and `others`, as autograd has recorded them, in place of the first ones of
        DIFFERENTIABLE."""
        if not others:
            return ForwardOutputs(loss, *self[1:])
        return self._replace(loss=loss, **dict(zip(DIFFERENTIABLE[1:], others, strict=False)))

    def strategy(self):
        """What "auto" became, told by which outputs exist. `saved` and gradients are asked first,
        because any strategy may return stats."""
        if self.saved is not None:
            return "samples" if self.saved.dtype == torch.int32 else "logits"
        if any(grad is not None for grad in (self.grad_input, self.grad_weight, self.grad_bias)):
            return "grads"
        return "nothing" if self.stats is None else "stats"


class Gradients(typing.NamedTuple):
    """Of input, linear_weight and linear_bias; None for those that are not wanted."""

    grad_input: MaybeTensor
    grad_weight: MaybeTensor
    grad_bias: MaybeTensor


class BackwardCall(typing.NamedTuple):
    """flce::backward. grad_output, grad_stats, grad_classes: the gradients of loss, stats and
    class_logits; forward: of the forward call."""

    grad_output: torch.Tensor
    grad_stats: MaybeTensor
    grad_classes: MaybeTensor
    forward: ForwardTensors
    options: OperatorOptions

    def flat(self):
        *upstream, forward, options = self
        return (*upstream, *forward, *options)


class LogitsTensors(typing.NamedTuple):
    """What the backward needs of a LogitsCall and its outputs."""

    logits: torch.Tensor
    target: torch.Tensor
    weight: MaybeTensor
    token_weight: MaybeTensor
    token_temperature: MaybeTensor
    stats: torch.Tensor
    scalars: torch.Tensor


class LogitsCall(typing.NamedTuple):
    """flce::cross_entropy_forward, of logits that exist."""

    logits: torch.Tensor
    target: torch.Tensor
    weight: MaybeTensor
    token_weight: MaybeTensor
    token_temperature: MaybeTensor
    num_items: MaybeTensor
    integers: tuple
    numbers: tuple

    def flat(self):
        return self


class LogitsOutputs(typing.NamedTuple):
    """As ForwardOutputs."""

    loss: torch.Tensor
    stats: torch.Tensor
    scalars: torch.Tensor
    predictions: MaybeTensor = None

    def of_forward(self):
        return ForwardOutputs(**self._asdict())


class LogitsBackwardCall(typing.NamedTuple):
    """flce::cross_entropy_backward."""

    grad_output: torch.Tensor
    grad_stats: MaybeTensor
    forward: LogitsTensors
    integers: tuple
    numbers: tuple

    def flat(self):
        return (self.grad_output, self.grad_stats, *self.forward, self.integers, self.numbers)


class PlanOutputs(typing.NamedTuple):
    """flce::plan. fields: of plan.Plan, in JSON."""

    fields: str
    sampled_time: float
    text: str


class SavedGradients(typing.NamedTuple):
    """What the autograd Function of a loss saves where the forward has made the gradients.
    loss_scale: scalars, where float16's gradients are times a factor that the backward divides out;
    forward: what computes other gradients than the loss's in the backward."""

    loss_scale: MaybeTensor
    grad_input: MaybeTensor
    grad_weight: MaybeTensor
    grad_bias: MaybeTensor
    forward: ForwardTensors

    def flat(self):
        *gradients, forward = self
        return (*gradients, *forward)


# ---- flat tuples of a record's values, with the values of nested records in their places ----
#
# A teacher that is None has no values: the operators' last arguments have defaults.

NESTED = (OperatorOptions, Teacher, ForwardTensors, LogitsTensors)
OPERATORS = {
    ForwardCall: (inner.forward.default, ForwardOutputs),
    BackwardCall: (inner.backward.default, Gradients),
    LogitsCall: (inner.cross_entropy_forward.default, LogitsOutputs),
}


def operator_of(call):
    op, _ = OPERATORS[type(call)]
    return op


@functools.cache
def _records_in(kind):
    """[(position, class)] of the records in a record of this class."""
    annotations = enumerate(kind.__annotations__.values())
    kinds = ((i, (annotation, *typing.get_args(annotation))) for i, annotation in annotations)
    return [(i, nested) for i, of_field in kinds for nested in of_field if nested in NESTED]


def read(kind, values):
    """The record of this class whose `flat` is `values`; the last ones may be left out where the
    record has defaults for them."""
    values = list(values)
    for i, nested in _records_in(kind):
        end = i + len(nested._fields)
        of_nested = values[i:end]
        is_none = nested is Teacher and all(value is None for value in of_nested)
        values[i:end] = [None if is_none else nested(*of_nested)]
    return kind(*values)


def run(call):
    """Runs the operator of a record's class; its outputs as a record."""
    op, outputs = OPERATORS[type(call)]
    return outputs(*operators.run(op, *call.flat()))


def run_backward_into(grad_weight, call):
    """Runs a BackwardCall that adds to the weight's gradient."""
    grad_input, grad_bias = operators.run(inner.backward_into.default, grad_weight, *call.flat())
    return Gradients(grad_input, None, grad_bias)


def run_logits_backward(call):
    """The gradient of the logits, by a LogitsBackwardCall."""
    return operators.run(inner.cross_entropy_backward.default, *call.flat())


def run_plan(gpu, index, options, sizes):
    """The PlanOutputs. gpu: the name or the numbers of a GPU to plan for without its hardware, as
    text; "" for a device that is present, whose index is `index`. sizes: by their names in the
    schema of flce::plan."""
    lists = options.valid_vocab, options.integers, options.numbers
    sizes = {name: int(size) for name, size in sizes.items()}
    return PlanOutputs(*operators.run_plain(inner.plan.default, gpu, index, *lists, **sizes))


def save(ctx, record):
    """Saves a record's tensors for the backward of an autograd Function."""
    ctx.save_for_backward(*(record.flat() if _records_in(type(record)) else record))


def saved(ctx, kind):
    """What `save` saved of a record of this class."""
    values = ctx.saved_tensors
    return read(kind, values) if _records_in(kind) else kind(*values)
