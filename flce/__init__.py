"""flce: fused linear + cross entropy for PyTorch."""

from . import compat, reference
from .functional import cross_entropy, linear_cross_entropy, linear_logprobs
from .modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
from .output import LinearCrossEntropyOutput
from .plan import Plan, plan
from .tune import TunedProduct, Tuning, tune

__version__ = "0.1.0"
__all__ = [
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "Plan",
    "TunedProduct",
    "Tuning",
    "compat",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_logprobs",
    "plan",
    "reference",
    "tune",
]
