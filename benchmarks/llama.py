"""A decoder in the shape of Llama 3, in plain torch: what train_parallel.py divides over ranks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Sizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool


# Tied or not as the published models are.
SIZES = {
    "tiny": Sizes(32, 2, 8, 4, 64, 200, tied=True),
    "tiny-untied": Sizes(32, 2, 8, 4, 64, 200, tied=False),
    "1b": Sizes(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8b": Sizes(4096, 32, 32, 8, 14336, 128256, tied=False),
}
THETA = 500_000.0


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def angles(positions, size):
    """cos and sin of the rotary embedding, (positions, size / 2)."""
    powers = torch.arange(0, size, 2, device=positions.device) / size
    turned = positions[:, None] * THETA**-powers
    return turned.cos(), turned.sin()


def rotated(x, cos, sin):
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Of as many heads as its projections have on this rank."""

    def __init__(self, sizes):
        super().__init__()
        self.size, self.repeats = sizes.hidden // sizes.heads, sizes.heads // sizes.kv_heads
        self.q, self.o = linear(sizes.hidden, sizes.hidden), linear(sizes.hidden, sizes.hidden)
        self.k = linear(sizes.hidden, sizes.kv_heads * self.size)
        self.v = linear(sizes.hidden, sizes.kv_heads * self.size)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x, cos, sin):
        heads = (made(x).unflatten(-1, (-1, self.size)) for made in (self.q, self.k, self.v))
        q, k, v = (one.transpose(1, 2) for one in heads)  # (batch, heads, sequence, size)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        # Not enable_gqa: torch's context_parallel does not support it.
        k, v = (one.repeat_interleave(self.repeats, 1) for one in (k, v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.gate, self.up = (linear(sizes.hidden, sizes.ffn) for _ in range(2))
        self.down = linear(sizes.ffn, sizes.hidden)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Its forward is computed again in the backward: activation checkpointing."""

    def __init__(self, sizes):
        super().__init__()
        self.attention, self.ffn = Attention(sizes), FeedForward(sizes)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden, 1e-5) for _ in range(2))

    def compute(self, x, cos, sin):
        x = x + self.attention(self.norms[0](x), cos, sin)
        return x + self.ffn(self.norms[1](x))

    def forward(self, x, cos, sin):
        return checkpoint(self.compute, x, cos, sin, use_reentrant=False)


class Body(nn.Module):
    """From ids to the hidden states of the head. A stage of a pipeline has some of its layers, no
    embedding unless it is the first, and no norm unless it is the last."""

    def __init__(self, sizes):
        super().__init__()
        self.size = sizes.hidden // sizes.heads
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, 1e-5)

    def forward(self, x, positions=None):
        x = x if self.embedding is None else self.embedding(x)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, *angles(positions, self.size))
        return x if self.norm is None else self.norm(x)


class Decoder(nn.Module):
    """`make_head(hidden, vocab, bias=False)`; `loss_of(head, hidden states, labels)`."""

    def __init__(self, sizes, make_head, loss_of):
        super().__init__()
        self.body, self.head = Body(sizes), make_head(sizes.hidden, sizes.vocab, bias=False)
        self.loss_of = loss_of
        if sizes.tied:
            self.tie()
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def tie(self):
        self.head.weight = self.body.embedding.weight

    def forward(self, ids, labels, positions=None):
        return self.loss_of(self.head, self.body(ids, positions), labels)
