from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from torch import Tensor, device, dtype, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack, overload

from . import compat, integrations, reference
from .distributed import VocabParallel
from .distributed.vocab_parallel_head import VocabParallelHead
from .fusion import explain, fuse
from .options import (
    Gradient,
    LinearCrossEntropyOutput,
    Options,
    Reduction,
    Save,
    TopLogprobs,
    _DivergenceOptions,
    _Entropy,
    _LinearLossOptions,
    _LogitsLossOptions,
    _LogitsOptions,
    _LogitsOutputOptions,
    _LogprobsAtOptions,
    _LogprobsOptions,
    _LossOptions,
    _ModuleOptions,
    _OutputOptions,
    _PlanOptions,
)
from .plan import Plan

_T = TypeVar("_T")
_Target = Tensor | tuple[Tensor, Tensor]

__version__: str
__all__ = [
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "Plan",
    "TopLogprobs",
    "VocabParallel",
    "VocabParallelHead",
    "compat",
    "cross_entropy",
    "explain",
    "fuse",
    "integrations",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprobs",
    "linear_logprobs_at",
    "linear_loss",
    "num_items",
    "plan",
    "reference",
]

@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: _Target, **options: Unpack[_LossOptions]
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: _Target, **options: Unpack[_OutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: _Target, **options: Unpack[Options]
) -> Tensor | LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[_LogitsLossOptions]
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[_LogitsOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **options: Unpack[_LogitsOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
def linear_logprobs_at(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    tail: bool = False,
    **options: Unpack[_LogprobsAtOptions],
) -> Tensor: ...
@overload
def linear_logprobs(  # type: ignore[overload-overlap]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: _Entropy = "differentiable",
    return_topk: Literal[0] = 0,
    tail: Literal[False] = False,
    **options: Unpack[_LogprobsOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprobs(  # type: ignore[overload-overlap]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: None,
    return_topk: Literal[0] = 0,
    tail: Literal[False] = False,
    **options: Unpack[_LogprobsOptions],
) -> tuple[Tensor, None]: ...
@overload
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: _Entropy = "differentiable",
    return_topk: int,
    tail: bool = False,
    **options: Unpack[_LogprobsOptions],
) -> tuple[Tensor, Tensor, TopLogprobs]: ...
@overload
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: None,
    return_topk: int,
    tail: bool = False,
    **options: Unpack[_LogprobsOptions],
) -> tuple[Tensor, None, TopLogprobs]: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, None, slice], Tensor],
    *,
    entropy: None = None,
    tail: bool = False,
    **options: Unpack[_LinearLossOptions],
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, None, slice], tuple[Tensor, _T]],
    *,
    entropy: None = None,
    tail: bool = False,
    **options: Unpack[_LinearLossOptions],
) -> tuple[Tensor, _T]: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor, slice], Tensor],
    *,
    entropy: _Entropy,
    tail: bool = False,
    **options: Unpack[_LinearLossOptions],
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor, slice], tuple[Tensor, _T]],
    *,
    entropy: _Entropy,
    tail: bool = False,
    **options: Unpack[_LinearLossOptions],
) -> tuple[Tensor, _T]: ...
def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    beta: float = 0.5,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | tuple[Tensor, Tensor] | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_temperature: float | Tensor | None = None,
    tail: Literal["class", "renormalize"] = "class",
    **options: Unpack[_DivergenceOptions],
) -> Tensor: ...
def num_items(
    targets: Tensor | Sequence[Tensor],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    averaged_over: float = 1,
    shift: int = 0,
    cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
    ignore_index: int | None = -100,
) -> Tensor: ...
def plan(
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    dtype: dtype = ...,
    device: str | device = "cuda",
    input_dtype: dtype | None = None,
    weight_dtype: dtype | None = None,
    bias: bool = False,
    probabilities: bool | dtype | None = False,
    valid_bound: int | None = None,
    grad_input: bool = True,
    grad_weight: bool = True,
    ranks: int = 1,
    sequence: bool = False,
    reduce_dtype: dtype | None = None,
    teacher_hidden: int | None = None,
    teacher_logits: int | dtype | None = None,
    return_lse: bool = False,
    return_entropy: bool | Literal["detached"] = False,
    return_predictions: bool = False,
    **options: Unpack[_PlanOptions],
) -> Plan: ...

class _Settings:
    """The options that a Module holds; they may change between calls."""

    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    temperature: float | Tensor
    z_loss: float
    shift: int
    valid_vocab: int | None
    accum_dtype: dtype | None
    logits_dtype: dtype | None
    save: Save
    max_memory: int | str | None
    accumulate_into: Literal["grad", "main_grad"] | None
    gradient: Gradient
    gradient_eps: float
    vocab_parallel: VocabParallel | None

class LinearCrossEntropyLoss(_Settings, nn.modules.loss._WeightedLoss):  # type: ignore[misc]
    weight: Tensor | None
    num_classes: int
    linear: nn.Linear
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: str | int | device | None = None,
        dtype: dtype | None = None,
        weight: Tensor | None = None,
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __call__(
        self, input: Tensor, target: _Target, **options: Unpack[_LossOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, input: Tensor, target: _Target, **options: Unpack[_OutputOptions]
    ) -> LinearCrossEntropyOutput: ...
    @overload
    def __call__(
        self, input: Tensor, target: _Target, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...
    def forward(
        self, input: Tensor, target: _Target, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...

class LinearCrossEntropyHead(_Settings, nn.Linear):
    class_weight: Tensor | None
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: str | int | device | None = None,
        dtype: dtype | None = None,
        *,
        class_weight: Tensor | None = None,
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __call__(
        self, input: Tensor, labels: None = None, **options: Unpack[Options]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, input: Tensor, labels: _Target, **options: Unpack[_LossOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, input: Tensor, labels: _Target, **options: Unpack[_OutputOptions]
    ) -> LinearCrossEntropyOutput: ...
    @overload
    def __call__(
        self, input: Tensor, labels: _Target | None, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...
    @overload
    def forward(self, input: Tensor, labels: None = None, **options: Unpack[Options]) -> Tensor: ...
    @overload
    def forward(
        self, input: Tensor, labels: _Target | None, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...
