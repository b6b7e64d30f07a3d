"""Options beyond the numbers of drawn calls (test_properties.py): scalars as tensors, rows that are
skipped, class weights of 0."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases

TOKENS, VOCAB = 30, 41
SAVES = pytest.mark.parametrize("save", cases.SAVES)


def test_shift_of_int32_targets_with_a_wide_ignore_index(device):
    """ignore_index marks the sequence ends, although no int32 holds it."""
    x, w = torch.randn(2, 6, 8, device=device), torch.randn(11, 8, device=device)
    y = torch.randint(11, (2, 6), device=device, dtype=torch.int32)
    made = flce.linear_cross_entropy(x, w, y, shift=1, ignore_index=2**40)
    assert torch.equal(made, flce.linear_cross_entropy(x, w, y.long(), shift=1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_weights_of_zero_is_torchs(device, smoothing):
    """NaN, as in F.cross_entropy: there are valid rows, but the denominator is 0. Of no row: 0."""
    x, w, y = cases.leaves(device, 4)
    options = {"weight": torch.zeros(VOCAB, device=device).double(), "label_smoothing": smoothing}
    assert F.cross_entropy(F.linear(x, w), y, **options).isnan()
    assert flce.linear_cross_entropy(x, w, y, **options).isnan()
    assert flce.linear_cross_entropy(x, w, torch.full_like(y, -100), **options) == 0


# ---- scalars ----


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "0-d"])
def test_scalars_may_be_tensors(device, make):
    """0-d tensors, as in torch's own functions; the results are bitwise equal."""
    x, w, y = cases.leaves(device, TOKENS)
    values = {"temperature": 0.5, "softcap": 8.0, "logit_scale": 0.25, "z_loss": 0.125}
    ours = flce.linear_cross_entropy(x, w, y, **{name: make(v) for name, v in values.items()})
    assert torch.equal(ours, flce.linear_cross_entropy(x, w, y, **values))


def test_a_temperature_without_a_value():
    x, w, y = (t.to("meta") for t in cases.leaves("cpu", TOKENS))
    half = torch.tensor(0.5, device="meta")
    ours = flce.linear_cross_entropy(x, w, y, temperature=half, reduction="none")
    assert ours.shape == y.shape and ours.is_meta


# ---- ignored rows are skipped ----


def mostly_ignored(device, tokens, share=0.6, dtype=torch.float64):
    x, w, y = cases.leaves(device, tokens, dtype=dtype)
    order = torch.randperm(tokens, generator=cases.generator(5)).to(device)
    ignored = order[: int(share * tokens)]
    kept = order[len(ignored) :].sort().values
    with torch.no_grad():
        x[ignored] = math.nan
    y[ignored] = -100
    return (x, w, y), kept


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_ignored_rows_cost_no_products(device, save):
    """As many chunks as a batch of the valid rows alone; the CPU always counts them."""
    (x, w, y), kept = mostly_ignored(device, 100)
    alone = x.detach()[kept].clone().requires_grad_()
    knobs = {"save": save, "max_memory": 10 * (VOCAB + 3) * 8}
    bound = "count" if device == "cuda" else None

    def gemms(rows, target, bound=None):
        def step():
            loss = flce.linear_cross_entropy(rows, w, target, valid_bound=bound, **knobs)
            torch.autograd.grad(loss, (rows, w))

        return cases.gemms_of(step)

    few = gemms(alone, y[kept])
    assert gemms(x, y, bound) == few
    # Without ignored rows there are more GEMMs, so the count can distinguish.
    assert gemms(x.detach().nan_to_num().requires_grad_(), torch.zeros_like(y)) >= 2 * few


def test_memory_follows_the_valid_rows(device):
    # On CUDA so many rows that the GEMMs' scratch, which does not depend on them, is comparatively
    # small.
    tokens, copies = (20_000, 200) if device == "cuda" else (400, 25)
    (x, w, y), kept = mostly_ignored(device, tokens, dtype=torch.float32)
    weight = w.detach().repeat(copies, 1).requires_grad_()
    bound = "count" if device == "cuda" else None

    def peak(target):
        def step():
            loss = flce.linear_cross_entropy(x, weight, target, save="grads", valid_bound=bound)
            return torch.autograd.grad(loss, (x, weight))

        step()
        return cases.peak_bytes(step, device)

    some = peak(y)
    with torch.no_grad():
        x.nan_to_num_()
    assert some <= 0.5 * peak(torch.zeros_like(y))


def test_more_valid_rows_than_the_bound_are_refused_on_the_cpu():
    (x, w, y), kept = mostly_ignored("cpu", TOKENS)
    with pytest.raises(
        ValueError, match=f"valid_bound: expected at least {len(kept)}.* got {len(kept) - 1}"
    ):
        flce.linear_cross_entropy(x, w, y, valid_bound=len(kept) - 1)


@SAVES
def test_more_valid_rows_than_the_bound_are_nan_on_cuda(cuda, save):
    """Rows are never dropped silently."""
    (x, w, y), kept = mostly_ignored(cuda, TOKENS)
    for bound in (len(kept) - 1, 0):
        options = {"valid_bound": bound, "save": save, "return_accuracy": True}
        made = flce.linear_cross_entropy(x, w, y, **options)
        dx, dw = torch.autograd.grad(made.loss, (x, w))
        assert made.loss.isnan() and made.accuracy.isnan()
        assert dw.isnan().all() and (bound == 0 or dx[kept].isnan().all())


def test_reading_a_cpu_count_for_a_gpu(cuda):
    """num_items from a data loader is a CPU tensor; it must not make the call synchronise."""
    (x, w, y), _ = mostly_ignored(cuda, TOKENS)
    x = x.detach().nan_to_num()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = flce.linear_cross_entropy(x, w, y, num_items=torch.tensor(7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = flce.reference.linear_cross_entropy(x, w, y, num_items=7)
    assert cases.relative_error(loss.detach(), truth.detach().double()) <= 1e-6


def with_a_weightless_class(device, rows):
    """A case, and class weights that are 0 for class 5, the target of `rows`."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = cases.make_case(8, 1024, 33, dtype=dtype, device=device, bias=True)
    weight = torch.ones(33, device=device)
    weight[5], case.target[rows] = 0.0, 5
    return case, weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("save", cases.SAVES)
def test_weight_zero_hides_an_infinite_logit(device, save, smoothing):
    """As a target and in smoothing; the truth has a logit so low that p is 0."""
    case, weight = with_a_weightless_class(device, slice(3))
    fused = functools.partial(flce.linear_cross_entropy, save=save)
    results = []
    for function, kind, low in (
        (fused, case.dtype, -math.inf),
        (flce.reference.linear_cross_entropy, torch.float64, -1e5),
    ):
        x, w, b = (
            tensor.detach().to(kind).requires_grad_()
            for tensor in (case.input, case.linear_weight, case.options["linear_bias"])
        )
        bias = b.masked_fill(torch.arange(33, device=device) == 5, low)
        options = {"linear_bias": bias, "weight": weight.to(kind), "label_smoothing": smoothing}
        loss = function(x, w, case.target, **options)
        general = function(x, w, case.target, return_entropy=True, **options).loss
        assert cases.relative_error(general.detach(), loss.detach().double()) <= 1e-6
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, w, b))))
    (loss, *gradients), (true_loss, *truths) = results
    assert cases.relative_error(loss, true_loss) <= 1e-5
    for made, true in zip(gradients, truths, strict=True):
        assert cases.relative_error(made, true) <= (1e-5 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weight_zero_hides_no_other_logit(device, bad):
    """A row with a NaN or +inf is NaN, whatever the weight of its target's class."""
    case, weight = with_a_weightless_class(device, 3)
    x = case.input.detach().clone()
    x[3, 0] = bad
    loss = flce.linear_cross_entropy(
        x, case.linear_weight, case.target, weight=weight, reduction="none"
    )
    assert loss.isnan().nonzero().flatten().tolist() == [3]
