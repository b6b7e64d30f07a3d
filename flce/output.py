"""What a call gives that was asked for more than its loss."""

import typing

from torch import Tensor


class LinearCrossEntropyOutput(typing.NamedTuple):
    """The loss and the outputs that were asked for; None for the others.

    loss: shape (), or (...) for reduction="none"; differentiable.
    lse: logsumexp of each row's logits, shape (...); differentiable; 0 where ignored.
    entropy: of each row's softmax, in nats, shape (...); differentiable; 0 where ignored.
    accuracy: rows whose largest logit is the target's, over valid rows, shape (); 0 without any.
    predictions: the lowest class of the largest logit, int64, shape (...); -1 where ignored.
    z_loss: the loss's part z_loss lse^2, reduced as the loss is; detached.

    All but the predictions have the loss's dtype: float64 for float64 operands, else float32.
    """

    loss: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    accuracy: Tensor | None = None
    predictions: Tensor | None = None
    z_loss: Tensor | None = None
