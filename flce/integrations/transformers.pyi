from collections.abc import Sequence
from typing import Literal

from torch import nn
from transformers import TrainerCallback
from typing_extensions import Unpack

from ..fusion import Fusion
from ..options import FuseOptions

class FuseCallback(TrainerCallback):
    handle: Fusion | None
    def __init__(
        self,
        head: str | nn.Module | Sequence[str | nn.Module] | None = None,
        *,
        when: Literal["labels", "always"] = "labels",
        strict: bool = False,
        **options: Unpack[FuseOptions],
    ) -> None: ...
