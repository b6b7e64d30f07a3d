"""flce: fused linear + cross entropy for PyTorch. The public names."""

import importlib
import typing

__version__ = "0.1.0"

# `installation` before all other files of flce: it imports torch and the compiled module.
from . import installation, reference
from .options import LinearCrossEntropyOutput, TopLogprobs

if typing.TYPE_CHECKING or installation.COMPILED:
    from .chunked_loss import linear_loss
    from .distillation import linear_divergence
    from .distributed import VocabParallel
    from .functional import cross_entropy, linear_cross_entropy
    from .logprobs import linear_logprobs, linear_logprobs_at
    from .modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
    from .plan import Plan, plan
    from .targets import num_items
else:
    from .plain import (
        LinearCrossEntropyHead,
        LinearCrossEntropyLoss,
        absent,
        cross_entropy,
        linear_cross_entropy,
        linear_logprobs,
    )

__all__ = [
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "Plan",
    "TopLogprobs",
    "VocabParallel",
    "VocabParallelHead",
    "cross_entropy",
    "explain",
    "fuse",
    "integrations",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprobs",
    "linear_logprobs_at",
    "linear_loss",
    "num_items",
    "plan",
    "reference",
]
_LATER = {"explain": ".fusion", "fuse": ".fusion"}
_LATER["VocabParallelHead"] = ".distributed.vocab_parallel_head"

if typing.TYPE_CHECKING:
    from . import integrations
    from .distributed.vocab_parallel_head import VocabParallelHead
    from .fusion import explain, fuse
else:

    def __getattr__(name):
        """Imports on first access what depends on flce or takes long to import."""
        if not installation.COMPILED and name in __all__:
            return absent(name)
        if name == "integrations":
            return importlib.import_module(f".{name}", __name__)
        if name in _LATER:
            return getattr(importlib.import_module(_LATER[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    """The public names alone, for help() and completion."""
    return sorted((*__all__, "__version__"))
