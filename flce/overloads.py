"""Types for the overloads that type checkers see: of calls without outputs, and of calls with only
those that are asked for."""

import typing
from typing import Literal, TypedDict

from torch import Tensor

from . import options

if typing.TYPE_CHECKING:

    class LseOutput(options.LinearCrossEntropyOutput):
        """The output of a call with return_lse=True."""

        @property
        def lse(self) -> Tensor: ...

else:
    LseOutput = options.LinearCrossEntropyOutput


class _NoReturns(TypedDict, total=False):
    return_lse: Literal[False]
    return_entropy: Literal[False]
    return_accuracy: Literal[False]
    return_predictions: Literal[False]
    return_z_loss: Literal[False]
    return_tail_lse: Literal[False]


class _AskedButLse(TypedDict, total=False):
    return_entropy: Literal[True, "detached"]
    return_accuracy: Literal[True]
    return_predictions: Literal[True]
    return_z_loss: Literal[True]
    return_tail_lse: Literal[True]


class _Asked(_AskedButLse, total=False):
    return_lse: Literal[True]


class _NoOutputs(_NoReturns, total=False):
    classes: None
    topk: Literal[0]


class _AskedClasses(TypedDict, total=False):
    classes: Tensor
    topk: int


class _AskedOutputs(_Asked, _AskedClasses): ...


class LossOptions(options._OfLoss, _NoOutputs): ...


class LseOptions(options._OfLoss, _AskedButLse, _AskedClasses):
    """Those in addition to return_lse=True."""


class OutputOptions(options._OfLoss, _AskedOutputs): ...


class LogitsLossOptions(options._OfLogits, _NoReturns): ...


class LogitsLseOptions(options._OfLogits, _AskedButLse): ...


class LogitsOutputOptions(options._OfLogits, _Asked): ...


class ReferenceLossOptions(options._OfReference, _NoOutputs): ...


class ReferenceOutputOptions(options._OfReference, _AskedOutputs): ...


class ReferenceLogitsLossOptions(options._OfLogits, _NoOutputs): ...


class ReferenceLogitsOutputOptions(options._OfLogits, _AskedOutputs): ...
