from ..options import _Entropy
from ._rebind import Installation

def install(*, entropy: _Entropy | None = None) -> Installation: ...
