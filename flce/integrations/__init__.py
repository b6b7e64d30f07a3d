"""Frameworks whose loss flce computes, a module for each: docs/integrations.md has what it serves.

`liger`, `cce`, `torch`: functions and Modules with the names, argument orders and return values of
the package, computed by flce without it, so that migrating means changing an import. Their
docstrings list the results that differ.

`trl`, `trl_distillation`, `liger`, `cce`, `verl`, `verl_distillation`, `skyrl`: `install()` imports
the package, rebinds its loss and returns a handle: `remove()`, or the end of a `with` block,
restores the package's own. ImportError where the package is missing or takes arguments that flce
does not know, RuntimeError where flce is installed already. `axolotl`, `nemo`, `torchtitan`,
`transformers`: a class to name in a configuration or script; these import the framework.

>>> weight, hidden, target = torch.randn(16, 8), torch.randn(5, 8), torch.arange(5)
>>> criterion = flce.integrations.liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")
>>> cce = flce.integrations.cce.linear_cross_entropy(hidden, weight, target, reduction="sum")
>>> torch.testing.assert_close(criterion(weight, hidden, target), cce)
>>> handle = flce.integrations.trl.install()  # doctest: +SKIP
"""

import importlib
import typing

__all__ = ["axolotl", "cce", "liger", "nemo", "skyrl", "torch", "torchtitan", "transformers", "trl"]
__all__ += ["trl_distillation", "verl", "verl_distillation"]

if typing.TYPE_CHECKING:
    from . import (
        axolotl,
        cce,
        liger,
        nemo,
        skyrl,
        torch,
        torchtitan,
        transformers,
        trl,
        trl_distillation,
        verl,
        verl_distillation,
    )
else:

    def __getattr__(name):
        """Imports a module of __all__ on first access: `import flce` imports no framework."""
        if name in __all__:
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    """The public names alone, for help() and completion."""
    return sorted(__all__)
