"""The definition of the loss, composed of torch's own operations.

In float64 it is the truth of the tests; in the dtype of a call it is the eager result whose own
error is the yardstick. It holds all N x V logits and takes none of the shortcuts that it checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    accum_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    save: str = "auto",
    max_memory: int | str | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)`, with two differences.

    Rows of `input` (..., H) whose target (...) is `ignore_index` are cut off before the product, so
    that nothing in them reaches a gradient; and a mean over no rows is 0 instead of NaN. The loss
    has the dtype that flce gives: float64 for float64, float32 for the others. `accum_dtype`,
    `logits_dtype`, `save` and `max_memory` say how flce computes, not what: they are ignored here.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    ignored = target == ignore_index
    kept = input.masked_fill(ignored.unsqueeze(-1), 0.0)
    logits = F.linear(kept, linear_weight, linear_bias)
    return _cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of logits (..., V), classes last, with the same two differences."""
    ignore_index = -100 if ignore_index is None else ignore_index
    ignored = target == ignore_index
    kept = logits.masked_fill(ignored.unsqueeze(-1), 0.0)
    return _cross_entropy(kept, target, weight, reduction, ignore_index, label_smoothing)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    if reduction == "mean" and bool((target == ignore_index).all()):
        reduction = "sum"  # of no rows: 0, and zero gradients that still reach every input
    loss = F.cross_entropy(
        logits.reshape(target.numel(), logits.shape[-1]),
        target.reshape(-1),
        weight=None if weight is None else weight.to(logits.dtype),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    loss = loss.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    return loss.reshape(target.shape) if reduction == "none" else loss
