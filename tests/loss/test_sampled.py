"""gradient="sampled": flce against the reference with the same seed, of many classes and rows
that drawn calls (test_properties.py) do not have, 16 bits, graphs that are kept."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flce
from harness import cases, raw, sampled_reference
from harness.sampled_case import SAMPLED, TOKENS, compare, make, sampled, upstream_of


@pytest.mark.parametrize("vocab", [2, 31, 1021, 4099])
@pytest.mark.parametrize("std", [0.0, 1.0, 8.0])
def test_vocabularies_of_any_size(device, vocab, std):
    case = make(device, std=max(std, 1.0), vocab=vocab, bias=False)
    if std == 0.0:
        case.linear_weight.zero_()
    compare(case, upstream=upstream_of("none"), reduction="none", eps=2**-5)


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("accum_dtype", [None, torch.float32], ids=str)
def test_no_valid_rows(device, ignore, dtype, accum_dtype):
    case = make(device, dtype).with_options(accum_dtype=accum_dtype)
    if ignore:
        case = cases.ignore_some(case, every=1)
    else:
        case.input, case.target = case.input[:0], case.target[:0]
    made = cases.outcome(flce.linear_cross_entropy, case, **sampled(3))
    assert all(tensor.count_nonzero() == 0 for tensor in made.values())


OPTIONS = {
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.02},
    "softcap": {"softcap": 4.0, "temperature": 1.5},
    "entropy": {"return_entropy": True},
    "all": {"return_entropy": True, "label_smoothing": 0.1, "logit_scale": -0.8},
}


@cases.pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16], options=list(OPTIONS), seed=[1, 2]
)
def test_all_classes_above_eps_give_the_exact_gradient(device, dtype, options, seed):
    """Every class is kept then: the draw makes no difference."""
    case = make(device, dtype, std=0.1, vocab=31).with_options(**OPTIONS[options])
    call = {"upstream": {"loss": None}}
    if "return_entropy" in OPTIONS[options]:
        rows = torch.randn(2, TOKENS, generator=cases.generator(3)).to(device)
        call["upstream"] = dict(zip(("loss", "entropy"), rows, strict=True))
        case.options["reduction"] = "none"
    given = {**sampled(seed, 2**-12), **call}
    made = cases.outcome(flce.linear_cross_entropy, case, **given)
    cases.Yardstick(case, cancels=True, **call).check(made)


@pytest.mark.parametrize("wants", [("input",), ("linear_weight",), ("linear_bias",)], ids="-".join)
def test_frozen_parts(device, wants):
    """What is wanted has the same bits as with all gradients."""
    case = cases.ignore_some(make(device))
    every, made = (
        cases.outcome(flce.linear_cross_entropy, case, wants=names, **sampled(5))
        for names in (cases.GRADIENTS, wants)
    )
    assert cases.same_bits(made, {name: every[name] for name in made})


def test_autocast(device):
    case = make(device)
    with torch.autocast(device, torch.bfloat16):
        first, again, other = (
            cases.outcome(flce.linear_cross_entropy, case, **sampled(seed)) for seed in (3, 3, 4)
        )
    assert cases.same_bits(first, again) and not cases.same_bits(first, other)
    assert all(made.dtype == torch.float32 for made in first.values())


# ---- millions of classes ----


@pytest.mark.parametrize(("vocab", "eps"), [(300_007, 2**-6), (1_100_003, 2**-6), (1_100_003, 1.0)])
def test_lists_of_many_classes(device, vocab, eps):
    """The entries of the lists are where the prefix sums of q have the draws, within the rounding
    of q, and of E, which moves the sums of 16 bits; and the gradients are their sums."""
    tokens, bits = 4, 23 if vocab <= 2**20 else 40
    for dtype, rounding in ((torch.float32, 4e-7), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)):
        tolerance = rounding / eps
        case = cases.make_case(tokens, 8, vocab, dtype=dtype, device=device, std=1.0)
        operands = case.input, case.linear_weight, case.target
        z = case.input.double() @ case.linear_weight.double().T
        if device == "cpu" and dtype == torch.bfloat16:
            z = z.to(dtype).double()  # as torch's GEMM gives them
        p = z.softmax(-1)
        at_target = case.target[:, None]
        q = (p / eps).clamp(max=1.0).scatter(-1, at_target, 0.0)
        end = q.cumsum(-1)
        draws = sampled_reference.offsets_of_rows(tokens, 7, device, bits).double() / 2**bits
        seed = torch.tensor(7, device=device)
        given = {"seed": seed, "gradient": "sampled", "gradient_eps": eps}
        given |= {"reduction": "sum", "max_memory": 1 << 28}
        made = torch.ops.flce.forward(*raw.forward(*operands, "samples", **given))
        lists = made[4].reshape(tokens, -1, 2).long()
        assert torch.equal(lists[:, 0, 0], case.target)
        estimate = torch.zeros_like(p)
        for row in range(tokens):
            count = lists[row, 0, 1].item()
            classes = lists[row, 1 : count + 1, 0]
            positions = draws[row] + torch.arange(count, device=device)
            assert (classes.diff() > 0).all() and abs(count - 1.0 / eps) <= 1.0
            assert ((end[row] - q[row])[classes] <= positions + tolerance).all()
            assert (positions <= end[row, classes] + tolerance).all()
            assert draws[row] + count >= end[row, -1] - tolerance
            estimate[row, classes] = p[row, classes].clamp(min=eps)
        estimate.scatter_(-1, at_target, p.gather(-1, at_target) - 1.0)
        ours = cases.outcome(flce.linear_cross_entropy, case, **sampled(7, eps), reduction="sum")
        floor = cases.FLOORS[dtype][1]
        for name, truth in (
            ("input", estimate @ case.linear_weight.double()),
            ("linear_weight", estimate.T @ case.input.double()),
        ):
            assert cases.relative_error(ours[name], truth) <= floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [1.0, 2**-6, 2**-12])
def test_millions_of_equal_classes(eps, dtype):
    """As the reference, on the CPU, entry by entry: E is 1 for two thirds of the classes and 0 for
    the others, so that no rounding can move a draw."""
    vocab, tokens = 3 << 19, 3
    case = make("cpu", dtype, tokens=tokens, vocab=8, bias=False)
    case.target = torch.arange(0, vocab, vocab // tokens)
    case.input = torch.zeros(tokens, 2, dtype=dtype)
    case.input[:, 0] = 1.0
    case.linear_weight = torch.randn(vocab, 2, generator=cases.generator(5)).to(dtype)
    case.linear_weight[:, 0] = torch.where(torch.arange(vocab) % 3 == 2, -200.0, 0.0)
    upstream = {"loss": torch.linspace(-1.0, 2.0, tokens), "entropy": torch.ones(tokens)}
    call = {"upstream": upstream, "reduction": "none", "return_entropy": True, **sampled(3, eps)}
    ours = cases.outcome(flce.linear_cross_entropy, case, **call)
    truth = cases.outcome(sampled_reference.linear_cross_entropy, case.to(torch.float64), **call)
    for name in ("loss", "entropy", "input", "linear_weight"):
        error = cases.relative_error(ours[name], truth[name])
        assert error <= cases.FLOORS[dtype][name in cases.GRADIENTS], name


# ---- graphs that are kept ----


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_kept_graph_gives_the_same_bits(device, reduction):
    case = make(device)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    loss = flce.linear_cross_entropy(x, w, case.target, reduction=reduction, **SAMPLED)
    upstream = upstream_of(reduction)["loss"].to(device)
    first = torch.autograd.grad(loss, (x, w), upstream, retain_graph=True)
    doubled = torch.autograd.grad(loss, (x, w), 2.0 * upstream, retain_graph=True)
    again = torch.autograd.grad(loss, (x, w), upstream)
    for one, two, three in zip(first, again, doubled, strict=True):
        assert torch.equal(one, two) and torch.equal(2.0 * one, three)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same(device, reentrant):
    """As the call without it, and anew in the next step."""
    case = make(device)
    x = case.input.requires_grad_()

    def loss(x):
        return flce.linear_cross_entropy(2.0 * x, case.linear_weight, case.target, **SAMPLED)

    torch.manual_seed(12)
    plain = [torch.autograd.grad(loss(x), x)[0] for _ in range(2)]
    torch.manual_seed(12)
    for expected in plain:
        x.grad = None
        checkpoint(loss, x, use_reentrant=reentrant).backward()
        assert torch.equal(x.grad, expected)
    assert not torch.equal(*plain)
