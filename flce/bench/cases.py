"""What is run: the operands, and the three ways to the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import flce

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_flce: Callable[..., torch.Tensor] = flce.linear_cross_entropy

HIDDEN, VOCAB, TOKENS = 4096, 128256, 8192  # the head of Llama 3 8B
EAGER_BYTES = 14  # of a logit: of 16 bits, three times float32 at the peak


@dataclass(frozen=True)
class Case:
    """N, H, V, where, and the dtype of the operands."""

    tokens: int
    hidden: int
    vocab: int
    device: str
    dtype: torch.dtype

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random hidden states [N, H], weight [V, H] and targets [N]; logits of deviation 1."""
        random = torch.Generator(self.device).manual_seed(0)
        like: dict[str, Any] = {"generator": random, "device": self.device}
        x = torch.randn(self.tokens, self.hidden, dtype=self.dtype, **like)
        weight = torch.randn(self.vocab, self.hidden, dtype=self.dtype, **like)
        weight *= self.hidden**-0.5
        target = torch.randint(self.vocab, (self.tokens,), **like)
        return x.requires_grad_(), weight.requires_grad_(), target


def default_case(device: str) -> Case:
    """On a GPU the head of Llama 3 8B, in as many tokens as the eager loss can take; on a CPU many
    classes of few hidden units, whose logits take most of the memory and a good part of the time;
    four cores compute a step in about a second."""
    if device == "cpu":
        tokens = 2048 if torch.get_num_threads() >= 4 else 1024
        return Case(tokens, 256, 32768, device, torch.float32)
    free, _ = torch.cuda.mem_get_info()
    weights = 3 * 2 * VOCAB * HIDDEN  # W, dW, and as much again
    fits = int(0.8 * (free - weights)) // (EAGER_BYTES * VOCAB)
    if fits >= 1024:
        return Case(min(TOKENS, fits // 1024 * 1024), HIDDEN, VOCAB, device, torch.bfloat16)
    return Case(1024, 1024, 32000, device, torch.bfloat16)


def eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As transformers computes it: logits in float32."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def fused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _flce(x, weight, target)


def compiled() -> Loss:
    torch.compiler.reset()
    return torch.compile(eager)


CONTESTANTS: dict[str, Callable[[], Loss]] = {
    "eager": lambda: eager,
    "torch.compile": compiled,
    "flce": lambda: fused,
}
