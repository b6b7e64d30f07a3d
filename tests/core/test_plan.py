"""The plan compared with what runs: number of GEMMs, measured bytes, memory bounds."""

import itertools
import math
import os
import random

import pytest
import torch

import flce
from flce.fakes import describe_sizes
from flce.options import CHOICES, DTYPES, RETURNS
from flce.packing import CallContext, WantedGradients, split
from harness import cases, hopper

BF16 = {"dtype": torch.bfloat16}
NAMES = {"input": "grad_input", "linear_weight": "grad_weight"}
WANTS = [subset for size in range(4) for subset in itertools.combinations(cases.GRADIENTS, size)]


def plan_of(case, device, wants=cases.GRADIENTS, **knobs):
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
    """One of logits, dX and dW a chunk (float32), none of what is frozen; "stats": logits twice."""
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
@pytest.mark.parametrize("save", ["auto", *cases.SAVES])
@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
def test_planned_gemms_are_the_counted_ones(device, dtype, save, accum_dtype):
    if dtype == torch.float64 and accum_dtype == torch.float32:
        pytest.skip("float64 sums in float64")
    case = cases.make_case(100, 16, 300, dtype=dtype, device=device, bias=True)
    knobs = {"save": save, "max_memory": 32 * 304 * 4, "accum_dtype": accum_dtype}
    plan = plan_of(case, device, **knobs)
    counted = split_step(case, cases.GRADIENTS, **knobs)
    assert (plan.forward_gemms, plan.backward_gemms) == counted


WHOLE = 1024 * 4096 * 4  # bytes of the logits
LARGE = (256, 4097, 16384)  # a weight above 128 MiB in 16 bits
# Sizes, options, and the strategies of the CPU and of CUDA.
AUTO = [
    ((1024, 64, 4096), {"max_memory": WHOLE}, "logits", "grads"),
    ((1024, 64, 4096), {"max_memory": WHOLE, "reduction": "none"}, "logits", "logits"),
    ((1024, 64, 4096), {"max_memory": WHOLE - 1}, "grads", "grads"),
    ((2048, 64, 4096), {"max_memory": WHOLE - 1, **BF16, "reduction": "sum"}, "grads", "grads"),
    ((2048, 64, 4096), {"max_memory": WHOLE - 1, **BF16, "reduction": "none"}, "stats", "stats"),
    # On CUDA without max_memory: the gradients in the forward, even if the logits would fit.
    (LARGE, BF16, "logits", "grads"),
    (LARGE, {"dtype": torch.float16}, "logits", "grads"),
    (LARGE, {**BF16, "reduction": "none"}, "logits", "logits"),
    (LARGE, {**BF16, "return_lse": True}, "logits", "logits"),
    (LARGE, {**BF16, "max_memory": "1GiB"}, "logits", "logits"),
    # The bound is of float32 logits while there are more rows than fit, then of saved 16-bit rows.
    ((1024, 64, 4096), {**BF16, "max_memory": WHOLE - 1}, "logits", "logits"),
    # Up to 128 MiB of weight in any case.
    ((256, 4096, 8192), {"max_memory": "1GiB"}, "logits", "grads"),
    ((256, 4097, 8192), {"max_memory": "1GiB"}, "logits", "logits"),
]


@pytest.mark.parametrize(("sizes", "options", "on_cpu", "on_cuda"), AUTO)
def test_auto(device, sizes, options, on_cpu, on_cuda):
    plan = flce.plan(*sizes, **{"dtype": torch.float32, "device": device, **options})
    assert plan.save == (on_cuda if device == "cuda" else on_cpu)


@pytest.mark.parametrize(("sizes", "options", "_", "on_cuda"), AUTO)
@pytest.mark.parametrize("name", torch.ops.flce.gpu_names().split())
def test_auto_of_a_named_gpu(name, sizes, options, _, on_cuda):
    plan = flce.plan(*sizes, **{"dtype": torch.float32, "device": name, **options})
    assert plan.save == on_cuda


@pytest.mark.parametrize(("sizes", "options", "_", "on_cuda"), AUTO)
def test_auto_of_a_gpu_that_is_not_there(sizes, options, _, on_cuda):
    """As the fakes ask, which know the type of the device alone."""
    dtype = DTYPES.index(options.get("dtype", torch.float32))
    packed, _ = split({name: value for name, value in options.items() if name != "dtype"})
    memory, wants = packed.memory(torch.device("cpu")), WantedGradients(True, True)
    integers = packed.integers(CallContext(memory, wants))
    tokens, hidden, vocab = sizes
    named = {"hidden": hidden, "weight_rows": vocab, "input_dtype": dtype, "weight_dtype": dtype}
    found = describe_sizes(None, integers, packed.numbers, **named)
    if tokens <= found.one_chunk_rows:
        save = found.save_of_one_chunk
    elif tokens <= found.rows_to_keep:
        save = found.save_of_rows_to_keep
    else:
        save = found.save_beyond
    assert CHOICES["save"][save] == on_cuda


def test_predictions_alone_keep_no_statistics():
    for name in RETURNS:
        packed, _ = split({name: True})
        found = describe_sizes(None, packed.integers(CallContext()), packed.numbers)
        assert found.keeps_statistics == (name != "return_predictions")


@pytest.mark.parametrize("wrong", [{"input_dtype": -1}, {"bias_dtype": -2}, {"added_dtype": 4}])
def test_describe_refuses_what_is_no_dtype(wrong):
    packed, _ = split({})
    with pytest.raises(ValueError, match=f"^{[*wrong][0]}: expected the index of a dtype, got"):
        describe_sizes(None, packed.integers(CallContext()), packed.numbers, **wrong)


def test_max_memory_of_the_environment(device, monkeypatch):
    """FLCE_MAX_MEMORY counts as given: no smaller chunks than it allows."""
    monkeypatch.setenv("FLCE_MAX_MEMORY", "1GiB")
    assert flce.plan(*LARGE, device=device).save == "logits"


@hopper.ONLY
@pytest.mark.parametrize("sizes", [(8192, 4096, 128256), (4096, 4096, 128256)])
def test_the_default_is_small(monkeypatch, sizes):
    """Chunks are smaller than max_memory allows, unless it is given."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    default, given = flce.plan(*sizes), flce.plan(*sizes, max_memory="1GiB", save="grads")
    assert (default.chunk_rows, given.chunk_rows) == (2048, 4096)
    assert default.peak_bytes < given.peak_bytes


def test_a_named_gpu(monkeypatch):
    """As on the GPU: the chunks of test_the_default_is_small, kernels by compute capability."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    default = flce.plan(8192, 4096, 128256, device="h200")
    given = flce.plan(8192, 4096, 128256, device="h200", max_memory="1GiB", save="grads")
    assert (default.chunk_rows, given.chunk_rows, default.kernel) == (2048, 4096, "fused")
    numbers = tuple(map(int, torch.ops.flce.find_gpu("h200")[:3]))
    assert numbers[:2] == (90, 132) and flce.plan(8192, 4096, 128256, device=numbers) == default
    assert flce.plan(8192, 4096, 128256, device="a100").kernel == "gemm"
    small = flce.plan(4096, 64, 128256, device=(90, 132, 1 << 30))
    assert small.buffers["logits"] <= 1 << 27  # 1/8 of the memory


@pytest.mark.parametrize("wrong", ["h101", "h100:1", (90, 132), (70, 132, 1 << 30), (90, 0, 8)])
def test_a_gpu_that_is_not_known(wrong):
    text = ",".join(map(str, wrong)) if isinstance(wrong, tuple) else wrong
    with pytest.raises(ValueError, match=f"^device: expected .*h100.*numbers.*, got {text}$"):
        flce.plan(64, 64, 64, device=wrong)
    with pytest.raises(ValueError, match="^device: "):
        flce.plan(64, 64, 64, device=wrong, max_memory="1MiB")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"gradient": "sampled"}, {"bias": True}])
@pytest.mark.parametrize("sizes", [(4096, 1024, 32000), (20000, 770, 50257), (32768, 4096, 128256)])
def test_numbers_give_the_plan_of_the_present_gpu(sizes, options):
    """But for CUB's scratch, of which the numbers give an estimate."""
    facts = torch.cuda.get_device_properties(0)
    capability = 10 * facts.major + facts.minor
    numbers = capability, facts.multi_processor_count, facts.total_memory
    here, there = (flce.plan(*sizes, device=one, **options) for one in ("cuda", numbers))
    for name in ("order", "index", "sample_order", "samples"):
        size, estimate = (plan.buffers.pop(name, 0) for plan in (here, there))
        assert (size > 0) == (estimate > 0) and abs(size - estimate) <= 0.1 * size + (1 << 16)
    assert here.buffers == there.buffers
    assert (here.save, here.kernel, here.chunk_rows) == (there.save, there.kernel, there.chunk_rows)
    assert there.peak_bytes == pytest.approx(here.peak_bytes, rel=1e-3)


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
    plan = flce.plan(8192, 4096, 128256, dtype=torch.bfloat16, device=device, save="grads")
    text = plan.text
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


def peaks(case, wants, device, attribute=None, **knobs):
    """Bytes that a forward and a step take, and the plan's; with `attribute` the weight's gradient
    is added to the existing one, which has the dtype that the plan assumes."""
    named = {"input": case.input, "linear_weight": case.linear_weight, **case.options}
    leaves = {name: value.clone().requires_grad_(name in wants) for name, value in named.items()}
    weight = leaves["linear_weight"]
    if attribute:
        setattr(weight, attribute, torch.zeros_like(weight, dtype=held_dtype(case, attribute)))

    def forward():
        given = {**leaves, **knobs, "accumulate_into": attribute}
        return flce.linear_cross_entropy(target=case.target, **given)

    def step():
        loss = forward()
        if attribute:
            loss.backward()
            return loss.detach()
        return loss.detach(), torch.autograd.grad(loss.sum(), [leaves[name] for name in wants])

    step()  # what the first call initialises does not belong to a step
    for name in ("input", "linear_bias") if attribute else ():
        leaves[name].grad = None
    return cases.peak_bytes(forward, device), cases.peak_bytes(step, device)


def held_dtype(case, attribute):
    wide = torch.promote_types(case.dtype, torch.float32)
    return case.dtype if attribute == "grad" else wide


def gemm_scratch(case, plan):
    """Bytes that oneDNN takes from torch's allocator, in addition to results, for the bfloat16
    GEMMs of the plan: of a chunk of each pass, and of a block. They grow with the number of threads
    and are not in the plan."""
    if case.dtype != torch.bfloat16 or case.input.is_cuda:
        return 0
    sizes = {
        (rows, len(case.linear_weight)) for rows in (plan.chunk_rows, plan.backward_chunk_rows)
    }
    if plan.block_classes:
        sizes.add((plan.block_rows, plan.block_classes))
    return max(scratch_of_gemms(case, *size) for size in sizes if size[0])


def scratch_of_gemms(case, rows, classes):
    x, w = case.input[:rows], case.linear_weight[:classes]
    z = torch.randn(len(x), len(w)).bfloat16()
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    products = (
        lambda: torch.mm(x, w.T, out=z),
        lambda: torch.mm(z, w, out=dx),
        lambda: torch.mm(z.T, x, out=dw),
        lambda: torch.addmm(dw, z.T, x, out=dw),
    )
    return max(cases.peak_bytes(product, "cpu") for product in products)


def check_peaks(
    case, device, wants=cases.GRADIENTS, attribute=None, of_plan=None, forward=False, **knobs
):
    """Bytes of a step (and forward): within 2 % of the plan's plus the scratch of the GEMMs."""
    plan = plan_of(case, device, wants, accumulate_into=attribute, **(of_plan or {}), **knobs)
    scratch = gemm_scratch(case, plan)
    of_forward, of_step = peaks(case, wants, device, attribute, **knobs)
    for measured, planned in (
        (of_step, plan.peak_bytes),
        *([(of_forward, plan.forward_peak_bytes)] if forward else ()),
    ):
        assert 0.98 * planned <= measured <= 1.02 * planned + scratch, (measured, planned, scratch)
    return plan


def sized_case(device, dtype):
    size, budget = (256, 128, 4096), "1MiB"
    if device == "cuda":
        size, budget = (2048, 512, 16000), "16MiB"
    elif dtype == torch.bfloat16:
        size, budget = (512, 512, 16384), "4MiB"
    return cases.make_case(*size, dtype=dtype, device=device, bias=True), budget


@cases.pairwise(dtype=cases.DTYPES, chunks=[False, True], save=cases.SAVES)
def test_peak_memory(device, save, chunks, dtype):
    case, budget = sized_case(device, dtype)
    check_peaks(case, device, forward=True, save=save, max_memory=budget if chunks else None)


@cases.pairwise(dtype=(torch.float32, torch.bfloat16), tail=(False, True))
def test_peak_memory_of_the_largest_classes(device, dtype, tail):
    case = cases.make_case(512, 128, 16384, dtype=dtype, device=device)
    options = {"topk": 8, "return_lse": True, "return_tail_lse": tail, "reduction": "none"}
    options["max_memory"] = "8MiB"
    plan = plan_of(case, device, (), **options)
    assert plan.chunks > 1 and {"classes", "class_logits"} <= plan.buffers.keys()

    @torch.no_grad()
    def call():
        return flce.linear_cross_entropy(case.input, case.linear_weight, case.target, **options)

    call()
    measured, scratch = cases.peak_bytes(call, device), gemm_scratch(case, plan)
    assert 0.98 * plan.peak_bytes <= measured <= 1.02 * plan.peak_bytes + scratch


def test_the_tail_of_no_classes_is_refused():
    with pytest.raises(ValueError, match="^return_tail_lse: expected False without topk, got True"):
        flce.plan(8, 4, 16, device="cpu", return_tail_lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_copy_of_a_weight_with_an_odd_hidden_size(dtype):
    """The CPU's GEMMs take rows of any size: a call allocates less than the weight has."""
    case = cases.make_case(2, 33, 8192, dtype=dtype, device="cpu")
    measured, _ = peaks(case, ("input",), "cpu")
    assert measured < case.linear_weight.nbytes / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("save", cases.SAVES)
def test_peak_memory_of_probabilities(device, save, dtype):
    """With bfloat16 operands on a GPU: some bfloat16 probabilities need no logits buffer."""
    gpu, wants = device == "cuda", ("input", "linear_weight")
    size, budget = ((2048, 1024, 16000), "16MiB") if gpu else ((256, 128, 4096), "1MiB")
    case = cases.make_case(*size, dtype=torch.bfloat16 if gpu else torch.float32, device=device)
    case.target = torch.rand(size[0], size[2], device=device).softmax(-1).to(dtype)
    of_plan = {"probabilities": dtype}
    check_peaks(case, device, wants, of_plan=of_plan, save=save, max_memory=budget)


@pytest.mark.parametrize("wants", [("input",), ("linear_weight",)], ids="+".join)
@pytest.mark.parametrize("save", cases.SAVES)
def test_peak_memory_with_frozen_parts(device, save, wants):
    case = cases.make_case(256, 128, 4096, dtype=torch.float32, device=device)
    check_peaks(case, device, wants, save=save, max_memory="1MiB")


@pytest.mark.parametrize("save", ["logits", "stats"])
def test_peak_memory_without_reduction(device, save):
    case = cases.make_case(512, 512, 16384, dtype=torch.bfloat16, device=device)
    knobs = {"save": save, "reduction": "none", "max_memory": "4MiB"}
    check_peaks(case, device, ("input", "linear_weight"), **knobs)


@cases.pairwise(
    accum_dtype=[None, torch.float32],
    attribute=["grad", "main_grad"],
    dtype=cases.DTYPES,
    save=["logits", "stats"],
)
def test_peak_memory_of_accumulation(device, save, dtype, attribute, accum_dtype):
    """The plan has no gradient of the weight, and the measured peak has none."""
    if dtype == torch.float64 and accum_dtype == torch.float32:
        pytest.skip("float64 sums in float64")
    case, budget = sized_case(device, dtype)
    knobs = {"save": save, "max_memory": budget, "accum_dtype": accum_dtype}
    plan = check_peaks(case, device, attribute=attribute, **knobs)
    without = plan_of(case, device, **knobs)
    assert "grad_weight" in without.buffers and "grad_weight" not in plan.buffers
    if held_dtype(case, attribute) == dtype or "dw_accum" in without.buffers:
        saved = without.buffers["grad_weight"] + without.buffers.get("dw_accum", 0)
        saved -= plan.buffers.get("dw_accum", 0)
        assert without.backward_peak_bytes - plan.backward_peak_bytes >= 0.99 * saved > 0


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


def memory_of(device):
    if device == "h100":
        return int(torch.ops.flce.find_gpu(device)[2])
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("where", ["this device", "h100"])
@pytest.mark.parametrize("outputs", [{"reduction": "none"}, {"return_entropy": True}])
def test_kept_logits_may_exceed_a_chunk(device, outputs, where):
    """Without max_memory a loss of rows keeps 2 bytes a logit, up to 1/8 of the memory; a chunk has
    1 GiB at most."""
    device, vocab = device if where == "this device" else where, 32768
    call = {"dtype": torch.bfloat16, "device": device, **outputs}
    most = memory_of(device) // 8 // (2 * vocab)  # rows whose logits may be kept
    assert device != "h100" or most * 2 * vocab > 1 << 30
    for rows, kept in ((most, True), (most + 1, False)):
        plan = flce.plan(rows, 64, vocab, **call)
        assert (plan.save == "logits") == kept
        assert not kept or plan.buffers["saved"] == rows * 2 * vocab
        recomputes = "the backward computes the logits again" in plan.text
        assert (
            recomputes
            == (plan.save == "stats")
            == (not kept and outputs.get("reduction") == "none")
        )
    assert flce.plan(most, 64, vocab, max_memory=most * 2 * vocab - 1, **call).save != "logits"


@pytest.mark.parametrize(("sizes", "options"), [
    ((4_000_000, 256, 32), {}),
    ((2_000_000, 1024, 48), {}),
    ((8_000_000, 64, 16), {"bias": True, "label_smoothing": 0.1}),
    ((1_200_000, 512, 64), {"return_entropy": True}),
    ((5_000_000, 256, 1000), {"dtype": torch.float16, "valid_bound": 91_950}),
])  # fmt: skip
def test_few_classes_of_many_rows(sizes, options):
    """Heads over pixels, bytes and bases: a chunk takes what the numbers of all rows do."""
    tokens, hidden, vocab = sizes
    for gpu in torch.ops.flce.gpu_names().split():
        plan = flce.plan(*sizes, device=gpu, **options)
        assert 1 <= plan.chunks <= 64
        outputs = 6 * (tokens + vocab) * hidden  # float16 gradients are kept in float32, too
        assert plan.forward_peak_bytes <= outputs + 4 * 128 * tokens + (64 << 20)


def test_a_tile_of_logits_is_enough():
    """Drawn sizes with a max_memory of 128 rows of logits, and with the default."""
    pick, gpus = random.Random(1), torch.ops.flce.gpu_names().split()
    for _ in range(400):
        tokens, hidden, vocab = (int(2 ** pick.uniform(0, bits)) for bits in (24, 14, 18))
        options = {"dtype": pick.choice(cases.DTYPES), "save": pick.choice(["auto", *cases.SAVES])}
        options["reduction"] = pick.choice(["mean", "sum"])
        options["valid_bound"] = pick.choice([None, pick.randint(0, tokens)])
        size = 8 if options["dtype"] == torch.float64 else 4
        tile = 128 * (-(-vocab * size // 128) * 128)
        for budget in (None, tile):
            flce.plan(tokens, hidden, vocab, device=pick.choice(gpus), max_memory=budget, **options)


def test_wrong_values_are_refused_by_name():
    with pytest.raises(ValueError, match="^device: expected a CPU or CUDA device that is present"):
        flce.plan(6, 11, 8, device="")
    for value in (torch.tensor([1.0, 2.0]), torch.ones(1)):
        with pytest.raises(ValueError, match="^accumulate_into: expected one of"):
            flce.plan(6, 11, 8, device="cpu", accumulate_into=value)
