"""flce.cross_entropy: given logits, read once in each pass, checked against float64."""

import pytest
import torch

import flce
from harness import cases


def make_case(tokens, vocab, *, dtype, device, std=4.0, **options):
    random = cases.generator()
    logits = torch.randn(tokens, vocab, generator=random) * std
    target = torch.randint(vocab, (tokens,), generator=random)
    return cases.Case(logits.to(device, dtype), None, target.to(device), options)


def check(case):
    yardstick = cases.Yardstick(case, wants=("input",), cancels=True)
    yardstick.check(cases.outcome(flce.cross_entropy, case, wants=("input",)))


@cases.pairwise(
    vocab=[1, 2, 7, 8, 9, 127, 128, 129, 1000, 32064, 50257, 128256],
    std=[1.0, 8.0],
    dtype=cases.DTYPES,
)
def test_vocabs(device, vocab, std, dtype):
    tokens = 5 if vocab > 1000 else 33
    check(make_case(tokens, vocab, dtype=dtype, device=device, std=std, reduction="sum"))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("gap", [20.0, 80.0, 90.0, 1000.0])
def test_extreme_logits(device, gap, dtype):
    """The target far below and far above the others; -inf adds nothing and has no gradient."""
    logits = torch.zeros(4, 64, dtype=dtype, device=device)
    logits[0, 9], logits[1, 1], logits[2, 2] = gap, gap, -gap
    target = torch.tensor([0, 1, 2, 3], device=device)
    case = cases.Case(logits, None, target, {"reduction": "none"})
    check(case)
    logits = torch.nn.functional.pad(logits, (0, 40), value=-float("inf"))
    masked, plain = (
        cases.outcome(flce.cross_entropy, one, wants=("input",))
        for one in (cases.Case(logits, None, target, case.options), case)
    )
    assert not masked["input"][:, 64:].any()
    torch.testing.assert_close(masked["loss"], plain["loss"])
    torch.testing.assert_close(masked["input"][:, :64], plain["input"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_losses_keep_their_digits(device, dtype):
    logits = torch.zeros(1, 64, dtype=dtype, device=device)
    logits[0, 5] = 32.0
    case = cases.Case(logits, None, torch.tensor([5], device=device))
    made = cases.outcome(flce.cross_entropy, case, wants=("input",))
    rest = 63 * torch.exp(torch.tensor(-32.0, dtype=torch.float64))
    assert abs(made["loss"].item() / torch.log1p(rest).item() - 1) <= 1e-5
    bar = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    assert abs(-made["input"][0, 5].item() / (rest / (1 + rest)).item() - 1) <= bar


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_logits(device, dtype):
    case = make_case(12, 200, dtype=dtype, device=device)
    logits, target = case.input, case.target % 100
    views = logits[:, :100].contiguous(), logits[:, :100], logits.T.contiguous().T[:, :100]
    assert not any(view.is_contiguous() for view in views[1:])
    plain, *others = (
        cases.outcome(flce.cross_entropy, cases.Case(view, None, target), wants=("input",))
        for view in views
    )
    assert all(cases.same_bits(plain, other) for other in others)


def test_retain_graph(device):
    case = make_case(5, 9, dtype=torch.float32, device=device)
    leaf = case.input.requires_grad_()
    loss = flce.cross_entropy(leaf, case.target)
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_and_gemms(device, dtype):
    """Saved: four numbers per row. Allocated in the backward: the gradient. No GEMM runs."""
    case = make_case(256, 8192, dtype=dtype, device=device)
    leaf, target = case.input.requires_grad_(), case.target
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
    case = make_case(tokens, vocab, dtype=dtype, device=cuda)
    case.target[::7] = -100
    check(case)
