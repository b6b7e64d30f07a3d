"""Sizes V and H that are no multiple of what fast kernels require, and odd N, in memory that
holds NaN until it is written."""

import functools
import itertools
import math

import pytest
import torch

import flce
from harness import cases, raw
from harness.hopper import ONLY, launches

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setenv("FLCE_POISON", "1")


def saved_of(x, w, target, **options):
    arguments = raw.forward(x, w, target, "logits", **options)
    return torch.ops.flce.forward(*arguments)[4]


@cases.pairwise(
    kind=["exp", "probabilities", "softcap and smoothing", "entropy"],
    dtype=cases.DTYPES,
    vocab=[1, 7, 31, 33, 129, 1000],
)
def test_zeros_follow_the_columns_of_what_is_saved(device, kind, dtype, vocab):
    """E or logits: no element keeps its initial value."""
    case = cases.make_case(37, 24, vocab, dtype=dtype, device=device)
    target, options = case.target, {}
    if kind == "probabilities":
        target = torch.rand(37, vocab, device=device).softmax(-1).to(dtype)
    elif kind == "softcap and smoothing":
        options = {"softcap": 5.0, "label_smoothing": 0.1}
    elif kind == "entropy":
        options = {"wants_entropy": True}
    else:
        target[::3] = -100
    saved = saved_of(case.input, case.linear_weight, target, **options)
    assert saved.shape[1] % (64 // saved.dtype.itemsize) == 0
    assert not saved[:, vocab:].any() and bool(saved.isfinite().all())


def test_zeros_in_rows_that_are_skipped(cuda):
    """No tile computes the rows after the last valid one, at sizes for which rows are skipped."""
    case = cases.make_case(3000, 128, 50257, dtype=BF16, device=cuda)
    target = torch.full_like(case.target, -100)
    target[:700] = case.target[:700]
    saved = saved_of(case.input, case.linear_weight, target)
    assert bool(saved.isfinite().all())
    assert not saved[700:].any() and not saved[:, 50257:].any()


@pytest.mark.parametrize("hidden", [24, 33, 64])
@pytest.mark.parametrize("save", cases.SAVES)
def test_a_row_of_nan_stays_alone(device, save, hidden):
    """The NaN reaches neither the preceding nor the following row."""
    case = cases.make_case(21, hidden, 129, dtype=BF16, device=device)
    case.input[5] = float("nan")
    x = case.input.clone().requires_grad_()
    reduction = "sum" if save == "grads" else "none"
    call = functools.partial(flce.linear_cross_entropy, save=save, reduction=reduction)
    loss = call(x, case.linear_weight, case.target)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    spoilt = torch.arange(21, device=device) == 5
    assert torch.equal(dx.isnan().all(1), spoilt) and torch.equal(dx.isnan().any(1), spoilt)
    if save != "grads":
        assert torch.equal(loss.isnan(), spoilt)


@cases.pairwise(
    sizes=[(2100, 1024, 4099), (2100, 1028, 4096), (2049, 1027, 5001), (4099, 1030, 2051)],
    dtype=[BF16, torch.float16],
    kernel=["auto", "gemm"],
    options=[{}, {"linear_bias": True}, {"label_smoothing": 0.1}],
)
def test_large_products_of_ragged_sizes(cuda, monkeypatch, sizes, dtype, kernel, options):
    """Large enough for cuda_gemm to split off the columns beyond a multiple of 8."""
    monkeypatch.setenv("FLCE_KERNEL", kernel)
    case = cases.make_case(*sizes, dtype=dtype, device=cuda)
    if options.get("linear_bias"):
        bias = torch.randn(sizes[2], device=cuda).to(dtype)
        case = case.with_options(linear_bias=bias)
    else:
        case = case.with_options(**options)
    # With a scaled loss: dz of the mean is below float16's normal numbers.
    upstream = {"grad_output": torch.tensor(2.0**14, device=cuda)}
    wide = case.to(torch.float64)
    truth = cases.outcome(flce.reference.linear_cross_entropy, wide, **upstream)
    bar = {BF16: 2.6e-3, torch.float16: cases.F16_BAR}[dtype]
    for budget, save in itertools.product(("1GiB", 700 * (sizes[2] + 64) * 4), cases.SAVES):
        results = cases.outcome(
            flce.linear_cross_entropy, case, save=save, max_memory=budget, **upstream
        )
        assert abs(results["loss"] - truth["loss"]) <= 1e-5 * truth["loss"]
        for name in ("input", "linear_weight"):
            error = cases.relative_error(results[name], truth[name])
            assert error <= bar, f"{save} {budget} {name}: {error:.2e}"


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("of", ["logits", "grad_input", "grad_weight"])
@pytest.mark.parametrize("k", [1025, 4097, 4098, 6145, 8193, 11528, 12290, 57608])
def test_the_last_products_are_summed(cuda, monkeypatch, dtype, of, k):
    """cuBLASLt's split-K leaves out products after the last whole tile for such k. Only the last
    63 of the k products are not 0."""
    monkeypatch.setenv("FLCE_KERNEL", "gemm")
    rows, hidden, vocab = {"logits": (16, k, 512), "grad_input": (16, 512, k)}.get(of, (k, 8, 64))
    x = torch.zeros(rows, hidden, dtype=dtype, device=cuda)
    w = torch.zeros(vocab, hidden, dtype=dtype, device=cuda)
    if of == "logits":
        x[:, k - 63 :], w[:] = 1.0, 1.0
    else:
        (w if of == "grad_input" else x)[k - 63 :] = 1.0
    x, w = x.requires_grad_(), w.requires_grad_()
    target = torch.zeros(rows, dtype=torch.int64, device=cuda)
    made = flce.linear_cross_entropy(x, w, target, reduction="sum", return_lse=True)
    gradient = torch.autograd.grad(made.loss, w if of == "grad_weight" else x)[0]
    got, truth = {
        "logits": (made.lse, 63 + math.log(vocab)),
        "grad_input": (gradient, 63 / vocab),
        "grad_weight": (gradient[1:], 63 / vocab),
    }[of]
    assert ((got.double() - truth).abs() <= 8e-3 * truth).all()


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("sizes", [(2100, 1024, 4099), (2049, 1027, 5001)])
def test_sums_of_ragged_sizes(cuda, sizes, attribute):
    """The weight's gradient is added to the caller's tensor, whose rows have no padding."""
    case = cases.make_case(*sizes, dtype=BF16, device=cuda)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    truth = cases.outcome(flce.reference.linear_cross_entropy, case.to(torch.float64))
    start = torch.randn(w.shape, device=cuda).mul_(1e-4)
    if attribute == "grad":
        w.grad = start.to(BF16)
    else:
        w.main_grad = start.clone()
    begun = getattr(w, attribute).double()
    flce.linear_cross_entropy(x, w, case.target, accumulate_into=attribute).backward()
    expected = truth["linear_weight"] + begun
    assert cases.relative_error(getattr(w, attribute), expected) <= (
        4e-3 if attribute == "grad" else 2e-3
    )


@ONLY
@pytest.mark.parametrize("sizes", [(2100, 1024, 4099), (2100, 1028, 4096)])
def test_no_slow_kernel_runs(monkeypatch, sizes):
    """Hopper's own kernels but for the logits, and a small GEMM for each split size."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    case = cases.make_case(*sizes, dtype=BF16, device="cuda")
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def call():
        flce.linear_cross_entropy(x, w, case.target, save="grads").backward()

    call()
    parts = "nvjet", "logits_gemm_sm90", "gemm", "gemm_sm90"
    fast, product, gemms, own = launches(call, *parts)
    # If V is ragged, dX and dW each have one GEMM for the last columns, with any kernel.
    assert fast >= 2 and product == 2 and gemms - own <= (2 if sizes[2] % 8 else 0)
