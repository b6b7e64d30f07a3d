"""Sums of the weight's gradient over many chunks: in float32 by default, in the dtype that
accum_dtype names where it names one. Classes of Zipfian frequency and hidden states whose mean is
not 0: what a 16-bit sum then loses is mostly the rare classes'."""

import functools

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.packing import WIDE_SUM_CHUNKS
from harness import cases
from harness.wide_sums import (
    CHUNK,
    HIDDEN,
    MANY,
    ROUNDED,
    VOCAB,
    check,
    error_and_projection,
    operands,
)

NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def chunks_of_all_classes(monkeypatch):
    """Blocks of rows and classes would take the place of many chunks (core/test_blocks.py)."""
    monkeypatch.setenv("FLCE_BLOCKS", "0")


def budget(device, dtype, save="grads"):
    """max_memory of a chunk of CHUNK rows."""
    one = flce.plan(1, HIDDEN, VOCAB, device=device, dtype=dtype, save=save)
    return CHUNK * one.buffers["logits"]


def plan_of(device, dtype, chunks, save, **options):
    given = {"max_memory": budget(device, dtype, save), **options}
    made = flce.plan(CHUNK * chunks, HIDDEN, VOCAB, device=device, dtype=dtype, save=save, **given)
    assert (made.chunks if save == "grads" else made.backward_chunks) == chunks
    return made


def gradient(device, dtype, chunks, save, **options):
    x, w, target, _ = operands(device, dtype, chunks)
    w = w.detach().requires_grad_()
    given = {"max_memory": budget(device, dtype, save), "save": save, **options}
    return torch.autograd.grad(flce.linear_cross_entropy(x, w, target, **given), w)[0]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("save", ["grads", "stats"])
@pytest.mark.parametrize("chunks", [WIDE_SUM_CHUNKS, 86, 342, MANY])
def test_many_chunks(device, dtype, save, chunks):
    exact = operands(device, dtype, chunks)[3]
    check(gradient(device, dtype, chunks, save), exact, dtype)


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_a_named_dtype_is_taken(device, save):
    """The operands' own, whatever it loses, and float32 below 16 chunks."""
    dtype = torch.bfloat16
    exact = operands(device, dtype, MANY)[3]
    error, projection = error_and_projection(
        gradient(device, dtype, MANY, save, accum_dtype=dtype), exact
    )
    assert error > 0.1 and projection < 0.9, (error, projection)
    few = WIDE_SUM_CHUNKS - 1
    own, named, wide = (
        gradient(device, dtype, few, save, accum_dtype=accum)
        for accum in (None, dtype, torch.float32)
    )
    assert torch.equal(own, named) and not torch.equal(own, wide)
    many, wide = (
        gradient(device, dtype, WIDE_SUM_CHUNKS, save, accum_dtype=accum)
        for accum in (None, torch.float32)
    )
    assert torch.equal(many, wide)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("save", ["grads", "stats"])
def test_the_plan(device, dtype, save):
    """It names the accumulator's dtype and has its bytes."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = torch.float32 if dtype == torch.float16 and device == "cpu" else dtype
    few = plan_of(device, dtype, WIDE_SUM_CHUNKS - 1, save)
    many = plan_of(device, dtype, WIDE_SUM_CHUNKS, save)
    assert few.accum_dtype == str(own).removeprefix("torch.")
    assert many.accum_dtype == str(wide).removeprefix("torch.")
    assert f"accum_dtype={many.accum_dtype}" in many.text
    more = many.buffers.get("dw_accum", 0) - few.buffers.get("dw_accum", 0)
    assert more == (0 if own == wide else VOCAB * HIDDEN * wide.itemsize)
    narrow = plan_of(device, dtype, MANY, save, accum_dtype=dtype)
    assert narrow.accum_dtype == few.accum_dtype
    assert narrow.buffers.get("dw_accum", 0) == few.buffers.get("dw_accum", 0)


def test_the_plan_of_a_gpu():
    """float16 keeps dW in 16 bits also where the sum is wide: a compiled graph does not know."""
    size = {"hidden": 4096, "vocab": 128256, "device": "h100"}
    elements = 4096 * 128256
    for dtype in NARROW:
        made = [flce.plan(rows, dtype=dtype, **size) for rows in (8192, 350208)]
        assert made[0].chunks < WIDE_SUM_CHUNKS <= made[1].chunks
        assert [plan.accum_dtype for plan in made] == [made[0].dtype, "float32"]
        assert [plan.buffers["grad_weight"] for plan in made] == [2 * elements] * 2
        assert [plan.buffers.get("dw_accum", 0) for plan in made] == [0, 4 * elements]
        named = flce.plan(350208, dtype=dtype, accum_dtype=dtype, **size)
        assert named.accum_dtype == made[0].dtype
        assert named.forward_peak_bytes == made[1].forward_peak_bytes - 4 * elements
    rows = {"reduction": "none", "save": "stats", "return_lse": True}
    assert flce.plan(350208, **size, **rows).accum_dtype == "float32"
    added = flce.plan(350208, **size, **rows, accumulate_into="grad")
    assert added.buffers["dw_accum"] == 4 * elements and "grad_weight" not in added.buffers
    added = flce.plan(350208, **size, **rows, accumulate_into="main_grad")
    assert added.accum_dtype == "float32" and "dw_accum" not in added.buffers


def test_the_plan_of_a_divergence():
    """Of two calls that of the backward counts, which makes dW."""
    size = {"hidden": 4096, "vocab": 128256, "device": "h100", "teacher_hidden": 2048}
    for save in ("grads", "stats"):
        few, many = (flce.plan(rows, save=save, **size) for rows in (4096, 65536))
        assert (few.accum_dtype, many.accum_dtype) == ("bfloat16", "float32"), save
        assert "dw_accum" in many.buffers and "dw_accum" not in few.buffers


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("start", [None, 0.0])
def test_added_to_the_callers_gradient(device, dtype, start):
    """A backward adds to a 16-bit .grad once, not once for each chunk."""
    x, w, target, exact = operands(device, dtype, MANY)
    w = w.detach().requires_grad_()
    w.grad = None if start is None else torch.full_like(w, start)
    given = {"max_memory": budget(device, dtype, "stats"), "save": "stats"}
    flce.linear_cross_entropy(x, w, target, accumulate_into="grad", **given).backward()
    check(w.grad, exact, dtype)


def test_a_bias(device):
    """Its kernel on Hopper sums in 16 bits alone: a wide sum takes another way."""
    x, w, target, exact = operands(device, torch.bfloat16, MANY)
    bias = torch.zeros(VOCAB, device=device, dtype=w.dtype, requires_grad=True)
    w = w.detach().requires_grad_()
    wide = x.double() @ w.detach().double().T
    expected = torch.autograd.grad(F.cross_entropy(wide + (b := bias.double()), target), b)[0]
    given = {"max_memory": budget(device, torch.bfloat16), "linear_bias": bias, "save": "grads"}
    made = torch.autograd.grad(flce.linear_cross_entropy(x, w, target, **given), (w, bias))
    check(made[0], exact, torch.bfloat16)
    assert error_and_projection(made[1], expected)[0] <= ROUNDED[torch.bfloat16]


@pytest.mark.parametrize("trains", [False, True])
def test_an_adapter(device, trains):
    """dW of its columns alone, or of both weights."""
    x, w, target, exact = operands(device, torch.bfloat16, MANY)
    low = torch.zeros(VOCAB, 4, device=device, dtype=w.dtype, requires_grad=True)
    given = {"adapter_input": x[:, :4].contiguous(), "adapter_weight": low}
    leaves = [w.detach().requires_grad_(trains), low]
    loss = flce.linear_cross_entropy(
        x, leaves[0], target, save="grads", max_memory=budget(device, torch.bfloat16), **given
    )
    made = torch.autograd.grad(loss, leaves if trains else leaves[1:])
    check(made[-1], exact[:, :4], torch.bfloat16)
    if trains:
        check(made[0], exact, torch.bfloat16)


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_a_divergence(device, save):
    x, w, _, _ = operands(device, torch.bfloat16, MANY)
    teacher = (operands(device, torch.bfloat16, 1)[1] * 2).detach()
    w = w.detach().requires_grad_()
    wide = w.detach().double().requires_grad_()
    p = (x.double() @ wide.T).log_softmax(-1)
    q = (x.double() @ teacher.double().T).log_softmax(-1)
    F.kl_div(p, q, log_target=True, reduction="batchmean").backward()
    loss = flce.linear_divergence(
        x, w, x, teacher, save=save, max_memory=budget(device, torch.bfloat16) * 4
    )
    made = torch.autograd.grad(loss, w)[0]
    assert cases.relative_error(made.double(), wide.grad) <= 2 * ROUNDED[torch.bfloat16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("save", ["grads", "stats"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dtype, save, dynamic):
    """A graph has the dtypes that its fakes have told, for any number of rows."""
    compiled = torch.compile(
        functools.partial(
            flce.linear_cross_entropy, save=save, max_memory=budget(device, dtype, save)
        ),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for chunks in (WIDE_SUM_CHUNKS - 1, 86):
        x, w, target, _ = operands(device, dtype, chunks)
        w = w.detach().requires_grad_()
        made = torch.autograd.grad(compiled(x, w, target), w)[0]
        assert torch.equal(made, gradient(device, dtype, chunks, save))
