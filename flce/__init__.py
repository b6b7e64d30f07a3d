"""flce: fused linear + cross entropy for PyTorch. The public names."""

import importlib

import torch

try:
    from . import _C  # noqa: F401  registers the operators
except ImportError as error:
    raise ImportError(
        "flce: the compiled module flce._C is missing or unfit for this torch "
        f"({torch.__version__}): {error}. In a clone, run `pip install --no-build-isolation -e .`"
    ) from error

from . import reference
from .deferred import explain, fuse
from .functional import cross_entropy, linear_cross_entropy, linear_logprobs
from .modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
from .options import LinearCrossEntropyOutput
from .parallel import VocabParallel
from .plan import Plan, plan
from .targets import num_items

__version__ = "0.1.0"
__all__ = [
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "Plan",
    "VocabParallel",
    "VocabParallelHead",
    "compat",
    "cross_entropy",
    "explain",
    "fuse",
    "integrations",
    "linear_cross_entropy",
    "linear_logprobs",
    "num_items",
    "plan",
    "reference",
]


def __getattr__(name):
    """Imports flce.compat and flce.integrations on first access, because they depend on flce, and
    VocabParallelHead, because of what it imports."""
    if name == "VocabParallelHead":
        return importlib.import_module(".style", __name__).VocabParallelHead
    if name in ("compat", "integrations"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
