"""cut_cross_entropy.linear_cross_entropy and LinearCrossEntropy (Apple's CCE, 25.6).

Arguments, their order and return values are CCE's. Differences:

- The mean over no valid token is 0 (CCE: NaN, and an error in the backward); so it is over no rows
  (CCE: an error).
- Gradients are exact: nothing is filtered, so `filter_eps`, `filter_e_grad` and `filter_c_grad`
  have no effect; the gradient of `e` is one sum over the vocabulary, so `accum_e_fp32` has none.
- Two runs are bitwise equal, on CPU and CUDA.
- A target out of range is an error or NaN (flce.linear_cross_entropy); CCE does not check it.
- float64, float32, bfloat16 and float16 on CPU and CUDA.
"""

import torch
from torch import nn

import flce
from flce.validate import check_tensor

IMPLS = (
    "cce",
    "torch_compile",
    "cce_exact",
    "cce_kahan_full",
    "cce_kahan_full_c",
    "cce_kahan_full_e",
    "cce_kahan_full_c_full_e",
)
# These sum the gradient of c in float32, regardless of accum_c_fp32.
_FP32_IMPLS = IMPLS[2:]


def linear_cross_entropy(
    e,
    c,
    targets,
    bias=None,
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=0,
    return_lse=False,
    filter_eps="auto",
    accum_e_fp32=False,
    accum_c_fp32=False,
    filter_e_grad=True,
    filter_c_grad=True,
    impl="cce",
    vocab_parallel_options=None,
):
    """The cross entropy of `e @ c.T + bias`.

    Args:
        e: hidden states, shape (..., D); with a shift (..., T, D).
        c: the head's weight, shape (V, D).
        targets: class indices, shape (...); with a shift (..., T).
        bias: shape (V,), or None.
        ignore_index, reduction: as F.cross_entropy.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        shift: k >= 0, or a bool: position t has the target of t + k, and the last k none.
        return_lse: also return the logsumexp of each token's logits; it is differentiable.
        filter_eps, filter_e_grad, filter_c_grad, accum_e_fp32: no effect.
        accum_c_fp32: sum the gradient of c in float32 for 16-bit operands.
        impl: one of `IMPLS`, or an enum member with such a name. All run the same code; all except
            "cce" and "torch_compile" set accum_c_fp32, as in CCE.
        vocab_parallel_options: must be None.

    Returns:
        The loss, or (loss, lse). Shape () or, for "none", (...); lse always has (...). With a shift
        of k the last dimension of both is T - k, element t that of position t. 0 where ignored.

    Raises:
        ValueError: shift outside of [0, T), an unknown impl or filter_eps, vocab_parallel_options.
        Else as `flce.linear_cross_entropy`.
    """
    _check_filter_eps(filter_eps)
    if vocab_parallel_options is not None:
        raise ValueError(
            "vocab_parallel_options: expected None, a weight split over processes is not "
            "supported, got a "
            f"{type(vocab_parallel_options).__name__}; gather c, or use cut_cross_entropy for it"
        )
    check_tensor("targets", targets)
    shift = _check_shift(shift, targets)
    wide = c.dtype == torch.float64
    exact_c = (accum_c_fp32 or _impl_name(impl) in _FP32_IMPLS) and not wide
    # flce shifts along the second to last dimension of an input with three or more: a single
    # sequence becomes a batch of 1.
    alone = shift > 0 and targets.dim() == 1
    if alone:
        e, targets = e.unsqueeze(0), targets.unsqueeze(0)
    output = flce.linear_cross_entropy(
        e,
        c,
        targets,
        linear_bias=bias,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        shift=shift,
        accum_dtype=torch.float32 if exact_c else None,
        return_lse=return_lse,
    )
    loss, lse = (output.loss, output.lse) if return_lse else (output, None)
    if reduction == "none":
        loss = _without_tail(loss, shift, alone)
    return (loss, _without_tail(lse, shift, alone)) if return_lse else loss


def _without_tail(rows, shift, alone):
    """(..., T) -> (..., T - shift): only the positions that have a target."""
    rows = rows[..., : rows.shape[-1] - shift]
    return rows.squeeze(0) if alone else rows


def _check_filter_eps(filter_eps):
    if filter_eps not in (None, "auto") and not isinstance(filter_eps, float):
        raise ValueError(f'filter_eps: expected a float, "auto" or None, got {filter_eps!r}')


def _check_shift(shift, targets):
    if not isinstance(shift, int):
        raise TypeError(f"shift: expected an int or a bool, got {type(shift).__name__}")
    length = targets.shape[-1] if targets.dim() else 1
    if shift and not 0 <= shift < length:
        raise ValueError(f"shift: expected 0 <= shift < {length}, got {shift}")
    return int(shift)


def _impl_name(impl):
    name = impl if isinstance(impl, str) else str(getattr(impl, "name", impl)).lower()
    if name not in IMPLS:
        raise ValueError(f"impl: expected one of {IMPLS}, got {impl!r}")
    return name


class LinearCrossEntropy(nn.Module):
    """cut_cross_entropy.LinearCrossEntropy: the options of `linear_cross_entropy` in a Module.

    Call it as module(e, c, targets, bias=None). It has no parameters.
    """

    def __init__(
        self,
        ignore_index=-100,
        softcap=None,
        reduction="mean",
        shift=0,
        filter_eps="auto",
        accum_e_fp32=False,
        accum_c_fp32=False,
        filter_e_grad=True,
        filter_c_grad=True,
        impl="cce",
        return_lse=False,
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.softcap = softcap
        self.reduction = reduction
        self.shift = shift
        self.filter_eps = filter_eps
        self.accum_e_fp32 = accum_e_fp32
        self.accum_c_fp32 = accum_c_fp32
        self.filter_e_grad = filter_e_grad
        self.filter_c_grad = filter_c_grad
        self.impl = impl
        self.return_lse = return_lse

    def forward(self, e, c, targets, bias=None):
        """The loss, or (loss, lse)."""
        return linear_cross_entropy(
            e,
            c,
            targets,
            bias=bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            reduction=self.reduction,
            shift=self.shift,
            filter_eps=self.filter_eps,
            accum_e_fp32=self.accum_e_fp32,
            accum_c_fp32=self.accum_c_fp32,
            filter_e_grad=self.filter_e_grad,
            filter_c_grad=self.filter_c_grad,
            impl=self.impl,
            return_lse=self.return_lse,
        )
