"""Behaviour with autograd, autocast and GradScaler."""

import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases
from harness.small_case import BUDGET, call, leaves_of, make


@pytest.mark.parametrize("save", cases.SAVES)
def test_retain_graph_gives_the_same_gradients_twice(device, save):
    """And a third time, by the backward that may reuse the saved buffers."""
    case = make(device)
    leaves = leaves_of(case)
    loss = call(case, leaves, save=save, max_memory=BUDGET)
    scale = torch.tensor(3.0, device=device)
    first = torch.autograd.grad(loss, leaves, scale, retain_graph=True)
    kept = [tensor.clone() for tensor in first]
    second = torch.autograd.grad(loss, leaves, scale, retain_graph=True)
    third = torch.autograd.grad(loss, leaves, -scale)
    for one, copy_of_one, two, three in zip(first, kept, second, third, strict=True):
        assert torch.equal(one, copy_of_one), "a later backward wrote into an earlier gradient"
        assert torch.equal(one, two)
        assert torch.equal(one, -three)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves, scale)


@pytest.mark.parametrize("retain", [False, True])
def test_grads_are_handed_over_without_a_copy(device, retain):
    """But where the backward keeps the graph: then a scaled copy."""
    case = cases.make_case(64, 64, 4096, dtype=torch.float32, device=device, bias=True)
    leaves = leaves_of(case)
    loss = call(case, leaves, save="grads")
    scale = torch.tensor(0.5, device=device)

    def backward():
        return torch.autograd.grad(loss, leaves, scale, retain_graph=retain)

    weight_bytes = case.linear_weight.numel() * 4
    peak = cases.peak_bytes(backward, device)
    if retain:
        assert peak >= weight_bytes
    else:
        assert peak < weight_bytes // 8


@pytest.mark.parametrize("save", cases.SAVES)
def test_two_runs_are_bitwise_equal(device, save):
    case = cases.make_case(300, 64, 2000, dtype=torch.bfloat16, device=device, bias=True)
    case.target[:] = case.target % 7  # many tokens of one target: their sum has a fixed order
    knobs = {"save": save, "max_memory": 64 * 2000 * 4}
    first = cases.outcome(flce.linear_cross_entropy, case, **knobs)
    for _ in range(3):
        again = cases.outcome(flce.linear_cross_entropy, case, **knobs)
        assert cases.same_bits(first, again)


def test_no_grad_has_no_graph_and_no_gradient_buffers(device):
    case = cases.make_case(64, 64, 4096, dtype=torch.float32, device=device, bias=True)
    leaves = leaves_of(case)

    def forward():
        with torch.no_grad():
            return call(case, leaves, save="grads", max_memory="64KiB")

    assert not forward().requires_grad
    scratch = flce.plan(64, 64, 4096, dtype=torch.float32, device=device).buffers
    held = cases.peak_bytes(forward, device) - scratch.get("gemm_workspace", 0)
    assert held < case.linear_weight.numel() * 4
    with torch.inference_mode():
        assert torch.equal(call(case, leaves), forward())


@pytest.mark.parametrize("save", ["logits", "grads", "stats", "accumulate", "cross_entropy"])
@pytest.mark.parametrize("keeps", [False, True])
def test_batched_gradients_are_refused(device, save, keeps):
    """is_grads_batched: no backward operator has a batching rule."""
    case = cases.make_case(6, 8, 11, dtype=torch.float32, device=device)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    options = {"save": save, "reduction": "mean" if save == "grads" else "none"}
    if save == "accumulate":
        options, w.grad = {"accumulate_into": "grad", "reduction": "none"}, torch.zeros_like(w)
    if save == "cross_entropy":
        loss = flce.cross_entropy(x, case.target.clamp(max=7), reduction="none")
    else:
        loss = flce.linear_cross_entropy(x, w, case.target, **options)
    batch = torch.ones(3, *loss.shape, device=device)
    with pytest.raises(RuntimeError, match="vmap is not supported"):
        torch.autograd.grad(loss, x, batch, is_grads_batched=True, retain_graph=keeps)
    assert w.grad is None or not w.grad.any()


# ---- autocast, GradScaler ----


@pytest.mark.parametrize("save", cases.SAVES)
def test_autocast_keeps_a_float32_dw(device, save):
    """Rounded from the float32 accumulator: most elements are no bfloat16 numbers."""
    if device == "cpu":
        pytest.skip("the CPU's bfloat16 GEMM rounds its result; the sum over chunks is float32")
    case = cases.make_case(48, 64, 500, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        dw = cases.outcome(flce.linear_cross_entropy, case, save=save)["linear_weight"]
    rounded = dw.bfloat16().float()
    assert (dw != rounded).float().mean() > 0.5


def test_autocast_leaves_float64_alone(device):
    case = make(device, torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        results = cases.outcome(flce.linear_cross_entropy, case)
    assert results["loss"].dtype == torch.float64
    cases.Yardstick(case).check(results)


def eager_float32_loss(x, w, target, *, linear_bias=None):
    """What autocast does to the eager pair: the linear layer in float16, the loss in float32."""
    return F.cross_entropy(F.linear(x, w, linear_bias).float(), target)


def test_a_grad_scaler_drives_a_step(device):
    """The scaler's unscaling finds finite gradients, and the step equals eager's."""
    case = cases.make_case(64, 16, 64, dtype=torch.float16, device=device, std=2.0)
    heads = [torch.nn.Parameter(case.linear_weight.float()) for _ in range(2)]
    for head, function in zip(heads, (flce.linear_cross_entropy, eager_float32_loss), strict=True):
        scaler = torch.amp.GradScaler(device, init_scale=65536.0)
        optimizer = torch.optim.SGD([head], lr=0.1)
        with torch.autocast(device, dtype=torch.float16):
            loss = function(case.input, head, case.target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536.0
    assert not torch.equal(heads[0], case.linear_weight.float())
    assert cases.relative_error(heads[0], heads[1].double()) <= 1e-4
