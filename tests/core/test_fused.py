"""Hopper's own kernels: E in the epilogue of the logits GEMM, and the dW GEMM with the sums of
db. They are compared with the separate GEMMs and passes that they replace; the rest of the
suite also runs with them on a GPU that supports them."""

import itertools
import math

import pytest
import torch

import flce
from harness import cases
from harness.hopper import BF16, ONLY, assert_close, assert_near, draw, launches, results, truth

pytestmark = ONLY


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    """Selects Hopper's kernels also where "auto" selects cuBLASLt's, as for few rows."""
    monkeypatch.setenv("FLCE_KERNEL", "fused")


def kernel_of(**settings):
    return flce.plan(256, 64, 512, dtype=BF16, device="cuda", **settings).kernel


def test_it_serves_where_the_plan_says(monkeypatch):
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    assert kernel_of() == kernel_of(save="logits") == kernel_of(softcap=30.0) == "fused"
    assert flce.plan(256, 64, 512, dtype=torch.float32, device="cuda").kernel == "gemm"
    assert flce.plan(256, 60, 512, dtype=BF16, device="cuda").kernel == "fused"
    half = {"dtype": torch.float16, "device": "cuda", "save": "grads"}
    assert flce.plan(256, 64, 512, **half).kernel == "gemm"
    assert flce.plan(256, 1024, 512, **half).kernel == "fused"
    # The fused GEMM always computes 256 rows; with fewer rows cuBLASLt computes less.
    assert flce.plan(192, 64, 512, dtype=BF16, device="cuda").kernel == "gemm"
    assert flce.plan(193, 64, 512, dtype=BF16, device="cuda").kernel == "fused"
    monkeypatch.setenv("FLCE_KERNEL", "fused")
    assert flce.plan(1, 8, 1, dtype=BF16, device="cuda").kernel == "fused"
    assert flce.plan(1, 8, 1, **half).kernel == "fused"
    monkeypatch.setenv("FLCE_KERNEL", "gemm")
    assert kernel_of() == "gemm"
    monkeypatch.setenv("FLCE_KERNEL", "fastest")
    expected = 'FLCE_KERNEL: expected "auto", "gemm" or "fused", got "fastest"'
    with pytest.raises(ValueError, match=expected):
        kernel_of()


OWN_KERNELS = ("logits_gemm_sm90", "grad_weight_gemm_sm90", "exp_rows", "finish_grad_input")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_the_kernels_that_run(monkeypatch, save, with_bias):
    """Of each FLCE_KERNEL its own, so that the comparisons here compare different code."""
    x, w, y = draw(300, 64, 999)
    x.requires_grad_(), w.requires_grad_()
    bias = torch.randn(999, device="cuda", requires_grad=with_bias) if with_bias else None

    def call():
        flce.linear_cross_entropy(x, w, y, linear_bias=bias, save=save).backward()

    def ran(kernel):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        call()  # initialisation is not counted
        return launches(call, *OWN_KERNELS)

    assert launches(call, *OWN_KERNELS)[3] == 1  # checks that the profiler sees kernels at all
    for kernel in ("auto", "fused"):
        product, weight, rows, _ = ran(kernel)
        # The second launch recomputes the rows that need another offset.
        assert (product, weight, rows) == (2, int(with_bias), 0)
    assert ran("gemm")[:3] == [0, 0, 0 if save == "stats" else 1]


@pytest.mark.parametrize("vocab", [1, 7, 64, 191, 192, 193, 50257])
@pytest.mark.parametrize("hidden", [8, 64, 768, 1000, 4096])
def test_ragged_sizes(vocab, hidden):
    for tokens in (1, 127, 128, 129, 4097):
        x, w, y = draw(tokens, hidden, vocab)
        made = results(x, w, y)
        if vocab == 1:
            assert not any(value.any() for value in made)
            continue
        # With a single row, or few columns, rounding errors do not average out.
        few = tokens == 1 or vocab < 64
        assert_close(made, truth(x, w, y), 6e-3 if few else 2.6e-3)


@pytest.mark.parametrize("vocab", [7, 64, 191, 192, 193, 50257])
@pytest.mark.parametrize("hidden", [8, 128, 136, 768, 1000, 4096])
def test_bias_gradient_of_the_weight_product(vocab, hidden):
    for tokens in (1, 63, 64, 65, 1000):
        x, w, y = draw(tokens, hidden, vocab)
        bias = torch.randn(vocab, device="cuda", requires_grad=True)
        # With few rows or columns rounding errors do not average out.
        few = tokens < 100 or vocab <= 64
        expected = truth(x, w, y, bias.detach())
        for budget in (None, 300 * (vocab + 8) * 4):
            *made, db = results(x, w, y, linear_bias=bias, max_memory=budget)
            assert_close(made, expected[:3], 6e-3 if few else 2.6e-3)
            assert cases.relative_error(db, expected[3]) <= (6e-3 if vocab < 64 else 2.6e-3)


@cases.pairwise(vocab=[7, 193, 3001], hidden=[8, 136, 1160], save=["logits", "grads"])
def test_no_term_of_the_bias_gradient_is_lost(vocab, hidden, save):
    """Logits of 0: E is one power of two, db_j = sum_i c_i (1/V - [y_i = j])."""
    for tokens in (1, 63, 64, 65, 700):
        _, _, y = draw(tokens, 8, vocab)
        x = torch.zeros(tokens, hidden, device="cuda", dtype=BF16, requires_grad=True)
        w = torch.randn(vocab, hidden, device="cuda").to(BF16).requires_grad_()
        bias = torch.zeros(vocab, device="cuda", requires_grad=True)
        c = torch.rand(tokens, device="cuda") + 0.5
        ones = torch.nn.functional.one_hot(y, vocab).double()
        expected = (c.double()[:, None] * (1 / vocab - ones)).sum(0)
        for budget in (None, 128 * (vocab + 8) * 2):
            loss = flce.linear_cross_entropy(
                x,
                w,
                y,
                linear_bias=bias,
                token_weight=c,
                reduction="sum",
                save=save,
                max_memory=budget,
            )
            (db,) = torch.autograd.grad(loss, (x, w, bias))[2:]
            assert (db.double() - expected).abs().max() <= 2e-6 * c.sum() / vocab + 1e-6


def test_weight_and_bias_gradients_read_e_once():
    def parts(**settings):
        plan = flce.plan(4096, 1024, 50257, dtype=BF16, device="cuda", bias=True, **settings)
        return plan.buffers.get("db_parts", 0)

    assert parts() == parts(save="logits") == 8 * 50257 * 4
    assert parts(accum_dtype=torch.float32) == 0
    assert parts(grad_weight=False) == parts(accumulate_into="main_grad") == 0
    assert flce.plan(4096, 1024, 50257, dtype=BF16, device="cuda").buffers.get("db_parts") is None


def test_chunks_of_one_step_repeat():
    """Tiles of dW with one k step: of both warpgroups in flight, with old and new values."""
    x, w, y = draw(250, 128, 50257)
    bias = torch.randn(50257, device="cuda", requires_grad=True)
    budget = 64 * 50264 * 2
    first = results(x, w, y, linear_bias=bias, max_memory=budget, save="stats")
    assert_close(first, truth(x, w, y, bias.detach()), 6e-3)
    x.requires_grad_(), w.requires_grad_()
    made = []
    for _ in range(6):
        loss = flce.linear_cross_entropy(x, w, y, linear_bias=bias, max_memory=budget, save="grads")
        made.append(torch.autograd.grad(loss, (x, w, bias)))
    for other in made:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))
    assert_near(made[0], first[1:], 6e-3)


@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
@pytest.mark.parametrize("ignored", [0.0, 0.6])
def test_bias_gradient_of_chunks(monkeypatch, save, ignored):
    monkeypatch.setenv("FLCE_BLOCKS", "0")  # of chunks of all classes
    x, w, y = draw(1500, 512, 3001, seed=3)
    y[torch.rand(1500, device="cuda") < ignored] = -100
    valid = int((y >= 0).sum())
    bias = torch.randn(3001, device="cuda", requires_grad=True)
    made = []

    def call():
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_(), bias
        loss = flce.linear_cross_entropy(
            *leaves[:2], y, linear_bias=bias, save=save, max_memory="2MiB", valid_bound=valid
        )
        made.append(torch.autograd.grad(loss, leaves))

    for kernel in ("fused", "gemm"):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        assert (launches(call, "grad_weight_gemm_sm90")[0] > 0) == (kernel == "fused")
    assert_near(*made, 4e-3)


@pytest.mark.parametrize("std", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_errors_do_not_grow_with_the_logits(std, save):
    x, w, y = draw(2048, 1024, 32000, std)
    x.requires_grad_(), w.requires_grad_()
    loss = flce.linear_cross_entropy(x, w, y, save=save, max_memory="32MiB")
    dx, dw = torch.autograd.grad(loss, (x, w))
    expected = truth(x.detach(), w.detach(), y)
    assert abs(loss.item() - expected[0].mean().item()) <= 1e-5 * loss.item()
    bar = {1.0: 1.9e-3, 4.0: 2.2e-3, 8.0: 2.6e-3}[std]
    assert_near((dx, dw), expected[1:], bar)


@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_far_above_the_target(with_bias):
    """Rows whose first offset is too low are recomputed from their largest logit."""
    x, w, y = draw(600, 64, 5000)
    bias = 3 * torch.randn(5000, device="cuda") if with_bias else None
    x[::7] *= 300.0
    x[3] *= 1000.0
    expected = truth(x, w, y, bias)
    assert expected[0].max() > 900.0
    made = results(x, w, y, linear_bias=bias)
    assert all(bool(value.isfinite().all()) for value in made)
    assert_close(made, expected[:3])


def test_infinite_and_missing_logits():
    """Classes masked by a bias of -inf, a target among them; NaN in an ignored row of x."""
    x, w, y = draw(300, 64, 1000)
    bias = torch.zeros(1000, device="cuda")
    bias[10:400] = -math.inf
    y[:] = 5
    y[7] = 20
    y[8], x[8] = -100, math.nan
    loss = flce.linear_cross_entropy(x, w, y, linear_bias=bias, reduction="none")
    kept = torch.tensor([i for i in range(300) if i not in (7, 8)], device="cuda")
    expected = truth(x[kept], w, y[kept], bias)[0]
    assert bool(((loss[kept] - expected).abs() <= 1e-5 * expected + 1e-5).all())
    assert loss[7] == math.inf and loss[8] == 0.0


def test_operands_that_begin_anywhere():
    """A slice that is aligned to 2 bytes only uses the other kernel."""
    x, w, y = draw(200, 64, 999)
    memory = torch.empty(w.numel() + 1, device="cuda", dtype=BF16)
    shifted = memory[1:].view_as(w)
    shifted.copy_(w)
    bias = torch.randn(999, device="cuda", requires_grad=True)
    assert_close(results(x, shifted, y, linear_bias=bias), truth(x, w, y, bias.detach()))


@pytest.mark.parametrize("moves", ["x to an aligned address", "all to an unaligned address"])
def test_a_backward_whose_tensors_lie_elsewhere(moves):
    """As from hooks: no order of rows and no result may depend on an address."""
    tokens, vocab = 3000, 50257
    x, w, y = draw(tokens, 64, vocab)
    y[torch.rand(tokens, device="cuda") < 0.5] = -100
    kept = y >= 0
    bias = torch.randn(vocab, device="cuda", requires_grad=True)
    offset = 1 if moves == "x to an aligned address" else 0
    memory = torch.empty(x.numel() + 1, device="cuda", dtype=BF16)
    given = memory[offset : offset + x.numel()].view_as(x).copy_(x).requires_grad_()
    w.requires_grad_()

    def elsewhere(tensor):
        if tensor.dtype != BF16 or offset == 1:
            return tensor.clone()
        moved = torch.empty(tensor.numel() + 1, device="cuda", dtype=BF16)[1:]
        return moved.view(tensor.shape).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, elsewhere):
        loss = flce.linear_cross_entropy(given, w, y, linear_bias=bias, save="logits")
        made = torch.autograd.grad(loss, (given, w, bias))
    _, *expected = truth(x[kept], w.detach(), y[kept], bias.detach())
    assert_near((made[0][kept], *made[1:]), expected, 2.6e-3)


OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 8.0},
    "negative scale": {"logit_scale": -0.7},
    "temperature": {"temperature": 1.7},
    "z-loss": {"z_loss": 1e-2},
}


@pytest.mark.parametrize("names", [*((name,) for name in OPTIONS), ("smoothing", "z-loss")])
@pytest.mark.parametrize("save", ["logits", "grads"])
def test_both_kernels_agree(monkeypatch, names, save):
    x, w, y = draw(700, 256, 3001)
    y[::5] = -100
    options = dict(itertools.chain(*(OPTIONS[name].items() for name in names)))
    weight = torch.rand(3001, device="cuda") + 0.5
    weight[::13] = 0.0
    options |= {"weight": weight, "linear_bias": torch.randn(3001, device="cuda"), "save": save}
    outputs = {"return_lse": True, "return_predictions": True, "return_accuracy": True}
    made = []

    def call():
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        result = flce.linear_cross_entropy(a, b, y, **options, **outputs)
        made.append([*result[:5], *torch.autograd.grad(result.loss, (a, b))])

    for kernel in ("fused", "gemm"):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        assert (launches(call, "logits_gemm_sm90")[0] > 0) == (kernel == "fused")
    loss, lse, _, accuracy, predictions, dx, dw = zip(*made, strict=True)
    torch.testing.assert_close(*loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(*lse, rtol=2e-6, atol=2e-6)
    assert torch.equal(*predictions) and torch.equal(*accuracy)
    assert_near(*zip(dx, dw, strict=True), 4e-3)


@cases.pairwise(
    save=cases.SAVES, valid=[0, 1, 700, 1024, 1025, 2900, 3000], with_bias=[False, True]
)
def test_rows_beyond_the_valid_ones_are_skipped(save, valid, with_bias):
    """No bound is given: the kernels determine the number of valid rows themselves."""
    tokens, vocab = 3000, 50257
    x, w, y = draw(tokens, 128, vocab)
    kept = torch.randperm(tokens, device="cuda")[:valid]
    masked = torch.full_like(y, -100)
    masked[kept] = y[kept]
    bias = torch.randn(vocab, device="cuda", requires_grad=True) if with_bias else None
    with_nan = x.clone()
    with_nan[masked < 0] = math.nan
    leaves = (with_nan.requires_grad_(), w.requires_grad_(), bias)[: 2 + with_bias]
    loss = flce.linear_cross_entropy(
        *leaves[:2], masked, linear_bias=bias, save=save, max_memory="128MiB", reduction="sum"
    )
    dx, *others = torch.autograd.grad(loss, leaves)
    assert not dx[masked < 0].any()
    if valid == 0:
        assert loss == 0.0 and not any(value.any() for value in others)
        return
    few = 6e-3 if valid == 1 else 2.6e-3
    true, *gradients = truth(x[kept], w.detach(), y[kept], bias.detach() if with_bias else None)
    assert abs(loss.item() - true.sum().item()) <= 1e-5 * true.sum().item()
    assert_near((dx[kept], *others), [valid * gradient for gradient in gradients], few)
