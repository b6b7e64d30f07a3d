"""The interfaces of other implementations, computed by flce: `liger`, `cce` and `torch`.

Each module has the names, argument orders and return values of the package it replaces, so that
migrating means changing an import. Its docstring lists the results that differ.
"""

from . import cce, liger, torch

__all__ = ["cce", "liger", "torch"]
