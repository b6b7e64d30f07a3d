from typing import Generic, Literal, TypedDict

from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack, overload

from ..options import Reduction
from ._rebind import Installation

_Made = TypeVar("_Made", default=Tensor | tuple[Tensor, Tensor])
_Both = tuple[Tensor, Tensor]

IMPLS: tuple[str, ...]

class _ModuleOptions(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: int
    filter_eps: float | Literal["auto"] | None
    accum_e_fp32: bool
    accum_c_fp32: bool
    filter_e_grad: bool
    filter_c_grad: bool
    impl: object

class _Options(_ModuleOptions, total=False):
    vocab_parallel_options: None

@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> _Both: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: int = 0,
    return_lse: bool = False,
    filter_eps: float | Literal["auto"] | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: object = "cce",
    vocab_parallel_options: None = None,
) -> Tensor | _Both: ...

class LinearCrossEntropy(nn.Module, Generic[_Made]):
    """_Made: what a call returns."""

    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: int
    filter_eps: float | Literal["auto"] | None
    accum_e_fp32: bool
    accum_c_fp32: bool
    filter_e_grad: bool
    filter_c_grad: bool
    impl: object
    return_lse: bool
    @overload
    def __init__(
        self: LinearCrossEntropy[Tensor],
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropy[_Both],
        *,
        return_lse: Literal[True],
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LinearCrossEntropy[Tensor | _Both],
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: int = 0,
        filter_eps: float | Literal["auto"] | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: object = "cce",
        return_lse: bool = False,
    ) -> None: ...
    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> _Made: ...
    def __call__(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> _Made: ...

def install() -> Installation: ...
