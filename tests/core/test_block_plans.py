"""What a plan says of gradients by blocks: the choice between them and chunks of all classes, the
bytes, the number of GEMMs, and FLCE_BLOCKS. test_blocks.py has the numbers."""

import itertools
import math
import random

import pytest
import torch

import flce
from harness import cases

BY_BLOCKS = ("grads", "stats")
BF16 = torch.bfloat16
HEAD = (16384, 4096, 128256)  # tokens, hidden, vocab
LEAST_BYTES = 32 << 20  # up to so many the rows of dX and x of a block take no part in the bound
GPUS = torch.ops.flce.gpu_names().split()


def by_blocks(plan):
    return plan.block_classes > 0


# ---- the choice ----

# Sizes, options; whether gradients are made by blocks.
CHOICES = [
    (HEAD, {"max_memory": "64MiB"}, True),
    (HEAD, {"max_memory": "16MiB"}, True),
    (HEAD, {"max_memory": "64MiB", "label_smoothing": 0.1, "bias": True}, True),
    (HEAD, {"max_memory": "64MiB", "softcap": 30.0, "return_lse": True}, True),
    (HEAD, {"max_memory": "64MiB", "probabilities": True}, True),
    (HEAD, {"max_memory": "64MiB", "ranks": 4}, True),
    # One chunk holds all logits, or its rows are as many as those of a block.
    (HEAD, {"max_memory": "16GiB"}, False),
    ((1024, 1024, 8192), {"max_memory": "64MiB"}, False),
    # Without a bound of the caller's, or without gradients.
    (HEAD, {}, False),
    (HEAD, {"max_memory": "64MiB", "grad_input": False, "grad_weight": False}, False),
    # What blocks of classes cannot give.
    (HEAD, {"max_memory": "64MiB", "teacher_hidden": 1024, "save": "grads"}, False),
    (HEAD, {"max_memory": "64GiB", "save": "logits"}, False),
    ((0, 64, 4096), {"max_memory": "64KiB"}, False),
]


@pytest.mark.parametrize("name", ["h100", "a100"])
@pytest.mark.parametrize(("sizes", "options", "expected"), CHOICES)
def test_choice(name, sizes, options, expected):
    plan = flce.plan(*sizes, dtype=BF16, device=name, **options)
    assert by_blocks(plan) == expected, plan.text
    assert ("gradients by blocks" in plan.text) == expected


IN_DW = [
    ({}, "in_dw"),
    ({"grad_input": False}, "in_dw"),
    ({"reduction": "none", "return_lse": True}, "in_dw"),
    ({"valid_bound": 12000}, "in_dw"),
    # dW is in a tensor with other contents, is summed in another one, or is not wanted; ranks.
    ({"accumulate_into": "grad"}, "workspace"),
    ({"accum_dtype": torch.float32}, "workspace"),
    ({"grad_weight": False}, "workspace"),
    ({"ranks": 4}, "workspace"),
    # dW has no room for the sum of dX; a block of the workspace is large, or a chunk.
    ({"tokens": 65536}, "workspace"),
    ({"max_memory": "512MiB"}, "workspace"),
    ({"max_memory": "1GiB"}, "none"),
]


@pytest.mark.parametrize(("options", "expected"), IN_DW)
def test_choice_of_the_memory_of_dw(options, expected):
    given = {"max_memory": "64MiB", "tokens": HEAD[0], **options}
    plan = flce.plan(
        given.pop("tokens"), *HEAD[1:], dtype=BF16, device="h100", save="stats", **given
    )
    assert plan.blocks == expected, plan.text
    assert (plan.whole_classes > 0) == (expected == "in_dw")
    assert ("dX and dW in the memory of dW" in plan.text) == (expected == "in_dw")


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab"), [(8192, 4096, 128256), (6000, 3072, 200064)]
)
def test_blocks_in_dw_take_no_more_memory(tokens, hidden, vocab, monkeypatch):
    """What is over that of blocks in the workspace is within the bound."""
    for budget in ("16MiB", "64MiB"):
        options = {"dtype": BF16, "device": "h100", "save": "stats", "max_memory": budget}
        monkeypatch.delenv("FLCE_BLOCKS", raising=False)
        plan = flce.plan(tokens, hidden, vocab, **options)
        monkeypatch.setenv("FLCE_BLOCKS", f"{plan.block_rows}x{plan.block_classes}")
        workspace = flce.plan(tokens, hidden, vocab, **options)
        assert (plan.blocks, workspace.blocks) == ("in_dw", "workspace")
        assert workspace.peak_bytes - plan.peak_bytes == workspace.buffers["dx_rows"]


def test_choice_on_the_cpu():
    """Where a chunk of all classes has fewer than about 64 rows."""
    for tokens, budget in itertools.product((128, 4096), (8, 16, 128, 512)):
        plan = flce.plan(
            tokens, 512, 32000, dtype=torch.float32, device="cpu", save="grads",
            max_memory=budget * 32000 * 4,
        )  # fmt: skip
        assert by_blocks(plan) == (budget < 64), f"{budget} of {tokens} rows"


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_max_memory_of_the_environment_is_the_callers(monkeypatch, save):
    monkeypatch.setenv("FLCE_MAX_MEMORY", "64MiB")
    assert by_blocks(flce.plan(*HEAD, device="h100", save=save))


# ---- drawn sizes ----


def drawn(seed):
    pick = random.Random(seed)
    tokens = pick.choice([1, 7, 100, 513, 2048, 8191, 16384, 65537, 1_000_003])
    hidden = pick.choice([1, 8, 100, 1024, 4096, 4097, 16384])
    vocab = pick.choice([1, 63, 64, 65, 1000, 8192, 32000, 50257, 128256, 1_000_000])
    dtype = pick.choice([torch.float64, torch.float32, torch.float16, BF16, BF16, BF16])
    options = {"max_memory": int(2 ** pick.uniform(16, 32)), "save": pick.choice(BY_BLOCKS)}
    drawn_options = {
        "bias": True,
        "softcap": 30.0,
        "label_smoothing": 0.1,
        "valid_bound": pick.randint(0, tokens),
        "accum_dtype": torch.float32 if dtype != torch.float64 else None,
        "logits_dtype": dtype,
        "grad_weight": False,
        "grad_input": False,
        "ranks": pick.choice([2, 3, 8]),
        "accumulate_into": "grad",
    }
    options |= {name: value for name, value in drawn_options.items() if pick.random() < 0.2}
    if "ranks" not in options and "valid_bound" not in options and pick.random() < 0.2:
        options["probabilities"] = True
    if options["save"] == "grads" or not options.get("grad_weight", True):
        options.pop("accumulate_into", None)
    return (tokens, hidden, vocab), {
        "dtype": dtype, "device": pick.choice([*GPUS, "cpu"]), **options
    }  # fmt: skip


def plan_of(sizes, options):
    """None if the bound is less than a row of logits."""
    try:
        return flce.plan(*sizes, **options)
    except ValueError as error:
        assert "max_memory: expected at least one row of logits" in str(error)
        return None


def most_of_the_fewest_rows(sizes, options):
    """Of a block, with 16-bit sums: the rows of a chunk by default, or those of 15 chunks, rounded
    up to whole tiles."""
    default = flce.plan(*sizes, **{**options, "max_memory": None})
    rows = default.chunk_rows if default.save == "grads" else default.backward_chunk_rows
    return max(rows, math.ceil(default.rows / 15)) + 255


def bytes_of_rows(plan):
    """What the rows of a block take besides their logits."""
    return sum(plan.buffers.get(name, 0) for name in ("dx_rows", "scaled_x", "gathered_x", "fused"))


@pytest.mark.parametrize("part", range(4))
def test_drawn_plans(part, monkeypatch):
    """The bound holds, and beyond it blocks take little that chunks do not."""
    chosen = 0
    for seed in range(1000 * part, 1000 * part + 1000):
        monkeypatch.delenv("FLCE_BLOCKS", raising=False)
        sizes, options = drawn(seed)
        plan = plan_of(sizes, options)
        if plan is None or not by_blocks(plan):
            continue
        chosen += 1
        where, bound = f"seed {seed}: {sizes} {options}", options["max_memory"]
        vocab = math.ceil(sizes[2] / options.get("ranks", 1))
        assert 1 <= plan.block_rows <= plan.rows, where
        assert plan.block_classes % 64 == 0 and plan.block_classes < vocab + 64, where
        assert plan.buffers["logits"] <= bound, where
        monkeypatch.setenv("FLCE_BLOCKS", "0")
        chunks = plan_of(sizes, options)
        exchanged = plan.buffers.get("shard_stats", 0)  # of all rows at once, as save="stats" does
        more = plan.peak_bytes - chunks.peak_bytes - exchanged
        allowed = 1.05 * max(bound, LEAST_BYTES)
        if plan.block_rows <= most_of_the_fewest_rows(sizes, options):
            allowed = max(allowed, 1.05 * (bytes_of_rows(plan) + min(bound, LEAST_BYTES // 2)))
        assert more <= allowed, f"{where}: {more} bytes more"
        if plan.save == "grads":
            assert plan.blocks == "dx_first" or plan.block_rows > chunks.chunk_rows, where
            assert chunks.chunks > 1, where
    assert chosen > 100


@pytest.mark.parametrize("device", ["cpu", "a100", "h100"])
@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_many_rows_of_few_classes(device, save, dtype, monkeypatch):
    """A float32 sum of dW takes 64 MiB, rows for few chunks would take 6 GiB."""
    sizes = (1_000_003, 16384, 1000)
    options = {"dtype": dtype, "device": device, "save": save, "max_memory": "20MiB"}
    plan = flce.plan(*sizes, **options)
    monkeypatch.setenv("FLCE_BLOCKS", "0")
    assert plan.peak_bytes <= flce.plan(*sizes, **options).peak_bytes + LEAST_BYTES
    if by_blocks(plan):
        assert plan.accum_dtype == "float32"


def test_few_chunks_of_rows_need_no_wide_sum(monkeypatch):
    """The other way round with many classes: the sum would take 2 GiB."""
    options = {"dtype": BF16, "device": "h100", "max_memory": "64MiB", "save": "grads"}
    plan = flce.plan(65536, 4096, 128256, **options)
    assert by_blocks(plan) and plan.accum_dtype == "bfloat16"
    assert math.ceil(65536 / plan.block_rows) < 16
    monkeypatch.setenv("FLCE_BLOCKS", "0")
    chunks = flce.plan(65536, 4096, 128256, **options)
    assert chunks.accum_dtype == "float32" and chunks.peak_bytes > plan.peak_bytes + (1 << 30)


@pytest.mark.parametrize("save", ["grads", "auto"])
@pytest.mark.parametrize("options", [{}, {"accum_dtype": torch.float32}, {"ranks": 2}], ids=str)
def test_a_bound_of_one_row_of_exponentials(save, options, monkeypatch):
    """On Hopper that row has 2 bytes a class. A pass for the statistics of blocks writes none."""
    sizes, bound = (600, 4097, 128256), 2 * 128256 // options.get("ranks", 1) + 256
    call = {"dtype": BF16, "device": "h100", "save": save, "max_memory": bound, **options}
    plan = flce.plan(*sizes, **call)
    assert by_blocks(plan) and plan.buffers["logits"] <= bound
    monkeypatch.setenv("FLCE_BLOCKS", "0")
    assert flce.plan(*sizes, **call).chunk_rows == 1
    with pytest.raises(ValueError, match="max_memory: expected at least one row of logits"):
        flce.plan(*sizes, **{**call, "max_memory": bound - 512})


# ---- what runs ----


def step_of(case, save, **knobs):
    """(forward, backward) of one call."""
    named = {"input": case.input, "linear_weight": case.linear_weight, **case.options}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in named.items()}
    holder = []

    def forward():
        holder.append(flce.linear_cross_entropy(target=case.target, save=save, **leaves, **knobs))

    def backward():
        return torch.autograd.grad(holder.pop(), leaves.values())

    return forward, backward


@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("where", ["", "in_dw:"])
def test_planned_gemms_are_the_counted_ones(device, dtype, save, where, monkeypatch):
    monkeypatch.setenv("FLCE_BLOCKS", f"{where}30x128")
    case = cases.make_case(100, 64, 1000, dtype=dtype, device=device, bias=True)
    plan = flce.plan(100, 64, 1000, dtype=dtype, device=device, save=save, bias=True)
    assert (plan.block_rows, plan.block_classes) == (30, 128)
    sums_elsewhere = dtype == torch.float16 and device == "cpu" and save == "stats"
    assert (plan.whole_classes > 0) == (where == "in_dw:" and not sums_elsewhere)
    counted = tuple(map(cases.gemms_of, step_of(case, save)))
    assert (plan.forward_gemms, plan.backward_gemms) == counted
    gemms = counted[0] if save == "grads" else counted[1]
    if plan.blocks == "workspace":
        assert gemms >= 3 * 4 * 8  # of four chunks of rows and eight blocks of classes


BUDGETS = {"32KiB": 32 << 10, "128KiB": 128 << 10, "300KiB": 300 << 10}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_peak_memory(dtype, save, budget):
    """Bytes of a step, within 2 % of the plan's. (oneDNN's bfloat16 GEMMs have scratch of their
    own.)"""
    case = cases.make_case(512, 64, 4000, dtype=dtype, bias=True)
    sizes, knobs = (512, 64, 4000), {"save": save, "max_memory": budget}
    plan = flce.plan(*sizes, dtype=dtype, device="cpu", bias=True, **knobs)
    assert by_blocks(plan) and plan.buffers["logits"] <= BUDGETS[budget]
    forward, backward = step_of(case, **knobs)

    def step():
        forward()
        return backward()

    step()
    measured = cases.peak_bytes(step, "cpu")
    assert 0.98 * plan.peak_bytes <= measured <= 1.02 * plan.peak_bytes


@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_chosen_blocks_run(device, dtype, save):
    """Of a small max_memory alone."""
    case = cases.make_case(300, 24, 3000, dtype=dtype, device=device, bias=True)
    knobs = {"save": save, "max_memory": {"cpu": "40KiB", "cuda": "160KiB"}[device]}
    plan = flce.plan(300, 24, 3000, dtype=dtype, device=device, bias=True, **knobs)
    assert by_blocks(plan) and plan.block_classes < 3000
    cases.check(flce.linear_cross_entropy, case, **knobs)


# ---- FLCE_BLOCKS ----


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x64", "8x63", "0x64", "8x0", "-8x64", "8x64x2", "00"]
)
def test_wrong_shapes_are_refused(text, monkeypatch):
    monkeypatch.setenv("FLCE_BLOCKS", text)
    match = f'FLCE_BLOCKS: expected "0" or rows and a multiple of 64 .* got "{text}"'
    with pytest.raises(ValueError, match=match):
        flce.plan(9, 8, 70, device="h100")
    with pytest.raises(ValueError, match=match):
        cases.outcome(
            flce.linear_cross_entropy, cases.make_case(9, 8, 70, dtype=torch.float32), save="grads"
        )


@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("shape", ["9223372036854775807x64", "7x9223372036854775744"])
def test_a_shape_is_at_most_that_of_the_problem(shape, save, monkeypatch):
    monkeypatch.setenv("FLCE_BLOCKS", shape)
    plan = flce.plan(9, 8, 70, dtype=torch.float32, device="cpu", save=save)
    assert (plan.block_rows, plan.block_classes) in ((9, 64), (7, 128))
    case = cases.make_case(9, 8, 70, dtype=torch.float32)
    cases.check(flce.linear_cross_entropy, case, save=save)


@pytest.mark.parametrize("options", [{"save": "logits"}, {"save": "grads", "topk": 3}], ids=str)
def test_no_blocks_where_all_classes_of_a_row_are_read(device, options, monkeypatch):
    """The largest of a row; the saved logits."""
    case = cases.make_case(20, 8, 150, dtype=torch.float32, device=device)
    counts = []
    for shape in ("8x64", "0"):
        monkeypatch.setenv("FLCE_BLOCKS", shape)
        counts.append(cases.gemms_of(lambda: run_outputs(case, **options)))
    assert counts[0] == counts[1]


def run_outputs(case, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in (case.input, case.linear_weight)]
    made = flce.linear_cross_entropy(*leaves, case.target, **options)
    loss = made if isinstance(made, torch.Tensor) else made.loss
    return torch.autograd.grad(loss, leaves)
