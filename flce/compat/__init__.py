"""The interfaces of other implementations, computed by flce: `liger`, `cce` and `torch`.

Each module has the names, argument orders and return values of the package it replaces, so that
migrating means changing an import. Its docstring lists the results that differ.

>>> weight, hidden, target = torch.randn(16, 8), torch.randn(5, 8), torch.arange(5)
>>> liger = flce.compat.liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")
>>> cce = flce.compat.cce.linear_cross_entropy(hidden, weight, target, reduction="sum")
>>> torch.testing.assert_close(liger(weight, hidden, target), cce)
"""

from . import cce, liger, torch

__all__ = ["cce", "liger", "torch"]
