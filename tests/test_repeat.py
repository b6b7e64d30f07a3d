"""A call that looks like an earlier one takes the short way; whatever differs the long one."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import flce
from flce import composite, repeat
from flce.compiled import same_objects

WEIGHT = "linear_weight"


@pytest.fixture
def long_ways(monkeypatch):
    """How many calls have looked for their signature; none is kept from earlier tests."""
    taken, through = [], composite.linear_signature

    def count(*args):
        taken.append(args)
        return through(*args)

    monkeypatch.setattr(composite, "linear_signature", count)
    monkeypatch.setattr(repeat, "_known", {})
    return taken


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
def test_a_repeated_call_gives_the_same(device, save, long_ways):
    call = draw(device) | {"save": save, "label_smoothing": 0.1}
    first = check(call)
    made = gradients(call, first)
    call["target"] = call["target"].flip(0)
    other = check(call)
    call["target"] = call["target"].flip(0)
    again = check(call)
    assert len(long_ways) == 1
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
def test_what_looks_otherwise_is_looked_at(device, change, long_ways):
    call = draw(device)
    check(call)
    change(call)
    tokens = call["input"].shape[:-1].numel()
    if call["target"].shape[0] != call["input"].shape[0]:
        call["target"] = call["target"][:tokens]
    loss = check(call)
    assert len(long_ways) == 2
    if call["input"].requires_grad:
        ours, theirs = gradients(call, loss), gradients(call, expected(call))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_options_beside_the_signature_are_never_kept(long_ways):
    call = draw("cpu")
    for more in (
        {"num_items": 3},
        {"valid_bound": 12},
        {"return_lse": True},
        {"token_weight": torch.ones(12)},
        {"weight": torch.ones(16)},
        {"temperature": torch.tensor(2.0)},
        {"shift": 1, "input": call["input"][None], "target": call["target"][None]},
        {"accumulate_into": "grad"},
        {"options": SimpleNamespace(acc_dtype=None, acc_policy="auto", batch_chunk_size=None)},
    ):
        for _ in range(2):
            flce.linear_cross_entropy(**{**call, **more})
    assert len(long_ways) == 18 and not repeat._known


def test_the_surroundings_count(long_ways, monkeypatch):
    call = draw("cpu")
    check(call)
    with torch.no_grad():
        assert not check(call).requires_grad
    assert check(call).requires_grad
    taken = len(long_ways)
    with torch.autocast("cpu", torch.bfloat16):
        assert check(call, 2e-2).dtype == torch.float32
    assert len(long_ways) == taken + 1
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


def test_refusals_stay(long_ways):
    """What an equal value of another type or a tensor changed in place would be refused for."""
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


def test_subclasses_and_modules(long_ways):
    class Marked(torch.Tensor):
        pass

    call = draw("cpu")
    check(call)
    bias = torch.zeros(16)
    check(call | {"linear_bias": bias})
    for name, plain in (*call.items(), ("linear_bias", bias)):
        marked = plain.detach().as_subclass(Marked)
        flce.linear_cross_entropy(**{**call, name: marked})
    assert len(long_ways) == 6
    head = flce.LinearCrossEntropyHead(8, 16, bias=True)
    losses = [head(call["input"], call["target"]) for _ in range(3)]
    assert len(long_ways) == 7 and torch.equal(losses[0], losses[2])
    losses[1].backward()
    truth = F.cross_entropy(head(call["input"]), call["target"])
    (bias,) = torch.autograd.grad(truth, head.bias)
    torch.testing.assert_close(head.bias.grad, bias)


@pytest.mark.filterwarnings("ignore")
def test_compiled_calls_keep_their_way(long_ways):
    call = draw("cpu")

    def loss(input, linear_weight, target):
        return flce.linear_cross_entropy(input, linear_weight, target)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    made = [compiled(**call), check(call), compiled(**call), check(call)]
    torch.compiler.reset()
    made.append(compiled(**call))
    for value in made:
        torch.testing.assert_close(value, made[1])


def test_options_are_told_by_identity():
    """An equal value may be of another type, and a tensor's comparison would wait for it."""
    given = (None, 1, "mean", torch.ones(2))
    assert same_objects(given, (*given,)) and same_objects((), ())
    for other in (given[:3], (*given, None), (None, 1.0, *given[2:]), (*given[:3], torch.ones(2))):
        assert not same_objects(given, other) and not same_objects(other, given)
    for wrong in ((given,), (given, list(given)), (None, given), (given, given, given)):
        with pytest.raises((TypeError, SystemError)):
            same_objects(*wrong)


def test_few_are_kept(long_ways):
    for vocab in range(2, 2 + 2 * repeat._KEPT):
        call = draw("cpu", vocab=vocab)
        flce.linear_cross_entropy(**call)
        assert 0 < len(repeat._known) <= repeat._KEPT


def test_a_repeated_call_takes_operands_of_any_strides(device, long_ways):
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
    assert len(long_ways) == 1


def test_a_repeated_call_checks_its_targets(device, monkeypatch, long_ways):
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
