from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ..options import NemoOptions, Reduction

class FlceLinearCrossEntropy(LinearCrossEntropy):
    ignore_index: int
    logit_softcapping: float
    reduction: Reduction
    options: NemoOptions
    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        reduction: Reduction = "sum",
        **options: Unpack[NemoOptions],
    ) -> None: ...
    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: float | Tensor | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor: ...
