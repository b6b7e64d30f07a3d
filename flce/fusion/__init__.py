"""`flce.fuse` and `flce.explain`. A head's call returns a Tensor of `deferred`, whose value is
one of `values`, where `operations` records `steps`; `loss` calls the core within the hooks of the
head, by `reentry`. Not named fuse: importing the package would put a module in the place of the
function `flce.fuse`."""

from .handle import Explanation, Fusion, explain, fuse

__all__ = ["Explanation", "Fusion", "explain", "fuse"]
