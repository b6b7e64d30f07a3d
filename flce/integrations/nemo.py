"""NeMo AutoModel: a loss class for a recipe. Importing this module imports nemo_automodel."""

from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

import flce
from flce.options import NemoOptions, Reduction, check_names, defaults, show_options
from flce.validate import refuse

from ._operands import in_dtype_of
from ._rebind import imports_of

with imports_of("nemo_automodel"):
    from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy

_KNOWN = defaults(NemoOptions)


class FlceLinearCrossEntropy(LinearCrossEntropy):
    """The loss of hidden states and the head's weight, in place of FusedLinearCrossEntropy.

    Args:
        ignore_index, reduction ("sum", "mean" or "none"): as flce.linear_cross_entropy.
        logit_softcapping: the softcap; 0 for none.
        **options: further options of flce's Modules, such as z_loss and max_memory, else
            TypeError; not `shift` and `accumulate_into`: AutoModel shifts the labels before the
            loss, and a gathered weight is no leaf.
    """

    ignore_index: int
    logit_softcapping: float
    reduction: Reduction
    options: NemoOptions

    @show_options
    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        reduction: Reduction = "sum",
        **options: Unpack[NemoOptions],
    ) -> None:
        super().__init__()
        check_names(type(self).__name__, _KNOWN, options)
        self.ignore_index, self.logit_softcapping = ignore_index, logit_softcapping
        self.reduction, self.options = reduction, options

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: float | Tensor | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss, float32: shape (), or that of labels for "none".

        Args:
            hidden_states: shape (..., H); labels: class indices, shape (...).
            lm_weight: shape (V, H), cast to hidden_states' dtype; an FSDP2 DTensor is gathered.
            num_label_tokens: divides a sum; 0 only where no label counts.
            grad_reduce_group: process group over which the gathered weight's gradient is averaged.
            loss_weights: a factor for each token, shape (...); only with "sum".

        Raises ValueError for num_label_tokens or loss_weights without "sum" and for a sharded
        weight without its group, else as flce.linear_cross_entropy.
        """
        for name, value in (("num_label_tokens", num_label_tokens), ("loss_weights", loss_weights)):
            if value is not None and self.reduction != "sum":
                refuse(name, 'None, or reduction="sum"', f"reduction={self.reduction!r}")
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        weight = in_dtype_of(hidden_states, weight)
        reduction = self.reduction if num_label_tokens is None else "mean"
        options = {"reduction": reduction, "num_items": num_label_tokens, **self.options}
        options |= {"ignore_index": self.ignore_index, "softcap": self.logit_softcapping or None}
        options["token_weight"] = loss_weights
        return flce.linear_cross_entropy(hidden_states, weight, labels, **options)
