"""Replacements for torch.nn.functional.linear_cross_entropy and torch.nn.LinearCrossEntropyLoss
(torch 2.13)."""

import math

import torch
from torch import nn

import flce

from ..functional import from_torch_options
from ..validate import check_tensor
from .kdim import k_dimensional


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=None,
    label_smoothing=0.0,
    options=None,
):
    """torch.nn.functional.linear_cross_entropy, computed by flce whatever `options` are.

    Args:
        input: shape (H,) or (N, H).
        linear_weight: shape (C, H), or (C, d1, ..., dK, H) with an input of shape (N, H).
        target: class indices, shape (), (N,) or (N, d1, ..., dK), or probabilities, shape (C,),
            (N, C) or (N, C, d1, ..., dK).
        linear_bias: shape (C,) or (C, d1, ..., dK), or None.
        weight: a factor for each class, shape (C,), or None.
        reduction, label_smoothing: as F.cross_entropy.
        ignore_index: None means -100 for class indices; it must be None for probabilities.
        options: torch.nn.LinearCrossEntropyOptions or None; accum_dtype and max_memory of
            `flce.linear_cross_entropy` are derived from them.

    Returns:
        The loss, shape () or that of class indices for "none".

    Differences from torch: the loss of 16-bit operands is float32 (torch: the input's dtype);
    "mean" over no valid target is 0 (torch: NaN); `options` never fall back to a slower path, with
    a warning or without; class indices may be int32 and inputs may have more leading dimensions.
    vmap, double backward and forward-mode AD, which torch has with options=None, are refused.

    Raises:
        As `flce.linear_cross_entropy`, so ValueError where torch raises RuntimeError for a shape.
    """
    has_probabilities = isinstance(target, torch.Tensor) and target.is_floating_point()
    if has_probabilities and ignore_index is not None:
        raise ValueError(
            "ignore_index: expected None with a target of class probabilities, which has no "
            f"ignored rows, got {ignore_index}"
        )
    check_tensor("linear_weight", linear_weight)
    call = flce.linear_cross_entropy if linear_weight.dim() <= 2 else k_dimensional
    return call(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        **from_torch_options(options, linear_weight),
    )


class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    """A replacement for torch.nn.LinearCrossEntropyLoss: same constructor, state_dict and call.

    Args:
        in_features: H.
        num_classes: C.
        out_features: (d1, ..., dK), the positions of a K-dimensional loss; () for one position.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer's parameters.
        reduction, weight, ignore_index, label_smoothing, options: as in `linear_cross_entropy`.

    Shape: input (H,) or (N, H), target and output as in `linear_cross_entropy`. `linear` is an
    nn.Linear(H, C d1 ... dK), as in torch.
    """

    def __init__(
        self,
        in_features,
        num_classes,
        *,
        out_features=(),
        bias=False,
        device=None,
        dtype=None,
        reduction="mean",
        weight=None,
        ignore_index=None,
        label_smoothing=0.0,
        options=None,
    ):
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"weight: expected shape ({num_classes},), a factor for each class, "
                f"got {tuple(weight.shape)}"
            )
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(
                f"label_smoothing: expected 0 <= label_smoothing <= 1, got {label_smoothing}"
            )
        super().__init__(weight=weight, reduction=reduction)
        self.num_classes = num_classes
        self.out_features = out_features
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        outputs = math.prod(out_features, start=num_classes)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)

    def forward(self, input, target):
        """The loss of `input` with `target`."""
        classes = (self.num_classes, *self.out_features)
        bias = self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.reshape(*classes, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(classes),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
        )

    def extra_repr(self):
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"out_features={self.out_features}, bias={self.linear.bias is not None}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, options={self.options}"
        )
