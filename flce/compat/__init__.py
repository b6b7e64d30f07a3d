"""The calls of other implementations, computed by flce: `liger`, `cce` and `torch`.

Each module has the names, argument orders and returns of the package it stands for, so that moving
over is a change of an import. Where a result differs, its docstring says so.
"""

from . import cce, liger, torch

__all__ = ["cce", "liger", "torch"]
