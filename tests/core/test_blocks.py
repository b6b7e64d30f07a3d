"""Gradients by blocks of rows and classes under a small max_memory: numbers, memory, the choice.

FLCE_BLOCKS="ROWSxCLASSES" forces a shape, for most tests here one that divides nothing evenly.
"""

import functools
import itertools
import math
import random

import pytest
import torch
from torch import nn

import flce
from flce import operators
from harness import cases, drawn_checks
from harness.blocks import VOCABS, drawn_call, shape_of_blocks
from harness.drawn import FUNCTIONS
from harness.drawn_options import LINEAR, called, linear_case, upstream_of

TOKENS, HIDDEN, VOCAB = 22, 60, 150
BY_BLOCKS = ("grads", "stats")
# Of five chunks of rows and three of classes, the last ones smaller. In the memory of dW the first
# 64 classes are a block over all rows, where the call may use that memory.
SHAPES = ("5x64", "in_dw:5x64")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def set_blocks(monkeypatch):
    """Sets the shape of the blocks, "0" for none."""
    return functools.partial(monkeypatch.setenv, "FLCE_BLOCKS")


@pytest.fixture(params=SHAPES)
def blocks(request, set_blocks):
    """The same, of a test that runs with each of SHAPES."""
    set_blocks(request.param)
    return set_blocks


def make(device, dtype=torch.float64, **options):
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device, bias=True)
    return cases.ignore_some(case).with_options(**options)


def test_the_shapes_are_those_of_their_comment(set_blocks):
    for shape in SHAPES:
        set_blocks(shape)
        for dtype, save in itertools.product(cases.DTYPES[:2], BY_BLOCKS):
            plan = flce.plan(TOKENS, HIDDEN, VOCAB, dtype=dtype, device="cpu", save=save)
            in_dw = shape.startswith("in_dw")
            assert (plan.block_rows, plan.block_classes) == (5, 64)
            assert plan.whole_classes == (64 if in_dw else 0)
            expected = {"grads": "dx_first", "stats": "in_dw"}[save] if in_dw else "workspace"
            assert plan.blocks == expected


# ---- numbers ----

CLASSES = {**LINEAR, "vocab": VOCABS, "hidden": (*LINEAR["hidden"], 64, 128, 200)}


def hide_padding(case):
    """The same call, with NaN in the rows of the weight from valid_vocab on."""
    valid = case.options["valid_vocab"]
    if valid is not None:
        case.linear_weight = case.linear_weight.clone()
        case.linear_weight[valid:] = math.nan
    return case


def check_drawn(table, seed, device, shape_of, saves, monkeypatch):
    """A call of drawn options against float64, and twice with the same bits: NaN in the workspace
    reaches no result."""
    pick = random.Random(seed)
    plan = {name: pick.choice(values) for name, values in table.items()}
    case, generator = linear_case(plan)
    case = case.map(lambda tensor: drawn_checks.moved(tensor, device))
    upstream = drawn_checks.moved(upstream_of(plan, generator), device)
    adapter = cases.LEAVES[3:] if plan["adapter"] and plan["wants"] else ()
    call = {"wants": (*plan["wants"], *adapter), "upstream": upstream}
    dtype = plan["dtype"] if plan["logits_dtype"] else None
    yardstick = cases.Yardstick(case, cancels=True, logits_dtype=dtype, **call)
    case = hide_padding(case)
    for save in saves if plan["reduction"] != "none" else ("stats",):
        shape, made = shape_of(pick), []
        monkeypatch.setenv("FLCE_BLOCKS", shape)
        for poison in "01":
            monkeypatch.setenv("FLCE_POISON", poison)
            made.append(called(case, plan, **call, save=save, logits_dtype=dtype))
        yardstick.check(made[0], f"seed {seed}, {save}, blocks of {shape}")
        assert cases.same_bits(*made), f"seed {seed}, {save}, blocks of {shape}"


@pytest.mark.parametrize("part", range(4))
def test_drawn_options(device, part, monkeypatch):
    for seed in range(100 * part, 100 * part + 100):
        check_drawn(CLASSES, seed, device, shape_of_blocks, BY_BLOCKS, monkeypatch)


# More classes than rows: the memory of dW has room for the sum of dX and blocks over all rows.
MANY_CLASSES = {**LINEAR, "shape": [(40,), (3, 17)], "vocab": (600, 701, 835), "hidden": (64, 100)}
MANY_CLASSES |= {"wants": [subset for subset in LINEAR["wants"] if "linear_weight" in subset]}


def test_these_sizes_have_blocks_in_dw(set_blocks):
    """In each dtype, and two of them or more; float16 GEMMs of a CPU are float32."""
    set_blocks("in_dw:9x128")
    for dtype in cases.DTYPES[:3]:
        plan = flce.plan(51, 64, 600, dtype=dtype, device="cpu", save="stats", accum_dtype=dtype)
        assert plan.blocks == "in_dw" and plan.whole_classes >= 256


@pytest.mark.parametrize("part", range(2))
def test_drawn_options_in_dw(device, part, monkeypatch):
    def shape_of(pick):
        return f"in_dw:{pick.choice((7, 9, 16, 60))}x{pick.choice((64, 128, 320))}"

    for seed in range(60 * part, 60 * part + 60):
        check_drawn(MANY_CLASSES, seed, device, shape_of, ("stats",), monkeypatch)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_drawn_functions(device, function, set_blocks):
    """Log-probabilities, outputs of chosen classes, sparse targets and losses of rows, with their
    gradients, accumulation among them."""
    record = drawn_checks.Record()
    for seed in range(150):
        call, shape = drawn_call(function, seed)
        set_blocks(shape)
        drawn_checks.check(call, record, device=device)


@pytest.mark.parametrize("variant", ["scalar", "avx2", "avx512"])
def test_cpu_variants(variant, blocks, monkeypatch):
    monkeypatch.setenv("FLCE_CPU_VARIANT", variant)
    if operators.run_plain(operators.inner.cpu_variant.default) != variant:
        pytest.skip(f"this CPU has no {variant}")
    for dtype in cases.DTYPES:
        for save in BY_BLOCKS:
            for options in ({}, {"softcap": 2.0, "label_smoothing": 0.2, "reduction": "sum"}):
                cases.check(flce.linear_cross_entropy, make("cpu", dtype, **options), save=save)


def row_errors(value, truth):
    return (value.double() - truth).norm(dim=-1)


def uncentred(case):
    case.input += 4.0
    case.linear_weight += 1.0
    return case


def rare_classes(case):
    case.target[:] = 0
    case.target[-1] = VOCAB - 1
    return case


def peaked(case):
    case.input *= 12.0
    case.target[:] = (case.input.double() @ case.linear_weight.double().T).argmax(-1)
    return case


def near_probabilities(case):
    case.target = (case.input.double() @ case.linear_weight.double().T).softmax(-1)
    return case


def rounding_of_logits(case):
    """What float32 logits of two GEMMs differ by, which sum in another order: those of the
    statistics and those of a block."""
    logits = case.input @ case.linear_weight.T
    return torch.finfo(torch.float32).eps * logits.abs().max()


def weighted_sums(case):
    """What an error of the logits is multiplied by in each row of the gradients."""
    p = (case.input @ case.linear_weight.T).softmax(-1)
    sums = {"input": p @ case.linear_weight.abs(), "linear_weight": p.T @ case.input.abs()}
    return {name: value.norm(dim=-1) for name, value in sums.items()}


@pytest.mark.parametrize("kind", [uncentred, rare_classes, peaked, near_probabilities])
@pytest.mark.parametrize("dtype", cases.DTYPES[1:], ids=str)
def test_hard_numbers_are_as_without_blocks(device, dtype, kind, set_blocks):
    """At most half as much again as the error of one chunk, in the norm and in the worst row."""
    case = kind(cases.make_case(32, HIDDEN, VOCAB, dtype=dtype, device=device))
    case = case.with_options(reduction="sum")
    names = ("input", "linear_weight")
    wants = {"wants": names}
    wide = case.to(torch.float64)
    truth = cases.outcome(flce.reference.linear_cross_entropy, wide, **wants)
    again = rounding_of_logits(wide) * (dtype == torch.float32)
    for save in BY_BLOCKS:
        errors = {}
        for shape in ("0", *SHAPES):
            set_blocks(shape)
            made = cases.outcome(flce.linear_cross_entropy, case, save=save, **wants)
            errors[shape] = {
                name: (made[name].double() - truth[name]).norm(dim=-1)
                for name in cases.GRADIENTS[:2]
            }
        for shape, name in itertools.product(SHAPES, cases.GRADIENTS[:2]):
            own, one = torch.finfo(dtype).eps * truth[name].norm(dim=-1), errors["0"][name]
            own = own + again * weighted_sums(wide)[name]
            rows, where = errors[shape][name], f"{name}, {save}, blocks of {shape}"
            assert rows.norm() <= 1.5 * one.norm() + own.norm(), where
            assert rows.max() <= 1.5 * one.max() + 2.0 * own.max(), where


@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("dtype", cases.DTYPES[:2], ids=str)
def test_logits_that_are_computed_again_may_be_huge(dtype, save, blocks):
    """A GEMM of another shape sums 3000 products in another order: a logit of 1e30 may then exceed
    the largest of its row by far more than exp can take."""
    case = cases.make_case(TOKENS, 3000, VOCAB, dtype=dtype)
    case.linear_weight[-1] *= 1e30 if dtype == torch.float32 else 1e200
    wants = ("input", "linear_weight")
    made = cases.outcome(flce.linear_cross_entropy, case, wants=wants, save=save)
    assert all(bool(value.isfinite().all()) for value in made.values())


# ---- edges ----


@pytest.mark.parametrize("save", BY_BLOCKS)
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
@pytest.mark.parametrize("vocab", [1, 64, 65])
@pytest.mark.parametrize("ignored", [False, True])
def test_few_rows_and_classes(device, save, tokens, vocab, ignored, blocks):
    case = cases.make_case(tokens, HIDDEN, vocab, dtype=torch.float64, device=device, bias=True)
    case = case.with_options(reduction="sum")
    if ignored:
        case = cases.ignore_some(case, every=1)
    for bound in (None, "count"):
        cases.check(
            flce.linear_cross_entropy, case, save=save, valid_bound=bound, max_memory="64KiB"
        )


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_targets_out_of_range(device, save, blocks):
    """Refused on the CPU, NaN in the row on a GPU; and so is a bound below the valid rows."""
    case = make(device)
    for bad in (-1, VOCAB):
        case.target[7] = bad
        if device == "cpu":
            with pytest.raises(IndexError, match=rf"target\[7\] is {bad}: expected 0 <= target"):
                cases.outcome(flce.linear_cross_entropy, case, save=save)
        else:
            made = cases.outcome(flce.linear_cross_entropy, case, save=save)
            assert made["input"][7].isnan().all() and made["loss"].isnan()
    case.target[7] = 0
    valid = int((case.target >= 0).sum())
    if device == "cpu":
        with pytest.raises(ValueError, match=f"valid_bound: expected at least {valid}"):
            cases.outcome(flce.linear_cross_entropy, case, save=save, valid_bound=valid - 1)
    else:
        made = cases.outcome(flce.linear_cross_entropy, case, save=save, valid_bound=valid - 1)
        assert made["loss"].isnan()
    cases.check(flce.linear_cross_entropy, case, save=save, valid_bound=valid)


# ---- autograd ----


def leaves_of(case):
    leaves = {"input": case.input, "linear_weight": case.linear_weight}
    leaves["linear_bias"] = case.options["linear_bias"]
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_backwards_of_one_forward(device, save, blocks):
    """Twice, with another call in between and with other blocks: the same bits, since a step reads
    the shape in the pass that makes the gradients."""
    leaves, case = leaves_of(make(device)), make(device)
    loss = flce.linear_cross_entropy(target=case.target, save=save, **leaves)
    first = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
    kept = [tensor.clone() for tensor in first]
    cases.outcome(flce.linear_cross_entropy, make(device, softcap=1.0), save=save)
    second = torch.autograd.grad(loss, leaves.values(), retain_graph=True)
    blocks("3x128")
    third = torch.autograd.grad(loss, leaves.values())
    for one, copy_of_one, two, three in zip(first, kept, second, third, strict=True):
        assert torch.equal(one, copy_of_one) and torch.equal(one, two)
        assert cases.relative_error(three, one) < 1e-12


def test_strided_gradients_of_rows(device, blocks):
    case = make(device, reduction="none")
    grad = torch.randn(TOKENS, 2, device=device, dtype=torch.float64)[:, 1]
    for upstream in (grad, torch.ones((), device=device, dtype=torch.float64).expand(TOKENS)):
        cases.check(flce.linear_cross_entropy, case, save="stats", grad_output=upstream)


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_accumulation(device, dtype, attribute, blocks):
    case = make(device, dtype)
    yardstick = cases.Yardstick(case)
    weight, before = nn.Parameter(case.linear_weight.clone()), 2.0**-10
    total = torch.full_like(weight, before, requires_grad=False)
    setattr(weight, attribute, total)
    leaves = {**leaves_of(case), "linear_weight": weight}
    loss = flce.linear_cross_entropy(
        target=case.target, save="stats", accumulate_into=attribute, **leaves
    )
    loss.backward()
    assert getattr(weight, attribute) is total
    grads = {"input": leaves["input"].grad, "linear_bias": leaves["linear_bias"].grad}
    yardstick = yardstick.granting(linear_weight=torch.finfo(dtype).eps * before * VOCAB)
    yardstick.check({"loss": loss.detach(), "linear_weight": total - before, **grads})


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_frozen_weight_with_an_adapter(device, save, blocks):
    case = make(device, adapter_input=None)
    random = cases.generator(3)
    low_rank = torch.randn(TOKENS, 3, generator=random).to(device, torch.float64)
    narrow = torch.randn(VOCAB, 3, generator=random).to(device, torch.float64)
    case = case.with_options(adapter_input=low_rank, adapter_weight=narrow)
    wants = ("input", "adapter_input", "adapter_weight")
    cases.check(flce.linear_cross_entropy, case, wants=wants, save=save)


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_without_gradients(device, save, blocks):
    """No gradients are made: one GEMM of the logits for each chunk of rows."""
    case = make(device)
    with torch.no_grad():
        bias = case.options["linear_bias"]
        call = functools.partial(
            flce.linear_cross_entropy, case.input, case.linear_weight, case.target,
            linear_bias=bias, save=save,
        )  # fmt: skip
        assert cases.gemms_of(call) == 1
        cases.Yardstick(case, wants=()).check({"loss": call()})


@pytest.mark.parametrize("save", BY_BLOCKS)
def test_compile_with_a_graph_break(device, save, blocks):
    head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, save=save).to(device, torch.float64)
    case = make(device)

    def step(x):
        x = x * 2.0
        torch._dynamo.graph_break()
        return head(x, case.target) * 0.5

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        x = case.input.nan_to_num().requires_grad_()
        loss = function(x)
        results.append((loss, *torch.autograd.grad(loss, [x, *head.parameters()])))
    assert all(map(torch.equal, *results))
