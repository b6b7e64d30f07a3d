"""Deferred logits: `flce.fuse` and `flce.explain`.

fusion.py: the state of a fused model. search.py: its heads. head.py: the classes that they get.
proxies.py: what a head's call returns. node.py: values not made yet. snapshot.py: what must not
change before they are. operations.py: what is recorded. forms.py: classes that are the second
dimension, or split. loss.py: the losses. steps.py: records, and their meaning as options.
reentry.py: calls back into the heads.
"""

from .explain import Explanation, explain
from .handle import Fusion, fuse

__all__ = ["Explanation", "Fusion", "explain", "fuse"]
