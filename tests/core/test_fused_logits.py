"""Hopper's fused logits GEMM where it also writes the logits, for losses whose gradient is no
row factor times exp(l): probabilities, a differentiable entropy, softcap with smoothing."""

import functools
import math

import pytest
import torch

import flce
from harness import cases
from harness.gpu import captured
from harness.hopper import BF16, ONLY, assert_close, assert_near, launches, results, truth
from harness.hopper import draw_noise as draw

pytestmark = ONLY
DTYPES = [BF16, torch.float16, torch.float32, torch.float64]


def kernel_of(hidden=1024, **settings):
    return flce.plan(256, hidden, 512, dtype=BF16, device="cuda", **settings).kernel


def test_it_serves_where_the_plan_says(monkeypatch):
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    for save in ("logits", "grads"):
        assert kernel_of(probabilities=True, save=save) == "fused"
        assert kernel_of(probabilities=True, save=save, logits_dtype=BF16) == "gemm"
        assert kernel_of(softcap=3.0, label_smoothing=0.1, save=save) == "fused"
    nothing = {"grad_input": False, "grad_weight": False}
    assert kernel_of(probabilities=True, **nothing) == "fused"
    # The backward would recompute the logits with another GEMM.
    assert kernel_of(probabilities=True, save="stats") == "gemm"
    assert kernel_of(softcap=3.0, label_smoothing=0.1, save="stats") == "fused"
    assert kernel_of(1020, probabilities=True) == "fused"
    # With a small H the GEMM is too short to hide the writes of z.
    assert kernel_of(1016, probabilities=True, save="grads") == "gemm"
    assert kernel_of(1016, probabilities=True, **nothing) == "fused"
    for option in ({"softcap": 3.0}, {"label_smoothing": 0.1}, {"return_entropy": True}):
        assert kernel_of(probabilities=True, **option) == "gemm"
    monkeypatch.setenv("FLCE_KERNEL", "gemm")
    assert kernel_of(probabilities=True) == "gemm"


@pytest.mark.parametrize("vocab", [7, 191, 192, 193, 200, 3001, 3008])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_probabilities(vocab, dtype):
    for tokens in (1, 129, 700):
        x, w, noise = draw(tokens, 1032, vocab)
        t = noise.softmax(-1).to(dtype)
        few = tokens == 1 or vocab < 64
        chunks = {"max_memory": 128 * (vocab + 8) * 4, "accum_dtype": torch.float32}
        for options in ({"save": "logits"}, {"save": "grads"}, {"save": "grads", **chunks}):
            made = results(x, w, t, **options)
            assert_close(made, truth(x, w, t), 6e-3 if few else 2.6e-3)


CLASSES = 1000
OPTIONS = {  # and whether the fused GEMM supports them with probabilities
    "scale": ({"logit_scale": 0.7, "temperature": 1.3}, True),
    "z-loss": ({"z_loss": 1e-2}, True),
    "token weight": ({"token_weight": torch.linspace(0.0, 2.0, 400)}, True),
    "smoothing": ({"label_smoothing": 0.2}, False),
    "softcap": ({"softcap": 4.0}, False),
    "negative scale": ({"logit_scale": -0.7}, False),
    "class weights": ({"weight": torch.linspace(-0.3, 1.0, CLASSES).clamp(min=0.0)}, False),
}


@pytest.mark.parametrize("kind", ["logits", "grads", "grads, bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_beside_probabilities(name, kind):
    """Plus a bias with its gradient, a differentiable lse, and rows whose sum is not 1."""
    x, w, noise = draw(400, 1024, CLASSES)
    t = noise.softmax(-1) * torch.linspace(0.0, 3.0, 400, device="cuda")[:, None]
    t = t.to(BF16 if "bfloat16" in kind else t.dtype)
    save = kind.split(",")[0]
    options = {k: v.cuda() if torch.is_tensor(v) else v for k, v in OPTIONS[name][0].items()}
    bias = torch.linspace(-2.0, 2.0, CLASSES, device="cuda")
    chunks = {"max_memory": "1MiB", "accum_dtype": torch.float32, "save": save}
    made = outcome(flce.linear_cross_entropy, x, w, t, bias, save != "grads", **chunks, **options)
    wide = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    operands = (one.double() for one in (x, w, t, bias))
    reference = flce.reference.linear_cross_entropy
    expected = outcome(reference, *operands, save != "grads", **wide)
    for value, true in zip(made[:2], expected[:2], strict=True):
        assert bool(((value.double() - true).abs() <= 1e-5 * true.abs() + 2e-5).all())
    assert_near(made[2:], expected[2:], 2.6e-3)


def outcome(function, x, w, t, bias, differentiates_lse, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    given = {"linear_bias": leaves[2], "return_lse": True, **options}
    made = function(*leaves[:2], t, **given)
    total = made.loss + 1e-3 * made.lse.mean() if differentiates_lse else made.loss
    return made.loss.detach(), made.lse.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_product_takes_these_options(monkeypatch, name):
    """Tested by what the forward launches without it: a plan does not know every option."""
    x, w, noise = draw(400, 1024, CLASSES)
    t = noise.softmax(-1)
    options = {k: v.cuda() if torch.is_tensor(v) else v for k, v in OPTIONS[name][0].items()}
    kernels = []
    for kernel in ("auto", "gemm"):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        call = functools.partial(flce.linear_cross_entropy, x, w, t, **options)
        kernels.append(launches(call, "logits_gemm_sm90") != [0])
    assert kernels == [OPTIONS[name][1], False]


@pytest.mark.parametrize("far", [0.5, 3.0, 20.0, 90.0])
def test_logits_far_from_the_probed_ones(far):
    """A row's offset comes from four columns' logits, V / 4 apart: rows are recomputed."""
    x, w, noise = draw(300, 1024, 4096)
    level = torch.full((4096,), far, device="cuda")
    level[torch.arange(4) * 1024] = -far
    level[5:300] = -4 * far
    bias = level.to(BF16).float()
    t = noise.softmax(-1).to(BF16)
    made = results(x, w, t, linear_bias=bias.requires_grad_(), save="grads")
    expected = truth(x, w, t, bias.detach())
    true = expected[0].mean()
    assert abs(made[0] - true) <= 1e-5 * true
    assert_near(made[1:], expected[1:], 2.6e-3)


def test_classes_ruled_out_have_no_gradient():
    """Classes with a bias of -inf have p = 0, and dz = 0 if their probability is 0."""
    x, w, noise = draw(300, 1024, 5000)
    bias = torch.zeros(5000, device="cuda")
    bias[7:4001] = -math.inf
    t = noise.softmax(-1).to(BF16)
    t[:, 7:4001] = 0.0
    w.requires_grad_()
    (dw,) = torch.autograd.grad(
        flce.linear_cross_entropy(x, w, t, linear_bias=bias, save="grads"), w
    )
    assert not dw[7:4001].any() and bool(dw[:7].any()) and bool(dw.isfinite().all())


@cases.pairwise(
    top=[10, 14, 17, 20, 60, 200, 1000, 4000], save=["logits", "grads"], dtype=[BF16, torch.float32]
)
def test_certain_rows_leave_nothing(top, save, dtype):
    hidden, vocab = 1024, 3008
    x = torch.zeros(256, hidden, device="cuda", dtype=BF16)
    rows = torch.arange(256, device="cuda")
    x[rows, rows % 4] = 1.0
    w = torch.zeros(vocab, hidden, device="cuda", dtype=BF16)
    w[torch.arange(4) * 700, torch.arange(4)] = float(top)
    t = torch.nn.functional.one_hot(rows % 4 * 700, vocab).to(dtype)
    loss, dx, dw = results(x, w, t, save=save)
    true, true_dx, true_dw = truth(x, w, t)
    true = true if loss.dim() else true.mean()
    assert bool(((loss.double() - true).abs() <= 2e-6 + 1e-7 * top).all())
    bar = (2e-6 + 1e-7 * top) * max(top, 1) / 256
    # Otherwise dz and its GEMM are rounded to bfloat16, in all rows alike.
    assert (dx.double() - true_dx).abs().max() <= bar + 6e-3 * true_dx.abs().max()
    assert (dw.double() - true_dw).abs().max() <= 2e-6 + 1e-7 * top + 6e-3 * true_dw.abs().max()


def test_a_mixed_target_equal_to_the_softmax():
    """Two classes of probability 1/2, which bfloat16 holds exactly; p - t is p / 16."""
    hidden, vocab = 1024, 3008
    rows = torch.arange(256, device="cuda")
    x = torch.zeros(256, hidden, device="cuda", dtype=BF16)
    x[rows, rows % 4] = 1.0
    w = torch.zeros(vocab, hidden, device="cuda", dtype=BF16)
    w[torch.arange(8) * 300, torch.arange(8) % 4] = 20.3
    w[torch.arange(4) * 300, torch.arange(4)] = 20.4
    t = torch.zeros(256, vocab, device="cuda", dtype=BF16)
    t[rows, rows % 4 * 300] = t[rows, (rows % 4 + 4) * 300] = 0.5
    dw, true = results(x, w, t, save="grads")[2], truth(x, w, t)[2]
    assert cases.relative_error(dw, true) <= 6e-3


@pytest.mark.parametrize("level", [1e5, 1e6, 1e7])
def test_logits_that_are_all_far_from_zero(level):
    """The remainder of a rounded lse still cancels against sum t."""
    x = torch.ones(64, 1024, device="cuda", dtype=BF16)
    w = torch.zeros(3001, 1024, device="cuda", dtype=BF16)
    w[:, 0] = level
    t = torch.full((64, 3001), 1 / 3001, device="cuda")
    dx = results(x, w, t, save="logits")[1]
    assert dx.abs().max() <= 1e-5 * level / 64


@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_a_target_near_the_softmax(save):
    """p - t is a small part of p: rounding p itself would lose it."""
    x, w, noise = draw(512, 1024, 3001, std=8.0)
    t = (x.double() @ w.double().T + 1e-2 * noise.double()).softmax(-1)
    made = results(x, w, t, save=save)
    assert_close(made, truth(x, w, t), 3e-3)


@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_padding_is_never_read(save):
    x, w, noise = draw(300, 1024, 700)
    t = torch.full((300, 1000), math.nan, device="cuda", dtype=BF16)
    # Column 700 lies within the eight columns that a lane reads at once.
    t[:, :700] = noise.softmax(-1)
    padded = torch.full((1000, 1024), math.nan, device="cuda", dtype=BF16)
    padded[:700] = w
    loss, dx, dw = results(x, padded, t, valid_vocab=700, save=save)
    assert not dw[700:].any()
    assert_close((loss, dx, dw[:700]), truth(x, w, t[:, :700]))


def test_logits_far_above_the_sampled_ones():
    x, w, noise = draw(600, 1024, 5000)
    x[::7] *= 300.0
    x[3] *= 1000.0
    t = noise.softmax(-1)
    made = results(x, w, t)
    assert all(bool(value.isfinite().all()) for value in made)
    assert_close(made, truth(x, w, t))


@pytest.mark.parametrize("masked", [slice(0, 4000), slice(1, 5000), slice(0, 5000)])
def test_classes_ruled_out(masked):
    """p = 0 by a bias of -inf in the columns of a row's first offset, all but one, and all."""
    x, w, noise = draw(300, 1024, 5000)
    bias = torch.zeros(5000, device="cuda")
    bias[masked] = -math.inf
    t = noise.softmax(-1)
    t[:, masked] = 0.0
    loss = flce.linear_cross_entropy(x, w, t, linear_bias=bias, reduction="none")
    if masked == slice(0, 5000):
        assert bool(loss.isnan().all())
        return
    logits = (x.double() @ w.double().T + bias.double()).log_softmax(-1)
    logits[:, masked] = 0.0
    expected = -(t.double() * logits).sum(-1)
    assert bool(((loss - expected).abs() <= 1e-5 * expected + 1e-5).all())


def test_not_a_number_stays_in_its_row():
    x, w, noise = draw(300, 1024, 1000)
    t = noise.softmax(-1)
    x[7], t[9, 30] = math.nan, math.nan
    loss = flce.linear_cross_entropy(x, w, t, reduction="none")
    bad = torch.zeros(300, dtype=torch.bool, device="cuda")
    bad[[7, 9]] = True
    assert bool(loss[bad].isnan().all()) and bool(loss[~bad].isfinite().all())


@pytest.mark.parametrize("save", ["logits", "grads"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_bitwise_repeatable(dtype, save):
    x, w, noise = draw(1500, 1024, 50264)
    t = noise.softmax(-1).to(dtype)
    first, second = (results(x, w, t, save=save) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


KINDS = {
    "entropy": {"entropy": True},
    "entropy of probabilities": {"entropy": True, "soft": True},
    "entropy with softcap": {"entropy": True, "softcap": 5.0, "logit_scale": -1.1},
    "entropy with temperatures": {"entropy": True, "temperature": 1.5},
    "softcap with smoothing": {"softcap": 5.0, "label_smoothing": 0.1},
}


@cases.pairwise(kind=list(KINDS), save=["logits", "stats"], bound=[False, True])
def test_both_kernels_agree(monkeypatch, kind, save, bound):
    x, w, noise = draw(700, 1032, 3001)
    options = dict(KINDS[kind])
    entropy, soft = options.pop("entropy", False), options.pop("soft", False)
    y = torch.randint(3001, (700,), device="cuda")
    y[::3] = -100
    if bound and not soft:
        options["valid_bound"] = int((y >= 0).sum()) + 5
    target = noise.softmax(-1) if soft else y
    bias = torch.randn(3001, device="cuda")
    outputs = ("lse", "entropy", "predictions") if entropy else ("lse", "predictions")
    made = []
    for kernel in ("auto", "gemm"):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_(), bias.requires_grad_()
        result = flce.linear_cross_entropy(
            *leaves[:2],
            target,
            linear_bias=leaves[2],
            save=save,
            max_memory="2MiB",
            **{f"return_{name}": True for name in outputs},
            **options,
        )
        total = result.loss + (0.3 * result.entropy.mean() if entropy else 0.0)
        values = [result.loss, result.lse, *([result.entropy] if entropy else [])]
        made.append([values, result.predictions, torch.autograd.grad(total, leaves)])
    (values, predictions, gradients), (other_values, other_predictions, others) = made
    for value, other in zip(values, other_values, strict=True):
        torch.testing.assert_close(value, other, rtol=4e-6, atol=4e-6)
    assert torch.equal(predictions, other_predictions)
    assert_near(gradients, others, 4e-3)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_captured_step_repeats(dtype):
    x, w, noise = draw(512, 1024, 5000)
    t = noise.softmax(-1).to(dtype)
    expected = results(x, w, t, save="grads")
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step():
        loss = flce.linear_cross_entropy(*leaves, t, save="grads")
        return loss, *torch.autograd.grad(loss, leaves)

    graph, made = captured(step)
    for _ in range(2):
        graph.replay()
    for value, other in zip(made, expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("save", ["logits", "grads"])
def test_more_than_2_31_probabilities(save):
    tokens, vocab = 17000, 128256
    assert tokens * vocab > 2**31
    x, w, _ = draw(tokens, 1024, 8)
    w = draw(vocab, 1024, 8, seed=1)[0] / 32
    t = torch.rand(tokens, vocab, device="cuda", dtype=BF16).mul_(2.0 / vocab)
    t[-1, -1] = 0.5
    x.requires_grad_()
    rows = torch.tensor([0, 16999], device="cuda")
    reduction = "sum" if save == "grads" else "none"
    loss = flce.linear_cross_entropy(x, w, t, save=save, reduction=reduction)
    (dx,) = torch.autograd.grad(loss.sum(), (x,))
    logits = x[rows].double() @ w.double().T
    soft = t[rows].double()
    expected = -(soft * logits.log_softmax(-1)).sum(-1)
    if save == "logits":
        assert bool(((loss[rows] - expected).abs() <= 1e-5 * expected).all())
    p = logits.softmax(-1) * soft.sum(-1, keepdim=True)
    assert cases.relative_error(dx[rows], (p - soft) @ w.double()) <= 6e-3
