"""Shared by the tests of sampled gradients: the small problem, the options, and the comparison with
sampled_reference of the same seed.

The float32 of a device rounds differently from the reference's float64, so now and then another
class is drawn: `agree` bounds how often.
"""

import math

import torch

import flce
from harness import cases, sampled_reference

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
    if reduction != "none":
        return {"loss": torch.tensor(-0.37)}
    upstream = torch.randn(TOKENS, generator=cases.generator(2))
    upstream[3], upstream[5] = 0.0, 50.0
    return {"loss": upstream}


def agree(ours, truth, case, reach):
    """Compares float32 gradients row by row; `reach`: the largest upstream gradient, of which a
    rounding remains where terms cancel. Where a prefix sum lies within its rounding of a point that
    is drawn, a neighbouring class may be taken: a row of input's gradient differs then, and two of
    the weight's."""
    tokens, vocab = case.target.numel(), case.linear_weight.shape[0]
    x, w = case.input.nan_to_num().abs(), case.linear_weight.abs()
    longest = {"input": w, "linear_weight": x, "linear_bias": torch.ones(1, 1)}
    products = [(x, w)]
    if case.options.get("adapter_weight") is not None:
        low_rank, narrow = (case.options[name].nan_to_num().abs() for name in cases.LEAVES[3:])
        longest |= {"adapter_input": narrow, "adapter_weight": low_rank}
        products.append((low_rank, narrow))
    largest = sum(a.max() * b.sum(-1).max() for a, b in products).item() if x.numel() else 0.0
    tolerance = cases.FLOORS[torch.float32][1] + 2.0**-24 * largest
    drawn = 1 + math.ceil(tokens * min(0.5, 4e-5 * vocab))
    for name in truth.keys() & longest.keys():
        got, expected = ours[name].double(), truth[name]
        assert got.shape == expected.shape
        width = 1 if name == "linear_bias" else expected.shape[-1]
        error = (got - expected).reshape(-1, width).norm(dim=-1)
        size = expected.reshape(-1, width).norm(dim=-1)
        row = longest[name].norm(dim=-1)
        least = 2.0**-24 * reach * (row.max().item() if row.numel() else 0.0)
        differs = ~(error <= tolerance * (size + size.mean()) + least)
        allowed = drawn if name.endswith("input") else 2 * drawn
        assert differs.sum() <= allowed, f"{name}: {differs.nonzero().flatten().tolist()}"


def compare(case, *, eps=2**-6, seed=7, upstream=None, **call):
    """Loss and outputs against the exact call's, gradients against the reference's; -> them."""
    upstream = upstream or upstream_of("mean")
    upstream = {name: one.to(case.input.device) for name, one in upstream.items()}
    given = {**sampled(seed, eps), "upstream": upstream}
    ours = cases.outcome(flce.linear_cross_entropy, case, **given, **call)
    exact = {**given, "gradient": "exact", "save": "logits"}
    exact = cases.outcome(flce.linear_cross_entropy, case, **exact, **call)
    assert ours.keys() == exact.keys()
    # Other chunks, or the entropy's own kernels, may order a row's sums differently.
    same_kernels = call.get("max_memory") is None and "entropy" not in exact
    logits = cases.final_logits(case.to(torch.float64))[0].abs()
    near = 1e-6 + 2.0**-22 * (logits.max().item() if logits.numel() else 0.0)
    for name, value in exact.items():
        assert ours[name].dtype == value.dtype
        if name == "predictions" or (name == "loss" and same_kernels):
            assert torch.equal(ours[name], value)
        elif name not in cases.LEAVES:
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=near)
    reach = max(one.abs().max().item() if one.numel() else 0.0 for one in upstream.values())
    wide = case.to(torch.float64)
    truth = cases.outcome(sampled_reference.linear_cross_entropy, wide, **given, **call)
    agree(ours, truth, case, reach)
    return ours
