"""A gradient of the weight that is a sum over many chunks: operands and bounds."""

import functools

import torch
import torch.nn.functional as F

from harness import cases

HIDDEN, VOCAB, CHUNK = 16, 200, 8
RARE = slice(VOCAB // 2, VOCAB)
MANY = 683
# Of a sum that is rounded once, or each of whose terms is, as the CPU's products in bfloat16.
ROUNDED = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}


@functools.cache
def operands(device, dtype, chunks):
    """input, linear_weight, target, and the gradient of the weight in float64; of sum / rows."""
    generator = cases.generator(7)
    rows = CHUNK * chunks
    x = (torch.randn(rows, HIDDEN, generator=generator) + 1).to(device, dtype)
    w = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1).to(device, dtype)
    frequency = 1.0 / torch.arange(1, VOCAB + 1)
    target = torch.multinomial(frequency, rows, replacement=True, generator=generator).to(device)
    exact = w.double().requires_grad_()
    F.cross_entropy(x.double() @ exact.T, target).backward()
    return x, w, target, exact.grad


def error_and_projection(made, exact):
    """Of the gradients of the rare classes: relative error, projection on the exact ones."""
    made, exact = made.double()[RARE], exact[RARE]
    projection = (made * exact).sum() / exact.square().sum()
    return cases.relative_error(made, exact), projection.item()


def check(made, exact, dtype):
    error, projection = error_and_projection(made, exact)
    assert error <= ROUNDED[dtype] and abs(projection - 1) <= 5e-4, (error, projection)
    assert cases.relative_error(made.double(), exact) <= ROUNDED[dtype]
