"""Shared by test_fused.py and test_fused_logits.py: the condition to run, operands, and the
kernels that were launched."""

import math
import os

import cases
import pytest
import torch

ONLY = pytest.mark.skipif(
    not cases.HAS_CUDA or torch.cuda.get_device_capability() != (9, 0),
    reason="the fused kernel is Hopper's",
)
BF16 = torch.bfloat16


def launches(call, *parts):
    """How many kernels with each of `parts` in their names the call launches."""
    if "FLCE_SANITIZED" in os.environ:
        pytest.skip("there is no profiler under compute-sanitizer")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = trace.key_averages()
    return [sum(event.count for event in events if part in event.key) for part in parts]


def operands(tokens, hidden, vocab, std, seed):
    """x and W whose logits have standard deviation `std`, and the generator for further data."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random, device="cuda") * math.sqrt(std)
    w = torch.randn(vocab, hidden, generator=random, device="cuda") * math.sqrt(std / hidden)
    return x.to(BF16), w.to(BF16), random
