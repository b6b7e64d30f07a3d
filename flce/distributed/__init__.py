"""A vocabulary sharded over ranks, and DTensors as operands."""

from ..sharding import Hooks, register
from .collectives import pending_error
from .dtensor import local_call
from .parallel import VocabParallel, before_call

__all__ = ["VocabParallel"]

register(Hooks(before_call, local_call, pending_error))
