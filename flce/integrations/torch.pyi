from torch import Tensor, device, dtype, nn

from ..options import Reduction

def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor: ...

class LinearCrossEntropyLoss(nn.modules.loss._WeightedLoss):
    num_classes: int
    out_features: tuple[()]
    ignore_index: int | None
    label_smoothing: float
    options: object
    linear: nn.Linear
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[()] = (),
        bias: bool = False,
        device: str | int | device | None = None,
        dtype: dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
    ) -> None: ...
    def forward(self, input: Tensor, target: Tensor) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor) -> Tensor: ...
