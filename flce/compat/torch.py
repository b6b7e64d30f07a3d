"""torch.nn.functional.linear_cross_entropy and torch.nn.LinearCrossEntropyLoss (torch 2.13)."""

import math
import numbers

import torch
from torch import nn

import flce  # read when a function runs: flce.loss itself imports this module

from ..options import row_pitch

_FIELDS = ("acc_dtype", "acc_policy", "batch_chunk_size")


def knobs(options, linear_weight):
    """What torch's `options` mean here, as keyword arguments of `flce.linear_cross_entropy`.

    Args:
        options: torch.nn.LinearCrossEntropyOptions, an object with its fields acc_dtype, acc_policy
            and batch_chunk_size, or None.
        linear_weight: the head's weight, shape (V, H) or (C, d1, ..., dK, H), read for its sizes
            and dtype.

    Returns:
        A dict with those of these keys that `options` decide:
        accum_dtype: `acc_dtype` where one is given, except under acc_policy="compact", which in
            torch too sums the weight's gradient in the weight's own dtype.
        max_memory: bytes of `batch_chunk_size` rows of logits in float32 (float64 for a float64
            weight). It bounds a chunk; where all logits fit they are kept whole.

    `chunking_method` has no effect (max_memory decides), nor has `allow_retain_graph`: a backward
    that keeps the graph may always be repeated.

    Raises:
        TypeError: `options` is no such object.
        ValueError: batch_chunk_size is no positive int.
    """
    if options is None:
        return {}
    if not all(hasattr(options, name) for name in _FIELDS):
        raise TypeError(
            "options: expected torch.nn.LinearCrossEntropyOptions or an object with the fields "
            f"{', '.join(_FIELDS)}, got {type(options).__name__}"
        )
    found = {}
    if options.acc_dtype is not None and options.acc_policy != "compact":
        found["accum_dtype"] = options.acc_dtype
    rows = options.batch_chunk_size
    if rows is not None:
        if isinstance(rows, bool) or not isinstance(rows, numbers.Integral) or rows < 1:
            raise ValueError(
                f"options: expected a positive int or None as batch_chunk_size, got {rows!r}"
            )
        dtype = torch.float64 if linear_weight.dtype == torch.float64 else torch.float32
        pitch = row_pitch(linear_weight.shape[0], dtype, linear_weight.device.type)
        found["max_memory"] = int(rows) * pitch * dtype.itemsize
    return found


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
        options: torch.nn.LinearCrossEntropyOptions or None; see `knobs` for what they do here.

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
    return flce.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
        **knobs(options, linear_weight),
    )


class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    """torch.nn.LinearCrossEntropyLoss: its constructor, its state_dict, its call.

    Args:
        in_features: H.
        num_classes: C.
        out_features: (d1, ..., dK), the positions of a K-dimensional loss; () for one position.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer's parameters.
        reduction, weight, ignore_index, label_smoothing, options: as in `linear_cross_entropy`.

    Shape: input (H,) or (N, H), target and output as in `linear_cross_entropy`. `linear` is an
    nn.Linear(H, C d1 ... dK), as torch stores it.
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
