"""The Modules: a linear layer with its loss, and a replacement for a model's nn.Linear."""

import typing
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack, overload

from . import composite, validate
from .functional import linear_cross_entropy
from .options import (
    Attribute,
    Gradient,
    LinearCrossEntropyOutput,
    ModuleOptions,
    Options,
    Reduction,
    Save,
    Target,
    completed,
    defaults,
)
from .overloads import LossOptions, LseOptions, LseOutput, OutputOptions
from .packing import all_classes
from .torch_private import WeightedLoss

if typing.TYPE_CHECKING:
    from .distributed import VocabParallel

_Device = str | int | torch.device | None
# The options that Modules hold as attributes, which may change between calls. The defaults fill in
# attributes that a Module pickled by an earlier version lacks.
_MODULE_OPTIONS = defaults(ModuleOptions)


class _Settings:
    """The attributes of ModuleOptions."""

    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    logit_scale: float
    temperature: float | Tensor
    z_loss: float
    shift: int
    valid_vocab: int | None
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    save: Save
    max_memory: int | str | None
    accumulate_into: Attribute | None
    gradient: Gradient
    gradient_eps: float
    vocab_parallel: "VocabParallel | None"


def _check_class_weight(name, tensor, rows, options, device):
    if tensor is None:
        return
    validate.check_tensor(name, tensor)
    classes, _ = all_classes(options.get("vocab_parallel"), rows)
    validate.check_shape(name, tensor, (classes,), ", a factor for each class")
    on_meta = torch.device(device).type if device is not None else torch.get_default_device().type
    if tensor.is_meta or on_meta == "meta":
        expected = "None on the meta device, as to_empty() leaves no values; set it afterwards"
        validate.refuse(name, expected, "a tensor")


def _keep_options(module, rows, options):
    """Stores a Module's options, after the checks that need no tensor. `rows`: of its weight;
    `options`: the constructor's arguments by name."""
    values = completed(type(module).__name__, _MODULE_OPTIONS, options)
    sharded = values["vocab_parallel"] is not None
    composite.check_options(values, rows if sharded else max(rows, 1))
    for name, value in values.items():
        setattr(module, name, value)


def _loss_of(module, input, linear, target, class_weight, options):
    """The loss with a Module's options and those of this call."""
    settings = {name: getattr(module, name, default) for name, default in _MODULE_OPTIONS.items()}
    settings.update({"linear_bias": linear.bias, "weight": class_weight, **options})
    return linear_cross_entropy(input, linear.weight, target, **settings)


def _describe_options(module):
    """extra_repr: the options whose text is not their default's (a tensor has no truth value)."""
    options = _MODULE_OPTIONS.items()
    shown = ((name, repr(getattr(module, name, value)), repr(value)) for name, value in options)
    return "".join(f", {name}={text}" for name, text, default in shown if text != default)


class _CallOfLoss(typing.Protocol):
    """Module.__call__ of a LinearCrossEntropyLoss."""

    @overload
    def __call__(self, input: Tensor, target: Target, **options: Unpack[LossOptions]) -> Tensor: ...
    @overload
    def __call__(
        self,
        input: Tensor,
        target: Target,
        *,
        return_lse: Literal[True],
        **options: Unpack[LseOptions],
    ) -> LseOutput: ...
    @overload
    def __call__(
        self, input: Tensor, target: Target, **options: Unpack[OutputOptions]
    ) -> LinearCrossEntropyOutput: ...
    @overload
    def __call__(
        self, input: Tensor, target: Target, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...


class _CallOfHead(typing.Protocol):
    """Module.__call__ of a LinearCrossEntropyHead."""

    @overload
    def __call__(
        self, input: Tensor, labels: None = None, **options: Unpack[Options]
    ) -> Tensor: ...
    @overload
    def __call__(
        self, input: Tensor, labels: Target | None, **options: Unpack[LossOptions]
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        input: Tensor,
        labels: Target,
        *,
        return_lse: Literal[True],
        **options: Unpack[LseOptions],
    ) -> LseOutput: ...
    @overload
    def __call__(
        self, input: Tensor, labels: Target, **options: Unpack[OutputOptions]
    ) -> LinearCrossEntropyOutput: ...
    @overload
    def __call__(
        self, input: Tensor, labels: Target | None, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...


class LinearCrossEntropyLoss(_Settings, WeightedLoss):  # type: ignore[misc]
    """A linear layer and the cross entropy of its output, like torch.nn.LinearCrossEntropyLoss.

    Args:
        in_features: H.
        num_classes: V; with vocab_parallel the number of this rank's classes.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer's parameters.
        weight, **options: as in `linear_cross_entropy`; of its options all but those that are
            tensors or belong to one call. Each becomes an attribute. As every buffer `weight` loses
            its values in to_empty(): on the meta device it is refused, and set afterwards.

    Shape: input (..., H) of the parameters' dtype, target (...) int64 or int32 or as in
    `linear_cross_entropy`; output () or (...) for reduction="none", float64 for float64 parameters,
    else float32. `linear` is an nn.Linear(H, V).

    Raises:
        TypeError, ValueError: when it is made, an option of a wrong name, type or value, by name;
            when it is called, as `linear_cross_entropy`.

    >>> criterion = flce.LinearCrossEntropyLoss(8, 16, label_smoothing=0.1)
    >>> criterion(torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)).shape
    torch.Size([])
    """

    __call__: _CallOfLoss
    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        **options: Unpack[ModuleOptions],
    ) -> None:
        _check_class_weight("weight", weight, num_classes, options, device)
        super().__init__(weight=weight)
        _keep_options(self, num_classes, options)
        self.num_classes = num_classes
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(
        self, input: Tensor, target: Target, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput:
        """The loss of `input` (..., H) with `target` (...). `options`: options of
        `linear_cross_entropy` for this call only (token_weight, num_items, return_lse ...)."""
        return _loss_of(self, input, self.linear, target, self.weight, options)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.linear.in_features}, num_classes={self.num_classes}"
        return f"{sizes}{_describe_options(self)}"


class LinearCrossEntropyHead(_Settings, nn.Linear):
    """A model's head: an nn.Linear that returns the loss if called with labels, else the logits.

    Both go through Module.__call__, so that hooks (FSDP, ZeRO, adapters) run, and its state_dict is
    that of the nn.Linear it replaces. The logits are the nn.Linear's output, before logit_scale,
    softcap and temperature.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear; with vocab_parallel
            out_features is the number of this rank's classes. Without labels the call then gives
            the logits of this rank's rows of input and classes. Ranks with one seed begin with the
            same weights in all shards.
        class_weight: a factor for each class, shape (V,), or None; a non-persistent
            buffer. With vocab_parallel it is that of all classes. As every buffer it loses its
            values in to_empty(): on the meta device it is refused, and set afterwards.
        **options: as for LinearCrossEntropyLoss, except `weight`.

    Shape: input (..., H) of the weight's dtype, labels (...) int64 or int32 or as in
    `linear_cross_entropy`, or None; output () or (...) for reduction="none", float64 for float64
    parameters, else float32; without labels the logits (..., V), of input's dtype.

    Raises:
        TypeError, ValueError: when it is made, an option of a wrong name, type or value, by name;
            when it is called, as `linear_cross_entropy`.

    >>> head, hidden = flce.LinearCrossEntropyHead(8, 16), torch.randn(2, 3, 8)
    >>> head(hidden, torch.zeros(2, 3, dtype=torch.int64)).shape, head(hidden).shape
    (torch.Size([]), torch.Size([2, 3, 16]))
    """

    __call__: _CallOfHead
    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        class_weight: Tensor | None = None,
        **options: Unpack[ModuleOptions],
    ) -> None:
        _check_class_weight("class_weight", class_weight, out_features, options, device)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight, persistent=False)
        _keep_options(self, out_features, options)

    @overload
    def forward(self, input: Tensor, labels: None = None, **options: Unpack[Options]) -> Tensor: ...
    @overload
    def forward(
        self, input: Tensor, labels: Target | None, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput: ...
    def forward(
        self, input: Tensor, labels: Target | None = None, **options: Unpack[Options]
    ) -> Tensor | LinearCrossEntropyOutput:
        """The loss of `input` with `labels`, or the logits without labels. `options`: options
        of `linear_cross_entropy` for this call only (token_weight, num_items, return_lse ...)."""
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        return _loss_of(self, input, self, labels, self.class_weight, options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{_describe_options(self)}"


# Pickles refer to the package, so that a class may move to another file.
for _class in (LinearCrossEntropyLoss, LinearCrossEntropyHead, LinearCrossEntropyOutput):
    _class.__module__ = __package__
