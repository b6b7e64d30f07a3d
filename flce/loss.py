"""The loss as a function and as Modules."""

import torch
import torch.nn.functional as F
from torch import nn

from . import ops, options


def _entry(name):
    """The composite operator, or its body at once where nothing traces or transforms the call."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
    return getattr(torch.ops.flce if traced else ops, name)


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    accum_dtype=None,
    logits_dtype=None,
    save="auto",
    max_memory=None,
):
    """Cross entropy of `input @ linear_weight.T + linear_bias`, without holding all logits.

    Equivalent to ``F.cross_entropy(F.linear(input, linear_weight, linear_bias).flatten(0, -2),
    target.flatten(), ...)`` with the loss in float32, except that the mean over no valid row is 0
    (there: NaN).

    Args:
        input: hidden states, shape (..., H); float64, float32, bfloat16 or float16, CPU or CUDA.
        linear_weight: the head's weight, shape (V, H), of input's dtype (of any under autocast,
            which casts as F.linear does).
        target: class indices in [0, V) or `ignore_index`, shape (...), int64.
        linear_bias: shape (V,), of input's dtype or float32 (any under autocast), or None.
        weight: a factor for each class, shape (V,), or None; it must not require grad.
        reduction: "mean" divides the sum by the sum of the valid rows' class weights (without
            `weight`: by their number), "sum" does not divide, "none" gives a loss for each row,
            0 for ignored ones.
        ignore_index: rows with this target give no loss and no gradient, whatever they hold.
            None means -100.
        label_smoothing: s in [0, 1]; the target becomes (1 - s) onehot + s/V.
        accum_dtype: the dtype in which the weight's gradient is summed over chunks: the operands'
            own (None; its error grows with the number of chunks) or torch.float32, which takes
            4 V H bytes more for 16-bit operands.
        logits_dtype: torch.float32 (None) keeps the logits exact; the operands' own dtype lets
            them be rounded, as an eager head does. On the CPU, bfloat16 operands always give
            bfloat16 logits.
        save: what the forward keeps for the backward: "logits" (N V elements, fastest), "grads"
            (the gradients, made in the forward; mean and sum only), "stats" (four numbers a row;
            the backward computes the logits again) or "auto": logits where they fit `max_memory`
            (on CUDA grads, where a scalar loss has all logits in one chunk and the weight has at
            most 128 MiB), else grads for a scalar loss (stats in float16), else stats.
        max_memory: bound of the logits buffer in bytes, or text such as "512MiB". None: the
            variable FLCE_MAX_MEMORY, else the smaller of 1 GiB and 1/8 of the device's memory.

    Returns:
        The loss, float64 for float64 operands and float32 for all others; shape () or, for
        "none", target's.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or value, by name.
        IndexError: a target out of range on the CPU, or on CUDA with FLCE_CHECK=1. Without it
            such a row's loss and gradients are NaN on CUDA, where checking would wait.
        torch.OutOfMemoryError: names the buffer and a smaller max_memory (under torch.compile:
            MemoryError).
        RuntimeError: double backward, forward-mode AD, vmap.

    Formula (torch.nn.CrossEntropyLoss): a valid row with class weights w has
    ``(1-s) w_y (lse - z_y) + s/V sum_j w_j (lse - z_j)``.
    """
    return _entry("linear_cross_entropy")(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        accum_dtype=accum_dtype,
        logits_dtype=logits_dtype,
        save=save,
        max_memory=None if max_memory is None else options.parse_bytes(max_memory),
    )


def cross_entropy(
    logits, target, *, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0
):
    """Cross entropy on logits that the caller holds.

    The forward reads the logits once; the backward reads them once and writes their gradient.
    Between the two it keeps four float32 numbers a row beside the logits, no log-probabilities.

    Args:
        logits: shape (..., V), classes last; float64, float32, bfloat16 or float16, CPU or CUDA.
        target: class indices, shape (...), int64.
        weight, reduction, ignore_index, label_smoothing: as in `linear_cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64 logits), shape () or target's for "none". The
        gradient has the logits' dtype.

    Raises:
        As `linear_cross_entropy`.
    """
    return _entry("cross_entropy")(
        logits,
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


_MODULE_OPTIONS = (
    "reduction",
    "ignore_index",
    "label_smoothing",
    "accum_dtype",
    "logits_dtype",
    "save",
    "max_memory",
)


def _loss_of(module, input, linear, target, class_weight):
    """The loss under a Module's options, which are its attributes and may change between calls."""
    return linear_cross_entropy(
        input,
        linear.weight,
        target,
        linear_bias=linear.bias,
        weight=class_weight,
        **{name: getattr(module, name) for name in _MODULE_OPTIONS},
    )


class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    """A linear layer and the cross entropy of its output; torch.nn.LinearCrossEntropyLoss's twin.

    Args:
        in_features: H.
        num_classes: V.
        bias: whether the linear layer has one.
        device, dtype: of the linear layer's parameters.
        reduction, weight, ignore_index, label_smoothing, accum_dtype, logits_dtype, save,
            max_memory: as in `linear_cross_entropy`.

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
        accum_dtype=None,
        logits_dtype=None,
        save="auto",
        max_memory=None,
    ):
        options.check_choices(reduction, label_smoothing, save)
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(
                f"weight: expected shape ({num_classes},), a factor for each class, "
                f"got {tuple(weight.shape)}"
            )
        super().__init__(weight=weight, reduction=reduction)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.accum_dtype = accum_dtype
        self.logits_dtype = logits_dtype
        self.save = save
        self.max_memory = max_memory
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input, target):
        """The loss of `input` (..., H) with `target` (...)."""
        return _loss_of(self, input, self.linear, target, self.weight)

    def extra_repr(self):
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, "
            f"reduction={self.reduction!r}, save={self.save!r}, max_memory={self.max_memory!r}"
        )


class LinearCrossEntropyHead(nn.Linear):
    """A model's head: an nn.Linear whose call with labels gives the loss, without them the logits.

    Both go through the Module's call, so that its hooks (FSDP, ZeRO, adapters) fire, and its
    state_dict is that of the nn.Linear it replaces.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear.
        class_weight: a factor for each class, shape (out_features,), kept as a buffer that is not
            saved, or None.
        reduction, ignore_index, label_smoothing, accum_dtype, logits_dtype, save, max_memory: as in
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
        accum_dtype=None,
        logits_dtype=None,
        save="auto",
        max_memory=None,
    ):
        options.check_choices(reduction, label_smoothing, save)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.accum_dtype = accum_dtype
        self.logits_dtype = logits_dtype
        self.save = save
        self.max_memory = max_memory

    def forward(self, input, labels=None):
        """The loss of `input` with `labels`, or the logits when there are none."""
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        return _loss_of(self, input, self, labels, self.class_weight)

    def extra_repr(self):
        return (
            f"{super().extra_repr()}, reduction={self.reduction!r}, save={self.save!r}, "
            f"max_memory={self.max_memory!r}"
        )
