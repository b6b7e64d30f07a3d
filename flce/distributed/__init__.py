"""A vocabulary sharded over ranks, and DTensors as operands."""

from .. import composite, functional, operators
from . import collectives, dtensor, parallel
from .parallel import VocabParallel

__all__ = ["VocabParallel"]

operators.pending_error = collectives.pending_error
composite.before_sharded_call = parallel.before_call
functional.local_call = dtensor.local_call
