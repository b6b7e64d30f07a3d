from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper

class FlceLoss(ChunkedLossWrapper):
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        softcap: float | None = None
        z_loss: float = 0.0
        max_memory: str | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None: ...
    def set_lm_head(self, lm_head: nn.Module) -> None: ...
    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: float | Tensor | None = None,
        **loss_inputs: object,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...
