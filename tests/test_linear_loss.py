"""flce.linear_loss against the same loss of whole logits."""

import math
import re

import cases
import pytest
import torch

import flce
from flce import reference

TOKENS, HIDDEN, VOCAB, SEQUENCES = 41, 12, 67, (0, 7, 8, 20, 33, 41)
REFUSED = (TypeError, ValueError)


def operands(device, dtype=torch.float64, **others):
    x, w, target = cases.leaves(device, TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=dtype)
    target[::9] = -100
    made = {"input": x, "linear_weight": w, "target": target}
    if "linear_bias" in others:
        made["linear_bias"] = torch.randn(VOCAB, device=device, dtype=dtype, requires_grad=True)
    if "adapter_weight" in others:
        made["adapter_input"] = torch.randn(
            TOKENS, 3, device=device, dtype=dtype, requires_grad=True
        )
        made["adapter_weight"] = torch.randn(
            VOCAB, 3, device=device, dtype=dtype, requires_grad=True
        )
    return made


def data(device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    old, advantages = torch.randn(2, TOKENS, generator=generator, dtype=dtype).to(device)
    return old - math.log(VOCAB), advantages


def sequence_sums(values, rows, bounds=SEQUENCES):
    """Sums of the values of a chunk over its sequences, and the index of each sequence."""
    offsets = torch.tensor(bounds, device=values.device)
    index = torch.arange(rows.start, rows.stop, device=values.device)
    sequence = torch.searchsorted(offsets, index, right=True) - 1
    kept, place = sequence.unique(return_inverse=True)
    return values.new_zeros(len(kept)).index_add(0, place, values), kept


def ppo(logprobs, entropy, rows, old, advantages):
    ratio, a = (logprobs - old[rows]).exp(), advantages[rows]
    loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / TOKENS
    clipped = (ratio - 1).abs().gt(0.2).sum()
    loss = loss if entropy is None else loss - 0.01 * entropy.sum() / TOKENS
    return loss, {"clipped": clipped, "kl": (old[rows] - logprobs).sum()}


def gspo(logprobs, entropy, rows, old, advantages):
    log_ratio, kept = sequence_sums(logprobs - old[rows], rows)
    lengths, _ = sequence_sums(torch.ones_like(logprobs), rows)
    return -((log_ratio / lengths).exp() * advantages[kept]).sum()


def dpo(logprobs, entropy, rows, old, advantages):
    """Pairs are the chosen and the rejected half of a sequence."""
    margin, _ = sequence_sums((logprobs - old[rows]) * advantages[rows].sign(), rows)
    return -torch.nn.functional.logsigmoid(0.1 * margin).sum()


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


@pytest.mark.parametrize("others", [{}, {"linear_bias"}, {"adapter_weight"}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 10},
        {"rows": 1000},
        {"rows": 7, "softcap": 3.0, "logit_scale": 1.5, "temperature": 0.7},
        {"max_memory": 128 * VOCAB * 8},
        {"rows": 16, "valid_vocab": 60, "ignore_index": 3},
    ],
    ids=str,
)
def test_ppo(device, options, others):
    given, arguments = operands(device, **dict.fromkeys(others)), data(device)
    given["target"] %= 60 if "valid_vocab" in options else VOCAB
    meant = {k: v for k, v in options.items() if k not in ("rows", "max_memory")}
    for entropy in (None, "detached", "differentiable"):
        ours = gradients(chunked(ppo, arguments, entropy=entropy, **options), given, 3.0)

        def loss_fn(logprobs, e, *rest, detach=entropy == "detached"):
            return ppo(logprobs, e.detach() if detach else e, *rest)

        truth = gradients(whole(loss_fn, arguments, entropy is not None, **meant), given, 3.0)
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss_fn", [gspo, dpo, focal, dft])
@pytest.mark.parametrize("rows", [1, 9, 15, None])
def test_losses_of_sequences(device, loss_fn, rows):
    given, arguments = operands(device), data(device)
    offsets = torch.tensor(SEQUENCES, device=device)
    ours = gradients(chunked(loss_fn, arguments, rows=rows, cu_seqlens=offsets), given)
    torch.testing.assert_close(
        ours, gradients(whole(loss_fn, arguments), given), rtol=1e-9, atol=1e-11
    )
    if loss_fn is focal:  # rows of no sequence, shifted targets
        part = torch.tensor([8, 20, 33], device=device)
        ours = gradients(chunked(focal, arguments, rows=rows, cu_seqlens=part, shift=1), given)

        def truth(logprobs, entropy, rows, *arguments):
            return focal(logprobs[8:33], None, rows, *arguments)

        given_truth = gradients(whole(truth, arguments, shift=1, cu_seqlens=part), given)
        torch.testing.assert_close(ours, given_truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_operands(device, dtype, autocast):
    """The error is that of the eager composition, and float16 keeps small gradients."""
    if autocast and dtype == torch.float32:
        pytest.skip("autocast has no float32")
    given = operands(device, torch.float32 if autocast else dtype, linear_bias=True)
    arguments = data(device)
    tiny = 2.0**-24 if dtype == torch.float16 else 1.0

    def loss_fn(*given):
        return ppo(*given)[0] * tiny

    with torch.autocast(device, dtype, enabled=autocast):
        loss, ours = gradients(
            chunked(loss_fn, arguments, rows=1, entropy="differentiable"), given, 1 / tiny
        )
        eager, rounded = gradients(whole(lambda *g: ppo(*g)[0], arguments, True), given)
    exact = {
        k: t.double().detach().requires_grad_() if t.requires_grad else t for k, t in given.items()
    }
    _, truth = gradients(whole(lambda *g: ppo(*g)[0], arguments, True), exact)
    for made, theirs, right in zip(ours, rounded, truth, strict=True):
        error, allowed = (cases.relative_error(v.double(), right) for v in (made, theirs))
        assert error <= 2.0 * allowed + 1e-6, (error, allowed)


@pytest.mark.parametrize("transposed", [("input",), ("linear_weight",), ("input", "linear_weight")])
def test_strides(device, transposed):
    """A second backward too: the first one writes the gradients in place or not at all."""
    given = operands(device)
    _, truth = gradients(whole(focal, ()), given)
    for name in transposed:
        given[name] = given[name].detach().t().contiguous().t().requires_grad_()
    loss = chunked(focal, (), rows=9)(**given)
    tensors = [given["input"], given["linear_weight"]]
    for keeps in (True, False):
        ours = torch.autograd.grad(loss, tensors, retain_graph=keeps)
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


def test_float16_of_a_transposed_weight(device):
    """Its gradient is held in float32 too, until it is multiplied by grad_output."""
    given = operands(device, torch.float16)
    given["linear_weight"] = given["linear_weight"].detach().t().contiguous().t().requires_grad_()
    small = chunked(lambda *g: focal(*g) * 2.0**-24, (), rows=3)
    _, ours = gradients(small, given, 2.0**24)
    exact = {
        k: t.detach().double().requires_grad_() if t.requires_grad else t for k, t in given.items()
    }
    _, truth = gradients(whole(focal, ()), exact)
    for made, right in zip(ours, truth, strict=True):
        assert cases.relative_error(made.double(), right) < 1e-3


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


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("exists", [False, True])
def test_accumulate_into(device, attribute, exists):
    given, arguments = operands(device), data(device)
    weight = given["linear_weight"]
    _, (dx, dw) = gradients(chunked(ppo, arguments, rows=10), given, 2.0)
    if exists or attribute == "main_grad":
        setattr(weight, attribute, torch.ones_like(weight))
        dw = dw + 1.0
    loss, _ = chunked(ppo, arguments, rows=10, accumulate_into=attribute)(**given)
    before = getattr(weight, attribute)
    (loss * 2.0).backward()
    assert before is None or getattr(weight, attribute) is before
    torch.testing.assert_close(getattr(weight, attribute), dw)
    torch.testing.assert_close(given["input"].grad, dx)


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

    refused = [
        (lambda *_: 1.0, {}, "loss_fn: expected a scalar tensor, .* got float"),
        (lambda logprobs, *_: logprobs, {}, r"loss_fn: expected a scalar tensor, .* got \(10,\)"),
        (lambda logprobs, *_: (logprobs * outside).sum(), {}, r"loss_fn: .* of shape \(\); detach"),
        (lambda *_: outside, {}, r"loss_fn: .* of shape \(\); detach"),
        (across, {}, r"loss_fn: .* of shape \(10,\); detach"),
        (
            lambda lp, e, rows: (lp.sum(), {rows.start: 1}),
            {},
            "loss_fn: .* of one structure .* got",
        ),
        (
            lambda lp, e, rows: (lp.sum(), *[1] * (rows.start < 9)),
            {},
            "loss_fn: .* of one structure",
        ),
        (lambda lp, *_: (lp.sum(), lp), {"rows": 40}, r"loss_fn: .* shapes \(40,\) and \(1,\)"),
        (
            lambda lp, e, rows: (lp.sum(), lp if rows.start else 1),
            {},
            r"loss_fn: .* shapes \(\) and",
        ),
        (lambda lp, *_: (lp.sum(), "text"), {}, "loss_fn: expected values that can be added"),
        (lambda lp, *_: (lp.sum(), None), {}, "loss_fn: expected values that can be added"),
        (focal, {"entropy": []}, "entropy: expected one of .* got"),
        (focal, {"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens: .* dtype torch.float32"),
        (focal, {"cu_seqlens": torch.tensor(5)}, r"cu_seqlens: .* shape \(\)"),
        (focal, {"temperature": torch.ones(TOKENS + 5)}, r"temperature: .* \(41,\), got \(46,\)"),
        (focal, {"temperature": torch.ones(TOKENS, 1)}, r"temperature: .* \(41,\), got \(41, 1\)"),
        (focal, {"adapter_input": torch.ones(TOKENS + 5, 2)}, r"adapter_input: .* \(41, 2\), got"),
        (focal, {"adapter_input": torch.ones(TOKENS, 2)}, "adapter_weight: expected"),
        (focal, {"gradient": "sampled", "gradient_seed": "a"}, "gradient_seed: expected an int"),
        (focal, {"rows": 0}, "rows: expected an int of at least 1, got 0"),
        (focal, {"entropy": True}, "entropy: expected one of .* got True"),
        (focal, {"cu_seqlens": torch.tensor([0, 50])}, "cu_seqlens: .* got"),
        (focal, {"cu_seqlens": torch.tensor([5, 3])}, "cu_seqlens: .* got"),
    ]
    for loss_fn, options, match in refused:
        with pytest.raises(REFUSED, match=match):
            flce.linear_loss(
                **given,
                loss_fn=lambda *g, f=loss_fn: f(*g, *arguments) if f is focal else f(*g),
                **{"rows": 10, **options},
            )
    for name, value in (("target", given["target"][:3]), ("input", given["input"].tolist())):
        with pytest.raises(REFUSED, match=f"^{name}: "):
            chunked(focal, arguments)(**{**given, name: value})
    with pytest.raises(
        TypeError, match=re.escape("linear_loss() got an unexpected keyword argument 'save'")
    ):
        chunked(focal, arguments, save="stats")(**given)


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
    given = operands(device, torch.float16, adapter_weight=True)
    with pytest.raises(ValueError, match="^adapter_weight: .* underflow"):
        chunked(focal, arguments)(**given)


@pytest.mark.parametrize("rows", [1, 7, None])
def test_k_classes_of_each_row(device, rows):
    """A target (..., K), of none and repeated ids, in chunks and in whole sequences."""
    x, w, _ = cases.leaves(device, 3, 9, hidden=HIDDEN, vocab=VOCAB)
    ids = torch.randint(VOCAB, (3, 9, 5), generator=cases.generator(1)).to(device)
    ids[..., 4], ids[0, 2, 1], ids[1, 4] = ids[..., 0], -100, -100
    weights = cases.per_row(device, 27, 5)
    offsets = torch.tensor([0, 9, 18, 27], device=device) if rows == 7 else None

    def loss_fn(logprobs, entropy, part):
        assert entropy is None and logprobs.shape == weights[part].shape
        return -(weights[part] * logprobs).sum()

    loss = flce.linear_loss(x, w, ids, loss_fn, rows=rows, cu_seqlens=offsets, temperature=0.7)
    absent = ids < 0
    log_p = (x @ w.T / 0.7).log_softmax(-1).gather(-1, ids.masked_fill(absent, 0))
    truth = -(weights * log_p.masked_fill(absent, 0.0).flatten(0, 1)).sum()
    cases.assert_same(3.0 * loss, 3.0 * truth, (x, w), tolerance=1e-10)
    for wrong, name in (({"entropy": "detached"}, "entropy"), ({"shift": 1}, "shift")):
        with pytest.raises(ValueError, match=f"{name}: expected .* with a target"):
            flce.linear_loss(x, w, ids, loss_fn, **wrong)
    with pytest.raises(ValueError, match=r"target: expected shape \(3, 9, 5\), got \(2, 9, 5\)"):
        flce.linear_loss(x, w, ids[:2], loss_fn)
