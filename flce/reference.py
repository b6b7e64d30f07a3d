"""The definition of the loss, composed of torch's own operations.

In float64 it is the truth of the tests; in the dtype of a call it is the eager result whose own
error is the yardstick. It holds all N x V logits and takes none of the shortcuts that it checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import LinearCrossEntropyOutput


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    shift: int = 0,
    cu_seqlens: Tensor | None = None,
    valid_vocab: int | None = None,
    options: object = None,
    valid_bound: int | str | None = None,
    accum_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    save: str = "auto",
    max_memory: int | str | None = None,
    **loss,
) -> Tensor | LinearCrossEntropyOutput:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)` and its extensions.

    Without them there are two differences. Rows of `input` (..., H) whose target (...) is
    `ignore_index` are cut off before the product, so that nothing in them reaches a gradient; and a
    mean over no rows, or over 0 items, is 0 instead of NaN. The results have the dtype that flce
    gives: float64 for float64, float32 for the others. `loss`: the other options of
    `cross_entropy`. `options`, `valid_bound`, `accum_dtype`, `logits_dtype`, `save` and
    `max_memory` say how flce computes, not what: they are ignored here.
    """
    target = shifted(target, shift, cu_seqlens, ignore_index)
    kept = input.masked_fill(ignored(target, ignore_index).unsqueeze(-1), 0.0)
    if valid_vocab is not None:
        linear_weight = linear_weight[:valid_vocab]
        linear_bias = None if linear_bias is None else linear_bias[:valid_vocab]
        weight = None if weight is None else weight[:valid_vocab]
        target = target[..., :valid_vocab] if target.is_floating_point() else target
    logits = F.linear(kept, linear_weight, linear_bias)
    return cross_entropy(logits, target, weight=weight, ignore_index=ignore_index, **loss)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_accuracy: bool = False,
    return_predictions: bool = False,
    return_z_loss: bool = False,
) -> Tensor | LinearCrossEntropyOutput:
    """`F.cross_entropy` of logits (..., V), classes last, with the same differences."""
    cut = ignored(target, ignore_index)
    # Finite in the ignored rows, which count for nothing.
    kept = logits.masked_fill(cut.unsqueeze(-1), 0.0)
    logits = final_logits(kept, cut, softcap, logit_scale, temperature)
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32

    def reduced(rows: Tensor, denominator: Tensor) -> Tensor:
        if token_weight is not None:
            rows = rows * token_weight.to(stat).masked_fill(cut, 0.0)
        if reduction == "none":
            return rows
        if reduction == "sum":
            return rows.sum()
        divisor, empty = denominator.to(stat), cut.all()
        if num_items is not None:
            divisor = torch.as_tensor(num_items, dtype=stat, device=rows.device)
            empty = divisor == 0
        return rows.sum() * torch.where(empty, 0.0, 1.0 / divisor)

    rows = _rows_of_loss(logits, target, weight, ignore_index, label_smoothing).to(stat)
    lse = torch.logsumexp(logits, dim=-1).to(stat).masked_fill(cut, 0.0)
    z_part = reduced(z_loss * lse.square(), (~cut).sum())
    loss = reduced(rows, denominator(target, weight, cut, stat)) + z_part
    wanted = (return_lse, return_entropy, return_accuracy, return_predictions, return_z_loss)
    if not any(wanted):
        return loss
    predictions = logits.argmax(dim=-1).masked_fill(cut, -1)  # the first of equals
    accuracy = None
    if not target.is_floating_point():
        correct = ((predictions == target) & ~cut).sum()
        accuracy = correct.to(stat) / (~cut).sum().clamp(min=1)
    entropy = _entropy(logits).to(stat).masked_fill(cut, 0.0)
    made = (lse, entropy, accuracy, predictions, z_part.detach())
    chosen = (value if want else None for value, want in zip(made, wanted, strict=True))
    return LinearCrossEntropyOutput(loss, *chosen)


def linear_logprobs(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options
) -> tuple[Tensor, Tensor]:
    """log p of each target and the entropy of its row, both (...), 0 where ignored.

    `options` are those of `flce.linear_logprobs`, all of them options of `linear_cross_entropy`.
    """
    output = linear_cross_entropy(
        input, linear_weight, target, reduction="none", return_entropy=True, **options
    )
    return -output.loss, output.entropy


def final_logits(
    logits: Tensor,
    cut: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float | Tensor,
) -> Tensor:
    """What the loss sees of the product (..., V); `temperature` is a number or has shape (...).

    `cut` are the ignored rows (...): not even their temperature may reach a gradient.
    """
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        temperature = temperature.to(logits.dtype).masked_fill(cut, 1.0).unsqueeze(-1)
    return logits / temperature


def shifted(
    target: Tensor, shift: int, cu_seqlens: Tensor | None, ignore_index: int | None
) -> Tensor:
    """The target (...) of each position: the one `shift` later in its sequence, if there is one.

    A sequence is a last dimension of `target`; `cu_seqlens` cuts the flattened target further, into
    the documents between two neighbours of it. What lies in no document is ignored.
    """
    if shift == 0:
        return target
    ignore_index = -100 if ignore_index is None else ignore_index
    later = torch.full_like(target, ignore_index)
    later[..., :-shift] = target[..., shift:]
    if cu_seqlens is None:
        return later
    inside = torch.zeros(target.numel(), dtype=torch.bool, device=target.device)
    bounds = cu_seqlens.tolist()
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        inside[begin : max(begin, end - shift)] = True
    return later.masked_fill(~inside.reshape(target.shape), ignore_index)


def ignored(target: Tensor, ignore_index: int | None) -> Tensor:
    """Which rows (...) count for nothing: none of those with probabilities (..., V)."""
    if target.is_floating_point():
        return torch.zeros(target.shape[:-1], dtype=torch.bool, device=target.device)
    return target == (-100 if ignore_index is None else ignore_index)


def denominator(target: Tensor, weight: Tensor | None, cut: Tensor, stat: torch.dtype) -> Tensor:
    """What `F.cross_entropy` divides by under "mean"."""
    if target.is_floating_point() or weight is None:
        return (~cut).sum()
    return weight.to(stat)[target.masked_fill(cut, 0).long()].masked_fill(cut, 0.0).sum()


def _rows_of_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    label_smoothing: float,
) -> Tensor:
    """`F.cross_entropy` of each row, shape (...)."""
    rows = logits.shape[:-1]
    flat = logits.reshape(rows.numel(), logits.shape[-1])
    options = {
        "weight": None if weight is None else weight.to(logits.dtype),
        "reduction": "none",
        "label_smoothing": label_smoothing,
    }
    if target.is_floating_point():
        loss = F.cross_entropy(flat, target.reshape(flat.shape).to(flat.dtype), **options)
    else:
        options["ignore_index"] = -100 if ignore_index is None else ignore_index
        loss = F.cross_entropy(flat, target.reshape(-1).long(), **options)
    return loss.reshape(rows)


def _entropy(logits: Tensor) -> Tensor:
    """Of each row's softmax, in nats; a class of probability 0 adds nothing."""
    log_p = logits.log_softmax(dim=-1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=-1)
