"""Replacements for torch.nn.functional.linear_cross_entropy and torch.nn.LinearCrossEntropyLoss
(torch 2.13). A weight of more than two dimensions, torch's K-dimensional loss, is refused."""

import torch
from torch import nn

import flce
from flce.validate import refuse

from ._signatures import takes

_SHARED = {"ignore_index": None, "label_smoothing": 0.0, "options": None}
_OPTIONS = {"linear_bias": None, "weight": None, "reduction": "mean", **_SHARED}
_LAYER = {"out_features": (), "bias": False, "device": None, "dtype": None}
_MODULE_OPTIONS = {"reduction": "mean", "weight": None, **_SHARED}


@takes("input", "linear_weight", "target", keyword_only=True, **_OPTIONS)
def linear_cross_entropy(input, linear_weight, target, **options):
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
    ignore_index = options["ignore_index"]
    if torch.is_tensor(target) and target.is_floating_point() and ignore_index is not None:
        expected = "None with a target of class probabilities, which has no ignored rows"
        refuse("ignore_index", expected, ignore_index)
    return flce.linear_cross_entropy(input, linear_weight, target, **options)


class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    """A replacement for torch.nn.LinearCrossEntropyLoss: same constructor, state_dict and call.

    Args: in_features is H, num_classes C, out_features must be (); bias, device and dtype are those
    of `linear`, an nn.Linear(H, C). The others, input and output are as in `linear_cross_entropy`.
    """

    @takes("self", "in_features", "num_classes", keyword_only=True, **_LAYER, **_MODULE_OPTIONS)
    def __init__(self, in_features, num_classes, out_features, weight, reduction, **others):
        layer = {name: others.pop(name) for name in ("bias", "device", "dtype")}
        if tuple(out_features):
            refuse("out_features", "(), a loss at one position", out_features)
        if weight is not None and weight.shape != (num_classes,):
            expected = f"shape ({num_classes},), a factor for each class"
            refuse("weight", expected, tuple(weight.shape))
        if not 0.0 <= others["label_smoothing"] <= 1.0:
            refuse("label_smoothing", "0 <= label_smoothing <= 1", others["label_smoothing"])
        super().__init__(weight=weight, reduction=reduction)
        self.num_classes, self.out_features = num_classes, out_features
        for name, value in others.items():
            setattr(self, name, value)
        self.linear = nn.Linear(in_features, num_classes, **layer)

    def forward(self, input, target):
        """The loss of `input` with `target`."""
        options = {name: getattr(self, name) for name in _MODULE_OPTIONS}
        options["linear_bias"] = self.linear.bias
        return linear_cross_entropy(input, self.linear.weight, target, **options)

    def extra_repr(self):
        names = ("num_classes", "out_features", "reduction", *_SHARED)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
