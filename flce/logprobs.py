"""Log-probabilities of a target, of its row's largest, and of given classes; entropies."""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Never, Unpack, overload

from . import class_losses, mistakes, validate
from .functional import A_BIAS, OF_LINEAR, call_by_composed_function, linear_cross_entropy
from .options import (
    Entropy,
    LogprobsAtOptions,
    LogprobsOptions,
    TopLogprobs,
    check_names,
    defaults,
    show_options,
)

_OF_LOGPROBS = defaults(LogprobsOptions)
_OF_LOGPROBS_AT = defaults(LogprobsAtOptions)
ENTROPIES = {"differentiable": True, "detached": "detached", None: False}


@show_options
def linear_logprobs_at(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *others: Never,
    tail: bool = False,
    **options: Unpack[LogprobsAtOptions],
) -> Tensor:
    """log p of K given classes of each row, in one pass over the logits.

    The gradient takes the same two GEMMs as that of `linear_logprobs`; no (..., V) tensor but that
    of `save="logits"` is in memory.

    Args:
        input, linear_weight: as in `linear_cross_entropy`.
        ids: class indices, shape (..., K), int64 or int32; `ignore_index` for none. They may
            repeat.
        tail: adds a column: log of the probability of all other classes together. It is computed
            from their logits, so it is exact also where 1 - sum of the K probabilities would be
            rounding noise. Not with gradient="sampled".
        **options: those of `linear_logprobs` without shift and cu_seqlens.

    Returns:
        log-probabilities (..., K), with tail (..., K + 1), float32 (float64 for float64 operands),
        in nats; 0 where an id is `ignore_index`, and in the tail of a row without an id.
        Differentiable, but not with gradient="sampled".

    Raises: as `linear_cross_entropy`.

    >>> x, W, ids = torch.zeros(1, 8), torch.randn(16, 8), torch.tensor([[3, 5, -100]])
    >>> flce.linear_logprobs_at(x, W, ids, tail=True).exp()
    tensor([[0.0625, 0.0625, 1.0000, 0.8750]])
    """
    if others:
        operands = "input", "linear_weight", "ids"
        mistakes.refuse_positional("linear_logprobs_at", operands, others, A_BIAS)
    check_names("linear_logprobs_at", _OF_LOGPROBS_AT, options)
    ids = validate.local_replica("ids", ids)
    return class_losses.logprobs_at(
        call_by_composed_function, input, linear_weight, ids, options, tail
    )


@overload
def linear_logprobs(  # type: ignore[overload-overlap]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: Entropy = "differentiable",
    return_topk: Literal[0] = 0,
    tail: Literal[False] = False,
    **options: Unpack[LogprobsOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprobs(  # type: ignore[overload-overlap]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: None,
    return_topk: Literal[0] = 0,
    tail: Literal[False] = False,
    **options: Unpack[LogprobsOptions],
) -> tuple[Tensor, None]: ...
@overload
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: Entropy = "differentiable",
    return_topk: int,
    tail: bool = False,
    **options: Unpack[LogprobsOptions],
) -> tuple[Tensor, Tensor, TopLogprobs]: ...
@overload
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: None,
    return_topk: int,
    tail: bool = False,
    **options: Unpack[LogprobsOptions],
) -> tuple[Tensor, None, TopLogprobs]: ...
@show_options
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *others: Never,
    entropy: Entropy | None = "differentiable",
    return_topk: int = 0,
    tail: bool = False,
    **options: Unpack[LogprobsOptions],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, TopLogprobs]:
    """log p_y and the entropy of each row, for policy-gradient training.

    Both are differentiable, and their gradients come from one backward pass of two GEMMs (three
    with save="stats"), or of two gathers with gradient="sampled".

    Args:
        input, linear_weight: as in `linear_cross_entropy`.
        target: class indices, shape (...), int64 or int32.
        entropy: "differentiable"; "detached": without a gradient; None: not computed.
        return_topk: the number of classes of `TopLogprobs` (`topk` of `linear_cross_entropy`).
        tail: with return_topk: computes `TopLogprobs.tail`.
        **options: those of `linear_cross_entropy` on which log p and the entropy depend, and those
            of how they are computed, as there; save="grads" requires a scalar loss and is refused
            here.

    Returns:
        (logprobs, entropy), both of shape (...), float32 (float64 for float64 operands), in nats;
        0 where the target is ignored; with return_topk (logprobs, entropy, TopLogprobs).

    Raises: as `linear_cross_entropy`.

    >>> x, W, y = torch.zeros(2, 8), torch.randn(16, 8), torch.tensor([3, 5])
    >>> logprobs, entropy = flce.linear_logprobs(x, W, y)
    >>> logprobs.exp(), entropy.exp()
    (tensor([0.0625, 0.0625]), tensor([16., 16.]))
    """
    if others:
        mistakes.refuse_positional("linear_logprobs", OF_LINEAR, others, A_BIAS)
    check_names("linear_logprobs", _OF_LOGPROBS, options)
    check_logprobs(target, entropy)
    if tail and not return_topk:
        validate.refuse("tail", "False without return_topk", tail)
    return logprobs_of(input, linear_weight, target, entropy, return_topk, options, tail)


def check_logprobs(target, entropy):
    """What linear_logprobs and linear_loss refuse, and linear_cross_entropy does not."""
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        expected = "class indices of dtype torch.int64 or torch.int32"
        got = f"{target.dtype}; pass target.long() if these are labels"
        validate.refuse("target", expected, got, TypeError)
    if entropy not in tuple(ENTROPIES):
        got = f"{entropy!r}{mistakes.our_value(entropy, ENTROPIES)}"
        validate.refuse("entropy", f"one of {tuple(ENTROPIES)}", got)


def logprobs_of(
    input, linear_weight, target, entropy, topk, options, tail=False, call=linear_cross_entropy
):
    """As linear_logprobs, without its checks; `options`: any of linear_cross_entropy, or of `call`
    in its place."""
    validate.check_flag("tail", tail)
    options = {**options, "reduction": "none", "return_entropy": ENTROPIES[entropy]}
    options |= {"topk": topk, "return_lse": topk != 0, "return_tail_lse": tail}
    output = call(input, linear_weight, target, **options)
    if entropy is None and topk == 0:
        return -output, None
    if topk == 0:
        return -output.loss, output.entropy
    logprobs = output.class_logits - output.lse.unsqueeze(-1)
    top = TopLogprobs(logprobs, output.classes, output.lse)
    if tail:
        top = top._replace(tail=output.tail_lse - output.lse)
    return -output.loss, output.entropy, top
