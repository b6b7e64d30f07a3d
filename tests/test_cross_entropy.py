"""flce.cross_entropy: given logits, read once in each pass, checked against float64.

The logits are given, so the tolerances are absolute: a float32 loss, and gradients rounded once.
"""

import cases
import pytest
import torch

import flce
from flce import reference

# Relative error of a gradient, as a whole and for each row: one rounding to its dtype (eps / 2) and
# float32 arithmetic, where exponents of 80 have an error of 80 * 2**-24 each.
GRADIENT_BARS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
}


def make_logits(tokens, vocab, *, dtype, device, std=4.0, seed=0):
    random = cases.generator(seed)
    logits = torch.randn(tokens, vocab, generator=random) * std
    target = torch.randint(vocab, (tokens,), generator=random)
    return logits.to(device, dtype), target.to(device)


def step(function, logits, target, grad_output=None, **options):
    leaf = logits.clone().requires_grad_()
    loss = function(leaf, target, **options)
    if grad_output is None:
        grad_output = torch.ones_like(loss)
    (grad,) = torch.autograd.grad(loss, leaf, grad_output.to(loss.dtype))
    return loss.detach(), grad


def check(logits, target, grad_output=None, **options):
    dtype = logits.dtype
    loss, grad = step(flce.cross_entropy, logits, target, grad_output, **options)
    wide_options = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    true_loss, true_grad = step(
        reference.cross_entropy, logits.double(), target, grad_output, **wide_options
    )
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    assert loss.shape == true_loss.shape and grad.shape == true_grad.shape
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    largest = logits.double().nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if len(logits) else 0.0
    bar = 8 * unit * true_loss.abs() + 2 * unit * largest
    assert not (~((loss.double() - true_loss).abs() <= bar)).any()
    check_gradient(grad, true_grad, GRADIENT_BARS[dtype])


def check_gradient(grad, truth, bar):
    vocab = grad.shape[-1]
    grad, truth = grad.reshape(-1, vocab), truth.reshape(-1, vocab)
    limits = torch.finfo(grad.dtype)
    # Half the spacing of the subnormals, and the error of the truth's own p - 1.
    least = limits.tiny * limits.eps + 2.0**-51
    error = (grad.double() - truth).norm(dim=-1)
    allowed = bar * truth.norm(dim=-1) + least * vocab**0.5
    bad = ~(error <= allowed)
    assert not bad.any(), f"{int(bad.sum())} rows, worst {error.max():.3e}"
    assert cases.relative_error(grad, truth) <= bar or truth.norm() <= least * truth.numel() ** 0.5


@cases.pairwise(
    vocab=[1, 2, 7, 8, 9, 127, 128, 129, 1000, 32064, 50257, 128256],
    std=[1.0, 8.0],
    dtype=cases.DTYPES,
)
def test_vocabs(device, vocab, std, dtype):
    tokens = 5 if vocab > 1000 else 33
    logits, target = make_logits(tokens, vocab, dtype=dtype, device=device, std=std)
    check(logits, target, reduction="sum")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("gap", [20.0, 80.0, 90.0, 1000.0])
def test_extreme_logits(device, gap, dtype):
    """The target far below and far above the other logits, some of which are -inf."""
    logits = torch.zeros(4, 64, dtype=torch.float64, device=device)
    target = torch.tensor([0, 1, 2, 3], device=device)
    logits[0, 9], logits[1, 1], logits[2, 2] = gap, gap, -gap
    logits[3, 32:] = -float("inf")
    check(logits.to(dtype), target, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_losses_keep_their_digits(device, dtype):
    logits = torch.zeros(1, 64, dtype=dtype, device=device)
    logits[0, 5] = 32.0
    loss, grad = step(flce.cross_entropy, logits, torch.tensor([5], device=device))
    rest = 63 * torch.exp(torch.tensor(-32.0, dtype=torch.float64))
    assert abs(loss.item() / torch.log1p(rest).item() - 1) <= 1e-5
    assert abs(-grad[0, 5].item() / (rest / (1 + rest)).item() - 1) <= GRADIENT_BARS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_logits(device, dtype):
    logits, target = make_logits(12, 200, dtype=dtype, device=device)
    plain = step(flce.cross_entropy, logits[:, :100].contiguous(), target % 100)
    views = (logits[:, :100], logits.T.contiguous().T[:, :100])
    for view in views:
        leaf = view.detach().requires_grad_()
        assert not leaf.is_contiguous()
        loss = flce.cross_entropy(leaf, target % 100)
        (grad,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(loss, plain[0]) and torch.equal(grad, plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_and_gemms(device, dtype):
    """Saved: four numbers per row. Allocated in the backward: the gradient. No GEMM runs."""
    logits, target = make_logits(256, 8192, dtype=dtype, device=device)
    leaf = logits.requires_grad_()
    size = leaf.numel() * leaf.element_size()

    def forward():
        return flce.cross_entropy(leaf, target)

    def both():
        return torch.autograd.grad(forward(), leaf)

    both()
    assert cases.peak_bytes(forward, device) <= 0.02 * size
    assert size <= cases.peak_bytes(both, device) <= 1.02 * size
    assert cases.gemms_of(both) == 0


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype"),
    [(8192, 32064, torch.float32), (4096, 131072, torch.bfloat16)],
    ids=["float32-8192x32064", "bfloat16-4096x131072"],
)
def test_reference_shapes(cuda, tokens, vocab, dtype):
    logits, target = make_logits(tokens, vocab, dtype=dtype, device=cuda)
    target[::7] = -100
    check(logits, target)
