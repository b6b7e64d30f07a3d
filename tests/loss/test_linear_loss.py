"""flce.linear_loss: what drawn calls (drawn.py) do not have, against the loss of whole logits."""

import math
import re

import pytest
import torch

import flce
from flce import reference
from harness import cases

TOKENS, HIDDEN, VOCAB = 41, 12, 67
REFUSED = (TypeError, ValueError)


def operands(device, dtype=torch.float64, bias=False):
    x, w, target = cases.leaves(device, TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=dtype)
    target[::9] = -100
    made = {"input": x, "linear_weight": w, "target": target}
    if bias:
        made["linear_bias"] = torch.randn(VOCAB, device=device, dtype=dtype, requires_grad=True)
    return made


def data(device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    old, advantages = torch.randn(2, TOKENS, generator=generator, dtype=dtype).to(device)
    return old - math.log(VOCAB), advantages


def ppo(logprobs, entropy, rows, old, advantages):
    ratio, a = (logprobs - old[rows]).exp(), advantages[rows]
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / TOKENS
    clipped = (ratio - 1).abs().gt(0.2).sum()
    loss = loss if entropy is None else loss - 0.01 * entropy.sum() / TOKENS
    return loss, {"clipped": clipped, "kl": (old[rows] - logprobs).sum()}


def focal(logprobs, entropy, rows, *_):
    return -((1 - logprobs.exp()).square() * logprobs).sum() / TOKENS


def dft(logprobs, entropy, rows, *_):
    return -(logprobs.detach().exp() * logprobs).sum() / TOKENS


def gradients(function, given, scale=1.0):
    tensors = [t for t in given.values() if t.requires_grad]
    made = function(**given)
    loss = made[0] if isinstance(made, tuple) else made
    return made, torch.autograd.grad(loss * scale, tensors)


def whole(loss_fn, arguments, entropy=False, **options):
    def function(input, linear_weight, target, **others):
        made = reference.linear_logprobs(input, linear_weight, target, **others, **options)
        return loss_fn(made[0], made[1] if entropy else None, slice(0, TOKENS), *arguments)

    return function


def chunked(loss_fn, arguments, **options):
    def function(input, linear_weight, target, **others):
        def call(*given):
            return loss_fn(*given, *arguments)

        return flce.linear_loss(input, linear_weight, target, call, **others, **options)

    return function


def exactly(given):
    return {k: t.double().detach().requires_grad_() if t.requires_grad else t
            for k, t in given.items()}  # fmt: skip


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_16_bit_operands(device, autocast, transposed):
    """The error is that of the eager composition, and float16 keeps small gradients, also of a
    transposed weight: it is held in float32 until it is multiplied by grad_output."""
    given = operands(device, torch.float32 if autocast else torch.float16, bias=True)
    if transposed:
        weight = given["linear_weight"].detach()
        given["linear_weight"] = weight.t().contiguous().t().requires_grad_()
    arguments = data(device)
    tiny = 1.0 if autocast == torch.bfloat16 else 2.0**-24

    def loss_fn(*given):
        return ppo(*given)[0] * tiny

    with torch.autocast(device, autocast, enabled=autocast is not None):
        _, ours = gradients(
            chunked(loss_fn, arguments, rows=1, entropy="differentiable"), given, 1 / tiny
        )
        _, rounded = gradients(whole(lambda *g: ppo(*g)[0], arguments, True), given)
    _, truth = gradients(whole(lambda *g: ppo(*g)[0], arguments, True), exactly(given))
    for made, theirs, right in zip(ours, rounded, truth, strict=True):
        error, allowed = (cases.relative_error(v.double(), right) for v in (made, theirs))
        assert error <= 2.0 * allowed + 1e-6, (error, allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_under_autocast(device, dtype):
    given = operands(device)
    with torch.autocast(device, dtype):
        ours = gradients(chunked(focal, (), rows=9), given)
    torch.testing.assert_close(ours, gradients(whole(focal, ()), given), rtol=1e-9, atol=1e-11)


def test_sums_of_chunks(device):
    """In float32 at least, of copies, and of True as 1."""
    given, calls = operands(device, torch.float32), torch.zeros((), device=device)

    def loss_fn(logprobs, entropy, rows):
        calls.add_(1)
        return calls.bfloat16() + 256, {"calls": calls, "true": calls > 0, "number": True}

    loss, values = chunked(loss_fn, (), rows=10)(**given)
    assert (loss.dtype, loss.item()) == (torch.float32, 5 * 256 + 14)  # 257 and 259 are 256 and 260
    assert values == {"calls": 15, "true": 5, "number": 5}
    loss, (grad, _) = gradients(chunked(lambda lp, *_: lp.sum().bfloat16(), (), rows=10), given)
    _, (truth, _) = gradients(whole(lambda lp, *_: lp.sum(), ()), given)
    torch.testing.assert_close(grad, truth)


def test_meta_tensors():
    given = {name: t.detach().to("meta") for name, t in operands("cpu").items()}
    given["linear_weight"].requires_grad_()
    chunked(focal, (), rows=9)(**given).backward()
    assert given["linear_weight"].grad.shape == (VOCAB, HIDDEN)


def test_sampled_gradients(device):
    """Unbiased: near the exact gradients on average; equal rows of two chunks draw anew."""
    given, arguments = operands(device, torch.float32), data(device)
    sampled = {"rows": 10, "gradient": "sampled", "gradient_eps": 0.25}
    _, truth = gradients(chunked(dft, arguments), given)
    draws = [
        gradients(chunked(dft, arguments, gradient_seed=seed, **sampled), given)[1]
        for seed in range(200)
    ]
    for made, right in zip(zip(*draws, strict=True), truth, strict=True):
        assert cases.relative_error(torch.stack(made).mean(0), right) < 0.1
    twice = {**given, "input": given["input"].detach()[:10].repeat(2, 1).requires_grad_()}
    twice["target"] = given["target"][:10].repeat(2)
    first, second = gradients(chunked(focal, (), gradient_seed=3, **sampled), twice)[1][0].split(10)
    assert not torch.equal(first, second)


def test_without_gradients_or_rows(device):
    given, arguments = operands(device), data(device)
    with torch.no_grad():
        loss, values = chunked(ppo, arguments, rows=10)(**given)
    assert not loss.requires_grad and values.keys() == {"clipped", "kl"}
    torch.testing.assert_close(loss, whole(ppo, arguments)(**given)[0])
    empty = {
        k: v.detach()[:0].requires_grad_(v.requires_grad) if k != "linear_weight" else v
        for k, v in given.items()
    }
    loss, grads = gradients(chunked(focal, arguments), empty)
    assert loss == 0 and all(not grad.any() for grad in grads)
    frozen = {**given, "linear_weight": given["linear_weight"].detach()}
    torch.testing.assert_close(
        gradients(chunked(focal, arguments, rows=9), frozen)[1],
        gradients(whole(focal, arguments), frozen)[1],
    )


def test_in_a_compiled_function(device):
    given, arguments = operands(device), data(device)
    call = torch.compile(lambda: chunked(focal, arguments, rows=9)(**given) * 2.0, backend="eager")
    torch.testing.assert_close(call(), whole(focal, arguments)(**given) * 2.0)


def test_refusals(device):
    given, arguments = operands(device), data(device)
    outside = torch.ones((), device=device, dtype=torch.float64, requires_grad=True)
    kept = []

    def across(logprobs, *_):
        kept.append(logprobs)
        return sum(each.sum() for each in kept)

    def starts(lp, e, rows):
        return lp.sum(), {rows.start: 1}

    def fewer(lp, e, rows):
        return lp.sum(), *[1] * (rows.start < 9)

    def shapes(lp, e, rows):
        return lp.sum(), lp if rows.start else 1

    refused = [
        (lambda *_: 1.0, {}, "loss_fn: expected a scalar tensor, .* got float"),
        (lambda logprobs, *_: logprobs, {}, r"loss_fn: expected a scalar tensor, .* got \(10,\)"),
        (lambda logprobs, *_: (logprobs * outside).sum(), {}, r"loss_fn: .* of shape \(\); detach"),
        (lambda *_: outside, {}, r"loss_fn: .* of shape \(\); detach"),
        (across, {}, r"loss_fn: .* of shape \(10,\); detach"),
        (starts, {}, "loss_fn: .* of one structure .* got"),
        (fewer, {}, "loss_fn: .* of one structure"),
        (lambda lp, *_: (lp.sum(), lp), {"rows": 40}, r"loss_fn: .* shapes \(40,\) and \(1,\)"),
        (shapes, {}, r"loss_fn: .* shapes \(\) and"),
        (lambda lp, *_: (lp.sum(), "text"), {}, "loss_fn: expected values that can be added"),
        (lambda lp, *_: (lp.sum(), None), {}, "loss_fn: expected values that can be added"),
    ]
    adapter = torch.ones(TOKENS + 5, 2)
    for options, match in (
        ({"entropy": []}, "entropy: expected one of .* got"),
        ({"entropy": True}, "entropy: expected one of .* got True"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens: .* dtype torch.float32"),
        ({"cu_seqlens": torch.tensor(5)}, r"cu_seqlens: .* shape \(\)"),
        ({"cu_seqlens": torch.tensor([0, 50])}, "cu_seqlens: .* got"),
        ({"cu_seqlens": torch.tensor([5, 3])}, "cu_seqlens: .* got"),
        ({"temperature": torch.ones(TOKENS + 5)}, r"temperature: .* \(41,\), got \(46,\)"),
        ({"temperature": torch.ones(TOKENS, 1)}, r"temperature: .* \(41,\), got \(41, 1\)"),
        ({"adapter_input": adapter}, r"adapter_input: .* \(41, 2\), got"),
        ({"adapter_input": adapter[:TOKENS]}, "adapter_weight: expected"),
        ({"gradient": "sampled", "gradient_seed": "a"}, "gradient_seed: expected an int"),
        ({"rows": 0}, "rows: expected an int of at least 1, got 0"),
    ):
        refused.append((focal, options, match))
    for loss_fn, options, match in refused:
        with pytest.raises(REFUSED, match=match):
            chunked(loss_fn, (), **{"rows": 10, **options})(**given)
    for name, value in (("target", given["target"][:3]), ("input", given["input"].tolist())):
        with pytest.raises(REFUSED, match=f"^{name}: "):
            chunked(focal, arguments)(**{**given, name: value})
    with pytest.raises(
        TypeError, match=re.escape("linear_loss() got an unexpected keyword argument 'save'")
    ):
        chunked(focal, arguments, save="stats")(**given)


def test_grad_mode_of_loss_fn(device):
    """The caller's, whatever requires grad: a parameter in it is refused, not ignored."""
    given = operands(device, torch.float32)
    frozen = {name: t.detach() for name, t in given.items()}
    scale, modes = torch.ones((), device=device, requires_grad=True), []

    def scaled(logprobs, *_):
        modes.append(torch.is_grad_enabled())
        return (logprobs * scale).sum()

    for call in (given, frozen):
        with pytest.raises(ValueError, match=r"^loss_fn: .* of shape \(\); detach"):
            chunked(scaled, ())(**call)
    assert modes == [True, True]
    with torch.no_grad():
        assert not chunked(scaled, ())(**given).requires_grad
    with torch.inference_mode():
        assert not chunked(scaled, ())(**given).requires_grad
    assert modes == [True, True, False, False]
    loss, value = chunked(lambda lp, *_: (lp.sum(), scale), (), rows=41)(**frozen)
    assert not loss.requires_grad and not value.requires_grad


def test_max_memory_of_the_classes_that_exist(device):
    """A row of valid_vocab logits fits, as in linear_cross_entropy; the chunks are its own."""
    x, w, target = cases.leaves(device, 256, hidden=8, vocab=1000, dtype=torch.float32)
    target %= 10
    options = {"valid_vocab": 10, "max_memory": 8 * 256}
    call, starts = (x, w, target), []

    def summed(logprobs, entropy, rows):
        starts.append(rows.start)
        return -logprobs.sum()

    made = flce.linear_loss(*call, summed, **options)
    torch.testing.assert_close(made, flce.linear_cross_entropy(*call, reduction="sum", **options))
    plan = flce.plan(256, 8, 1000, device=device, dtype=x.dtype, save="grads", **options)
    assert len(starts) == plan.chunks > 1


@pytest.mark.parametrize("max_memory", ["1GiB", "4KiB"])
def test_gemms_of_a_chunk(device, monkeypatch, max_memory):
    """Logits, dX and dW: the backward of a chunk, which follows at once, computes no logits again,
    also where `rows` asks for chunks of more memory than FLCE_MAX_MEMORY."""
    monkeypatch.setenv("FLCE_MAX_MEMORY", max_memory)
    given, arguments = operands(device, torch.float32), data(device)
    step = chunked(focal, arguments, rows=20)
    assert cases.gemms_of(lambda: gradients(step, given)) == 3 * 3


def test_messages(device):
    """They name linear_loss's own arguments, and rows by their number in the whole call."""
    given = operands(device, torch.float32)
    x, w, target = (given[name] for name in ("input", "linear_weight", "target"))
    half = torch.float16 if device == "cpu" else torch.bfloat16
    ids = target.unsqueeze(-1)
    refused = [
        ((torch.ones((), device=device), w, target), {}, "input: expected at least one dim"),
        ((x, w[:0], target), {}, rf"linear_weight: expected at least one row .* \(0, {HIDDEN}\)"),
        ((x, w[:, :5], target), {}, rf"linear_weight: expected shape \(V, {HIDDEN}\)"),
        ((x.int(), w, target), {}, "input: expected one of"),
        ((x, w, ids[:, :0]), {}, r"target: expected .* K at least 1, got shape \(41, 0\)"),
        ((x, w, ids.short()), {}, "target: expected int64 or int32"),
        ((x, w, target), {"loss_fn": None}, "loss_fn: expected a function, got NoneType"),
        ((x, w, target), {"loss_fn": lambda *_: ()}, "loss_fn: expected a scalar tensor, .* tuple"),
        ((x, w.half(), target), {}, "linear_weight: expected the dtype of input"),
        ((x, w, target), {"accum_dtype": half, "rows": 9}, "accum_dtype: expected torch.float32"),
        ((x, w, target), {"valid_vocab": VOCAB + 1}, f"valid_vocab: expected .* 1 to {VOCAB}"),
    ]
    for call, options, match in refused:
        with pytest.raises(REFUSED, match=f"^{match}"):
            flce.linear_loss(*call, **{"loss_fn": focal, **options})
    # Without a row the same is refused.
    for call, options, match in refused[1:4] + refused[8:]:
        x, *others, target = call
        with pytest.raises(REFUSED, match=f"^{match}"):
            flce.linear_loss(x[:0], *others, target[:0], **{"loss_fn": focal, **options})


def test_targets_out_of_range():
    given = operands("cpu", torch.float32)
    for classes in ((), (3,)):
        target = given["target"].reshape(-1, *(1 for _ in classes)).expand(-1, *classes).clone()
        target[37] = 1000
        row = r"classes: row 37 has class 1000" if classes else r"target\[37\] is 1000"
        for options in ({"rows": 9}, {"cu_seqlens": torch.tensor([3, 8, 30, 41]), "rows": 1}):
            with pytest.raises(IndexError, match=f"^{row}"):
                chunked(focal, (), **options)(**{**given, "target": target})


def test_transforms(device):
    """A tangent of a frozen input would be lost; the names are those of flce."""
    given = operands(device)
    x, weight = given["input"].detach(), given["linear_weight"].detach()

    def loss(x):
        return flce.linear_loss(x, weight, given["target"], focal, rows=9)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="flce: forward-mode AD"):
            loss(dual)
    with pytest.raises(RuntimeError, match="flce: torch.func"):
        torch.func.grad(loss)(x)
    with pytest.raises(RuntimeError, match="flce: vmap"):
        torch.vmap(loss)(x.unsqueeze(0))


def test_a_function_with_an_attribute_named_variable(device):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.variable = torch.ones(1)
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    given = operands(device)
    ours = gradients(chunked(lambda lp, *_: focal(Same.apply(lp), None, None), ()), given)
    torch.testing.assert_close(ours, gradients(whole(focal, ()), given), rtol=1e-9, atol=1e-11)


def test_a_loss_without_a_gradient(device):
    """As torch's: the backward has nothing to do. float16 with an adapter is refused."""
    given, arguments = operands(device), data(device)
    loss = flce.linear_loss(**given, loss_fn=lambda logprobs, *_: logprobs.detach().sum(), rows=9)
    assert not loss.requires_grad
    given = operands(device, torch.float16)
    shapes = {"adapter_input": (TOKENS, 3), "adapter_weight": (VOCAB, 3)}
    given |= {n: torch.ones(s, device=device, dtype=torch.float16) for n, s in shapes.items()}
    with pytest.raises(ValueError, match="^adapter_weight: .* underflow"):
        chunked(focal, arguments)(**given)


def test_refusals_of_k_classes(device):
    x, w, target = cases.leaves(device, 3, 9, hidden=HIDDEN, vocab=VOCAB)
    ids = target.unsqueeze(-1).expand(3, 9, 5)
    for wrong, name in (({"entropy": "detached"}, "entropy"), ({"shift": 1}, "shift")):
        with pytest.raises(ValueError, match=f"{name}: expected .* with a target"):
            flce.linear_loss(x, w, ids, focal, **wrong)
    with pytest.raises(ValueError, match=r"target: expected shape \(3, 9, 5\), got \(2, 9, 5\)"):
        flce.linear_loss(x, w, ids[:2], focal)
