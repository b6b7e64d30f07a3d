"""float16, whose range is small: gradients that are made before grad_output is known."""

import functools

import pytest
import torch

import flce
from harness import cases

HALF = torch.float16
SCALE = 65536.0  # the initial scale of a GradScaler


def draw(device, tokens=700, vocab=1003, std=1.0):
    hidden = 1024 if device == "cuda" else 128  # with smaller H no fused kernel accepts float16
    return cases.make_case(tokens, hidden, vocab, dtype=HALF, device=device, std=std)


def truth_of(case, **options):
    wide = case.to(torch.float64).with_options(**options)
    return cases.outcome(flce.reference.linear_cross_entropy, wide)


def scaled_outcome(case, scale=SCALE, **options):
    results = cases.outcome(
        flce.linear_cross_entropy,
        case,
        grad_output=torch.tensor(scale, device=case.input.device),
        **options,
    )
    grads = {name: results[name].double() / scale for name in ("input", "linear_weight")}
    return {"loss": results["loss"], **grads}


def assert_close(results, truth, bar=cases.F16_BAR):
    assert abs(results["loss"] - truth["loss"]) <= 2e-5 * truth["loss"]
    for name in ("input", "linear_weight"):
        error = cases.relative_error(results[name], truth[name])
        assert error <= bar, f"{name}: {error:.2e}"


@cases.pairwise(
    save=["auto", *cases.SAVES], scale=[1.0, SCALE, 3000.0], kernel=["auto", "gemm", "fused"]
)
def test_scaled_gradients(device, monkeypatch, save, scale, kernel):
    monkeypatch.setenv("FLCE_KERNEL", kernel)
    case = draw(device)
    truth = truth_of(case)
    for budget in ("1GiB", 300 * 1024 * 4):
        results = scaled_outcome(case, scale, save=save, max_memory=budget)
        assert_close(results, truth, cases.F16_BAR + rounding(truth, scale))


def rounding(truth, scale=1.0):
    """The error of the exact gradients in float16: large below its normal numbers."""
    exact = [truth[name] * scale for name in ("input", "linear_weight")]
    return max(cases.relative_error(grad.half(), grad) for grad in exact)


@cases.pairwise(
    save=cases.SAVES,
    reduction=["mean", "none"],
    options=[{"label_smoothing": 0.1, "logit_scale": 0.25}, {"softcap": 5.0, "z_loss": 0.01}, {}],
    bias=[False, True],
)
def test_small_gradients_without_a_loss_scale(device, save, reduction, options, bias):
    """dz is below float16's normal numbers, and dW is not, or hardly."""
    if (save, reduction) == ("grads", "none"):
        return
    case = cases.make_case(130, 64, 129, dtype=HALF, device=device, bias=bias)
    case.target[::7] = -1
    weight = torch.rand(129, device=device) * 0.02
    options = {**options, "weight": weight, "ignore_index": -1, "reduction": reduction}
    grad = torch.rand((130,) if reduction == "none" else (), device=device) * 1e-4 + 1e-4
    truth = cases.outcome(
        flce.reference.linear_cross_entropy,
        case.to(torch.float64).with_options(**options),
        grad_output=grad.double(),
    )
    results = cases.outcome(
        flce.linear_cross_entropy, case.with_options(**options), grad_output=grad, save=save
    )
    for name in ("input", "linear_weight", *(("linear_bias",) if bias else ())):
        error = cases.relative_error(results[name], truth[name])
        own = cases.relative_error(truth[name].half(), truth[name])
        assert error <= cases.F16_BAR + 1.5 * own, f"{name}: {error:.2e}, rounding {own:.2e}"


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_frequent_class_and_a_large_feature(device, save, reduction):
    """The largest sums of dW leave the other columns their accuracy."""
    case = draw(device, tokens=3000)
    case.target.fill_(5)
    case.input[:, 7] = 500.0 + case.input[:, 7].abs()
    scale = 16.0 if reduction == "mean" else 1.0 / 64.0
    results = scaled_outcome(case, scale, save=save, reduction=reduction)
    truth = truth_of(case, reduction=reduction)
    assert bool(results["linear_weight"].isfinite().all())
    others = torch.arange(case.input.shape[1], device=device) != 7
    for part in (others, ~others):
        true = truth["linear_weight"][5, part]
        error = cases.relative_error(results["linear_weight"][5, part], true)
        assert error <= 2e-3, f"{error:.2e}"


@pytest.mark.parametrize("save", cases.SAVES)
def test_small_inputs_and_ignored_rows(device, save):
    """Ignored rows do not influence the unit either, including NaN and large numbers in them."""
    case = draw(device)
    case.input.mul_(2.0**-12)
    case.linear_weight.mul_(2.0**6)
    case = cases.ignore_some(case)
    case.input[3] = 60000.0
    results = scaled_outcome(case, save=save)
    truth = truth_of(case)
    kept = case.target != -100
    results["input"], truth["input"] = results["input"][kept], truth["input"][kept]
    assert_close(results, truth)


@pytest.mark.parametrize("options", [{}, {"accum_dtype": torch.float32}, {"label_smoothing": 0.1}])
def test_the_graph_is_kept(device, options):
    """A second backward, with another factor, gives the same gradients times that factor."""
    case = draw(device)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = flce.linear_cross_entropy(x, w, case.target, save="grads", **options)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(1024.0, device=device), True)
    second = torch.autograd.grad(loss, (x, w), torch.tensor(4096.0, device=device), True)
    for one, other in zip(first, second, strict=True):
        assert cases.relative_error(other, 4.0 * one.double()) <= 1e-3
    third = torch.autograd.grad(loss, (x, w), torch.tensor(4096.0, device=device))
    assert all(torch.equal(one, other) for one, other in zip(second, third, strict=True))


def test_too_large_a_gradient_is_infinite(device):
    case = draw(device)
    w = case.linear_weight.requires_grad_()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**30)
    scaler.scale(flce.linear_cross_entropy(case.input, w, case.target)).backward()
    assert bool(w.grad.isinf().any())


@pytest.mark.parametrize("probabilities", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("save", ["logits", "grads"])
def test_probabilities(device, save, probabilities):
    case = draw(device)
    noise = torch.randn(700, 1003, generator=cases.generator(3)).to(device)
    case.target = (2.0 * noise).softmax(-1).to(probabilities)
    call = functools.partial(scaled_outcome, case, save=save)
    assert_close(call(), truth_of(case), 2e-3)
