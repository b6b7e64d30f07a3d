"""The result cached for a call's signature is reused by later calls; any difference leads to a
new one."""

import pytest
import torch
import torch.nn.functional as F

import flce

WEIGHT = "linear_weight"


def draw(device, tokens=12, hidden=8, vocab=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(tokens, hidden, generator=g).to(device, dtype).requires_grad_(),
        WEIGHT: torch.randn(vocab, hidden, generator=g).to(device, dtype).requires_grad_(),
        "target": torch.randint(vocab, (tokens,), generator=g).to(device),
    }


def expected(call):
    logits = F.linear(call["input"].double(), call[WEIGHT].double())
    options = {name: call[name] for name in ("label_smoothing", "reduction") if name in call}
    target = call["target"]
    target = target.double() if target.is_floating_point() else target.flatten().long()
    return F.cross_entropy(logits.flatten(0, -2), target, **options)


def check(call, tolerance=1e-5):
    loss = flce.linear_cross_entropy(**call)
    torch.testing.assert_close(loss.double(), expected(call), rtol=tolerance, atol=tolerance)
    return loss


def gradients(call, loss):
    return torch.autograd.grad(loss, (call["input"], call[WEIGHT]))


@pytest.mark.parametrize("save", ["auto", "logits", "grads", "stats"])
def test_a_repeated_call_gives_the_same(device, save):
    call = draw(device) | {"save": save, "label_smoothing": 0.1}
    first = check(call)
    made = gradients(call, first)
    call["target"] = call["target"].flip(0)
    other = check(call)
    call["target"] = call["target"].flip(0)
    again = check(call)
    assert torch.equal(first, again) and not torch.equal(first, other)
    for a, b in zip(made, gradients(call, again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call.update(input=call["input"].detach()),
        lambda call: call.update(input=call["input"][:5]),
        lambda call: call.update(input=call["input"][None], target=call["target"][None]),
        lambda call: call.update({n: call[n].double() for n in ("input", WEIGHT)}),
        lambda call: call.update({WEIGHT: call[WEIGHT][:15]}, target=call["target"] % 15),
        lambda call: call.update(target=call["target"].int()),
        lambda call: call.update(target=F.one_hot(call["target"], 16).float()),
        lambda call: call.update(label_smoothing=0.25),
        lambda call: call.update(reduction="sum"),
        lambda call: call.update(max_memory="1KiB"),
        lambda call: call.update(save="stats"),
    ],
)
def test_what_differs_is_found_again(device, change):
    call = draw(device)
    check(call)
    change(call)
    tokens = call["input"].shape[:-1].numel()
    if call["target"].shape[0] != call["input"].shape[0]:
        call["target"] = call["target"][:tokens]
    loss = check(call)
    if call["input"].requires_grad:
        ours, theirs = gradients(call, loss), gradients(call, expected(call))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_grad_mode_autocast_and_environment_are_read_each_time(monkeypatch):
    call = draw("cpu")
    check(call)
    with torch.no_grad():
        assert not check(call).requires_grad
    assert check(call).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert check(call, 2e-2).dtype == torch.float32
    monkeypatch.setenv("FLCE_MAX_MEMORY", "nonsense")
    with pytest.raises(ValueError, match="FLCE_MAX_MEMORY"):
        check(call)
    monkeypatch.delenv("FLCE_MAX_MEMORY")
    check(call)
    with (
        pytest.raises(RuntimeError, match="forward-mode AD"),
        torch.autograd.forward_ad.dual_level(),
    ):
        dual = torch.autograd.forward_ad.make_dual(call["input"], torch.ones(12, 8))
        flce.linear_cross_entropy(**{**call, "input": dual})
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: flce.linear_cross_entropy(**{**call, "input": x}))(
            call["input"].detach()[None].expand(2, -1, -1)
        )


def test_refusals_stay():
    """After a valid call, an equal value of another type, or a tensor changed in place, is
    still refused."""
    call = draw("cpu") | {"ignore_index": 1}
    check(call | {"target": call["target"].clamp(min=2)})
    with pytest.raises(TypeError, match="ignore_index"):
        flce.linear_cross_entropy(**{**call, "ignore_index": 1.0})
    with pytest.raises(IndexError, match="target"):
        flce.linear_cross_entropy(**{**call, "target": call["target"] + 16})
    with pytest.raises(ValueError, match="target.*device"):
        flce.linear_cross_entropy(**{**call, "target": call["target"].to("meta")})
    with pytest.raises(TypeError, match="target"):
        flce.linear_cross_entropy(**{**call, "target": call["target"].tolist()})
    call[WEIGHT].data = call[WEIGHT].data.double()
    with pytest.raises((TypeError, ValueError), match=WEIGHT):
        flce.linear_cross_entropy(**call)


def test_subclasses_and_modules():
    class Marked(torch.Tensor):
        pass

    call = draw("cpu")
    check(call)
    bias = torch.zeros(16)
    check(call | {"linear_bias": bias})
    for name, plain in (*call.items(), ("linear_bias", bias)):
        marked = plain.detach().as_subclass(Marked)
        flce.linear_cross_entropy(**{**call, name: marked})
    head = flce.LinearCrossEntropyHead(8, 16, bias=True)
    losses = [head(call["input"], call["target"]) for _ in range(3)]
    assert torch.equal(losses[0], losses[2])
    losses[1].backward()
    truth = F.cross_entropy(head(call["input"]), call["target"])
    (bias,) = torch.autograd.grad(truth, head.bias)
    torch.testing.assert_close(head.bias.grad, bias)


def test_a_repeated_call_takes_operands_of_any_strides(device):
    call = draw(device)
    first = check(call)
    made = gradients(call, first)
    for name, tensor in list(call.items()):
        strided = torch.stack([tensor.detach(), tensor.detach()], -1)[..., 0]
        assert not strided.is_contiguous()
        other = call | {name: strided.requires_grad_(tensor.requires_grad)}
        loss = check(other)
        assert torch.equal(loss, first)
        for a, b in zip(made, gradients(other, loss), strict=True):
            assert torch.equal(a, b)


def test_a_repeated_call_checks_its_targets(device, monkeypatch):
    call = draw(device)
    check(call)
    check(call)
    monkeypatch.setenv("FLCE_CHECK", "1")
    call["target"][0] = 16
    with pytest.raises(IndexError, match=r"target\[0\] is 16"):
        flce.linear_cross_entropy(**call)
    monkeypatch.setenv("FLCE_CHECK", "0")
    call["target"][0] = 15
    check(call)
