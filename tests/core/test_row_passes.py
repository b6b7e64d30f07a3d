"""The row passes from one column to rows larger than a GPU's cache: probabilities of every
dtype, float16, and agreement between strategies."""

import math

import pytest
import torch

import flce
from harness import cases

SMALL = (1, 7, 127, 128, 129, 1000)
LARGE = (32000, 50257, 128256, 300001)
TOKENS, HIDDEN = 24, 64
WANTS = ("input", "linear_weight")
T_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tolerance between two strategies: gradient rows are rounded to 16 bits, where a few of them
# differ.
AGREEMENT = {torch.float32: 2e-5, torch.bfloat16: 1e-3, torch.float16: 5e-4}


def skip_long_rows(device, vocab):
    if device == "cpu" and vocab > 1000:
        pytest.skip("a GPU's sizes")


def make(device, vocab, dtype=torch.bfloat16, **knobs):
    return cases.make_case(TOKENS, HIDDEN, vocab, dtype=dtype, device=device, std=4.0, **knobs)


def soften(case, dtype, sharp=0.5):
    """Probabilities between uniform and one-hot, some of them 0."""
    vocab = case.linear_weight.shape[0]
    t = torch.rand(TOKENS, vocab, generator=cases.generator(3)).to(case.input.device)
    t = t.masked_fill_(t < 0.3, 0.0) * ((1 - sharp) / vocab)
    t[torch.arange(TOKENS), case.target] += sharp
    return cases.Case(case.input, case.linear_weight, t.to(dtype), case.options)


def every_option(device, vocab, classes=True):
    vectors = {
        "weight": torch.rand(vocab, generator=cases.generator(4)).to(device) + 0.5,
        "token_weight": torch.rand(TOKENS, generator=cases.generator(5)).to(device) + 0.5,
        "temperature": torch.rand(TOKENS, generator=cases.generator(6)).to(device) + 0.5,
    }
    outputs = {"return_lse": True, "return_entropy": True, "return_predictions": True}
    scalars = {"softcap": 15.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 0.7}
    return {**vectors, **scalars, **outputs, "return_accuracy": classes}


def agree(once, twice, dtype, gradients=None):
    assert once.keys() == twice.keys()
    for name, value in once.items():
        if name in ("predictions", "accuracy"):
            assert torch.equal(value, twice[name]), name
            continue
        limit = (gradients or AGREEMENT[dtype]) if name in cases.GRADIENTS else 2e-6
        expected = twice[name].double()
        error = (value.double() - expected).norm()
        # With one class it is only rounding error.
        assert error <= limit * max(expected.norm(), 1e-3), name


@cases.pairwise(vocab=SMALL + LARGE, t_dtype=T_DTYPES, save=cases.SAVES)
def test_probabilities_read_once(device, vocab, t_dtype, save):
    skip_long_rows(device, vocab)
    once = soften(make(device, vocab), t_dtype)
    twice = cases.Case(once.input, once.linear_weight, once.target.double())
    results = [
        cases.outcome(flce.linear_cross_entropy, case, wants=WANTS, save=save)
        for case in (once, twice)
    ]
    agree(*results, torch.bfloat16)


@pytest.mark.parametrize("dtype", AGREEMENT, ids=str)
@pytest.mark.parametrize("vocab", SMALL + LARGE)
def test_probabilities_with_every_option(device, vocab, dtype):
    skip_long_rows(device, vocab)
    case = soften(make(device, vocab, dtype, bias=True), torch.float32)
    case = case.with_options(**every_option(device, vocab, classes=False))
    yardstick = cases.Yardstick(case, cancels=True)
    results = cases.outcome(flce.linear_cross_entropy, case, save="grads")
    yardstick.check(results)
    twice = cases.Case(case.input, case.linear_weight, case.target.double(), case.options)
    agree(results, cases.outcome(flce.linear_cross_entropy, twice, save="grads"), dtype)


@cases.pairwise(vocab=SMALL + LARGE, dtype=list(AGREEMENT), bound=[None, TOKENS - TOKENS // 3])
def test_classes_with_every_option(device, vocab, dtype, bound):
    """Softcap with smoothing has form dz; every third row is ignored and contains NaN."""
    skip_long_rows(device, vocab)
    case = cases.ignore_some(make(device, vocab, dtype, bias=True), every=3)
    case = case.with_options(**every_option(device, vocab))
    yardstick = cases.Yardstick(case, cancels=True)
    results = cases.outcome(flce.linear_cross_entropy, case, save="grads", valid_bound=bound)
    yardstick.check(results)


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("vocab", SMALL + LARGE)
def test_smoothing(device, vocab, save):
    """Smoothing without class weights has its own row kernel, and affects all rows of dW."""
    skip_long_rows(device, vocab)
    case = cases.ignore_some(make(device, vocab)).with_options(label_smoothing=0.2)
    yardstick = cases.Yardstick(case, wants=WANTS, cancels=True)
    yardstick.check(cases.outcome(flce.linear_cross_entropy, case, wants=WANTS, save=save))


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("vocab", [129, 50257, 128256])
def test_masked_columns(device, vocab, save):
    """Whole spans of a row are -inf, with probability 0: they add nothing and get no gradient."""
    skip_long_rows(device, vocab)
    case = soften(make(device, vocab), torch.bfloat16)
    bias = torch.zeros(vocab, device=device)
    bias[: vocab // 2] = -torch.inf
    t = case.target.clone()
    t[:, : vocab // 2] = 0.0
    masked = cases.Case(case.input, case.linear_weight, t, {"linear_bias": bias})
    cut = cases.Case(case.input, case.linear_weight[vocab // 2 :], t[:, vocab // 2 :])
    got, expected = (
        cases.outcome(flce.linear_cross_entropy, c, wants=WANTS, save=save) for c in (masked, cut)
    )
    assert (got["linear_weight"][: vocab // 2] == 0).all()
    got["linear_weight"] = got["linear_weight"][vocab // 2 :]
    limit = 4e-3 if device == "cpu" else 2e-3
    for name in ("loss", *WANTS):
        assert cases.relative_error(got[name], expected[name].double()) <= limit, name


@pytest.mark.parametrize("save", ["logits", "stats"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"temperature": 2.0}], ids=str)
def test_rows_of_minus_infinity(device, dtype, save, options):
    """All logits of a row are -inf: so is its lse, and its predicted class is 0, as in torch."""
    case = make(device, 1000, dtype)
    x, w, y = case.input, case.linear_weight, case.target
    x, w[:, 0] = torch.zeros_like(x), 1.0
    x[5, 0] = -torch.inf
    x, w = x.requires_grad_(), w.requires_grad_()
    wants = {"return_lse": True, "return_entropy": True, "return_predictions": True}
    for returns in ({"return_lse": True}, wants):
        made = flce.linear_cross_entropy(x, w, y, reduction="none", save=save, **options, **returns)
        assert made.lse[5] == -torch.inf
        assert made.loss[5].isnan() or made.loss[5] == torch.inf
        assert (made.lse.isfinite() == made.loss.isfinite()).all()
        if made.predictions is not None:
            assert made.predictions[5] == 0
            others = torch.arange(TOKENS, device=device) != 5  # their logits are all 0
            assert (made.entropy[others] - math.log(1000)).abs().max() < 1e-4


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab", [7, 1000, 50257, 128256])
def test_bad_logits_stay_in_their_row(device, vocab, bad, save):
    skip_long_rows(device, vocab)
    case = soften(make(device, vocab), torch.bfloat16)
    clean = cases.outcome(
        flce.linear_cross_entropy, case, wants=("input",), save=save, reduction="sum"
    )
    x = case.input.clone()
    x[5, 3] = bad
    case = cases.Case(x, case.linear_weight, case.target)
    broken = cases.outcome(
        flce.linear_cross_entropy, case, wants=("input",), save=save, reduction="sum"
    )
    others = torch.arange(TOKENS, device=device) != 5
    assert broken["loss"].isnan()
    assert broken["input"][5].isnan().all()
    # Not bitwise: the CPU's GEMM may sum a tile with a bad row in another order.
    expected = clean["input"][others].double()
    assert cases.relative_error(broken["input"][others], expected) <= AGREEMENT[torch.bfloat16]


@pytest.mark.parametrize("vocab", [1000, 50257, 128256])
def test_runs_repeat_bit_for_bit(device, vocab):
    """The order of a row's sums depends on the vocabulary only."""
    skip_long_rows(device, vocab)
    case = soften(make(device, vocab), torch.bfloat16)
    knobs = {"wants": ("input",), "save": "grads", "return_lse": True, "return_entropy": True}
    whole, again, parts = (
        cases.outcome(flce.linear_cross_entropy, case, max_memory=budget, **knobs)
        for budget in ("1GiB", "1GiB", 5 * vocab * 4 + 4096)
    )
    assert cases.same_bits(whole, again)
    for name in ("lse", "entropy"):  # the GEMM may sum in another order for fewer rows
        assert cases.relative_error(whole[name], parts[name].double()) <= 1e-5, name
