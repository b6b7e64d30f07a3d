"""Loss and gradients against float64: every strategy, flat to peaked logits, large vocabularies."""

import math

import pytest
import torch

import flce
from harness import cases

VOCABS = (1, 2, 127, 128, 129, 1000, 32000, 50257, 128256)
# bfloat16 on CUDA, where the logits are kept in float32: one rounding each of E, x and the result.
CUDA_BF16_BAR = 3e-3
F16_SCALE = 2.0**14


def grid_case(device, dtype, vocab, std, targets):
    if device == "cuda":
        tokens, hidden = 256, 256
    else:
        # In chunks of 8, 8 and 4. For rows beyond a multiple of 4 MKL sums V terms sequentially,
        # and its error would dominate ours.
        tokens, hidden = (20, 16) if vocab > 1000 else (33, 32)
    case = cases.make_case(
        tokens, hidden, vocab, dtype=dtype, device=device, std=std, targets=targets, seed=vocab
    )
    # float16 with a scaled loss: otherwise most dz are subnormal.
    scale = torch.tensor(F16_SCALE if dtype == torch.float16 else 1.0, device=device)
    return case, cases.Yardstick(case, grad_output=scale), scale


def held_rounding(case, scale, chunks):
    """Error of a row of dW held in float16 (csrc/backend_args.h: FLCE_SCALAR_DW_SCALE): half of
    float16's smallest number in each of its sums, in the unit in which no sum can overflow."""
    rows, hidden = case.input.shape
    v = 13 - math.ceil(math.log2(case.input.abs().max().item()))
    unit = 14 + v - 12 - math.ceil(math.log2(rows))  # dz may be as large as 1
    return 2.0 ** (-25 - unit) * scale / rows * math.sqrt(chunks * hidden)


@cases.pairwise(
    dtype=cases.DTYPES,
    vocab=VOCABS,
    std=[1.0, 4.0, 8.0],
    targets=["random", "sampled"],
    save=cases.SAVES,
)
def test_grid(device, dtype, vocab, std, targets, save):
    case, yardstick, scale = grid_case(device, dtype, vocab, std, targets)
    # Three chunks, the last one shorter, if the strategy has chunks; rows are multiples of 128
    # bytes.
    budget = math.ceil(case.input.shape[0] / 2.5) * math.ceil(vocab * 8 / 128) * 128
    results = cases.outcome(
        flce.linear_cross_entropy, case, save=save, max_memory=budget, grad_output=scale
    )
    if (device, dtype, save) == ("cuda", torch.float16, "grads"):
        yardstick = yardstick.granting(linear_weight=held_rounding(case, scale.item(), 3))
    yardstick.check(results, f"std={std} {targets}")
    bar = math.inf
    if dtype == torch.float16:
        bar = cases.F16_BAR
    elif (device, dtype) == ("cuda", torch.bfloat16):
        bar = CUDA_BF16_BAR
    # With one or two columns the sums cancel.
    for name in ("input", "linear_weight") if vocab > 2 else ():
        error = cases.relative_error(results[name], yardstick.truth[name])
        assert error <= bar, f"{name}: {error:.2e}"


def sure_case(device, dtype, margin):
    """Rows whose target leads by `margin`; loss, dX, dW in float64 without cancellation."""
    x = torch.eye(8, 16, device=device, dtype=torch.float64) * margin
    w = torch.zeros(64, 16, device=device, dtype=torch.float64)
    w[:8, :8] = torch.eye(8, device=device)
    target = torch.arange(8, device=device)
    # Each row has one logit equal to `margin` and 63 equal to 0.
    rest = 63 * math.exp(-margin)
    others = torch.exp(x @ w.T - margin) / (1 + rest)
    others[target, target] = -rest / (1 + rest)
    truth = {
        "loss": torch.full((8,), math.log1p(rest), device=device, dtype=torch.float64),
        "input": others @ w,
        "linear_weight": others.T @ x,
    }
    return cases.Case(x.to(dtype), w.to(dtype), target), truth


@pytest.mark.parametrize("margin", [8.0, 16.0, 32.0, 64.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", cases.SAVES)
def test_tiny_losses_keep_their_digits(device, save, dtype, margin):
    """Of a certain model, where eager gives 0 or noise: p - 1 must not cancel."""
    case, truth = sure_case(device, dtype, margin)
    if device == "cuda" and dtype == torch.bfloat16 and save != "stats" and margin > 43.0:
        # The row is read once: terms more than 43 nats (62 powers of two) below the target count as
        # 0.
        results = cases.outcome(flce.linear_cross_entropy, case, save=save)
        assert 0.0 <= results["loss"].item() <= 1e-18
        for name in ("input", "linear_weight"):  # 2**-62 times sums of 63 columns, x or W up to 64
            assert (results[name].abs() <= 1e-15).all(), name
        return
    if save == "grads":
        truth["loss"] = truth["loss"].sum()
    case = case.with_options(reduction="sum" if save == "grads" else "none")
    results = cases.outcome(flce.linear_cross_entropy, case, save=save)
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for name, value in results.items():
        bar = min(limit, 1e-5) if name == "loss" else limit
        error = cases.relative_error(value, truth[name])
        assert error <= bar, f"{name}: {error:.2e}"
