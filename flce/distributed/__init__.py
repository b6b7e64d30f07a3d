"""A vocabulary sharded over ranks, and DTensors as operands."""

from .. import autograd, composite, functional
from . import collectives, dtensor, parallel
from .parallel import VocabParallel

__all__ = ["VocabParallel"]

autograd.pending_error = collectives.pending_error
composite.before_sharded_call = parallel.before_call
functional.local_call = dtensor.local_call
