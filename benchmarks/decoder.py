"""The decoder-only transformer of sampled_training.py."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):  # (batch, sequence, width)
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, sequence, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Gives the last hidden states; `head`, (V, width), is the loss function's operand."""

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        self.positions = nn.Embedding(options.sequence, options.width)
        blocks = (Block(options.width, options.heads) for _ in range(options.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(options.width)
        self.head = self.tokens.weight
        if not options.tied:
            self.head = nn.Parameter(torch.empty(options.vocab, options.width))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids):  # (batch, sequence) -> (batch, sequence, width)
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def precision(device):
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
