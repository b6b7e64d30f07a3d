"""A small problem with a bias and ignored rows, for tests of everything but the numbers."""

import torch

import flce
from harness import cases

TOKENS, HIDDEN = 24, 16
# A row is a multiple of 16 bytes in every dtype: opcheck compares all of a saved tensor, with its
# padding.
VOCAB = 56
# Five chunks of 5 rows for the strategies with chunks.
BUDGET = 5 * (VOCAB + 2) * 8


def make(device, dtype=torch.float32, **options):
    case = cases.make_case(
        TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device, std=2.0, bias=True, seed=3
    )
    case.target[::5] = -100
    return case.with_options(**options)


def leaves_of(case):
    named = (case.input, case.linear_weight, case.options["linear_bias"])
    return [tensor.clone().requires_grad_() for tensor in named]


def call(case, leaves, **knobs):
    x, w, b = leaves
    options = {**case.options, "linear_bias": b, **knobs}
    return flce.linear_cross_entropy(x, w, case.target, **options)
