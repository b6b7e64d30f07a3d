"""flce: fused linear + cross entropy for PyTorch."""

from . import reference
from .loss import (
    LinearCrossEntropyHead,
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
)
from .plan import Plan, plan

__version__ = "0.1.0"
__all__ = [
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "Plan",
    "cross_entropy",
    "linear_cross_entropy",
    "plan",
    "reference",
]
