"""`flce.fuse` and `flce.explain`: losses of a model's own logits, which are deferred. The files are
listed in CONTRIBUTING.md. The package is not named fuse because importing it would put a module in
the place of the function `flce.fuse`."""

from .handle import Explanation, Fusion, explain, fuse

__all__ = ["Explanation", "Fusion", "explain", "fuse"]
