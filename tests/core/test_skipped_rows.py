"""Rows that Hopper's kernels skip without a bound: outputs, graphs, memory, another kernel."""

import pytest
import torch

import flce
from harness import cases
from harness.gpu import captured
from harness.hopper import BF16, ONLY, assert_near, draw

pytestmark = ONLY

TOKENS, HIDDEN, VOCAB = 3000, 128, 50257  # enough logits that skipping rows pays off


def draw_masked(valid, seed=0):
    x, w, y = draw(TOKENS, HIDDEN, VOCAB)
    random = torch.Generator(device="cuda").manual_seed(seed)
    kept = torch.randperm(TOKENS, generator=random, device="cuda")[:valid].sort().values
    masked = torch.full_like(y, -100)
    masked[kept] = y[kept]
    return x.requires_grad_(), w.requires_grad_(), masked, kept


def skips(save, **outputs):
    plan = flce.plan(TOKENS, HIDDEN, VOCAB, dtype=BF16, save=save, reduction="none", **outputs)
    return plan.kernel == "fused" and "index" in plan.buffers


def true_outputs(x, w, y, kept):
    logits = x[kept].double() @ w.double().T
    lse = logits.logsumexp(-1)
    p = (logits - lse[:, None]).exp()
    loss = lse - logits.gather(1, y[kept][:, None])[:, 0]
    return loss, lse, lse - (p * logits).sum(-1), logits.argmax(-1)


@pytest.mark.parametrize("save", ["auto", "logits", "stats"])
@pytest.mark.parametrize("valid", [1, 700, 1024])
def test_outputs_and_their_gradients(monkeypatch, save, valid):
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    wanted = {"return_lse": True, "return_predictions": True}
    assert skips(save, **wanted)
    x, w, y, kept = draw_masked(valid)
    out = flce.linear_cross_entropy(x, w, y, reduction="none", save=save, **wanted)
    loss, lse, _, top = true_outputs(x, w, y, kept)
    others = torch.ones(TOKENS, dtype=torch.bool, device="cuda")
    others[kept] = False
    for ours, theirs in ((out.loss, loss), (out.lse, lse)):
        torch.testing.assert_close(ours[kept].double(), theirs, rtol=1e-5, atol=1e-4)
        assert not ours[others].any()
    assert torch.equal(out.predictions[kept], top) and (out.predictions[others] == -1).all()

    def gradients(loss, lse):
        total = loss.double().sum() + 0.5 * lse.double().sum()
        return torch.autograd.grad(total / valid, (x, w))

    made = gradients(out.loss, out.lse)
    assert not made[0][others].any()
    assert_near(made, gradients(loss, lse), 6e-3)


@pytest.mark.parametrize("valid", [1, 700, 1024])
def test_entropy(monkeypatch, valid):
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    no_gradients = {"grad_input": False, "grad_weight": False}
    assert skips("auto", return_entropy=True, **no_gradients)
    x, w, y, kept = draw_masked(valid)
    with torch.no_grad():
        out = flce.linear_cross_entropy(x, w, y, reduction="none", return_entropy=True)
        entropy = true_outputs(x, w, y, kept)[2]
    torch.testing.assert_close(out.entropy[kept].double(), entropy, rtol=1e-5, atol=1e-4)
    assert out.entropy.count_nonzero() == valid


@pytest.mark.parametrize("save", cases.SAVES)
def test_graphs_count_anew(monkeypatch, save):
    """The rows that a replay skips depend on the targets of that replay."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    assert save == "grads" or skips(save)  # "grads" refuses the reduction in `skips`
    x, w, y, _ = draw_masked(900)

    def step():
        loss = flce.linear_cross_entropy(x, w, y, save=save, max_memory="64MiB")
        return loss, *torch.autograd.grad(loss, (x, w))

    graph, static = captured(step)
    for seed, valid in enumerate((900, 3000, 0, 1, 2049)):
        y.copy_(draw_masked(valid, seed)[2])
        graph.replay()
        for value, expected in zip(static, step(), strict=True):
            assert torch.equal(value, expected), valid


@pytest.mark.parametrize("save", ["logits", "stats"])
@pytest.mark.parametrize("kernels", [("auto", "gemm"), ("gemm", "auto")])
def test_the_backward_may_have_another_kernel(monkeypatch, save, kernels):
    x, w, y, kept = draw_masked(700)
    monkeypatch.setenv("FLCE_KERNEL", kernels[0])
    loss = flce.linear_cross_entropy(x, w, y, save=save)
    monkeypatch.setenv("FLCE_KERNEL", kernels[1])
    made = torch.autograd.grad(loss, (x, w))
    expected = torch.autograd.grad(true_outputs(x, w, y, kept)[0].mean(), (x, w))
    assert_near(made, expected, 6e-3)


@pytest.mark.parametrize("hidden", [128, 4096])
def test_the_peak_without_gradients(hidden):
    """The copy of the valid rows of x is small, and the plan contains it."""
    tokens = 12000
    x, w, y = draw(tokens, hidden, VOCAB)
    no_gradients = {"grad_input": False, "grad_weight": False}
    plan = flce.plan(tokens, hidden, VOCAB, dtype=BF16, device="cuda", **no_gradients)
    with torch.no_grad():
        peak = cases.peak_bytes(lambda: flce.linear_cross_entropy(x, w, y), "cuda")
    assert peak <= 1.02 * plan.forward_peak_bytes + (2 << 20)
    assert plan.buffers["gathered_x"] <= 4096 * hidden * 2
