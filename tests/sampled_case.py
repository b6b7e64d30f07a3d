"""Shared by test_sampled*.py: the small problem and the options of a sampled gradient."""

import cases
import torch

TOKENS, HIDDEN, VOCAB = 37, 24, 131
SEEDS = 4096
SAMPLED = {"gradient": "sampled"}


def sampled(seed, eps=2**-6):
    return {"gradient": "sampled", "gradient_eps": eps, "gradient_seed": seed}


def make(device, dtype=torch.float32, *, std=2.0, bias=True, vocab=VOCAB, tokens=TOKENS):
    return cases.make_case(
        tokens, HIDDEN, vocab, dtype=dtype, device=device, std=std, targets="sampled", bias=bias
    )


def upstream_of(reduction):
    """The upstream gradient of the loss, as `outcome` takes it."""
    if reduction != "none":
        return {"loss": torch.tensor(-0.37)}
    upstream = torch.randn(TOKENS, generator=cases.generator(2))
    upstream[3], upstream[5] = 0.0, 50.0
    return {"loss": upstream}
