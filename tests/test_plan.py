"""The plan compared with what runs: number of GEMMs, measured bytes, memory bounds."""

import itertools
import math

import cases
import hopper
import pytest
import torch

import flce

NAMES = {"input": "grad_input", "linear_weight": "grad_weight"}
WANTS = [subset for size in range(4) for subset in itertools.combinations(cases.GRADIENTS, size)]


def plan_of(case, device, wants=cases.GRADIENTS, **knobs):
    """The plan for `case`; it includes a bias if the bias's gradient is wanted."""
    (tokens, hidden), vocab = case.input.shape, case.linear_weight.shape[0]
    grads = {flag: name in wants for name, flag in NAMES.items()}
    knobs.setdefault("bias", "linear_bias" in wants)
    return flce.plan(tokens, hidden, vocab, dtype=case.dtype, device=device, **grads, **knobs)


def split_step(case, wants, **knobs):
    """GEMMs of the forward and of the backward, counted by the engine."""
    named = {"input": case.input, "linear_weight": case.linear_weight, **case.options}
    leaves = {name: value.clone().requires_grad_(name in wants) for name, value in named.items()}
    holder = []

    def forward():
        holder.append(flce.linear_cross_entropy(target=case.target, **leaves, **knobs))

    def backward():
        loss = holder[0].sum()
        torch.autograd.grad(loss, [leaves[name] for name in wants])

    return cases.gemms_of(forward), cases.gemms_of(backward) if wants else 0


@pytest.mark.parametrize("wants", WANTS, ids=lambda wants: "+".join(wants) or "no_grad")
@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_gemms(device, save, wants, chunks):
    """In float32: per chunk one logits GEMM, one for dX and one for dW if they are wanted; a
    frozen operand costs none, "stats" computes the logits once more."""
    case = cases.make_case(64, 16, 256, dtype=torch.float32, device=device, bias=True)
    if "linear_bias" not in wants:
        del case.options["linear_bias"]
    budget = 64 * 256 * 4 // chunks
    gradients = ("input" in wants) + ("linear_weight" in wants)
    expected = {
        "logits": (1, gradients),
        "grads": (chunks * (1 + gradients), 0),
        "stats": (chunks, chunks * (1 + gradients)),
    }[save]
    if not wants:
        expected = (chunks, 0)
    assert split_step(case, wants, save=save, max_memory=budget) == expected
    plan = plan_of(case, device, wants, save=save, max_memory=budget)
    assert (plan.forward_gemms, plan.backward_gemms) == expected


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
def test_planned_gemms_are_the_counted_ones(device, dtype, save, accum_dtype):
    """In every dtype, also if an accumulator adds blocks of dW."""
    if dtype == torch.float64 and accum_dtype == torch.float32:
        pytest.skip("float64 sums in float64")
    case = cases.make_case(100, 16, 300, dtype=dtype, device=device, bias=True)
    knobs = {"save": save, "max_memory": 32 * 304 * 4, "accum_dtype": accum_dtype}
    plan = plan_of(case, device, **knobs)
    counted = split_step(case, cases.GRADIENTS, **knobs)
    assert (plan.forward_gemms, plan.backward_gemms) == counted


def test_no_grad_mode_plans_the_logits_alone(device):
    case = cases.make_case(64, 16, 256, dtype=torch.float32, device=device)

    def forward():
        with torch.no_grad():
            flce.linear_cross_entropy(
                case.input, case.linear_weight.requires_grad_(), case.target, max_memory=16 * 1024
            )

    assert cases.gemms_of(forward) == 4


@pytest.mark.parametrize(
    ("reduction", "dtype", "fits", "expected"),
    [
        ("mean", torch.float32, True, "logits"),
        ("none", torch.float32, True, "logits"),
        ("mean", torch.float32, False, "grads"),
        ("sum", torch.bfloat16, False, "grads"),
        ("none", torch.bfloat16, False, "stats"),
    ],
)
def test_auto(device, reduction, dtype, fits, expected):
    tokens, vocab = 1024, 4096
    budget = tokens * vocab * dtype.itemsize
    plan = flce.plan(
        tokens,
        64,
        vocab,
        dtype=dtype,
        device=device,
        reduction=reduction,
        max_memory=budget if fits else budget - 1,
    )
    if device == "cuda" and expected == "logits" and reduction != "none":
        expected = "grads"  # a weight this small: see test_auto_weighs_the_weight_on_cuda
    assert plan.save == expected


@pytest.mark.parametrize(
    ("options", "save"),
    [
        ({}, "grads"),
        ({"dtype": torch.float16}, "grads"),
        ({"reduction": "none"}, "logits"),
        ({"return_lse": True}, "logits"),
        ({"max_memory": "1GiB"}, "logits"),
    ],
)
def test_auto_saves_memory_on_cuda(device, options, save):
    """Without max_memory "auto" makes the gradients in the forward even if the logits would
    fit. (H, V: a weight above 128 MiB; below that it does so in any case.)"""
    plan = flce.plan(256, 4097, 16384, **{"dtype": torch.bfloat16, "device": device, **options})
    assert plan.save == (save if device == "cuda" else "logits")


@pytest.mark.parametrize("hidden, save", [(4096, "grads"), (4097, "logits")])
def test_auto_weighs_the_weight_on_cuda(device, hidden, save):
    """Up to 128 MiB of weight the forward makes the gradients even if the logits fit."""
    plan = flce.plan(256, hidden, 8192, dtype=torch.float32, device=device, max_memory="1GiB")
    assert plan.save == (save if device == "cuda" else "logits")


def test_max_memory_of_the_environment(device, monkeypatch):
    """FLCE_MAX_MEMORY counts as given: no smaller chunks than it allows."""
    monkeypatch.setenv("FLCE_MAX_MEMORY", "1GiB")
    assert flce.plan(256, 4097, 16384, device=device).save == "logits"


@hopper.ONLY
@pytest.mark.parametrize("sizes", [(8192, 4096, 128256), (4096, 4096, 128256)])
def test_the_default_is_small(monkeypatch, sizes):
    """By default chunks are smaller than max_memory allows; the same bound as an argument does
    not make them smaller."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    default, given = flce.plan(*sizes), flce.plan(*sizes, max_memory="1GiB", save="grads")
    assert (default.chunk_rows, given.chunk_rows) == (2048, 4096)
    assert default.peak_bytes < given.peak_bytes


def test_auto_does_as_planned(device):
    """The choice of "auto" determines the GEMMs of the forward: 1, 1 + 2, 1 per chunk."""
    case = cases.make_case(64, 16, 256, dtype=torch.float32, device=device)
    whole = 64 * 256 * 4
    wants = ("input", "linear_weight")
    assert split_step(case, wants, max_memory=whole) == ((1, 2) if device == "cpu" else (3, 0))
    assert split_step(case, wants, max_memory=whole // 2) == (6, 0)
    assert split_step(case, wants, max_memory=whole // 2, reduction="none") == (2, 6)


def test_form(device):
    shape = {"tokens": 64, "hidden": 32, "vocab": 100, "device": device}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert flce.plan(**shape, dtype=dtype).form == "exp"
    # Only if float16 operands are used as such: the CPU converts them to float32.
    expected = "dz" if device == "cuda" else "exp"
    assert flce.plan(**shape, dtype=torch.float16).form == expected


BUDGETS = {
    "96KiB": 96 << 10,
    "400KiB": 400 << 10,  # 12 rows: one tile of 8 and part of another
    "1MiB": 1 << 20,
    "5MB": 5_000_000,  # 156 rows: one tile of 128 and part of another
    "100MB": 100_000_000,
}


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_budget_bounds_the_logits_buffer(device, save, budget):
    """Whole rows, whole chunks, and chunks that cover all rows."""
    tokens, vocab = 5000, 8000
    plan = flce.plan(
        tokens, 64, vocab, dtype=torch.float32, device=device, save=save, max_memory=budget
    )
    count = BUDGETS[budget]
    assert plan.buffers.get("logits", 0) <= count
    if save != "logits":
        assert plan.chunk_rows * vocab * 4 <= count
        assert plan.chunks == math.ceil(tokens / plan.chunk_rows) > 1


def test_text(device):
    """str() shows the strategy and every buffer, and the totals match."""
    plan = flce.plan(8192, 4096, 128256, dtype=torch.bfloat16, device=device, save="grads")
    text = str(plan)
    for field in ("save=grads", f"form={plan.form}", f"chunk_rows={plan.chunk_rows}"):
        assert field in text
    for name, size in plan.buffers.items():
        assert name in text and str(size) in text
    assert str(plan.peak_bytes) in text
    assert plan.peak_bytes == max(plan.forward_peak_bytes, plan.backward_peak_bytes)
    assert {"grad_input", "grad_weight", "logits", "stats", "loss"} <= plan.buffers.keys()
    assert plan.buffers["grad_input"] == 8192 * 4096 * 2
    assert plan.buffers["grad_weight"] == 128256 * 4096 * 2
    assert plan.peak_bytes <= 1.01 * sum(plan.buffers.values())


def test_frozen_parts_have_no_buffers(device):
    shape = {"tokens": 512, "hidden": 64, "vocab": 4096, "device": device, "dtype": torch.float32}
    both = flce.plan(**shape, save="grads")
    for flag, name in (("grad_input", "grad_input"), ("grad_weight", "grad_weight")):
        frozen = flce.plan(**shape, save="grads", **{flag: False})
        assert name in both.buffers and name not in frozen.buffers
        assert frozen.peak_bytes < both.peak_bytes
    nothing = flce.plan(**shape, grad_input=False, grad_weight=False)
    assert not {"grad_input", "grad_weight", "saved", "coef"} & nothing.buffers.keys()
    assert nothing.backward_gemms == 0


# ---- bytes as measured ----


def measured_peaks(case, wants, device, **knobs):
    named = {"input": case.input, "linear_weight": case.linear_weight, **case.options}
    leaves = {name: value.clone().requires_grad_(name in wants) for name, value in named.items()}

    def forward():
        return flce.linear_cross_entropy(target=case.target, **leaves, **knobs)

    def step():
        loss = forward()
        return loss.detach(), torch.autograd.grad(loss.sum(), [leaves[name] for name in wants])

    step()  # what the first call initialises does not belong to a step
    return cases.peak_bytes(forward, device), cases.peak_bytes(step, device)


def fused_scratch(case, rows):
    """Bytes that oneDNN takes from torch's allocator, in addition to results, for the three
    bfloat16 GEMMs of `rows` tokens. They grow with the number of threads and are not in the
    plan."""
    if case.dtype != torch.bfloat16 or case.input.is_cuda:
        return 0
    x, w = case.input[:rows], case.linear_weight
    z = torch.randn(len(x), len(w)).bfloat16()
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    products = (
        lambda: torch.mm(x, w.T, out=z),
        lambda: torch.mm(z, w, out=dx),
        lambda: torch.mm(z.T, x, out=dw),
        lambda: torch.addmm(dw, z.T, x, out=dw),
    )
    return max(cases.peak_bytes(product, "cpu") for product in products)


def assert_close(measured, planned, what, scratch=0):
    """Within 2 % of the plan plus the scratch of the library's GEMMs."""
    assert 0.98 * planned <= measured <= 1.02 * planned + scratch, (
        f"{what}: {measured} against {planned} + {scratch}"
    )


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("save", cases.SAVES)
def test_peak_memory(device, save, budget, dtype):
    size, large_budget = (256, 128, 4096), budget
    if device == "cuda":
        size, large_budget = (2048, 512, 16000), "16MiB"
    elif dtype == torch.bfloat16:
        size, large_budget = (512, 512, 16384), "4MiB"
    budget = budget and large_budget
    case = cases.make_case(*size, dtype=dtype, device=device, bias=True)
    knobs = {"save": save, "max_memory": budget}
    plan = plan_of(case, device, **knobs)
    forward, step = measured_peaks(case, cases.GRADIENTS, device, **knobs)
    scratch = fused_scratch(case, plan.chunk_rows)
    assert_close(forward, plan.forward_peak_bytes, "forward", scratch)
    assert_close(step, plan.peak_bytes, "step", scratch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("save", cases.SAVES)
def test_peak_memory_of_probabilities(device, save, dtype):
    """With bfloat16 operands on a GPU: some bfloat16 probabilities need no logits buffer."""
    gpu, wants = device == "cuda", ("input", "linear_weight")
    size, budget = ((2048, 1024, 16000), "16MiB") if gpu else ((256, 128, 4096), "1MiB")
    case = cases.make_case(*size, dtype=torch.bfloat16 if gpu else torch.float32, device=device)
    case.target = torch.rand(size[0], size[2], device=device).softmax(-1).to(dtype)
    knobs = {"save": save, "max_memory": budget}
    plan = plan_of(case, device, wants, probabilities=dtype, **knobs)
    _, step = measured_peaks(case, wants, device, **knobs)
    assert_close(step, plan.peak_bytes, "step")


@pytest.mark.parametrize("wants", [("input",), ("linear_weight",)], ids="+".join)
@pytest.mark.parametrize("save", cases.SAVES)
def test_peak_memory_with_frozen_parts(device, save, wants):
    case = cases.make_case(256, 128, 4096, dtype=torch.float32, device=device)
    knobs = {"save": save, "max_memory": "1MiB"}
    plan = plan_of(case, device, wants, **knobs)
    _, step = measured_peaks(case, wants, device, **knobs)
    assert_close(step, plan.peak_bytes, "step")


@pytest.mark.parametrize("save", ["logits", "stats"])
def test_peak_memory_without_reduction(device, save):
    case = cases.make_case(512, 512, 16384, dtype=torch.bfloat16, device=device)
    wants = ("input", "linear_weight")
    knobs = {"save": save, "reduction": "none", "max_memory": "4MiB"}
    plan = plan_of(case, device, wants, **knobs)
    _, step = measured_peaks(case, wants, device, **knobs)
    scratch = fused_scratch(case, plan.chunk_rows)
    assert_close(step, plan.peak_bytes, "step", scratch)


# ---- accumulation into the caller's gradient ----


def accumulated_peak(case, attribute, held_dtype, device, **knobs):
    """Peak of a step that adds the weight's gradient to an existing one."""
    x = case.input.clone().requires_grad_()
    weight = torch.nn.Parameter(case.linear_weight.clone())
    bias = case.options["linear_bias"].clone().requires_grad_()

    def step():
        loss = flce.linear_cross_entropy(
            x, weight, case.target, linear_bias=bias, accumulate_into=attribute, **knobs
        )
        loss.backward()
        return loss.detach()

    setattr(weight, attribute, torch.zeros_like(weight, dtype=held_dtype))
    step()
    x.grad = bias.grad = None
    return cases.peak_bytes(step, device)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("save", ["logits", "stats"])
def test_peak_memory_of_accumulation(device, save, dtype, attribute, accum_dtype):
    """The plan has no gradient of the weight, and the measured peak has none."""
    if dtype == torch.float64 and accum_dtype == torch.float32:
        pytest.skip("float64 sums in float64")
    size, budget = (256, 128, 4096), "1MiB"
    if device == "cuda":
        size, budget = (2048, 512, 16000), "16MiB"
    elif dtype == torch.bfloat16:
        size, budget = (512, 512, 16384), "4MiB"
    case = cases.make_case(*size, dtype=dtype, device=device, bias=True)
    knobs = {"save": save, "max_memory": budget, "accum_dtype": accum_dtype}
    plan = plan_of(case, device, accumulate_into=attribute, **knobs)
    without = plan_of(case, device, **knobs)
    assert "grad_weight" in without.buffers and "grad_weight" not in plan.buffers
    held = {"grad": dtype, "main_grad": torch.promote_types(dtype, torch.float32)}[attribute]
    if held == dtype or "dw_accum" in without.buffers:
        saved = without.buffers["grad_weight"] + without.buffers.get("dw_accum", 0)
        saved -= plan.buffers.get("dw_accum", 0)
        assert without.backward_peak_bytes - plan.backward_peak_bytes >= 0.99 * saved > 0
    step = accumulated_peak(case, attribute, held, device, **knobs)
    assert_close(step, plan.peak_bytes, "step", fused_scratch(case, plan.chunk_rows))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
def test_accumulation_takes_no_grads(device, attribute, dtype):
    """With accumulation "auto" does not choose "grads" where it otherwise would."""
    size = {"tokens": 256, "hidden": 64, "vocab": 4096, "dtype": dtype, "device": device}
    for budget in ("1MiB", "1GiB"):
        plan = flce.plan(**size, max_memory=budget, accumulate_into=attribute)
        assert plan.save == ("stats" if budget == "1MiB" else "logits")
        frozen = {"max_memory": budget, "grad_weight": False}
        plan = flce.plan(**size, **frozen, accumulate_into=attribute)
        assert plan == flce.plan(**size, **frozen)
