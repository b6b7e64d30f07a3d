"""flce.linear_divergence against compositions of F.kl_div in float64."""

import math
import os

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.packing import DIVERGENCES as KINDS
from harness import cases
from harness.divergences import definition, divergence_of, draw, outcome

DRAWS = int(os.environ.get("FLCE_DRAWS", "120"))  # drawn cases of a device


def test_drawn_cases(device):
    for seed in range(DRAWS):
        named, options = draw(seed, device)
        truth = outcome(definition, named, options)
        for name, value in outcome(flce.linear_divergence, named, options).items():
            error, size = (value - truth[name]).abs().max(), truth[name].abs().max()
            assert error <= 1e-9 * max(size, 1e-3), (seed, name, float(error), float(size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
def test_dtypes(device, dtype, kind):
    """No more than twice eager's error, or the floors of the dtype. As in a training step the loss
    is scaled (GradScaler), and as large as 16 bits allow."""
    case = cases.make_case(64, 48, 500, dtype=dtype, device=device)
    teacher = cases.make_case(64, 80, 500, dtype=dtype, device=device, seed=1)
    options = {"divergence": kind, "max_memory": 256 << 10, "temperature": 1.5}
    constants = {"teacher_input": teacher.input, "teacher_weight": teacher.linear_weight}
    named = {"input": case.input, "linear_weight": case.linear_weight}
    wide = [{n: t.double() for n, t in given.items()} for given in (named, constants)]
    truth = outcome(definition, wide[0], {**wide[1], **options})
    eager = outcome(definition, named, {**constants, **options})
    for save in ("auto", "stats"):
        made = outcome(flce.linear_divergence, named, {**constants, **options, "save": save})
        assert made["loss"].dtype == torch.float32
        for name, value in made.items():
            allowed = 2 * cases.relative_error(eager[name], truth[name])
            error = cases.relative_error(value, truth[name])
            assert error <= max(allowed, cases.FLOORS[dtype][0]), (name, error, allowed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", cases.DTYPES[1:])
@pytest.mark.parametrize("distance", [1e-3, 1e-4])
@pytest.mark.parametrize("kernel", ["gemm", "fused"])  # of a GPU: their offsets differ
def test_student_near_its_teacher(device, monkeypatch, kernel, dtype, distance, kind):
    """p - q does not cancel: the error is that of an exact dz which is rounded to the dtype, as dX
    is. The logits are exact in every dtype, so that there is no other."""
    if device == "cpu" and kernel == "fused":
        pytest.skip("the CPU has one")
    monkeypatch.setenv("FLCE_KERNEL", kernel)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (32, 8), generator=generator).to(device, dtype)
    w = (torch.randint(-4, 5, (1000, 8), generator=generator) / 8).to(device, dtype)
    z = (x.double() @ w.double().T).requires_grad_()
    noise = torch.randn(32, 1000, generator=generator).to(device)
    teacher = (z.detach() + distance * noise).float()
    log_p, log_q = F.log_softmax(z, dim=-1), F.log_softmax(teacher.double(), dim=-1)
    truth = divergence_of(log_p, log_q, kind).sum()
    (dz,) = torch.autograd.grad(4096 * truth, z)  # a GradScaler's, for float16
    exact = dz @ w.double()
    floor = cases.relative_error((dz.to(dtype).double() @ w.double()).to(dtype), exact)
    options = {"teacher_logits": teacher, "divergence": kind, "reduction": "sum"}
    x.requires_grad_()
    loss = flce.linear_divergence(x, w, **options)
    (made,) = torch.autograd.grad(4096 * loss, x)
    assert cases.relative_error(made, exact) <= max(1.5 * floor, 2e-5)
    assert abs(loss.double() / truth - 1) <= 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions(device, kind):
    x, w, _ = cases.leaves(device, 9, hidden=5, vocab=70)
    loss = flce.linear_divergence(x, w, x.detach(), w.detach(), divergence=kind)
    assert loss == 0.0
    loss.backward()
    assert x.grad.abs().max() <= 1e-16 and w.grad.abs().max() <= 1e-16


@pytest.mark.parametrize("kind", KINDS)
def test_classes_without_probability(device, kind):
    """Logits of -inf: 0 log 0 is 0; a class that one alone excludes is infinitely far in one KL."""
    x, w, _ = cases.leaves(device, 6, hidden=5, vocab=70)
    bias = torch.zeros(70, dtype=x.dtype, device=device)
    bias[3] = -math.inf
    named = {"input": x, "linear_weight": w}
    logits = F.linear(x.detach(), w.detach() + 0.1)
    both = {"teacher_logits": logits + bias, "linear_bias": bias, "divergence": kind}
    made = outcome(flce.linear_divergence, named, both)
    kept = torch.arange(70, device=device) != 3
    cut = {"teacher_logits": logits[:, kept], "divergence": kind}
    truth = outcome(definition, {"input": x, "linear_weight": w[kept]}, cut)
    assert (made["input"] - truth["input"]).abs().max() <= 1e-12
    assert abs(made["loss"] - truth["loss"]) <= 1e-12
    one = flce.linear_divergence(x, w, teacher_logits=logits + bias, divergence=kind)
    assert (one == math.inf) if kind == "reverse_kl" else one.isfinite()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_logits_large_on_one_side(device, kind, side):
    """Their differences from the other side's are not rounded: an offset added to all, and one
    class far above the others."""
    small = torch.randn(4, 60, generator=cases.generator(0))
    noise = 1e-2 * torch.randn(4, 60, generator=cases.generator(1))
    peak = 1e30 * torch.nn.functional.one_hot(torch.arange(4), 60).float()
    for large, bound in ((small + noise + 1e4, 1e-4), (peak, 1e-5)):
        mine, theirs = (large, small) if side == "student" else (small, large)
        wide = mine.double().requires_grad_()
        truth = divergence_of(*(F.log_softmax(z, -1) for z in (wide, theirs.double())), kind).sum()
        (exact,) = torch.autograd.grad(truth, wide)
        x = torch.eye(4, device=device)
        w = mine.T.contiguous().to(device).requires_grad_()
        options = {"teacher_logits": theirs.to(device), "divergence": kind, "reduction": "sum"}
        loss = flce.linear_divergence(x, w, **options)
        (made,) = torch.autograd.grad(loss, w)
        assert abs(loss.item() - truth.item()) <= bound * truth.item()
        error = (made.T.cpu().double() - exact).norm()
        assert error <= bound * exact.norm() + 1e-12 * (exact.norm() == 0)


def test_gradcheck(device):
    x, w, target = cases.leaves(device, 4, hidden=3, vocab=11)
    bias = torch.randn(11, dtype=x.dtype, device=device, requires_grad=True)
    teacher = torch.randn(4, 11, dtype=x.dtype, device=device)
    for kind in KINDS:
        for reduction in ("mean", "none"):

            def call(x, w, b, kind=kind, reduction=reduction):
                return flce.linear_divergence(
                    *(x, w), teacher_logits=teacher, divergence=kind, beta=0.3, hard_weight=0.2,
                    target=target, softcap=3.0, linear_bias=b, reduction=reduction,
                )  # fmt: skip

            assert torch.autograd.gradcheck(call, (x, w, bias))


def test_no_grad_and_frozen_parts(device):
    x, w, _ = cases.leaves(device, 9, hidden=5, vocab=70)
    teacher = {"teacher_logits": torch.randn(9, 70, dtype=x.dtype, device=device)}
    truth = definition(x, w, **teacher)
    with torch.no_grad():
        made = flce.linear_divergence(x, w, **teacher)
    assert not made.requires_grad and abs(made - truth) <= 1e-12
    loss = flce.linear_divergence(x, w.detach(), **teacher)
    (3 * loss).backward(retain_graph=True)
    expected = torch.autograd.grad(3 * truth, x)[0]
    assert (x.grad - expected).abs().max() <= 1e-12
    loss.backward()  # again, after a graph that was kept
    assert (x.grad - 4 / 3 * expected).abs().max() <= 1e-12
    assert w.grad is None


def test_a_teacher_that_requires_grad_is_a_constant(device):
    x, w, _ = cases.leaves(device, 9, hidden=5, vocab=70)
    others = [tensor.detach().clone().requires_grad_() for tensor in (x, w)]
    flce.linear_divergence(x, w, *others, temperature=2.0).backward()
    assert all(tensor.grad is None for tensor in others)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"save": "stats"}, {}])
def test_a_teacher_of_inference_mode(device, options):
    x, w, target = cases.leaves(device, 9, hidden=5, vocab=70)
    with torch.inference_mode():
        others, target = [x * 2, w * 0.5], target.clone()
    expected = definition(x, w, *[one.clone() for one in others], target=target.clone(), **options)
    made = flce.linear_divergence(x, w, *others, target=target, **options)
    grads = [torch.autograd.grad(loss.sum(), (x, w)) for loss in (made, expected)]
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    """Both heads are cast, as F.linear does it."""
    x, w, _ = cases.leaves(device, 20, hidden=16, vocab=300, dtype=torch.float32)
    teacher = torch.randn(20, 24, device=device), torch.randn(300, 24, device=device) / 5
    with torch.autocast(device, dtype):
        loss = flce.linear_divergence(x, w, *teacher)
    truth = definition(x.double(), w.double(), *(tensor.double() for tensor in teacher))
    assert loss.dtype == torch.float32 and abs(loss - truth) <= 2e-2 * truth
    grads = torch.autograd.grad(loss, (x, w))
    for grad, expected in zip(grads, torch.autograd.grad(truth, (x, w)), strict=True):
        assert grad.dtype == torch.float32
        assert cases.relative_error(grad, expected.double()) <= 3e-2


@pytest.mark.parametrize("gradient", ["exact", "sampled"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(device, reduction, gradient):
    x, w, target = cases.leaves(device, 20, hidden=16, vocab=300)
    if gradient == "sampled":
        x, w = (leaf.detach().float().requires_grad_() for leaf in (x, w))
    temperature = torch.rand(20, dtype=x.dtype, device=device) + 0.5
    teacher = [torch.randn(n, 24, dtype=x.dtype, device=device) for n in (20, 300)]

    def step(x, w, temperature):
        rest = {"divergence": "jsd", "target": target, "temperature": temperature}
        rest |= {"gradient": gradient} | ({"gradient_seed": 1} if gradient == "sampled" else {})
        loss = flce.linear_divergence(x * 2, w, *teacher, reduction=reduction, **rest)
        return loss.square().sum()

    def gradients(function):
        loss = function(x, w, temperature)
        return [loss, *torch.autograd.grad(loss, (x, w))]

    compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"))
    for ours, plain in zip(compiled, gradients(step), strict=True):
        assert (ours - plain).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_logits_that_are_not_finite(device, kind, side):
    """Neither loss nor gradient of a row with a NaN or +inf, or with -inf alone, is finite."""
    for bad in ([0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3):
        mine, theirs = torch.randn(2, 1, 3, generator=cases.generator(0)).to(device)
        for one in [mine] * (side != "teacher") + [theirs] * (side != "student"):
            one[0] = torch.tensor(bad)
        named = {"input": torch.ones(1, 1, device=device), "linear_weight": mine.T.contiguous()}
        options = {"teacher_logits": theirs, "divergence": kind}
        for value in outcome(flce.linear_divergence, named, options).values():
            assert value.isnan().all()


@pytest.mark.parametrize("beta", [1e-12, 1e-6, 0.5, 1 - 1e-6])
def test_jsd_near_its_limits(beta):
    """Against exact sums. Where all classes are near the terms come from series, which do not
    cancel; beyond, beta q log(q / m) + (1 - beta) p log(p / m) does where beta is near 0 or 1."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 50
    for gap in (0.125, 0.25, 100.0, -math.inf):
        mine, theirs = [0.0, 0.5, 1.0, -1.0], [0.125, 0.5 + gap, 0.9375, -1.0625]
        p, q = ([mpmath.exp(v) / sum(map(mpmath.exp, row)) for v in row] for row in (mine, theirs))
        b, truth = mpmath.mpf(beta), mpmath.mpf(0)
        for one, other in zip(p, q, strict=True):
            m = b * other + (1 - b) * one
            truth += (1 - b) * one * mpmath.log(one / m)
            truth += b * other * mpmath.log(other / m) if other else 0
        z = torch.tensor([mine], dtype=torch.float64)
        made = flce.linear_divergence(
            torch.ones(1, 1, dtype=torch.float64), z.T.contiguous(), divergence="jsd", beta=beta,
            teacher_logits=torch.tensor([theirs], dtype=torch.float64),
        )  # fmt: skip
        bound = 1e-14 if gap == 0.125 else 4e-15 / min(beta, 1 - beta)
        assert abs(made.item() - truth) <= bound * truth, gap


def test_chunks_agree_and_repeat(device):
    named, options = draw(4, device)
    options |= {"reduction": "sum", "divergence": "jsd", "max_memory": 1 << 20}
    once = outcome(flce.linear_divergence, named, options)
    again = outcome(flce.linear_divergence, named, options)
    parts = outcome(flce.linear_divergence, named, {**options, "max_memory": 4 << 10})
    for name, value in once.items():
        assert torch.equal(value, again[name])
        assert (value - parts[name]).abs().max() <= 1e-11 * (1 + value.abs().max())


@pytest.mark.parametrize("given", cases.DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dtypes_of_teacher_logits(device, dtype, given):
    """They are read as they are: rows of any alignment, gathered where some are ignored."""
    case = cases.ignore_some(cases.make_case(12, 16, 301, dtype=dtype, device=device), every=4)
    teacher = torch.randn(12, 301, generator=cases.generator(2)).to(device, given)
    options = {"target": case.target, "reduction": "sum"}
    named = {"input": case.input, "linear_weight": case.linear_weight}
    wide = {name: tensor.double() for name, tensor in named.items()}
    truth = outcome(definition, wide, {**options, "teacher_logits": teacher.double()})
    eager = outcome(definition, named, {**options, "teacher_logits": teacher.to(truth["loss"])})
    for bound in ({}, {"valid_bound": 9}):
        made = outcome(
            flce.linear_divergence, named, {**options, **bound, "teacher_logits": teacher}
        )
        for name, value in made.items():
            allowed = max(2 * cases.relative_error(eager[name], truth[name]), 2e-2)
            allowed = allowed if dtype.itemsize == 2 else cases.FLOORS[dtype][0]
            assert cases.relative_error(value, truth[name]) <= allowed, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_almost_all_probability(device, kind):
    """p of 1 - 2e-4 and q of 1 - 5e-4: p - q and d - mean of the class are 3e-4, of which the
    rounding of l - l' in float32 is 2e-4 (eager's errors are 6e-4 to 3e-3)."""
    case = cases.make_case(64, 32, 1003, dtype=torch.float32, device=device)
    named = {"input": case.input, "linear_weight": case.linear_weight}
    named["linear_bias"] = torch.zeros(1003, device=device).index_fill(0, case.target[:1], 16.0)
    options = {"teacher_input": case.input.flip(0), "teacher_weight": case.linear_weight.flip(1)}
    options |= {"teacher_bias": named["linear_bias"] - 1.0, "divergence": kind}
    wide = [
        {n: t.double() for n, t in one.items() if n != "divergence"} for one in (named, options)
    ]
    truth = outcome(definition, wide[0], {**options, **wide[1]})
    for name, value in outcome(flce.linear_divergence, named, options).items():
        assert cases.relative_error(value, truth[name]) <= 2e-4, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_teacher_of_a_few_classes(device, tail, kind):
    x, w, _ = cases.leaves(device, 9, hidden=5, vocab=70)
    log_q = torch.randn(9, 70, dtype=x.dtype, device=device).log_softmax(-1)
    ids = log_q.topk(8).indices
    ids[2], ids[4, 5:] = -100, -100
    given = (ids, log_q.gather(-1, ids.clamp(min=0)))
    options = {"divergence": kind, "beta": 0.3, "temperature": 1.5, "num_items": 4.0}
    made = flce.linear_divergence(x, w, teacher_logits=given, tail=tail, **options)
    rows = []
    for row, (mine, theirs) in enumerate(zip((x @ w.T / 1.5).log_softmax(-1), log_q, strict=True)):
        kept = ids[row][ids[row] >= 0]
        parts = [
            torch.cat((one[kept], one[kept].exp().sum().neg().log1p()[None]))
            for one in (mine, theirs)
        ]
        parts = parts if tail == "class" else [one[kept].log_softmax(-1) for one in (mine, theirs)]
        rows += [divergence_of(*parts, kind, 0.3)] if len(kept) else []
    truth = sum(rows) / 4.0
    assert abs(made - truth) <= 1e-12
    grads = [torch.autograd.grad(loss, (x, w)) for loss in (made, truth)]
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_few_classes_without_probability(device, kind):
    """0 log 0 is 0, as with all of the teacher's logits; what is left of a sum near 1 counts."""
    x, w, _ = cases.leaves(device, 2, hidden=5, vocab=70)
    ids = torch.tensor([[3, 5, 8], [3, 5, 8]], device=device)
    log_q = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.5 - 1e-12, 0.0]], dtype=x.dtype).log()
    options = {"teacher_logits": (ids, log_q.to(device)), "divergence": kind, "reduction": "none"}
    made = flce.linear_divergence(x, w, **options)
    mine = (x @ w.T).log_softmax(-1).gather(-1, ids)
    log_p = torch.cat((mine, mine.exp().sum(-1, keepdim=True).neg().log1p()), dim=-1)
    tail = torch.tensor([[0.25], [1e-12]], dtype=x.dtype, device=device).log()
    log_q = torch.cat((log_q.to(device).clamp(min=-1e5), tail), dim=-1)
    truth = divergence_of(log_p, log_q, kind)
    if kind == "reverse_kl":
        assert made.isinf().all()
        return
    assert (made - truth).abs().max() <= 1e-9
    grads = [torch.autograd.grad(loss.sum(), (x, w)) for loss in (made, truth)]
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["class", "renormalize"])
def test_a_class_that_neither_allows_is_none_of_the_few(device, tail, kind):
    x, w, _ = cases.leaves(device, 2, hidden=5, vocab=70)
    bias = torch.zeros(70, dtype=x.dtype, device=device)
    bias[3] = -math.inf
    ids = torch.tensor([[3, 5, 8], [5, 8, 3]], device=device)
    log_q = (
        (torch.randn(2, 70, dtype=x.dtype, device=device) + bias).log_softmax(-1).gather(-1, ids)
    )
    results = []
    for kept in (ids, ids.masked_fill(ids == 3, -100)):
        options = {"teacher_logits": (kept, log_q), "divergence": kind, "tail": tail}
        loss = flce.linear_divergence(x, w, linear_bias=bias, **options)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-12


def test_heads_with_different_padding(device):
    """Beyond valid_vocab both may have any rows, which are never read."""
    x, w, _ = cases.leaves(device, 9, hidden=5, vocab=70)
    other = torch.randn(66, 5, dtype=x.dtype, device=device)
    named, given = {"input": x, "linear_weight": w}, {"teacher_input": x.detach()}
    cut = {**given, "teacher_weight": other[:64].clone(), "divergence": "jsd"}
    truth = outcome(definition, {"input": x, "linear_weight": w[:64]}, cut)
    with torch.no_grad():
        w[64:], other[64:] = math.nan, math.nan
    options = {**given, "teacher_weight": other, "divergence": "jsd", "valid_vocab": 64}
    made = outcome(flce.linear_divergence, named, options)
    assert (made["input"] - truth["input"]).abs().max() <= 1e-12
    assert (made["linear_weight"][:64] - truth["linear_weight"]).abs().max() <= 1e-12
    assert not made["linear_weight"][64:].any()
