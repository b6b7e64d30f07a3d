"""The definition of the loss, composed of torch's own operations.

In float64 it is the ground truth of the tests; in the dtype of a call it is the eager result whose
error sets the tolerance. It holds all N x V logits and uses none of the shortcuts that it checks.
Gradients are autograd's, exact ones also where flce is asked for an estimate of them (sampled).
Arguments have the shapes and dtypes of flce's functions of the same names.

>>> operands = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
>>> expected = flce.reference.linear_cross_entropy(*operands, z_loss=1e-4)
>>> torch.testing.assert_close(flce.linear_cross_entropy(*operands, z_loss=1e-4), expected)
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack, overload

from .options import (
    RETURNS,
    LinearCrossEntropyOutput,
    ReferenceLogitsOptions,
    ReferenceLogprobsOptions,
    ReferenceOptions,
    show_options,
)
from .overloads import (
    ReferenceLogitsLossOptions,
    ReferenceLogitsOutputOptions,
    ReferenceLossOptions,
    ReferenceOutputOptions,
)

_IGNORED_OPTIONS = ("options", "valid_bound", "accum_dtype", "logits_dtype", "save", "max_memory")
_IGNORED_OPTIONS += ("gradient", "gradient_eps", "gradient_seed")


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[ReferenceLossOptions]
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[ReferenceOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[ReferenceOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
@show_options
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **loss: Unpack[ReferenceOptions]
) -> Tensor | LinearCrossEntropyOutput:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)` with flce's options.

    Without options there are two differences from these functions. Rows of `input` (..., H) whose
    target (...) is `ignore_index` are zeroed before the GEMM, so that nothing in them reaches a
    gradient; and a mean over no rows is 0 instead of NaN, also with 0 items. The results have the
    dtype that flce returns: float64 for float64, float32 for the others. `loss`: the options of
    flce.linear_cross_entropy; those that select how flce computes, such as `save`, are ignored.
    """
    return cross_entropy(**as_logits(input, linear_weight, target, **loss))


def as_logits(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    adapter_input=None,
    adapter_weight=None,
    weight=None,
    ignore_index=-100,
    shift=0,
    cu_seqlens=None,
    valid_vocab=None,
    **loss,
):
    """The arguments of `cross_entropy` by name, of those of `linear_cross_entropy`."""
    loss = {name: value for name, value in loss.items() if name not in _IGNORED_OPTIONS}
    target = shifted(target, shift, cu_seqlens, ignore_index)
    finite = input.masked_fill(ignored_rows(target, ignore_index).unsqueeze(-1), 0.0)
    if valid_vocab is not None:
        of_classes = linear_weight, linear_bias, adapter_weight, weight
        linear_weight, linear_bias, adapter_weight, weight = (
            None if tensor is None else tensor[:valid_vocab] for tensor in of_classes
        )
        target = target[..., :valid_vocab] if target.is_floating_point() else target
    logits = F.linear(finite, linear_weight, linear_bias)
    if adapter_weight is not None:
        rows = ignored_rows(target, ignore_index).unsqueeze(-1)
        logits = logits + F.linear(adapter_input.masked_fill(rows, 0.0), adapter_weight)
    loss_options = {"weight": weight, "ignore_index": ignore_index, **loss}
    return {"logits": logits, "target": target, **loss_options}


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **of_logits: Unpack[ReferenceLogitsLossOptions]
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **of_logits: Unpack[ReferenceLogitsOutputOptions]
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, **of_logits: Unpack[ReferenceLogitsOptions]
) -> Tensor | LinearCrossEntropyOutput: ...
def cross_entropy(
    logits,
    target,
    *,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,
    num_items=None,
    classes=None,
    topk=0,
    **of_logits,
):
    """`F.cross_entropy` of logits (..., V), classes last, with the two differences that
    `linear_cross_entropy` has: an ignored row reaches no gradient, a mean over no rows is 0.

    of_logits: the options of `final_logits`, and return_lse and the like.
    """
    wanted = [of_logits.pop(name, False) for name in RETURNS]
    ignored = ignored_rows(target, ignore_index)
    # Finite also where it does not contribute.
    logits = final_logits(logits.masked_fill(ignored.unsqueeze(-1), 0.0), ignored, **of_logits)
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    reduced = functools.partial(sum_of_rows, reduction, ignored, token_weight, num_items)
    rows = _rows_of_loss(logits, target, weight, ignore_index, label_smoothing).to(stat)
    lse = torch.logsumexp(logits, dim=-1).to(stat).masked_fill(ignored, 0.0)
    z_part = reduced(z_loss * lse.square(), (~ignored).sum())
    loss = reduced(rows, denominator(target, weight, ignored, stat)) + z_part
    if not any(wanted) and classes is None and not topk:
        return loss
    # argmax is the first of several equal maxima.
    predictions = logits.argmax(dim=-1).masked_fill(ignored, -1)
    accuracy = None
    if not target.is_floating_point():
        right, counted = (predictions == target) & ~ignored, (~ignored).sum()
        accuracy = right.sum().to(stat) / counted.clamp(min=1)
    entropy = _entropy(logits, ignored)
    if topk:
        classes = logits.topk(topk, dim=-1).indices.masked_fill(ignored.unsqueeze(-1), ignore_index)
    at, top, tail_lse = _of_classes(logits, classes, ignored, ignore_index)
    outputs = (lse, entropy, accuracy, predictions, z_part.detach(), tail_lse)
    chosen = (value if want else None for value, want in zip(outputs, wanted, strict=True))
    return LinearCrossEntropyOutput(loss, *chosen, at, top if topk else None)


def sum_of_rows(reduction, ignored, token_weight, num_items, rows, denominator):
    """The loss of the rows' (...): each is multiplied by token_weight; "mean" divides their sum by
    num_items, or else by the denominator. ignored: mask of ignored rows."""
    if token_weight is not None:
        rows = rows * token_weight.to(rows.dtype).masked_fill(ignored, 0.0)
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    if num_items is None:
        return rows.sum() * torch.where(ignored.all(), 0.0, 1.0 / denominator.to(rows.dtype))
    items = torch.as_tensor(num_items, dtype=rows.dtype, device=rows.device)
    of_none = torch.where(ignored.all(), 0.0, math.nan)
    return rows.sum() * torch.where(items == 0, of_none, 1.0 / items)


def _entropy(logits, ignored):
    """The entropy of each row, (...)."""
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = logits.log_softmax(dim=-1)
    p = log_p.exp()
    # A class of probability 0 adds nothing to an entropy.
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=-1).to(stat).masked_fill(ignored, 0.0)


def _of_classes(logits, classes, ignored, ignore_index):
    """(logits, classes, logsumexp of the others) of `classes` (..., K); three None without."""
    if classes is None:
        return None, None, None
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    absent = (classes.long() == ignore_index) | ignored.unsqueeze(-1)
    at = logits.gather(-1, classes.masked_fill(absent, 0).long()).to(stat)
    ids = classes.masked_fill(absent, -1)
    tail_lse = _tail_lse(logits, ids).to(stat).masked_fill(ignored, 0.0)
    return at.masked_fill(absent, 0.0), ids, tail_lse


def _tail_lse(logits, classes):
    """logsumexp (...) of the logits that are not of `classes` (..., K), of which -1 is none."""
    counts = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(-1, classes.clamp(min=0).long(), (classes >= 0).long())
    others = logits.masked_fill(counts > 0, -math.inf)
    empty = others.isneginf().all(dim=-1)  # logsumexp's gradient would be NaN
    return others.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty, -math.inf)


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    **options: Unpack[ReferenceLogprobsOptions],
) -> tuple[Tensor, Tensor]:
    """log p of each target and the entropy of its row, both (...), 0 where ignored.

    `options` are those of `flce.linear_logprobs`, all of them options of `linear_cross_entropy`.
    """
    options |= {"reduction": "none", "return_entropy": True}
    output = linear_cross_entropy(input, linear_weight, target, **options)
    return -output.loss, output.entropy


def final_logits(logits, ignored, *, softcap=None, logit_scale=1.0, temperature=1.0):
    """The final logits from the linear layer's (..., V); `temperature`: a number or (...).

    `ignored`: mask of the ignored rows (...), whose temperature must not reach a gradient either.
    """
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        temperature = temperature.to(logits.dtype).masked_fill(ignored, 1.0).unsqueeze(-1)
    return logits / temperature


def shifted(target, shift, cu_seqlens, ignore_index):
    """The target (...) of each position: that `shift` later in its sequence, else `ignore_index`.

    A sequence is a slice along the last dimension of `target`. `cu_seqlens`: boundaries of
    documents in the flattened target. No target crosses one; outside of them all is ignored.
    """
    if shift == 0:
        return target
    ignore_index = -100 if ignore_index is None else ignore_index
    later = torch.full_like(target, ignore_index, dtype=torch.int64)
    later[..., :-shift] = target[..., shift:]
    if cu_seqlens is None:
        return later
    inside = torch.zeros(target.numel(), dtype=torch.bool, device=target.device)
    bounds = cu_seqlens.tolist()
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        inside[begin : max(begin, end - shift)] = True
    return later.masked_fill(~inside.reshape(target.shape), ignore_index)


def ignored_rows(target, ignore_index):
    """Mask of the ignored rows (...); with probabilities (..., V) no row is ignored."""
    if target.is_floating_point():
        return torch.zeros(target.shape[:-1], dtype=torch.bool, device=target.device)
    return target.long() == (-100 if ignore_index is None else ignore_index)


def denominator(target, weight, ignored, stat):
    """What `F.cross_entropy` divides by under "mean"."""
    if target.is_floating_point() or weight is None:
        return (~ignored).sum()
    return weight.to(stat)[target.masked_fill(ignored, 0).long()].masked_fill(ignored, 0.0).sum()


def _rows_of_loss(logits, target, weight, ignore_index, label_smoothing):
    """`F.cross_entropy` of each row, shape (...)."""
    rows = logits.shape[:-1]
    flat = logits.reshape(rows.numel(), logits.shape[-1])
    options = {"reduction": "none", "label_smoothing": label_smoothing}
    options["ignore_index"] = -100 if ignore_index is None else ignore_index
    probable = target.is_floating_point()
    target = target.reshape(flat.shape).to(flat.dtype) if probable else target.reshape(-1).long()
    weight = None if weight is None else weight.to(logits.dtype)
    return F.cross_entropy(flat, target, weight=weight, **options).reshape(rows)
