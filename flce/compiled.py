"""The compiled module: its import registers the operators."""

import torch

try:
    from ._C import getenv
except ImportError as error:
    raise ImportError(
        "flce: the compiled module flce._C is missing or unfit for this torch "
        f"({torch.__version__}): {error}. In a clone, run `pip install --no-build-isolation -e .`"
    ) from error

__all__ = ["getenv"]
