"""Logits of a few classes of each row: `classes`, `topk`, linear_logprobs_at, TopLogprobs, and
targets (ids, probabilities): what drawn calls (drawn.py) do not have."""

import functools
import math
from fractions import Fraction

import pytest
import torch

import flce
from harness import cases


@pytest.mark.parametrize("logits_dtype", [None, torch.bfloat16])
def test_class_logits_are_those_of_the_logsumexp(device, logits_dtype):
    """Where the GEMM rounds the logits it does so before a bias is added."""
    case = cases.make_case(37, 40, 261, dtype=torch.bfloat16, device=device, bias=True, seed=2)
    case = cases.ignore_some(case, every=5)
    case.options["linear_bias"] *= 100.0
    ids = torch.arange(261, device=device).expand(*case.target.shape, 261)
    call = {**case.options, "logits_dtype": logits_dtype, "return_lse": True}
    for given in ({"classes": ids.contiguous()}, {"topk": 261}):
        operands = case.input, case.linear_weight, case.target
        made = flce.linear_cross_entropy(*operands, **call, **given)
        kept = case.target != case.options["ignore_index"]
        gap = made.class_logits[kept].logsumexp(-1) - made.lse[kept]
        assert gap.abs().max() <= 2e-6 * made.lse.abs().max()


# ---- topk ----

DISTRIBUTIONS = {
    "normal": lambda z: z,
    "peaked": lambda z: 12.0 * z,
    "extreme": lambda z: 60.0 * z,
    "flat": lambda z: 0.0 * z,
    "rising": lambda z: torch.arange(z.shape[-1], dtype=z.dtype, device=z.device).expand_as(z) / 64,
    "few values": lambda z: (2.0 * z).round(),
}


def logits_of(kind, device, tokens, vocab, dtype):
    """Operands whose logits have this distribution: the weight is nearly the logits itself."""
    random = torch.randn(tokens, vocab, generator=cases.generator(4), dtype=torch.float64)
    z = DISTRIBUTIONS[kind](random).to(device)
    x = torch.eye(tokens, dtype=torch.float64, device=device)
    w = z.T.contiguous()
    return x.to(dtype), w.to(dtype)


@cases.pairwise(
    kind=list(DISTRIBUTIONS),
    count=[1, 8, 64, 500, 1024],
    dtype=[torch.float32, torch.bfloat16],
    shape=[(16, 3001), (208, 40009)],
)
def test_topk_of_distributions(device, kind, count, dtype, shape):
    """The logits are those of torch.topk. In bfloat16 on Hopper candidates are found by E, which
    holds l - max to 2^-8 and nothing below exp(-87); with the second shape the logits GEMM is the
    fused one, which writes the largest E of its 209 column tiles, enough for 64 classes."""
    tokens, vocab = shape
    x, w = logits_of(kind, device, tokens, vocab, dtype)
    if dtype == torch.bfloat16:  # a whole pipeline stage of the fused GEMM
        x = torch.nn.functional.pad(x, (0, 48))
        w = torch.nn.functional.pad(w, (0, 48))
    target = torch.arange(tokens, device=device) * 11
    made = flce.linear_cross_entropy(x, w, target, reduction="none", topk=count)
    truth = x.double() @ w.double().T
    best = truth.topk(count, dim=-1).values
    assert (made.classes.sort(-1).values.diff() > 0).all()  # no class twice
    torch.testing.assert_close(
        made.class_logits.double(), truth.gather(-1, made.classes), rtol=2e-6, atol=2e-6
    )
    assert (made.class_logits.diff(dim=-1) <= 0).all()
    seen = best > best[:, :1] - 80.0
    error = (made.class_logits.double() - best).abs().masked_fill(~seen, 0.0)
    slack = 2.0**-7 if device == "cuda" and dtype == torch.bfloat16 else 4e-6
    if kind != "few values" and kind != "flat":
        assert error.max() <= slack * best.abs().clamp(min=1.0).max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_topk_of_impossible_classes(device, dtype):
    """A logit of -inf is that of a class: the last ones, but no missing ones."""
    x, w, target = cases.leaves(device, 9, vocab=13, dtype=dtype)
    bias = torch.full((13,), -math.inf, device=device, dtype=dtype)
    bias[[3, 7, 11]] = 0.0
    for count in (1, 3, 5, 13):
        options = {"linear_bias": bias, "entropy": None, "return_topk": count}
        _, _, top = flce.linear_logprobs(x, w, target % 2 * 4 + 3, **options)
        assert (top.ids >= 0).all() and (top.ids.sort(-1).values.diff() > 0).all()
        assert (bias[top.ids[:, :3]] == 0).all()
        assert (top.logprobs[:, 3:] == -math.inf).all() and (top.logprobs[:, :3] <= 0).all()
    _, _, top = flce.linear_logprobs(x, w, target, **{**options, "linear_bias": bias - math.inf})
    assert torch.equal(top.ids.sort(-1).values, torch.arange(13, device=device).expand(9, 13))
    assert (top.lse == -math.inf).all() and top.logprobs.isnan().all()  # as torch.log_softmax


def test_topk_is_the_references(device):
    case = cases.make_case(37, 40, 261, dtype=torch.float64, device=device)
    case = cases.ignore_some(case, every=5).with_options(topk=7)
    functions = flce.linear_cross_entropy, flce.reference.linear_cross_entropy
    made, expected = (cases.outcome(function, case, wants=()) for function in functions)
    assert torch.equal(made["classes"], expected["classes"])
    torch.testing.assert_close(made["class_logits"], expected["class_logits"])


def test_topk_of_float64_logits_that_float32_cannot_tell_apart():
    """In float64 on the CPU the order is exact."""
    z = 1e4 + 1e-7 * torch.randperm(500, generator=cases.generator(2)).double()
    x, w = torch.ones(1, 1, dtype=torch.float64), z.unsqueeze(-1)
    _, _, top = flce.linear_logprobs(x, w, torch.zeros(1, dtype=torch.long), return_topk=9)
    assert torch.equal(top.ids[0], z.topk(9).indices)


# ---- linear_logprobs_at ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["logits", "stats"])
def test_many_equal_ids(device, dtype, save):
    """Their gradients are summed before they are rounded to the operands' dtype."""
    x, w, target = cases.leaves(device, 5, dtype=dtype)
    ids = torch.cat([target.unsqueeze(-1).expand(5, 600), (target.unsqueeze(-1) + 1) % 41], -1)
    grads = torch.full(ids.shape, 1 / 64, device=device)
    grads[:, -1] = 0.5
    made = flce.linear_logprobs_at(x, w, ids.contiguous(), save=save)
    ours = torch.autograd.grad(made, (x, w), grads)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = (wide[0] @ wide[1].T).log_softmax(-1).gather(-1, ids)
    for grad, right in zip(ours, torch.autograd.grad(truth, wide, grads.double()), strict=True):
        assert cases.relative_error(grad, right) <= 2 * cases.LOGIT_ROUNDING[dtype]


def test_autocast_and_compile(device):
    x, w, target = cases.leaves(device, 16, hidden=32, vocab=50, dtype=torch.float32)
    ids = torch.randint(50, (16, 3), generator=cases.generator(1)).to(device)

    def call(x, w):
        at = flce.linear_logprobs_at(x, w, ids)
        return at, flce.linear_logprobs(x, w, target, return_topk=2)[2].logprobs

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    cases.assert_same(compiled(x, w), call(x, w), (x, w))
    with torch.autocast(device, torch.bfloat16):
        cast = call(x, w)
    rounded = call(*(t.detach().bfloat16().requires_grad_() for t in (x, w)))
    for ours, theirs in zip(cast, rounded, strict=True):
        assert torch.equal(ours, theirs)


IDS, CHANCES = torch.arange(80).reshape(20, 4) % 60, torch.full((20, 4), 0.2)
ROWS = {"reduction": "none", "token_weight": torch.linspace(0.1, 2.0, 20), "return_lse": True}
OF_K_CLASSES = {
    "target": lambda x, w: flce.linear_cross_entropy(x, w, (IDS, CHANCES)),
    "target, rows": lambda x, w: flce.linear_cross_entropy(x, w, (IDS, CHANCES), **ROWS)[0].sum(),
    "target, items": lambda x, w: flce.linear_cross_entropy(x, w, (IDS, CHANCES), num_items=7.0),
    "tail": lambda x, w: flce.linear_logprobs_at(x, w, IDS, tail=True).sum(),
}
for _kind in flce.packing.DIVERGENCES:
    OF_K_CLASSES[_kind] = functools.partial(
        flce.linear_divergence, divergence=_kind, teacher_logits=(IDS, CHANCES.log())
    )


@pytest.mark.parametrize("name", OF_K_CLASSES)
def test_compiles_without_a_break(name):
    generator, function, made = cases.generator(3), OF_K_CLASSES[name], []
    leaves = [torch.randn(n, 8, generator=generator).requires_grad_() for n in (20, 60)]
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        loss = call(*leaves)
        made.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for got, expected in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_options_of_targets_are_refused_when_compiled():
    def function(x, w):
        return flce.linear_cross_entropy(x, w, (IDS, CHANCES), reduction="batchmean")

    leaves = [torch.randn(n, 8) for n in (20, 60)]
    with pytest.raises(ValueError, match="^reduction: expected one of"):
        torch.compile(function, backend="eager")(*leaves)


def test_two_gemms_and_no_logits_in_the_backward(device):
    x, w, _ = cases.leaves(device, 64, hidden=16, vocab=500, dtype=torch.float32)
    ids = torch.randint(500, (64, 8), generator=cases.generator(1)).to(device)
    made = []
    forward = cases.gemms_of(lambda: made.append(flce.linear_logprobs_at(x, w, ids)))
    assert forward == 1
    assert cases.gemms_of(lambda: made[0].sum().backward()) == 2


# ---- refusals, in addition to those of test_refusals.py ----


def test_refused_dtypes_and_sampled_gradients(device):
    x, w, target = cases.leaves(device, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"ids: expected int64 or int32 class indices of shape"):
        flce.linear_logprobs_at(x, w, target.float().unsqueeze(-1))
    for dtype in (torch.int16, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"ids: expected int64 .*{dtype}"):
            flce.linear_logprobs_at(x, w, target.unsqueeze(-1).to(dtype))
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        flce.linear_logprobs_at(x, w, target.unsqueeze(-1), shift=1)
    made = flce.linear_logprobs_at(x, w, target.unsqueeze(-1), gradient="sampled")
    torch.testing.assert_close(made[:, 0], flce.linear_logprobs(x, w, target)[0].detach())
    with pytest.raises(ValueError, match='gradient: expected "exact" for a gradient of class_log'):
        made.sum().backward()


def test_out_of_range(device, monkeypatch):
    x, w, target = cases.leaves(device, 5)
    ids = target.unsqueeze(-1).repeat(1, 3)
    ids[3, 1] = 41
    monkeypatch.setenv("FLCE_CHECK", "1")
    with pytest.raises(IndexError, match=r"classes.*41"):
        flce.linear_logprobs_at(x, w, ids)
    monkeypatch.delenv("FLCE_CHECK")
    if device == "cpu":
        return
    made = flce.linear_cross_entropy(x, w, target, reduction="none", classes=ids)
    assert made.class_logits.isnan().nonzero().tolist() == [[3, 1]]
    (gx,) = torch.autograd.grad(made.class_logits[:, 0].sum(), x)
    assert gx[3].isnan().all() and gx[:3].isfinite().all()
    made = flce.linear_logprobs_at(x, w, ids)
    assert made.isnan().nonzero().tolist() == [[3, 1]]


@pytest.mark.parametrize("ignore_index", [-100, -2, 3])
def test_minus_one_is_no_class_unless_it_is_ignored(device, ignore_index, monkeypatch):
    x, w, target = cases.leaves(device, 5)
    ids = target.unsqueeze(-1).repeat(1, 3)
    ids[3, 1] = -1
    call = {"ignore_index": ignore_index}
    monkeypatch.setenv("FLCE_CHECK", "1")
    with pytest.raises(IndexError, match=r"classes.*-1"):
        flce.linear_logprobs_at(x, w, ids, **call)
    monkeypatch.delenv("FLCE_CHECK")
    if device == "cuda":
        assert flce.linear_logprobs_at(x, w, ids, **call)[3, 1].isnan()
    made = flce.linear_logprobs_at(x, w, ids, ignore_index=-1)
    assert made[3, 1] == 0 and (made != 0).sum() == 14


# ---- targets (ids, probabilities) ----


def test_sparse_target_of_impossible_classes(device):
    """A class of probability 0 adds nothing, where its logit is -inf too."""
    x, w, _ = cases.leaves(device, 6)
    ids = torch.arange(12, device=device).reshape(6, 2)
    probabilities = torch.tensor([1.0, 0.0], device=device, dtype=torch.float64).expand(6, 2)
    bias = torch.zeros(41, device=device, dtype=torch.float64)
    bias[1:12:2] = -math.inf
    ours = flce.linear_cross_entropy(x, w, (ids, probabilities), linear_bias=bias)
    theirs = flce.linear_cross_entropy(x, w, ids[:, 0].contiguous(), linear_bias=bias)
    cases.assert_same(ours, theirs, (x, w), tolerance=1e-12)


def test_an_ignore_index_beyond_int32(device):
    x, w, target = cases.leaves(device, 6)
    ids = target.unsqueeze(-1).int()
    made = flce.linear_logprobs_at(x, w, ids, ignore_index=2**40)
    assert torch.equal(made, flce.linear_logprobs_at(x, w, ids))


def test_refusals_of_sparse_targets(device):
    x, w, target = cases.leaves(device, 6)
    ids, probabilities = target.unsqueeze(-1), torch.ones(6, 1, device=device)
    for given, message in (
        ((ids, probabilities[:3]), r"target: expected shape \(6, 1\), that of the ids"),
        (
            (ids, probabilities.clone().requires_grad_()),
            "target: expected a tensor that does not",
        ),
        ((ids, ids), "target: expected floating probabilities, got torch.int64"),
        ((ids, probabilities, ids), "target: expected a tensor, got tuple"),
        ((ids,), "target: expected a tensor, got tuple"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            flce.linear_cross_entropy(x, w, given)
    for option in ({"label_smoothing": 0.1}, {"shift": 1}, {"return_accuracy": True}):
        (name,) = option
        with pytest.raises(ValueError, match=rf"{name}: expected .* with \(ids, probabilities\)"):
            flce.linear_cross_entropy(x, w, (ids, probabilities.detach()), **option)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", ["logits", "stats"])
def test_gradients_of_confident_rows(device, dtype, save):
    """p near 1, and a teacher near the student: p - q cancels, and may not be rounded before."""
    random = cases.generator(3)
    w = (torch.randn(200, 64, generator=random) / 8).to(device, dtype)
    best = torch.randint(200, (32,), generator=random).to(device)
    x = (16.0 * torch.nn.functional.normalize(w[best].float(), dim=-1)).to(dtype)
    wide = [t.double().requires_grad_() for t in (x, w)]
    logits = wide[0] @ wide[1].T
    ids = logits.topk(4, dim=-1).indices
    noise = 0.02 * torch.randn(200, generator=random).to(device)
    q = (logits.detach() + noise).softmax(-1).gather(-1, ids)
    dense = torch.zeros_like(logits).scatter_(-1, ids, q)
    losses = {
        "at": lambda x, w: flce.linear_logprobs_at(x, w, ids[:, :1].contiguous(), save=save).sum(),
        "target": lambda x, w: flce.linear_logprobs(x, w, ids[:, 0], save=save)[0].sum(),
        "sparse": lambda x, w: flce.linear_cross_entropy(x, w, (ids, q.float()), save=save),
        "dense": lambda x, w: flce.linear_cross_entropy(x, w, dense.float(), save="stats"),
    }
    log_p = logits.log_softmax(-1).gather(-1, ids)
    truths = {"at": log_p[:, 0].sum(), "sparse": -(q * log_p).sum(-1).mean()}
    truths |= {"target": truths["at"], "dense": truths["sparse"]}
    errors = {}
    for name, loss in losses.items():
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        ours = torch.autograd.grad(loss(*leaves), leaves)
        right = torch.autograd.grad(truths[name], wide, retain_graph=True)
        errors[name] = max(cases.relative_error(a, b) for a, b in zip(ours, right, strict=True))
    assert errors["at"] <= 2.0 * errors["target"] + cases.LOGIT_ROUNDING[dtype], errors
    assert errors["sparse"] <= 2.0 * errors["dense"] + cases.LOGIT_ROUNDING[dtype], errors


@pytest.mark.parametrize("scale", [Fraction(1, 2), -(2**70), 2**64])
def test_the_logits_of_classes_are_mapped_by_floats(scale):
    x, w, target = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4)
    got = flce.linear_cross_entropy(x, w, target, topk=3, logit_scale=scale)
    expected = flce.linear_cross_entropy(x, w, target, topk=3, logit_scale=float(scale))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if a is not None)
