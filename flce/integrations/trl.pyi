from ..options import Entropy
from ._rebind import Installation

def install(*, entropy: Entropy | None = None) -> Installation: ...
