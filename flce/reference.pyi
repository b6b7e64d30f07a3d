from torch import Tensor
from typing_extensions import Unpack, overload

from .options import (
    LinearCrossEntropyOutput,
    _OfSequences,
    _ReferenceLogitsLossOptions,
    _ReferenceLogitsOptions,
    _ReferenceLogitsOutputOptions,
    _ReferenceLossOptions,
    _ReferenceOptions,
    _ReferenceOutputOptions,
)

@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[_ReferenceLossOptions]
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[_ReferenceOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[_ReferenceOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[_ReferenceLogitsLossOptions],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[_ReferenceLogitsOutputOptions],
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[_ReferenceLogitsOptions],
) -> Tensor | LinearCrossEntropyOutput: ...
def linear_logprobs(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[_OfSequences]
) -> tuple[Tensor, Tensor]: ...
