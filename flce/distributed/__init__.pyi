from torch import dtype
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["VocabParallel"]

class VocabParallel:
    start: int | None
    vocab: int | None
    sequence: bool
    reduce_input_grad: bool
    reduce_dtype: dtype | None
    group: str
    ranks: int
    rank: int
    shard: object
    def __init__(
        self,
        group: ProcessGroup | DeviceMesh,
        start: int | None = None,
        vocab: int | None = None,
        sequence: bool = False,
        reduce_input_grad: bool = True,
        reduce_dtype: dtype | None = None,
    ) -> None: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
