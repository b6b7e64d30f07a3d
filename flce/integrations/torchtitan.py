"""torchtitan: a loss for a trainer's configuration. Importing this module imports torchtitan."""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flce
from flce.validate import refuse

from ._rebind import imports_of

with imports_of("torchtitan"):
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss


class FlceLoss(ChunkedLossWrapper):
    """The cross entropy of the model's head in one call of it, in place of
    `ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())`.

    The head runs once a step through its `__call__`, so that FSDP2 gathers its weight as for
    logits. A head split by tensor parallelism is refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """num_chunks has no effect; loss_fn must be a CrossEntropyLoss. The others are options of
        flce.linear_cross_entropy."""

        softcap: float | None = None
        z_loss: float = 0.0
        max_memory: str | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        if type(config.loss_fn) is not CrossEntropyLoss.Config:
            refuse("loss_fn", "CrossEntropyLoss.Config", type(config.loss_fn).__qualname__)
        super().__init__(config, compile_config=compile_config)
        self.options = {name: getattr(config, name) for name in ("softcap", "z_loss", "max_memory")}

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Makes the head, an nn.Linear, return the loss where it is called with labels; TypeError
        if it computes something else than a linear layer does."""
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            refuse("lm_head", "an nn.Linear", type(lm_head).__qualname__, TypeError)
        lm_head.forward = functools.partial(_loss_or_logits, lm_head, lm_head.forward)
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: float | Tensor | None = None,
        **loss_inputs: object,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, {}): the sum over the valid tokens, divided by global_valid_tokens if given.

        pred: hidden states, shape (B, L, H); labels: class indices, shape (B, L), -100 where
        ignored; loss_inputs: without effect, as for CrossEntropyLoss. Raises TypeError where pred
        or the head's weight is a DTensor, else as flce.linear_cross_entropy.
        """
        if self.lm_head is None:
            refuse("lm_head", "set_lm_head() before the first call", "none")
        loss = self.lm_head(pred, labels, self.options)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


def _loss_or_logits(head, logits_of, input, labels=None, options=None):
    if labels is None:
        return logits_of(input)
    for name, value in (("pred", input), ("lm_head.weight", head.weight)):
        if isinstance(value, DTensor):
            refuse(name, "a plain tensor, whole on each rank", "a DTensor", TypeError)
    fixed = {"linear_bias": head.bias, "reduction": "sum", "ignore_index": IGNORE_INDEX}
    return flce.linear_cross_entropy(input, head.weight, labels, **fixed, **options)
