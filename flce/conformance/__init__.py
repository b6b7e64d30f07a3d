"""A conformance suite for any fused linear + cross entropy; docs/conformance.md.

`python -m flce.conformance --impl flce`; of your own, `--adapters mine.py --impl mine`:
    from flce.conformance import Adapter

    def loss(x, w, y, bias, options):
        return my_loss(x, w, y, **options)

    offers = frozenset(["bfloat16", "sum", "none", "ignore_index"])
    ADAPTERS = {"mine": lambda name: Adapter(name, loss, offers)}
"""

from .cases import FEATURES, NAMES, Case, draw, suite
from .check import Adapter, Record, evaluate, explain, run
from .operands import Operands, build
from .truth import Rounding, Truth, truth

__all__ = ["FEATURES", "NAMES", "Adapter", "Case", "Operands", "Record", "Rounding", "Truth"]
__all__ += ["build", "draw", "evaluate", "explain", "run", "suite", "truth"]
