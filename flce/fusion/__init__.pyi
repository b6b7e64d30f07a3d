from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch import nn
from typing_extensions import Self, Unpack

from ..options import FuseOptions

__all__ = ["Explanation", "Fusion", "explain", "fuse"]

class Fusion:
    when: Literal["labels", "always"]
    options: FuseOptions
    losses: Counter[str]
    reads: Counter[str]
    fallbacks: Counter[str]
    refused: list[tuple[str, str]]
    @property
    def model(self) -> nn.Module | None: ...
    def attached(self) -> list[tuple[str, nn.Module, list[nn.Linear]]]: ...
    def is_attached(self) -> bool: ...
    def remove(self) -> None: ...
    def summary(self) -> str: ...
    def tell_if_unused(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Explanation:
    model: str
    is_fused: bool
    heads: list[tuple[str, str]]
    refused: list[tuple[str, str]]
    losses: dict[str, int]
    reads: dict[str, int]
    fallbacks: dict[str, int]
    summary: str
    def __init__(self, model: nn.Module) -> None: ...

def fuse(
    model: nn.Module,
    head: str | nn.Module | Sequence[str | nn.Module] | None = None,
    *,
    when: Literal["labels", "always"] = "labels",
    strict: bool = False,
    **options: Unpack[FuseOptions],
) -> Fusion: ...
def explain(model: nn.Module) -> Explanation: ...
