import abc
import dataclasses
from typing import Generic, Literal, TypedDict

from torch import Tensor, dtype, nn
from typing_extensions import TypeVar, Unpack, overload

from ..options import Reduction
from ._rebind import Installation

@dataclasses.dataclass
class CrossEntropyOutput(abc.ABC):
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None

_Made = TypeVar("_Made", default=Tensor | CrossEntropyOutput)

class _ModuleOptions(TypedDict, total=False):
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: Reduction
    softcap: float | None
    accum_dtype: dtype | None
    use_token_scaling: bool

class _LossModuleOptions(_ModuleOptions, total=False):
    return_z_loss: Literal[False]
    return_token_accuracy: Literal[False]
    return_predicted_tokens: Literal[False]

class _OutputModuleOptions(_ModuleOptions, total=False):
    return_z_loss: Literal[True]
    return_token_accuracy: Literal[True]
    return_predicted_tokens: Literal[True]

class _LossOptions(_LossModuleOptions, total=False):
    chunk_mem_const: int

class _OutputOptions(_OutputModuleOptions, total=False):
    chunk_mem_const: int

@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Unpack[_LossOptions],
) -> Tensor: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Unpack[_OutputOptions],
) -> CrossEntropyOutput: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput: ...

class LigerFusedLinearCrossEntropyFunction:
    supports_inner_impl_dispatch: bool
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: None = None,
        ce_mode: None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...

class LigerFusedLinearCrossEntropyLoss(nn.Module, Generic[_Made]):
    """_Made: what a call returns."""

    ce_weight: Tensor | None
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: Reduction
    softcap: float | None
    return_z_loss: bool
    accum_dtype: dtype | None
    use_token_scaling: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor],
        ce_weight: Tensor | None = None,
        **options: Unpack[_LossModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[CrossEntropyOutput],
        ce_weight: Tensor | None = None,
        **options: Unpack[_OutputModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor | CrossEntropyOutput],
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None: ...
    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> _Made: ...
    def __call__(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> _Made: ...

def install() -> Installation: ...
