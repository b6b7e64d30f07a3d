"""Shared by the tests of Hopper's kernels: the condition to run, operands, results and their
truth, and the kernels that were launched."""

import math
import os

import pytest
import torch

import flce
from harness import cases

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


def draw(tokens, hidden, vocab, std=1.0, seed=0):
    x, w, random = operands(tokens, hidden, vocab, std, seed)
    return x, w, torch.randint(vocab, (tokens,), generator=random, device="cuda")


def draw_noise(tokens, hidden, vocab, std=1.0, seed=0):
    """x, W and normal numbers, whose softmax are probabilities."""
    x, w, random = operands(tokens, hidden, vocab, std, seed)
    return x, w, torch.randn(tokens, vocab, generator=random, device="cuda")


def results(x, w, target, **options):
    """Losses of rows (save="grads": their mean), dX and dW of their mean, db if it is wanted."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    bias = options.get("linear_bias")
    leaves = (x, w) if bias is None or not bias.requires_grad else (x, w, bias)
    reduction = "mean" if options.get("save") == "grads" else "none"
    loss = flce.linear_cross_entropy(x, w, target, reduction=reduction, **options)
    return loss.detach(), *torch.autograd.grad(loss.mean(), leaves)


def truth(x, w, target, bias=None):
    """The same of each row in float64, for classes or probabilities."""
    options = {} if bias is None else {"linear_bias": bias}
    made = cases.chunked_truth(cases.Case(x.detach(), w.detach(), target, options), 1024)
    return tuple(made[name] for name in ("loss", *cases.GRADIENTS) if name in made)


def assert_near(values, truths, bar):
    for value, true in zip(values, truths, strict=True):
        assert cases.relative_error(value, true.double()) <= bar


def assert_close(made, expected, of_gradients=2.6e-3):
    loss, true = made[0], expected[0] if made[0].dim() else expected[0].mean()
    error = (loss.double() - true).abs()
    assert bool((error <= 1e-5 * true.abs() + 2e-5).all()), error.max()
    assert_near(made[1:], expected[1:], of_gradients)
