"""The table of the loss's options: names, types, defaults, and which functions have them.

The TypedDict of a function says which options it has. Their defaults and types in the schemas of
the operators are metadata of the types, so that an option is one line here.
"""

import collections
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Literal, TypedDict

import torch
from torch import Tensor

from . import mistakes

if typing.TYPE_CHECKING:
    from .distributed import VocabParallel

Target = Tensor | tuple[Tensor, Tensor]
Reduction = Literal["none", "mean", "sum"]
Gradient = Literal["exact", "sampled"]
Save = Literal["auto", "logits", "grads", "stats"]  # those that a caller may choose
Attribute = Literal["grad", "main_grad"]  # of a parameter, that accumulate_into may name
Entropy = Literal["differentiable", "detached"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
# reduction and save: in the order of their enums in csrc/problem.h. gradient: read as a flag,
# sampling.wanted.
CHOICES = {
    "reduction": typing.get_args(Reduction),
    "save": ("nothing", "logits", "grads", "stats", "samples", "auto"),
    "gradient": typing.get_args(Gradient),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Option(typing.NamedTuple):
    """What the type of an option does not say.

    default: in the public functions, the operators and the Modules.
    schema: its type in the schema of torch.ops.flce.linear_cross_entropy; None: not passed to it,
    or, as vocab_parallel and return_entropy, under other names.
    """

    default: object
    schema: str | None = None


# ---- the table: options that the same functions have are in one class ----


class _Bias(TypedDict, total=False):
    linear_bias: Annotated[Tensor | None, Option(None, "Tensor?")]


# Not of a Module: a fixed seed would repeat one draw in every step.
class _Seed(TypedDict, total=False):
    gradient_seed: Annotated[int | Tensor | None, Option(None, "Tensor?")]


class _Adapter(TypedDict, total=False):
    adapter_input: Annotated[Tensor | None, Option(None, "Tensor?")]
    adapter_weight: Annotated[Tensor | None, Option(None, "Tensor?")]


class _Scales(TypedDict, total=False):
    logit_scale: Annotated[float, Option(1.0, "float")]
    temperature: Annotated[float | Tensor, Option(1.0, "float")]


class _OfEveryLoss(_Scales, total=False):
    ignore_index: Annotated[int | None, Option(-100, "int?")]
    softcap: Annotated[float | None, Option(None, "float?")]


class _Reduction(TypedDict, total=False):
    reduction: Annotated[Reduction, Option("mean", "str")]


class _Smoothing(TypedDict, total=False):
    label_smoothing: Annotated[float, Option(0.0, "float")]


class _ZLoss(TypedDict, total=False):
    z_loss: Annotated[float, Option(0.0, "float")]


class _RowFactors(TypedDict, total=False):
    token_weight: Annotated[Tensor | None, Option(None, "Tensor?")]
    num_items: Annotated[float | Tensor | None, Option(None, "Tensor?")]


class _Factors(_RowFactors, total=False):
    weight: Annotated[Tensor | None, Option(None, "Tensor?")]


class _Shift(TypedDict, total=False):
    shift: Annotated[int, Option(0, "int")]


class _Sequences(TypedDict, total=False):
    cu_seqlens: Annotated[Tensor | None, Option(None, "Tensor?")]


class _Padding(TypedDict, total=False):
    valid_vocab: Annotated[int | None, Option(None, "SymInt?")]


class _Bound(TypedDict, total=False):
    valid_bound: Annotated[int | Literal["count"] | None, Option(None, "SymInt?")]


class _Computation(TypedDict, total=False):
    accum_dtype: Annotated[torch.dtype | None, Option(None, "ScalarType?")]
    max_memory: Annotated[int | str | None, Option(None, "int?")]
    gradient: Annotated[Gradient, Option("exact", "str")]
    gradient_eps: Annotated[float, Option(2**-6, "float")]


class _LogitsDtype(TypedDict, total=False):
    logits_dtype: Annotated[torch.dtype | None, Option(None, "ScalarType?")]


class _Save(TypedDict, total=False):
    save: Annotated[Save, Option("auto", "str")]


class _Accumulates(TypedDict, total=False):
    accumulate_into: Annotated[Attribute | None, Option(None)]


class _Sharded(TypedDict, total=False):
    vocab_parallel: Annotated["VocabParallel | None", Option(None)]


class _TorchOptions(TypedDict, total=False):
    options: Annotated[object, Option(None)]


class _Topk(TypedDict, total=False):
    topk: Annotated[int, Option(0, "int")]


class _Classes(_Topk, total=False):
    classes: Annotated[Tensor | None, Option(None, "Tensor?")]


class _PlannedReturns(TypedDict, total=False):
    return_lse: Annotated[bool, Option(False)]
    return_entropy: Annotated[bool | Literal["detached"], Option(False)]
    return_predictions: Annotated[bool, Option(False)]
    return_tail_lse: Annotated[bool, Option(False)]


class _Returns(_PlannedReturns, total=False):
    return_accuracy: Annotated[bool, Option(False)]
    return_z_loss: Annotated[bool, Option(False)]


# ---- which options a function has ----


class _Terms(_Reduction, _Smoothing, _ZLoss): ...


class _OfLogits(_OfEveryLoss, _Terms, _Factors): ...


class _OfHead(_Bias, _Adapter, _OfEveryLoss, _Padding, _Computation, _LogitsDtype, _Seed): ...


class _OfRows(_OfHead, _Bound, _Save): ...


class _OfSequences(_OfRows, _Shift, _Sequences): ...


class _OfReference(_OfSequences, _Terms, _Factors, _TorchOptions): ...


class _OfLoss(_OfReference, _Accumulates, _Sharded): ...


class _OfPlan(
    _OfEveryLoss, _Terms, _Shift, _Padding, _Computation, _LogitsDtype, _Save, _Accumulates
): ...


class Options(_OfLoss, _Classes, _Returns):
    """Of flce.linear_cross_entropy: all."""


class LogitsOptions(_OfLogits, _Returns):
    """Of flce.cross_entropy."""


class LogprobsOptions(_OfSequences, _Sharded):
    """Of flce.linear_logprobs: those on which log p and the entropy depend."""


class LogprobsAtOptions(_OfRows, _Sharded):
    """Of flce.linear_logprobs_at. A shift would have to move the ids of a row too."""


class LinearLossOptions(_OfHead, _Shift, _Accumulates, _Sharded):
    """Of flce.linear_loss, after its named arguments."""


class DivergenceOptions(
    _Bias,
    _OfEveryLoss,
    _Reduction,
    _RowFactors,
    _Shift,
    _Sequences,
    _Padding,
    _Bound,
    _Computation,
    _Save,
    _Accumulates,
    _Sharded,
    _Seed,
):
    """Of flce.linear_divergence, after its named arguments."""


class TeacherOptions(TypedDict, total=False):
    """Named arguments of flce.linear_divergence that torch.ops.flce.linear_divergence has too."""

    divergence: Annotated[Divergence, Option("forward_kl", "str")]
    beta: Annotated[float, Option(0.5, "float")]
    hard_weight: Annotated[float, Option(0.0, "float")]
    teacher_weight: Annotated[Tensor | None, Option(None, "Tensor?")]
    teacher_bias: Annotated[Tensor | None, Option(None, "Tensor?")]
    teacher_softcap: Annotated[float | None, Option(None, "float?")]
    teacher_logit_scale: Annotated[float, Option(1.0, "float")]
    teacher_temperature: Annotated[float | Tensor, Option(1.0, "float")]


class ModuleOptions(_OfPlan, _Sharded):
    """Those that Modules hold as attributes."""


class PlanOptions(_OfPlan, _Topk, _PlannedReturns):
    """Of flce.plan, where ranks and sequence take the place of vocab_parallel."""


class FuseOptions(_Computation, _LogitsDtype, _Save, _Accumulates, _ZLoss, _Bound):
    """Of flce.fuse, after its named arguments."""


class NemoOptions(
    _Scales, _Smoothing, _ZLoss, _Padding, _Computation, _LogitsDtype, _Save, _Sharded
):
    """Of the loss class for NeMo AutoModel: a Module's, but for those that the framework sets, for
    shift, as it shifts the labels, and accumulate_into, as a gathered weight is no leaf."""


class ReferenceOptions(_OfReference, _Classes, _Returns):
    """Of flce.reference.linear_cross_entropy."""


class ReferenceLogitsOptions(_OfLogits, _Classes, _Returns):
    """Of flce.reference.cross_entropy."""


class ReferenceLogprobsOptions(_OfSequences):
    """Of flce.reference.linear_logprobs."""


# ---- outputs ----


class LinearCrossEntropyOutput(typing.NamedTuple):
    """The loss and the requested outputs; None for the others.

    loss: shape (), or (...) for reduction="none"; differentiable.
    lse: logsumexp of each row's logits, shape (...); differentiable; 0 where ignored.
    entropy: of each row's softmax, in nats, shape (...); differentiable; 0 where ignored.
    accuracy: the share of valid rows whose largest logit is the target's, shape (); 0 if there are
    none. predictions: the lowest class of the largest logit, int64, shape (...); -1 where ignored.
    z_loss: the part z_loss lse^2 of the loss, with the same reduction; detached.
    tail_lse: logsumexp of each row's logits of all classes that are not in class_logits, shape
    (...); differentiable; 0 where ignored, -inf where there is no such class. Exact however small
    the probability exp(tail_lse - lse) of these classes is.
    class_logits: final logits of `classes`, or of the `topk` largest in descending order, shape
    (..., K); differentiable, but not with gradient="sampled"; 0 where ignored.
    classes: with `topk`, the classes of class_logits, int64, shape (..., K); -1 where ignored.

    All but predictions and classes have the loss's dtype: float64 for float64 operands, else
    float32.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> out = flce.linear_cross_entropy(x, W, y, return_lse=True, topk=3)
    >>> out.lse.shape, out.class_logits.shape, out.entropy
    (torch.Size([5]), torch.Size([5, 3]), None)
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    accuracy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    tail_lse: torch.Tensor | None = None
    class_logits: torch.Tensor | None = None
    classes: torch.Tensor | None = None


class TopLogprobs(typing.NamedTuple):
    """The K largest log-probabilities of each row.

    logprobs: (..., K), in nats, descending; differentiable. ids: their classes, (..., K), int64; -1
    where the target is ignored. lse: logsumexp of all logits of the row, (...); differentiable.
    tail: with tail=True, log of the probability of all other classes together, (...), in nats;
    differentiable; 0 where the target is ignored, -inf without another class. It is computed from
    their logits: ``log1p(-logprobs.exp().sum(-1))`` is rounding noise where it is small.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> *_, top = flce.linear_logprobs(x, W, y, return_topk=4, tail=True)
    >>> torch.testing.assert_close(top.logprobs.exp().sum(-1) + top.tail.exp(), torch.ones(5))
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    lse: torch.Tensor
    tail: torch.Tensor | None = None


OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_FLAGGED = OUTPUTS[:-2]  # outputs that a flag asks for
RETURNS = tuple(f"return_{name}" for name in _FLAGGED)  # arguments, False by default
# Which of these outputs a call returns in addition to the loss.
Wanted = collections.namedtuple("Wanted", _FLAGGED, defaults=(False,) * len(_FLAGGED))


# ---- the table by name ----

# The first options in the signatures and in the schemas of the operators. Another one comes after
# them, in the order of the classes above.
_FIRST = "linear_bias adapter_input adapter_weight weight reduction ignore_index label_smoothing "
_FIRST += "options softcap logit_scale temperature z_loss token_weight num_items shift cu_seqlens "
_FIRST += "valid_vocab valid_bound accum_dtype logits_dtype save max_memory accumulate_into "
_FIRST += "gradient gradient_eps vocab_parallel gradient_seed classes topk"


def _ordered(names):
    """The names of options, then those of RETURNS."""
    first = [name for name in _FIRST.split() if name in names]
    others = [name for name in names if name not in (*first, *RETURNS)]
    return [*first, *others, *(name for name in RETURNS if name in names)]


def types_of(options):
    """{name: type} of a TypedDict of options, with an Option as the type's metadata."""
    types = options.__annotations__
    return {name: types[name] for name in _ordered(types)}


def _option_of(annotated):
    (option,) = annotated.__metadata__
    return option


OPTIONS = {
    name: _option_of(kind) for name, kind in types_of(Options).items() if name not in RETURNS
}
TEACHER_OPTIONS = {name: _option_of(kind) for name, kind in types_of(TeacherOptions).items()}


def defaults(options=Options):
    """Names and defaults of a TypedDict of options."""
    return {name: _option_of(kind).default for name, kind in types_of(options).items()}


OF_DIVERGENCE = defaults(DivergenceOptions)
OF_TEACHER = defaults(TeacherOptions)
# Those that map the logits of the linear layer to the final ones: parameters of
# reference.final_logits.
LOGIT_OPTIONS = ("softcap", "logit_scale", "temperature")


def completed(function, defaults, options):
    """The `options` to `function`, and for all others that it has their `defaults`."""
    check_names(function, defaults, options)
    return {**defaults, **options}


def check_names(function, known, options):
    for name in options:
        if name not in known:
            ours = mistakes.our_name(name, known)
            expected = f"expected some of {', '.join(known)}"
            expected = f"use {ours}; {expected}" if ours else expected
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {expected}")


_Function = typing.TypeVar("_Function", bound=Callable[..., object])


def show_options(function: _Function) -> _Function:
    """A decorator: lists in the signature of a function the options of its **options, whose type is
    Unpack of their TypedDict, by name with types and defaults."""
    signature = inspect.signature(function)
    *parameters, others = signature.parameters.values()
    variadic = inspect.Parameter.VAR_POSITIONAL  # it takes what is refused by a better message
    parameters = [parameter for parameter in parameters if parameter.kind is not variadic]
    (options,) = typing.get_args(others.annotation)
    by_name = inspect.Parameter.KEYWORD_ONLY
    for name, annotated in types_of(options).items():
        kind, default = annotated.__origin__, _option_of(annotated).default
        kind = getattr(kind, "__forward_arg__", kind)
        parameters.append(inspect.Parameter(name, by_name, default=default, annotation=kind))
    function.__signature__ = signature.replace(parameters=parameters)
    return function
