from typing import overload

from torch import Tensor
from typing_extensions import Unpack

from .options import (
    LinearCrossEntropyOutput,
    _LogitsLossOptions,
    _LogitsOptions,
    _LogitsOutputOptions,
    _OfSequences,
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
    logits: Tensor, target: Tensor, **of_logits: Unpack[_LogitsLossOptions]
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **of_logits: Unpack[_LogitsOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **of_logits: Unpack[_LogitsOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
def linear_logprobs(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[_OfSequences]
) -> tuple[Tensor, Tensor]: ...
