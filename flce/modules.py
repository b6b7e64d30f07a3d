"""The loss as Modules."""

import torch
import torch.nn.functional as F
from torch import nn

from . import accumulate
from .loss import DEFAULTS, linear_cross_entropy
from .options import check_choices, check_integer, check_scalars, number, parse_bytes

# What the Modules hold as attributes, which may change between calls. The defaults serve Modules
# that an earlier version has pickled.
_MODULE_OPTIONS = {
    name: DEFAULTS[name]
    for name in (
        "reduction",
        "ignore_index",
        "label_smoothing",
        "softcap",
        "logit_scale",
        "temperature",
        "z_loss",
        "shift",
        "valid_vocab",
        "accum_dtype",
        "logits_dtype",
        "save",
        "max_memory",
        "accumulate_into",
    )
}


def _keep_options(module, classes, given):
    """Keeps a Module's options, after the checks that need no tensor. `given`: its constructor's
    arguments by name."""
    check_choices(given["reduction"], given["save"])
    accumulate.check_place(given["accumulate_into"], given["save"])
    numbers_of = {
        name: None if given[name] is None else number(name, given[name])
        for name in ("label_smoothing", "logit_scale", "softcap", "temperature", "z_loss")
    }
    check_scalars(given["ignore_index"], **numbers_of)
    for name in ("accum_dtype", "logits_dtype"):
        if not isinstance(given[name], torch.dtype | None):
            raise TypeError(f"{name}: expected a torch.dtype or None, got {given[name]!r}")
    if given["max_memory"] is not None:
        parse_bytes(given["max_memory"])
    check_integer("shift", given["shift"], 0)
    if given["valid_vocab"] is not None:
        check_integer("valid_vocab", given["valid_vocab"], 1, classes)
    for name in _MODULE_OPTIONS:
        setattr(module, name, given[name])


def _loss_of(module, input, linear, target, class_weight, options):
    """The loss under a Module's options and those of this call."""
    settings = {name: getattr(module, name, default) for name, default in _MODULE_OPTIONS.items()}
    settings.update({"linear_bias": linear.bias, "weight": class_weight, **options})
    return linear_cross_entropy(input, linear.weight, target, **settings)


def _describe_options(module):
    """The options that are not at their default."""
    shown = ((name, getattr(module, name, value), value) for name, value in _MODULE_OPTIONS.items())
    return "".join(f", {name}={value!r}" for name, value, default in shown if value != default)


class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    """A linear layer and the cross entropy of its output; torch.nn.LinearCrossEntropyLoss's twin.

    Args:
        in_features: H.
        num_classes: V.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer's parameters.
        reduction, weight, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss,
            shift, valid_vocab, accum_dtype, logits_dtype, save, max_memory, accumulate_into: as in
            `linear_cross_entropy`.

    Shape: input (..., H), target (...), output () or (...) for reduction="none". `linear` is an
    nn.Linear(H, V).
    """

    def __init__(
        self,
        in_features,
        num_classes,
        *,
        bias=False,
        device=None,
        dtype=None,
        reduction="mean",
        weight=None,
        ignore_index=-100,
        label_smoothing=0.0,
        softcap=None,
        logit_scale=1.0,
        temperature=1.0,
        z_loss=0.0,
        shift=0,
        valid_vocab=None,
        accum_dtype=None,
        logits_dtype=None,
        save="auto",
        max_memory=None,
        accumulate_into=None,
    ):
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"weight: expected shape ({num_classes},), a factor for each class, "
                f"got {tuple(weight.shape)}"
            )
        super().__init__(weight=weight, reduction=reduction)
        _keep_options(self, num_classes, locals())
        self.num_classes = num_classes
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input, target, **options):
        """The loss of `input` (..., H) with `target` (...); `options` of `linear_cross_entropy`
        are for this call (token_weight, num_items, return_lse ...)."""
        return _loss_of(self, input, self.linear, target, self.weight, options)

    def extra_repr(self):
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}"
            f"{_describe_options(self)}"
        )


class LinearCrossEntropyHead(nn.Linear):
    """A model's head: an nn.Linear whose call with labels gives the loss, without them the logits.

    Both go through the Module's call, so that its hooks (FSDP, ZeRO, adapters) fire, and its
    state_dict is that of the nn.Linear it replaces. The logits are those of the nn.Linear: before
    logit_scale, softcap and temperature.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear.
        class_weight: a factor for each class, shape (out_features,), kept as a buffer that is not
            saved, or None.
        reduction, ignore_index, label_smoothing, softcap, logit_scale, temperature, z_loss, shift,
            valid_vocab, accum_dtype, logits_dtype, save, max_memory, accumulate_into: as in
            `linear_cross_entropy`.

    Shape: input (..., H), labels (...) int64; output () or (...) for reduction="none", or logits
    (..., V).
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        class_weight=None,
        reduction="mean",
        ignore_index=-100,
        label_smoothing=0.0,
        softcap=None,
        logit_scale=1.0,
        temperature=1.0,
        z_loss=0.0,
        shift=0,
        valid_vocab=None,
        accum_dtype=None,
        logits_dtype=None,
        save="auto",
        max_memory=None,
        accumulate_into=None,
    ):
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight, persistent=False)
        _keep_options(self, out_features, locals())

    def forward(self, input, labels=None, **options):
        """The loss of `input` with `labels`, or the logits when there are none; `options` of
        `linear_cross_entropy` are for this call (token_weight, num_items, return_lse ...)."""
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        return _loss_of(self, input, self, labels, self.class_weight, options)

    def extra_repr(self):
        return f"{super().extra_repr()}{_describe_options(self)}"


# A pickle names the package, not the file that holds the class today.
for _module in (LinearCrossEntropyLoss, LinearCrossEntropyHead):
    _module.__module__ = "flce"
