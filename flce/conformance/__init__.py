"""A conformance suite for any fused linear + cross entropy, its own or another's.

    python -m flce.conformance --impl flce

From Python an implementation is an `Adapter`, ten lines around a function of (x, w, y, bias, options):

    from flce.conformance import Adapter, run, suite

    def loss(x, w, y, bias, options):
        return my_loss(x, w, y, **options)

    offers = frozenset(["bfloat16", "sum", "none", "ignore_index"])
    record = run(Adapter("mine", loss, offers), suite(), "cuda")
    print(record.counts, record.failures)

docs/conformance.md has the cases, the tolerance and what others' implementations do.
"""

from .cases import FEATURES, NAMES, Case, Operands, build, draw, suite
from .check import Adapter, Outcome, evaluate, explain
from .report import Record, run, table
from .truth import Rounding, Truth, truth

__all__ = [
    "FEATURES",
    "NAMES",
    "Adapter",
    "Case",
    "Operands",
    "Outcome",
    "Record",
    "Rounding",
    "Truth",
    "build",
    "draw",
    "evaluate",
    "explain",
    "run",
    "suite",
    "table",
    "truth",
]
