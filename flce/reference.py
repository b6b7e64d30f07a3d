"""The definition of the loss, composed of torch's own operations.

In float64 it is the ground truth of the tests; in the dtype of a call it is the eager result whose
error sets the tolerance. It holds all N x V logits and uses none of the shortcuts that it checks.
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
    ReferenceLogitsLossOptions,
    ReferenceLogitsOptions,
    ReferenceLogitsOutputOptions,
    ReferenceLogprobsOptions,
    ReferenceLossOptions,
    ReferenceOptions,
    ReferenceOutputOptions,
)

_IGNORED_OPTIONS = ("options", "valid_bound", "accum_dtype", "logits_dtype", "save", "max_memory")


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
def linear_cross_entropy(
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
    gradient="exact",
    gradient_eps=2**-6,
    gradient_seed=None,
    **loss,
):
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)` with flce's options.

    Without options there are two differences from these functions. Rows of `input` (..., H) whose
    target (...) is `ignore_index` are zeroed before the GEMM, so that nothing in them reaches a
    gradient; and a mean over no rows is 0 instead of NaN, also with 0 items. The results have the
    dtype that flce returns: float64 for float64, float32 for the others. `loss`: the other options
    of `cross_entropy`; options that select how flce computes, such as `save`, are ignored.

    gradient="sampled" is for class targets. It gives the gradients that flce gives for the same
    `gradient_seed`, an int, in the dtype of the call; None draws a seed as flce does.
    """
    loss = {name: value for name, value in loss.items() if name not in _IGNORED_OPTIONS}
    target = shifted(target, shift, cu_seqlens, ignore_index)
    finite = input.masked_fill(ignored(target, ignore_index).unsqueeze(-1), 0.0)
    if valid_vocab is not None:
        of_classes = linear_weight, linear_bias, adapter_weight, weight
        linear_weight, linear_bias, adapter_weight, weight = (
            None if tensor is None else tensor[:valid_vocab] for tensor in of_classes
        )
        target = target[..., :valid_vocab] if target.is_floating_point() else target
    logits = F.linear(finite, linear_weight, linear_bias)
    if adapter_weight is not None:
        rows = ignored(target, ignore_index).unsqueeze(-1)
        logits = logits + F.linear(adapter_input.masked_fill(rows, 0.0), adapter_weight)
    loss.update(weight=weight, ignore_index=ignore_index)
    if gradient == "sampled":
        if gradient_seed is None:
            gradient_seed = torch.randint(2**63 - 1, (), device=input.device)
        loss.update(sampling=(gradient_eps, int(gradient_seed)))
    return cross_entropy(logits, target, **loss)


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[ReferenceLogitsLossOptions],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[ReferenceLogitsOutputOptions],
) -> LinearCrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    sampling: tuple[float, int] | None = None,
    **of_logits: Unpack[ReferenceLogitsOptions],
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
    sampling=None,
    **of_logits,
):
    """`F.cross_entropy` of logits (..., V), classes last, with the same differences.

    sampling: (gradient_eps, gradient_seed) of a sampled gradient, or None. of_logits: the options
    of `final_logits`, and return_lse and the like.
    """
    wanted = [of_logits.pop(name, False) for name in RETURNS]
    cut = ignored(target, ignore_index)
    finite = logits.masked_fill(cut.unsqueeze(-1), 0.0)  # finite also where it does not contribute
    logits = final_logits(finite, cut, **of_logits)
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    reduced = functools.partial(_reduced, reduction, cut, token_weight, num_items)
    rows = _rows_of_loss(logits, target, weight, ignore_index, label_smoothing).to(stat)
    lse = torch.logsumexp(logits, dim=-1).to(stat).masked_fill(cut, 0.0)
    derivative = None
    if sampling is not None and torch.is_grad_enabled():
        derivative = sampled_derivative(
            finite, target.masked_fill(cut, 0), cut, of_logits, *sampling
        )
        derivative = derivative.masked_fill(cut.unsqueeze(-1), 0.0)
        sampled = _with_derivative(lse, finite, derivative)
        # The same value. The row's loss has lse times this factor; its other terms have no p.
        factor = _factor_of_lse(logits, target.masked_fill(cut, 0), weight, label_smoothing)
        rows = rows + factor * (sampled - lse)
        lse = sampled
    z_part = reduced(z_loss * lse.square(), (~cut).sum())
    loss = reduced(rows, denominator(target, weight, cut, stat)) + z_part
    if not any(wanted) and classes is None and not topk:
        return loss
    predictions = logits.argmax(dim=-1).masked_fill(cut, -1)  # the first of several equal maxima
    accuracy = None
    if not target.is_floating_point():
        accuracy = ((predictions == target) & ~cut).sum().to(stat) / (~cut).sum().clamp(min=1)
    entropy = _entropy(logits, finite, cut, derivative)
    if topk:
        classes = logits.topk(topk, dim=-1).indices.masked_fill(cut.unsqueeze(-1), ignore_index)
    at, top, tail_lse = _of_classes(logits, classes, cut, ignore_index)
    outputs = (lse, entropy, accuracy, predictions, z_part.detach(), tail_lse)
    chosen = (value if want else None for value, want in zip(outputs, wanted, strict=True))
    return LinearCrossEntropyOutput(loss, *chosen, at, top if topk else None)


def _reduced(reduction, cut, token_weight, num_items, rows, denominator):
    """The loss of the rows' (...): each is multiplied by token_weight; "mean" divides their sum by
    num_items, or else by the denominator. cut: mask of ignored rows."""
    if token_weight is not None:
        rows = rows * token_weight.to(rows.dtype).masked_fill(cut, 0.0)
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    if num_items is None:
        return rows.sum() * torch.where(cut.all(), 0.0, 1.0 / denominator.to(rows.dtype))
    items = torch.as_tensor(num_items, dtype=rows.dtype, device=rows.device)
    of_none = torch.where(cut.all(), 0.0, math.nan)
    return rows.sum() * torch.where(items == 0, of_none, 1.0 / items)


def _entropy(logits, finite, cut, derivative):
    """The entropy of each row, (...). derivative: the sampled one of lse for `finite`, or None."""
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = logits.log_softmax(dim=-1)
    p = log_p.exp()
    # A class of probability 0 adds nothing to an entropy.
    log_p = log_p.masked_fill(p == 0, 0.0)
    entropy = -(p * log_p).sum(dim=-1).to(stat).masked_fill(cut, 0.0)
    if derivative is None:
        return entropy
    # d entropy / d l_j = -p_j (log p_j + entropy); the estimate of d lse / d z has the p_j.
    of_lse = (log_p + entropy.unsqueeze(-1)).detach()
    return _with_derivative(entropy, finite, -derivative * of_lse)


def _of_classes(logits, classes, cut, ignore_index):
    """(logits, classes, logsumexp of the others) of `classes` (..., K); three None without."""
    if classes is None:
        return None, None, None
    stat = torch.float64 if logits.dtype == torch.float64 else torch.float32
    absent = (classes.long() == ignore_index) | cut.unsqueeze(-1)
    at = logits.gather(-1, classes.masked_fill(absent, 0).long()).to(stat)
    ids = classes.masked_fill(absent, -1)
    return at.masked_fill(absent, 0.0), ids, _tail_lse(logits, ids).to(stat).masked_fill(cut, 0.0)


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


def final_logits(logits, cut, *, softcap=None, logit_scale=1.0, temperature=1.0):
    """The final logits from the linear layer's (..., V); `temperature`: a number or (...).

    `cut`: mask of the ignored rows (...), whose temperature must not reach a gradient either.
    """
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        temperature = temperature.to(logits.dtype).masked_fill(cut, 1.0).unsqueeze(-1)
    return logits / temperature


# ---- the sampled gradient ----


def philox(key, counter):
    """Philox4x32-10 (Salmon et al., SC 2011): the four output words, int64 tensors below 2^32.
    `key`: two ints; `counter`: four int64 tensors or ints, all of them below 2^32."""
    mask = 0xFFFFFFFF

    def product(factor, word):
        """The high and low word of a product, by halves: it may not fit into int64."""
        low, high = factor * (word & 0xFFFF), factor * (word >> 16)
        return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & mask

    a, b, c, d = counter
    for step in range(10):
        first = (key[0] + step * 0x9E3779B9) & mask
        second = (key[1] + step * 0xBB67AE85) & mask
        high_a, low_a = product(0xD2511F53, a)
        high_c, low_c = product(0xCD9E8D57, c)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def offsets_of_rows(rows, seed, device, bits):
    """u of docs/sampled-reference.md, so many random bits, up to 62, for each of `rows` rows."""
    row = torch.arange(rows, device=device)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    first, second, *_ = philox(key, (row & 0xFFFFFFFF, row >> 32, 0, 0))
    return (first << 30 | second >> 2) >> (62 - bits)


@torch.no_grad()
def sampled_derivative(z, target, cut, of_logits, eps, seed):
    """The estimate of d lse / d z (..., V), computed in float64 (docs/sampled-reference.md).

    z: the linear layer's logits (..., V); `target` (...): classes; `cut`, `of_logits`: the other
    arguments of `final_logits`.
    """
    z = z.double()
    slopes, scales = (_dl_dz(at, cut, of_logits) for at in (z, torch.zeros_like(z)))
    # E / S is p times the softcap's slope. d l / d z also has the scales; its value at z = 0, where
    # the slope is 1, removes them.
    share = final_logits(z, cut, **of_logits).softmax(dim=-1) * (slopes / scales)
    share = share.reshape(-1, share.shape[-1])
    bits = 23 if share.shape[-1] <= 2**20 else 40
    fixed = (share / eps).clamp(max=1.0).mul(2.0**bits).round().to(torch.int64)
    at_target = target.reshape(-1, 1).long()
    fixed.scatter_(-1, at_target, 0)
    end = fixed.cumsum(dim=-1)
    offset = offsets_of_rows(len(end), seed, z.device, bits).unsqueeze(-1)
    # The number of m with m 2^bits + u below the end, and below the begin, of a class.
    below, below_begin = ((edge - offset + 2**bits - 1) >> bits for edge in (end, end - fixed))
    estimate = share.clamp(min=eps).masked_fill(below == below_begin, 0.0)
    estimate = estimate.scatter(-1, at_target, share.gather(-1, at_target)).reshape(z.shape)
    return estimate * scales


@torch.enable_grad()
def _dl_dz(z, cut, of_logits):
    """d l / d z of each logit."""
    z = z.detach().requires_grad_()
    return torch.autograd.grad(final_logits(z, cut, **of_logits).sum(), z)[0]


def _with_derivative(value, z, derivative):
    """`value` (...), with `derivative` (..., V) as its derivative by `z`."""
    linear = (z * derivative).sum(dim=-1)
    return value.detach() + (linear - linear.detach()).to(value.dtype)


def _factor_of_lse(logits, target, weight, label_smoothing):
    """What a row's cross entropy with class targets multiplies lse by, a number or (...)."""
    if weight is None:
        return 1.0
    weight = weight.to(logits.dtype)
    of_target = (1.0 - label_smoothing) * weight[target.long()]
    return of_target + label_smoothing / logits.shape[-1] * weight.sum()


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


def ignored(target, ignore_index):
    """Mask of the ignored rows (...); with probabilities (..., V) no row is ignored."""
    if target.is_floating_point():
        return torch.zeros(target.shape[:-1], dtype=torch.bool, device=target.device)
    return target.long() == (-100 if ignore_index is None else ignore_index)


def denominator(target, weight, cut, stat):
    """What `F.cross_entropy` divides by under "mean"."""
    if target.is_floating_point() or weight is None:
        return (~cut).sum()
    return weight.to(stat)[target.masked_fill(cut, 0).long()].masked_fill(cut, 0.0).sum()


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
