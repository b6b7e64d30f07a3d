"""flce.plan of a divergence from a teacher, compared with what flce.linear_divergence asks for."""

import json

import pytest
import torch

import flce
from harness import ROOT, cases

RESULTS = ROOT / "benchmarks" / "results"
TOKENS, HIDDEN, VOCAB, TEACHER, CLASSES = 256, 128, 4096, 200, 8
KNOBS = [{}, {"save": "stats"}, {"reduction": "none"}, {"reduction": "sum", "save": "grads"}]
KNOBS += [{"gradient": "sampled"}]


def case_of(kind, device, dtype):
    size = {"dtype": dtype, "device": device}
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, bias=True, **size)
    leaves = case.input, case.linear_weight, case.options["linear_bias"]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    if kind == "head":
        other = cases.make_case(TOKENS, TEACHER, VOCAB, seed=1, **size)
        given = {"teacher_input": other.input, "teacher_weight": other.linear_weight}
        return leaves, given, {"teacher_hidden": TEACHER}
    logits = torch.randn(TOKENS, VOCAB, **size)
    if kind == "logits":
        return leaves, {"teacher_logits": logits}, {"teacher_logits": dtype}
    top = logits.float().log_softmax(-1).topk(CLASSES)
    return leaves, {"teacher_logits": (top.indices, top.values)}, {"teacher_logits": CLASSES}


def step_of(leaves, given, knobs):
    x, w, bias = leaves
    target = torch.arange(TOKENS, device=x.device)
    target = None if isinstance(given.get("teacher_logits"), tuple) else target

    def step():
        loss = flce.linear_divergence(x, w, linear_bias=bias, target=target, **given, **knobs)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaves)

    return step


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("kind", ["head", "logits"])
def test_peak_and_gemms(device, kind, knobs, dtype):
    """Within 2 % of the measured bytes; each GEMM is counted."""
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("oneDNN's scratch comes from torch's allocator")
    if dtype == torch.float64 and "gradient" in knobs:
        pytest.skip("float64 is not sampled")
    leaves, given, sizes = case_of(kind, device, dtype)
    knobs = {**knobs, "max_memory": "1MiB"}
    size = {"dtype": dtype, "device": device, "bias": True}
    plan = flce.plan(TOKENS, HIDDEN, VOCAB, **size, **sizes, **knobs)
    step = step_of(leaves, given, knobs)
    assert plan.chunks > 1
    assert cases.gemms_of(step) == plan.forward_gemms + plan.backward_gemms
    measured = cases.peak_bytes(step, device)
    assert 0.98 * plan.peak_bytes <= measured <= 1.02 * plan.peak_bytes


@pytest.mark.parametrize("save", ["auto", "stats"])
def test_peak_of_a_few_classes(device, save):
    """Torch's operations on (N, K) hold some of such tensors in addition."""
    leaves, given, sizes = case_of("classes", device, torch.float32)
    knobs = {"save": save, "max_memory": "8MiB" if save == "auto" else "1MiB"}
    size = {"dtype": torch.float32, "device": device, "bias": True}
    plan = flce.plan(TOKENS, HIDDEN, VOCAB, **size, **sizes, **knobs)
    assert plan.save == ("logits" if save == "auto" else "stats")
    step = step_of(leaves, given, knobs)
    assert cases.gemms_of(step) == plan.forward_gemms + plan.backward_gemms
    measured = cases.peak_bytes(step, device)
    assert plan.peak_bytes <= measured <= 1.01 * plan.peak_bytes + 24 * TOKENS * CLASSES * 8


@pytest.mark.parametrize("name", ["distill", "distill-teacher"])
def test_an_h200_that_is_not_there(name, monkeypatch):
    """Within 0.1 % of the peaks of the record."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")
    rows = json.loads((RESULTS / f"2026-11-26-h200-{name}.json").read_text())["rows"]
    rows = [row for row in rows if row["contestant"] == "flce"]
    assert rows
    for row in rows:
        hidden = {"head": 4096, "8192x2048x128256": 2048}[row["shape"]]
        plan = flce.plan(8192, hidden, 128256, device="h200", teacher_hidden=row["teacher"])
        assert plan.peak_bytes == pytest.approx(row["peak_bytes"], rel=1e-3)
        assert plan.chunk_rows < 2048 and "teacher" in plan.buffers and plan.form == "dz"


def test_a_later_backward(device):
    """Both calls are in the plan, and its text says so."""
    size = {"device": device, "dtype": torch.float32, "teacher_hidden": 64}
    now, later = (flce.plan(2048, 64, 4096, **size, save=save) for save in ("auto", "stats"))
    assert (now.save, later.save) == ("grads", "stats")
    assert now.backward_gemms == 0 and later.backward_gemms == now.forward_gemms
    assert later.forward_gemms == 2 * later.chunks and later.backward_chunks == now.chunks
    assert later.backward_peak_bytes == now.peak_bytes > later.forward_peak_bytes
    assert "the backward computes the logits again" in later.text
    names = [line.split()[0] for line in later.text.splitlines() if " bytes " in line]
    assert names == list(later.buffers) and "teacher" in names


def test_ranks(device):
    """Statistics of both heads and sums for each chunk; the teacher's x is gathered too."""
    size = {"device": device, "ranks": 8, "teacher_hidden": 2048, "sequence": True}
    plan = flce.plan(8192, 4096, 128256, **size)
    later = flce.plan(8192, 4096, 128256, **size, save="stats")
    gathered = 7 * 1024 * (4096 + 2048) * 2
    assert plan.collectives["input"] == ("all-gather", 2, 0, gathered)
    assert plan.collectives["statistics"][1] == 3 * plan.chunks
    assert later.collectives["input"] == ("all-gather", 2, 2, 2 * gathered)
    assert later.collectives["statistics"][2] == 3 * later.backward_chunks


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"teacher_hidden": 0}, "teacher_hidden: expected an int of at least 1, got 0"),
        ({"teacher_hidden": 8, "teacher_logits": 4}, "teacher_logits: expected None with"),
        ({"teacher_logits": torch.int8}, "teacher_logits: expected one of"),
        ({"teacher_logits": 0}, "teacher_logits: expected an int of at least 1"),
        ({"teacher_hidden": 8, "z_loss": 1.0}, "unexpected keyword argument 'z_loss'"),
        ({"teacher_hidden": 8, "save": "logits"}, "save: expected .* with a divergence"),
        ({"teacher_hidden": 8, "save": "grads", "reduction": "none"}, "save: expected"),
        ({"teacher_hidden": 8, "probabilities": True}, "target: expected class indices"),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        flce.plan(64, 64, 64, device="cpu", **wrong)
