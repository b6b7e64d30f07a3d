"""A small call that every function accepts, for tests of what is refused, and how."""

import functools

import torch

TOKENS, HIDDEN, VOCAB = 6, 8, 11


def tensors(device):
    """The operands and tensor options of all functions, by name."""
    ones = functools.partial(torch.ones, device=device)
    return {
        "input": torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True),
        "logits": torch.randn(TOKENS, VOCAB, device=device, requires_grad=True),
        "linear_weight": torch.randn(VOCAB, HIDDEN, device=device, requires_grad=True),
        "target": torch.arange(TOKENS, device=device),
        "linear_bias": ones(VOCAB),
        "weight": ones(VOCAB),
        "token_weight": ones(TOKENS),
        "temperature": ones(TOKENS),
        "num_items": ones(()),
        "adapter_input": ones(TOKENS, 4),
        "adapter_weight": ones(VOCAB, 4),
    }


def arguments(device):
    """Of flce.linear_cross_entropy."""
    arguments, names = tensors(device), ("input", "linear_weight", "target")
    return {name: arguments[name] for name in names}


def leaf(tensor):
    return tensor.clone().requires_grad_()
