"""Replacements for torch.nn.functional.linear_cross_entropy and torch.nn.LinearCrossEntropyLoss
(torch 2.13). A weight of more than two dimensions, torch's K-dimensional loss, is refused."""

import typing

import torch
from torch import Tensor, nn

import flce
from flce.options import Reduction
from flce.torch_private import WeightedLoss
from flce.validate import refuse

_MODULE_OPTIONS = ("reduction", "weight", "ignore_index", "label_smoothing", "options")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, computed by flce for all `options`.

    Args:
        input: shape (H,) or (N, H); linear_weight: shape (C, H).
        target: class indices, shape () or (N,), or probabilities, shape (C,) or (N, C).
        linear_bias: shape (C,), or None; weight: a factor for each class, shape (C,), or None.
        reduction, label_smoothing: as F.cross_entropy.
        ignore_index: None means -100 for class indices; it must be None for probabilities.
        options: torch.nn.LinearCrossEntropyOptions or None, which determine accum_dtype and
            max_memory of `flce.linear_cross_entropy`.

    Returns the loss, shape () or that of class indices for "none".

    Differences from torch: the loss of 16-bit operands is float32 (torch: the input's dtype);
    "mean" over no valid target is 0 (torch: NaN); `options` never fall back to a slower path, with
    a warning or without; class indices may be int32 and inputs may have more leading dimensions.
    Refused: vmap, double backward and forward-mode AD, which torch has with options=None, and a
    linear_weight of shape (C, d1, ..., dK, H).

    Raises as `flce.linear_cross_entropy`: ValueError where torch has RuntimeError for a shape.
    """
    if torch.is_tensor(target) and target.is_floating_point() and ignore_index is not None:
        expected = "None with a target of class probabilities, which has no ignored rows"
        refuse("ignore_index", expected, ignore_index)
    return flce.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        options=options,
    )


class LinearCrossEntropyLoss(WeightedLoss):  # type: ignore[misc]
    """A replacement for torch.nn.LinearCrossEntropyLoss: same constructor, state_dict and call.

    Args: in_features is H, num_classes C, out_features must be (); bias, device and dtype are those
    of `linear`, an nn.Linear(H, C). The others, input and output are as in `linear_cross_entropy`.
    """

    num_classes: int
    out_features: tuple[()]
    weight: Tensor | None
    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    options: object
    linear: nn.Linear

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[()] = (),
        bias: bool = False,
        device: str | int | torch.device | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
    ) -> None:
        if tuple(out_features):
            refuse("out_features", "(), a loss at one position", out_features)
        if weight is not None and weight.shape != (num_classes,):
            expected = f"shape ({num_classes},), a factor for each class"
            refuse("weight", expected, tuple(weight.shape))
        if not 0.0 <= label_smoothing <= 1.0:
            refuse("label_smoothing", "0 <= label_smoothing <= 1", label_smoothing)
        super().__init__(weight=weight, reduction=reduction)
        self.num_classes, self.out_features = num_classes, out_features
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.options = options
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of `input` with `target`."""
        options = {name: getattr(self, name) for name in _MODULE_OPTIONS}
        options["linear_bias"] = self.linear.bias
        return linear_cross_entropy(input, self.linear.weight, target, **options)

    if typing.TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        names = ("num_classes", "out_features", "reduction")
        names += ("ignore_index", "label_smoothing", "options")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
