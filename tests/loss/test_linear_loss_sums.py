"""flce.linear_loss: what is summed over its chunks, what is drawn in them, and its backward."""

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.packing import WIDE_SUM_CHUNKS
from harness import cases
from harness.wide_sums import CHUNK, HIDDEN, MANY, VOCAB, check, operands
from harness.wide_sums import error_and_projection as errors_of

NARROW = (torch.bfloat16, torch.float16)


def mean_loss(chunks):
    def loss_fn(logprobs, entropy, rows):
        return -logprobs.sum() / (CHUNK * chunks)

    return loss_fn


def leaves(device, dtype, chunks):
    x, w, target, exact = operands(device, dtype, chunks)
    return x.detach().requires_grad_(), w.detach().requires_grad_(), target, exact


def gradient(device, dtype, chunks, **options):
    x, w, target, _ = leaves(device, dtype, chunks)
    loss = flce.linear_loss(x, w, target, mean_loss(chunks), rows=CHUNK, **options)
    return torch.autograd.grad(loss, w)[0]


# ---- sums of the weight's gradient ----


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("chunks", [WIDE_SUM_CHUNKS, 86, MANY])
def test_many_chunks(device, dtype, chunks):
    check(gradient(device, dtype, chunks), operands(device, dtype, chunks)[3], dtype)


def test_a_named_dtype_is_taken(device):
    """bfloat16, whatever it loses; float32 below 16 chunks."""
    dtype, few = torch.bfloat16, WIDE_SUM_CHUNKS - 1
    made = gradient(device, dtype, MANY, accum_dtype=dtype)
    error, projection = errors_of(made, operands(device, dtype, MANY)[3])
    assert error > 0.1 and projection < 0.9, (error, projection)
    exact = operands(device, dtype, few)[3]
    own, named, wide = (
        gradient(device, dtype, few, accum_dtype=accum) for accum in (None, dtype, torch.float32)
    )
    assert torch.equal(own, named)
    errors = [cases.relative_error(made.double(), exact) for made in (own, wide)]
    assert errors[1] < 0.9 * errors[0], errors


@pytest.mark.parametrize("accum_dtype", [None, torch.bfloat16])
def test_a_float32_main_grad(device, accum_dtype):
    """The sum is added as it is: no rounding to the weight's dtype."""
    x, w, target, exact = leaves(device, torch.bfloat16, MANY)
    w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    options = {"accumulate_into": "main_grad", "accum_dtype": accum_dtype, "rows": CHUNK}
    flce.linear_loss(x, w, target, mean_loss(MANY), **options).backward()
    check(w.main_grad, exact, torch.bfloat16)
    assert w.grad is None
    # One rounding of the whole gradient, in place of each chunk's, would be seen in the last bits.
    assert not torch.equal(w.main_grad, w.main_grad.bfloat16().float())


def test_few_chunks_and_a_float32_main_grad(device):
    x, w, target, _ = leaves(device, torch.bfloat16, 2)
    w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    wide = torch.autograd.grad(
        flce.linear_loss(
            x, w, target, mean_loss(2), rows=CHUNK, accum_dtype=torch.float32
        ), w,
    )[0]  # fmt: skip
    loss = flce.linear_loss(x, w, target, mean_loss(2), rows=CHUNK, accumulate_into="main_grad")
    loss.backward()
    assert torch.equal(w.main_grad.bfloat16(), wide) and not torch.equal(w.main_grad, wide.float())


def test_a_16_bit_grad_is_rounded_once(device):
    """The sum of the chunks is added to it in float32."""
    x, w, target, _ = leaves(device, torch.bfloat16, MANY)
    options = {"rows": CHUNK, "accumulate_into": "main_grad"}
    w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    flce.linear_loss(x, w, target, mean_loss(MANY), **options).backward()
    start = torch.randn(w.shape, generator=cases.generator(1)).to(w) * 0.01
    w.grad = start.clone()
    options["accumulate_into"] = "grad"
    flce.linear_loss(x, w, target, mean_loss(MANY), **options).backward()
    assert torch.equal(w.grad, (start.float() + w.main_grad).bfloat16())


def test_k_classes(device):
    x, w, target, exact = leaves(device, torch.bfloat16, MANY)
    ids = torch.stack((target, torch.full_like(target, -100)), dim=-1)
    loss = flce.linear_loss(x, w, ids, mean_loss(MANY), rows=CHUNK)
    check(torch.autograd.grad(loss, w)[0], exact, torch.bfloat16)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("accum_dtype", [None, torch.bfloat16])
def test_an_adapter(device, trains, accum_dtype):
    x, w, target, exact = leaves(device, torch.bfloat16, MANY)
    w.requires_grad_(trains)
    low = torch.zeros(VOCAB, 4, device=device, dtype=w.dtype, requires_grad=True)
    given = {"adapter_input": x.detach()[:, :4].contiguous(), "adapter_weight": low}
    loss = flce.linear_loss(
        x, w, target, mean_loss(MANY), rows=CHUNK, accum_dtype=accum_dtype, **given
    )
    made = torch.autograd.grad(loss, [low, w] if trains else [low])
    if accum_dtype is None:
        for grad, right in zip(made, (exact[:, :4], exact), strict=False):
            check(grad, right, torch.bfloat16)
    else:
        assert errors_of(made[0], exact[:, :4])[0] > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(device, dtype):
    x, w, target, exact = operands(device, torch.bfloat16, MANY)
    w = w.to(dtype).detach().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = flce.linear_loss(x.float(), w, target, mean_loss(MANY), rows=CHUNK)
    check(torch.autograd.grad(loss, w)[0], exact, torch.bfloat16)


def test_sampled_sums(device):
    """A sum in 16 bits would have the bias that the estimate does not have."""
    dtype, sampled = torch.bfloat16, {"gradient": "sampled", "gradient_seed": 3}
    wide = gradient(device, dtype, MANY, **sampled)
    x, w, target, _ = (None if t is None else t.detach() for t in leaves(device, dtype, MANY))
    w = w.float().requires_grad_()
    loss = flce.linear_loss(x.float(), w, target, mean_loss(MANY), rows=CHUNK, **sampled)
    expected = torch.autograd.grad(loss, w)[0].double()
    error, _ = errors_of(wide, expected)
    narrow, _ = errors_of(gradient(device, dtype, MANY, accum_dtype=dtype, **sampled), expected)
    assert error < 0.5 * narrow, (error, narrow)


# ---- draws ----


def drawn(device, rows, seed, x=None, **options):
    """The gradients of input and weight with gradient="sampled"."""
    x0, w, target, _ = operands(device, torch.float32, 8)
    x = (x0 if x is None else x).detach().requires_grad_()
    w = w.detach().requires_grad_()
    sampled = {"gradient": "sampled", "gradient_eps": 0.25, "gradient_seed": seed}
    loss = flce.linear_loss(x, w, target, mean_loss(8), rows=rows, **sampled, **options)
    return torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("seed", [7, "tensor", None])
def test_a_draw_depends_on_no_chunk(device, seed):
    """Also where no seed is given: then one is drawn for all chunks. The logits' rounding may
    depend on the rows of a product, so bits are not compared: another draw is far away."""
    if seed == "tensor":
        seed = torch.tensor(7, device=device)
    made = []
    for rows in (64, 16, 5, 1):
        torch.manual_seed(3)
        made.append(drawn(device, rows, seed))
    offsets = torch.tensor([0, 3, 30, 64], device=device)
    torch.manual_seed(3)
    made.append(drawn(device, 16, seed, cu_seqlens=offsets))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0])


def test_the_draw_is_that_of_linear_cross_entropy(device):
    x, w, target, _ = leaves(device, torch.float32, 8)
    call = {"gradient": "sampled", "gradient_eps": 0.25, "gradient_seed": 7}
    expected = torch.autograd.grad(flce.linear_cross_entropy(x, w, target, **call), (x, w))
    for made, right in zip(drawn(device, 5, 7), expected, strict=True):
        torch.testing.assert_close(made, right)


def test_consecutive_seeds_are_independent(device):
    """Chunk 1 of a seed does not draw what chunk 0 of another one does."""
    x0, w, _, _ = operands(device, torch.float32, 8)
    equal = x0[:1].expand(64, HIDDEN)
    target = torch.zeros(64, dtype=torch.int64, device=device)
    x, w = equal.detach().clone().requires_grad_(), w.detach()
    call = {"gradient": "sampled", "gradient_eps": 0.25, "rows": 32}

    def rows_of(seed):
        loss = flce.linear_loss(x, w, target, mean_loss(8), gradient_seed=seed, **call)
        return torch.autograd.grad(loss, x)[0].split(32)

    chunks = [chunk for seed in (0, 1, 32) for chunk in rows_of(seed)]
    for i, one in enumerate(chunks):
        assert not any(torch.equal(one, other) for other in chunks[:i])


# ---- the backward ----


def test_backwards_of_one_graph(device):
    """Kept and last have equal bits; another forward, another weight in between change nothing; the
    upstream gradient may be expanded."""
    x, w, target, _ = leaves(device, torch.bfloat16, 3)
    loss = flce.linear_loss(x, w, target, mean_loss(3), rows=CHUNK)
    flce.linear_loss(x, w, target, mean_loss(3), rows=CHUNK).backward()
    first, second = (torch.autograd.grad(loss, (x, w), retain_graph=True) for _ in range(2))
    with torch.no_grad():
        w.mul_(2.0)
    scaled = torch.autograd.grad(
        (loss.expand(2) * torch.tensor([1.5, 0.5], device=device)).sum(),
        (x, w),
        retain_graph=True,
    )
    last = torch.autograd.grad(loss, (x, w))
    for one, two, double, end, leaf in zip(first, second, scaled, last, (x, w), strict=True):
        assert torch.equal(one, two) and torch.equal(one, end) and torch.equal(2 * one, double)
        assert torch.equal(leaf.grad, one)


def test_a_float64_loss(device):
    x, w, target, _ = leaves(device, torch.float32, 3)
    loss = flce.linear_loss(x, w, target, lambda p, *_: -p.double().mean(), rows=3 * CHUNK)
    made = torch.autograd.grad(loss, (x, w))
    expected = torch.autograd.grad(F.cross_entropy(x @ w.T, target), (x, w))
    assert loss.dtype == torch.float64
    torch.testing.assert_close(made, expected)


def test_16_bit_values(device):
    """They are summed in float32, as the loss is."""
    x, w, target, _ = leaves(device, torch.bfloat16, 3)
    one = torch.ones((), device=device)

    def loss_fn(logprobs, entropy, rows):
        part = 256 if rows.start == 0 else 1
        return logprobs.sum(), {"half": one.half() * part, "bfloat16": one.bfloat16() * part}

    _, values = flce.linear_loss(x, w, target, loss_fn, rows=CHUNK)
    assert values["half"].dtype == values["bfloat16"].dtype == torch.float32
    assert values["half"] == values["bfloat16"] == 258.0  # 256 in bfloat16
