"""The types of options and outputs, for type checkers; options.py has their defaults."""

import typing
from typing import Literal

from torch import Tensor, dtype

from .distributed import VocabParallel

Reduction = Literal["none", "mean", "sum"]
Gradient = Literal["exact", "sampled"]
Save = Literal["auto", "logits", "grads", "stats"]
_Entropy = Literal["differentiable", "detached"]

# The classes divide the options by the functions that have them.

class _Curve(typing.TypedDict, total=False):
    ignore_index: int | None
    softcap: float | None
    logit_scale: float
    temperature: float | Tensor

class _LossTerms(typing.TypedDict, total=False):
    reduction: Reduction
    label_smoothing: float
    z_loss: float

class _RowFactors(typing.TypedDict, total=False):
    weight: Tensor | None
    token_weight: Tensor | None
    num_items: float | Tensor | None

class _Computation(typing.TypedDict, total=False):
    accum_dtype: dtype | None
    logits_dtype: dtype | None
    max_memory: int | str | None
    gradient: Gradient
    gradient_eps: float

class _OfHead(_Curve, _Computation, total=False):
    linear_bias: Tensor | None
    adapter_input: Tensor | None
    adapter_weight: Tensor | None
    valid_vocab: int | None
    gradient_seed: int | Tensor | None

class _Sharded(typing.TypedDict, total=False):
    vocab_parallel: VocabParallel | None

class _OfRows(_OfHead, total=False):
    valid_bound: int | Literal["count"] | None
    save: Save

class _OfSequences(_OfRows, total=False):
    shift: int
    cu_seqlens: Tensor | None

class _OfLogits(_Curve, _LossTerms, _RowFactors): ...

class _OfReference(_OfSequences, _LossTerms, _RowFactors, total=False):
    options: object

class _WithoutOutputs(_OfReference, _Sharded, total=False):
    accumulate_into: Literal["grad", "main_grad"] | None

# ---- by function ----

class _LogprobsAtOptions(_OfRows, _Sharded): ...
class _LogprobsOptions(_OfSequences, _Sharded): ...

class _LinearLossOptions(_OfHead, _Sharded, total=False):
    rows: int | None
    cu_seqlens: Tensor | None
    shift: int
    accumulate_into: Literal["grad", "main_grad"] | None

class _DivergenceOptions(_Curve, _Sharded, total=False):
    linear_bias: Tensor | None
    reduction: Reduction
    token_weight: Tensor | None
    num_items: float | Tensor | None
    shift: int
    cu_seqlens: Tensor | None
    valid_vocab: int | None
    valid_bound: int | Literal["count"] | None
    accum_dtype: dtype | None
    save: Save
    max_memory: int | str | None
    gradient: Gradient
    gradient_eps: float
    gradient_seed: int | Tensor | None
    accumulate_into: Literal["grad", "main_grad"] | None

class _NemoOptions(_Computation, _Sharded, total=False):
    label_smoothing: float
    logit_scale: float
    temperature: float | Tensor
    z_loss: float
    valid_vocab: int | None
    save: Save

class _PlanOptions(_Curve, _Computation, _LossTerms, total=False):
    shift: int
    valid_vocab: int | None
    save: Save
    accumulate_into: Literal["grad", "main_grad"] | None

class _ModuleOptions(_PlanOptions, _Sharded): ...

class _FuseOptions(_Computation, total=False):
    save: Save
    accumulate_into: Literal["grad", "main_grad"] | None
    z_loss: float
    valid_bound: int | Literal["count"] | None

# ---- outputs: none asked for, only what is asked for, any ----

class _NoReturns(typing.TypedDict, total=False):
    return_lse: Literal[False]
    return_entropy: Literal[False]
    return_accuracy: Literal[False]
    return_predictions: Literal[False]
    return_z_loss: Literal[False]
    return_tail_lse: Literal[False]

class _Asked(typing.TypedDict, total=False):
    return_lse: Literal[True]
    return_entropy: Literal[True, "detached"]
    return_accuracy: Literal[True]
    return_predictions: Literal[True]
    return_z_loss: Literal[True]
    return_tail_lse: Literal[True]

class _Returns(typing.TypedDict, total=False):
    return_lse: bool
    return_entropy: bool | Literal["detached"]
    return_accuracy: bool
    return_predictions: bool
    return_z_loss: bool
    return_tail_lse: bool

class _NoOutputs(_NoReturns, total=False):
    classes: None
    topk: Literal[0]

class _AskedOutputs(_Asked, total=False):
    classes: Tensor
    topk: int

class _Outputs(_Returns, total=False):
    classes: Tensor | None
    topk: int

class _LossOptions(_WithoutOutputs, _NoOutputs): ...
class _OutputOptions(_WithoutOutputs, _AskedOutputs): ...
class Options(_WithoutOutputs, _Outputs): ...
class _LogitsLossOptions(_OfLogits, _NoReturns): ...
class _LogitsOutputOptions(_OfLogits, _Asked): ...
class _LogitsOptions(_OfLogits, _Returns): ...
class _ReferenceLossOptions(_OfReference, _NoOutputs): ...
class _ReferenceOutputOptions(_OfReference, _AskedOutputs): ...
class _ReferenceOptions(_OfReference, _Outputs): ...
class _ReferenceLogitsLossOptions(_OfLogits, _NoOutputs): ...
class _ReferenceLogitsOutputOptions(_OfLogits, _AskedOutputs): ...
class _ReferenceLogitsOptions(_OfLogits, _Outputs): ...

class LinearCrossEntropyOutput(typing.NamedTuple):
    loss: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    predictions: Tensor | None = None
    z_loss: Tensor | None = None
    tail_lse: Tensor | None = None
    class_logits: Tensor | None = None
    classes: Tensor | None = None

class TopLogprobs(typing.NamedTuple):
    logprobs: Tensor
    ids: Tensor
    lse: Tensor
    tail: Tensor | None = None
