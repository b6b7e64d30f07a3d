"""gradient="sampled": flce against the reference with the same seed, the mean in 16 bits, graphs
that are kept.

The float32 of a device rounds differently from the reference's float64, so now and then another
class is drawn: `agree` bounds how often.
"""

import math

import cases
import pytest
import raw
import torch
from sampled_case import HIDDEN, SAMPLED, SEEDS, TOKENS, VOCAB, make, sampled, upstream_of
from torch.utils.checkpoint import checkpoint

import flce
from flce import reference


def agree(ours, truth, case):
    """Compares float32 gradients row by row. Where a prefix sum lies within its rounding of a
    point that is drawn, a neighbouring class may be taken: a row of input's gradient differs then,
    and two of the weight's."""
    tokens, vocab = case.target.numel(), case.linear_weight.shape[0]
    largest = case.input.nan_to_num().abs().max() * case.linear_weight.abs().sum(-1).max()
    tolerance = cases.FLOORS[torch.float32][1] + 2.0**-24 * largest.item()
    drawn = 1 + math.ceil(tokens * min(0.5, 4e-5 * vocab))
    for name in cases.GRADIENTS:
        if name not in truth:
            continue
        got, expected = ours[name].double(), truth[name]
        assert got.shape == expected.shape
        width = 1 if name == "linear_bias" else expected.shape[-1]
        error = (got - expected).reshape(-1, width).norm(dim=-1)
        size = expected.reshape(-1, width).norm(dim=-1)
        differs = ~(error <= tolerance * (size + size.mean()))
        allowed = drawn if name == "input" else 2 * drawn
        assert differs.sum() <= allowed, f"{name}: {differs.nonzero().flatten().tolist()}"


def compare(case, *, eps=2**-6, seed=7, upstream=None, **call):
    """Loss and outputs against the exact call's, gradients against the reference's; -> them."""
    upstream = upstream or upstream_of("mean")
    upstream = {name: one.to(case.input.device) for name, one in upstream.items()}
    given = {**sampled(seed, eps), "upstream": upstream}
    ours = cases.outcome(flce.linear_cross_entropy, case, **given, **call)
    exact = {**given, "gradient": "exact", "save": "logits"}
    exact = cases.outcome(flce.linear_cross_entropy, case, **exact, **call)
    assert ours.keys() == exact.keys()
    # Other chunks, or the entropy's own kernels, may order a row's sums differently.
    same_kernels = call.get("max_memory") is None and "return_entropy" not in call
    for name, value in exact.items():
        assert ours[name].dtype == value.dtype
        if name == "predictions" or (name == "loss" and same_kernels):
            assert torch.equal(ours[name], value)
        elif name not in cases.GRADIENTS:
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)
    wide = case.to(torch.float64)
    agree(ours, cases.outcome(reference.linear_cross_entropy, wide, **given, **call), case)
    return ours


SCALES = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "negative": {"softcap": 5.0, "logit_scale": -1.5, "temperature": 0.7},
    "rows": {"logit_scale": 0.5, "temperature": "rows"},
}
WEIGHTS = {"none": (), "class": ("weight",), "token": ("token_weight",)}
WEIGHTS["both"] = ("weight", "token_weight")
BUDGET = 10 * (VOCAB + 3) * 4


def options_of(device, scales, weights):
    vectors = {
        "weight": 0.5 + torch.rand(VOCAB, generator=cases.generator(4)),
        "token_weight": torch.randn(TOKENS, generator=cases.generator(5)),
    }
    options = {**SCALES[scales], **{name: vectors[name] for name in WEIGHTS[weights]}}
    if options.get("temperature") == "rows":
        options["temperature"] = 0.5 + torch.rand(TOKENS, generator=cases.generator(6))
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


@cases.pairwise(
    eps=[2**-6, 2**-2, 0.3, 2**-12, 1.0],
    std=[1.0, 3.0, 20.0],
    reduction=["none", "mean", "sum"],
    smoothing=[0.0, 0.1, 1.0],
    scales=list(SCALES),
    weights=list(WEIGHTS),
    z_loss=[0.0, 0.05],
    ignore=[False, True],
    bias=[False, True],
    valid_vocab=[None, 100],
    budget=[None, BUDGET],
)
def test_combinations(
    device, eps, std, reduction, smoothing, scales, weights, z_loss, ignore, bias, valid_vocab,
    budget,
):  # fmt: skip
    case = make(device, std=std, bias=bias)
    if valid_vocab is not None:
        case.target.clamp_(max=valid_vocab - 1)
    case = cases.ignore_some(case) if ignore else case
    case = case.with_options(
        reduction=reduction,
        # With a softcap smoothing is refused.
        label_smoothing=0.0 if "softcap" in SCALES[scales] else smoothing,
        z_loss=z_loss,
        valid_vocab=valid_vocab,
        **options_of(device, scales, weights),
    )
    made = compare(case, eps=eps, upstream=upstream_of(reduction), max_memory=budget)
    if valid_vocab is not None:
        assert not made["linear_weight"][valid_vocab:].any()


@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 257, 1021, 4099])
@pytest.mark.parametrize("std", [0.0, 1.0, 8.0])
def test_vocabularies_of_any_size(device, vocab, std):
    case = make(device, std=max(std, 1.0), vocab=vocab, bias=False)
    if std == 0.0:
        case.linear_weight.zero_()
    compare(case, upstream=upstream_of("none"), reduction="none", eps=2**-5)


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 600])
def test_any_number_of_rows(device, tokens):
    compare(make(device, tokens=tokens, std=1.0))
    compare(cases.ignore_some(make(device, tokens=tokens), every=2), max_memory=BUDGET)


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


def shifted(case, **documents):
    case.input, case.target = case.input.reshape(3, 12, HIDDEN), case.target.reshape(3, 12)
    case.options.update(documents)
    return {"shift": 1}


def bounded(case, more):
    return {"valid_bound": int((case.target != -100).sum()) + more}


# A row's draw depends on its position among all rows, not among those that are computed.
CALLS = {
    **{f"seed {seed}": {"seed": seed} for seed in (0, -1, 2**63 - 1, -(2**63), 2**32)},
    **{f"items {n}": {"num_items": n, "z_loss": 0.1} for n in (7, 2.5, torch.tensor(11.0), 0)},
    "counted bound": {"valid_bound": "count"},
    "exact bound": lambda case: bounded(case, 0),
    "bound": lambda case: bounded(case, 3),
    "shift": lambda case: shifted(case),
    "documents": lambda case: shifted(case, cu_seqlens=torch.tensor([0, 5, 12, 30, 36])),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(device, name):
    call = CALLS[name]
    case = make(device, tokens=36)
    case = cases.ignore_some(case) if "items" in name or "bound" in name else case
    call = call(case) if callable(call) else call
    move = {k: v.to(device) for k, v in case.options.items() if isinstance(v, torch.Tensor)}
    compare(case.with_options(**move), **call)


def test_all_classes_above_eps_give_the_exact_gradient(device):
    """Every class is kept then: the draw makes no difference."""
    case = make(device, std=0.1, vocab=31)
    yardstick = cases.Yardstick(case)
    for seed in (1, 2):
        yardstick.check(cases.outcome(flce.linear_cross_entropy, case, **sampled(seed, 2**-12)))


OUTPUTS = [("lse",), ("loss", "lse"), ("entropy",), ("loss", "lse", "entropy")]


@pytest.mark.parametrize("outputs", OUTPUTS, ids="-".join)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_outputs(device, outputs, reduction):
    random = cases.generator(9)
    case = cases.ignore_some(make(device)).with_options(logit_scale=2.0, label_smoothing=0.1)
    scalar = reduction == "mean"
    upstream = {
        name: torch.randn(() if scalar and name == "loss" else TOKENS, generator=random)
        for name in outputs
    }
    compare(
        case, upstream=upstream, reduction=reduction, return_lse=True, return_entropy=True,
        return_accuracy=True, return_predictions=True, return_z_loss=True,
    )  # fmt: skip


@pytest.mark.parametrize("std", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("rows", [None, "count"])
def test_gradient_of_the_entropy(device, std, rows):
    """Flat rows, whose gradient is 0, and such whose target has all of the probability."""
    upstream = torch.randn(TOKENS, generator=cases.generator(9))
    case = cases.ignore_some(make(device, std=max(std, 1.0), bias=std > 0.0))
    if std == 0.0:
        case.linear_weight.zero_()
    upstream = {"loss": upstream.flip(0), "entropy": upstream}
    call = {"upstream": upstream, "reduction": "none", "return_entropy": True}
    compare(case, eps=2**-5, valid_bound=rows, **call)


@pytest.mark.parametrize(
    "wants",
    [("input",), ("linear_weight",), ("linear_bias",), ("input", "linear_weight")],
    ids="-".join,
)
def test_frozen_parts(device, wants):
    """What is wanted has the same bits as with all gradients."""
    case = cases.ignore_some(make(device))
    every = cases.outcome(flce.linear_cross_entropy, case, **sampled(5))
    made = compare(case, wants=wants, upstream={"loss": torch.tensor(1.0)}, seed=5)
    assert cases.same_bits(made, {name: every[name] for name in made})


# ---- 16-bit operands: the mean ----


MEANS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.02},
    "softcap": {"softcap": 4.0, "temperature": 0.8},
    "entropy": {"return_entropy": True},
    "all": {"return_entropy": True, "label_smoothing": 0.1, "logit_scale": -1.2},
}
UPSTREAM = {"entropy": ("entropy",), "all": ("loss", "entropy")}


@pytest.mark.parametrize(
    "dtype, options",
    [
        *((torch.float32, options) for options in MEANS),
        *((torch.bfloat16, options) for options in ("smoothing", "entropy")),
        *((torch.float16, options) for options in ("softcap", "all")),
    ],
    ids=str,
)
def test_the_mean_is_the_exact_gradient(device, dtype, options):
    """Over 4,096 seeds, within 4.5 standard errors and the rounding of the dtype."""
    case = make(device, dtype, tokens=8, vocab=40).with_options(**MEANS[options])
    random, call = cases.generator(3), {}
    if options in UPSTREAM:
        call["reduction"] = "none"
        named = {name: torch.randn(8, generator=random).to(device) for name in UPSTREAM[options]}
        call["upstream"] = named
    truth = cases.outcome(reference.linear_cross_entropy, case.to(torch.float64), **call)
    total = dict.fromkeys(cases.GRADIENTS, 0.0)
    squares = dict.fromkeys(cases.GRADIENTS, 0.0)
    for seed in range(SEEDS):
        made = cases.outcome(flce.linear_cross_entropy, case, **sampled(seed, 2**-4), **call)
        for name in total:
            total[name] = total[name] + made[name].double()
            squares[name] = squares[name] + made[name].double().square()
    for name in total:
        mean = total[name] / SEEDS
        deviation = (squares[name] / SEEDS - mean.square()).clamp(min=0.0).sqrt()
        assert deviation.any()
        size = truth[name].abs().max()
        limit = 4.5 * deviation / math.sqrt(SEEDS) + cases.FLOORS[dtype][1] * size
        error = (mean - truth[name]).abs()
        assert (error <= limit).all(), (error / limit).max()


def test_autocast(device):
    case = make(device)
    with torch.autocast(device, torch.bfloat16):
        first, again, other = (
            cases.outcome(flce.linear_cross_entropy, case, **sampled(seed)) for seed in (3, 3, 4)
        )
    assert cases.same_bits(first, again) and not cases.same_bits(first, other)
    assert all(made.dtype == torch.float32 for made in first.values())


# ---- millions of classes ----


@pytest.mark.parametrize(("vocab", "eps"), [(300_007, 2**-6), (3_000_017, 2**-6), (3_000_017, 1.0)])
def test_lists_of_many_classes(device, vocab, eps):
    """The entries of the lists are where the prefix sums of q have the draws, within the rounding
    of q, and of E, which moves the sums of bfloat16; and the gradients are their sums."""
    tokens, bits = 4, 23 if vocab <= 2**20 else 40
    for dtype, rounding in ((torch.float32, 4e-7), (torch.bfloat16, 1e-4)):
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
        draws = reference.offsets_of_rows(tokens, 7, device, bits).double() / 2**bits
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
    vocab, tokens = 3 << 20, 6
    case = make("cpu", dtype, tokens=tokens, vocab=8, bias=False)
    case.target = torch.arange(0, vocab, vocab // tokens)
    case.input = torch.zeros(tokens, 2, dtype=dtype)
    case.input[:, 0] = 1.0
    case.linear_weight = torch.randn(vocab, 2, generator=cases.generator(5)).to(dtype)
    case.linear_weight[:, 0] = torch.where(torch.arange(vocab) % 3 == 2, -200.0, 0.0)
    upstream = {"loss": torch.linspace(-1.0, 2.0, tokens), "entropy": torch.ones(tokens)}
    call = {"upstream": upstream, "reduction": "none", "return_entropy": True, **sampled(3, eps)}
    ours = cases.outcome(flce.linear_cross_entropy, case, **call)
    truth = cases.outcome(reference.linear_cross_entropy, case.to(torch.float64), **call)
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
