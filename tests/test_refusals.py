"""Every refusal names the argument, what was expected and what came, and touches nothing."""

import math

import cases
import pytest
import torch

import flce

TOKENS, HIDDEN, VOCAB = 6, 8, 11


def arguments(device):
    return {
        "input": torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True),
        "linear_weight": torch.randn(VOCAB, HIDDEN, device=device, requires_grad=True),
        "target": torch.arange(TOKENS, device=device),
    }


def ones(*shape, **options):
    return lambda device: torch.ones(*shape, device=device, **options)


def value(given):
    return lambda device: given


# Argument, what it is given, the error, and what the message says besides the argument's name.
REFUSALS = [
    ("input", ones(TOKENS, HIDDEN, dtype=torch.int64), TypeError, ["float32", "int64"]),
    ("input", ones(TOKENS, HIDDEN, dtype=torch.complex64), TypeError, ["float32", "complex64"]),
    ("input", ones((), dtype=torch.float32), ValueError, ["dimension"]),
    ("linear_weight", ones(VOCAB, HIDDEN + 1), ValueError, [f"(V, {HIDDEN})", f"{HIDDEN + 1})"]),
    ("linear_weight", ones(VOCAB), ValueError, ["(V, ", f"({VOCAB},)"]),
    ("linear_weight", ones(VOCAB, 2, HIDDEN), ValueError, ["(V, ", f"({VOCAB}, 2, {HIDDEN})"]),
    ("linear_weight", ones(0, HIDDEN), ValueError, [f"(0, {HIDDEN})"]),
    ("linear_weight", ones(VOCAB, HIDDEN, dtype=torch.int8), TypeError, ["float32", "int8"]),
    (
        "linear_weight",
        ones(VOCAB, HIDDEN, dtype=torch.bfloat16),
        TypeError,
        ["float32", "bfloat16"],
    ),
    (
        "target",
        ones(TOKENS + 1, dtype=torch.int64),
        ValueError,
        [f"({TOKENS},)", f"({TOKENS + 1},)"],
    ),
    ("target", ones(TOKENS, 1, dtype=torch.int64), ValueError, [f"({TOKENS},)", f"({TOKENS}, 1)"]),
    ("target", ones(TOKENS, dtype=torch.int32), TypeError, ["int64", "int32"]),
    ("target", ones(TOKENS, dtype=torch.bool), TypeError, ["int64", "bool"]),
    ("target", ones(TOKENS, dtype=torch.float32), TypeError, ["int64", "float32"]),
    ("target", ones(TOKENS, VOCAB, requires_grad=True), TypeError, ["int64", "float32"]),
    ("linear_bias", ones(VOCAB + 1), ValueError, [f"({VOCAB},)", f"({VOCAB + 1},)"]),
    ("linear_bias", ones(1, VOCAB), ValueError, [f"({VOCAB},)", f"(1, {VOCAB})"]),
    ("linear_bias", ones(VOCAB, dtype=torch.int64), TypeError, ["float32", "int64"]),
    ("linear_bias", ones(VOCAB, dtype=torch.float64), TypeError, ["float32", "float64"]),
    ("linear_bias", ones(VOCAB, dtype=torch.bfloat16), TypeError, ["float32", "bfloat16"]),
    ("linear_bias", value([0.0] * VOCAB), TypeError, ["tensor", "list"]),
    ("input", value([[0.0]]), TypeError, ["tensor", "list"]),
    ("target", value([0]), TypeError, ["tensor", "list"]),
    ("label_smoothing", value("0.1"), TypeError, ["number", "str"]),
    ("ignore_index", value(3.0), TypeError, ["int", "3.0"]),
    ("ignore_index", value(2**63), ValueError, ["int64", str(2**63)]),
    ("accum_dtype", value("float32"), TypeError, ["torch.dtype", "float32"]),
    ("max_memory", value(0.5), ValueError, ["0.5"]),
    ("weight", ones(VOCAB - 1), ValueError, [f"({VOCAB},)", f"({VOCAB - 1},)"]),
    ("weight", ones(VOCAB, dtype=torch.int64), TypeError, ["float32", "int64"]),
    ("weight", ones(VOCAB, requires_grad=True), ValueError, ["requires_grad"]),
    ("reduction", value("average"), ValueError, ["mean", "average"]),
    ("reduction", value(""), ValueError, ["mean"]),
    ("save", value("everything"), ValueError, ["stats", "everything"]),
    ("save", value("nothing"), ValueError, ["stats", "nothing"]),
    ("label_smoothing", value(-0.1), ValueError, ["0 <=", "-0.1"]),
    ("label_smoothing", value(1.5), ValueError, ["<= 1", "1.5"]),
    ("label_smoothing", value(math.nan), ValueError, ["<= 1", "nan"]),
    ("max_memory", value(0), ValueError, ["positive", "0"]),
    ("max_memory", value(-1), ValueError, ["positive", "-1"]),
    ("max_memory", value(math.nan), ValueError, ["positive", "nan"]),
    ("max_memory", value(math.inf), ValueError, ["positive", "inf"]),
    ("max_memory", value("lots"), ValueError, ["512MiB", "lots"]),
    ("max_memory", value("12 parsecs"), ValueError, ["512MiB", "parsecs"]),
    ("max_memory", value("-1MiB"), ValueError, ["512MiB", "-1MiB"]),
    ("max_memory", value("nan"), ValueError, ["512MiB", "nan"]),
    ("max_memory", value(True), TypeError, ["bytes", "bool"]),
    ("max_memory", value([1]), TypeError, ["bytes", "list"]),
    ("max_memory", value(VOCAB * 4 - 1), ValueError, ["one row", str(VOCAB * 4 - 1)]),
    ("accum_dtype", value(torch.bfloat16), ValueError, ["float32", "bfloat16"]),
    ("accum_dtype", value(torch.float64), ValueError, ["float32", "float64"]),
    ("logits_dtype", value(torch.float16), ValueError, ["float32", "float16"]),
]


def raised(error, call):
    """The message of the error; no GEMM may have been asked for."""
    before = torch.ops.flce.gemm_count()
    with pytest.raises(error) as caught:
        call()
    assert torch.ops.flce.gemm_count() == before
    return str(caught.value)


def label(item):
    return item if isinstance(item, str) else None


@pytest.mark.parametrize(("name", "given", "error", "words"), REFUSALS, ids=label)
def test_refusal(device, name, given, error, words):
    call = {**arguments(device), name: given(device)}
    message = raised(error, lambda: flce.linear_cross_entropy(**call))
    assert name in message
    assert "expected" in message
    for word in words:
        assert word in message, message
    # The same call with the argument put right goes through: the argument was the reason.
    flce.linear_cross_entropy(**arguments(device)).backward()


def test_grads_with_no_reduction(device):
    """The forward cannot know a gradient for each row."""
    call = {**arguments(device), "save": "grads", "reduction": "none"}
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**call))
    for word in ("save", "logits", "stats", "grads", "none"):
        assert word in message


@pytest.mark.parametrize("name", ["linear_weight", "target", "linear_bias", "weight"])
def test_other_device(device, name):
    """A tensor elsewhere is refused by name (the meta device is elsewhere for everyone)."""
    call = arguments(device)
    call["linear_bias"] = torch.ones(VOCAB, device=device)
    call["weight"] = torch.ones(VOCAB, device=device)
    call[name] = call[name].detach().to("meta")
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**call))
    for word in (name, "device", device, "meta"):
        assert word in message, message


def test_cpu_targets_with_a_cuda_model(cuda):
    call = arguments(cuda)
    call["target"] = call["target"].cpu()
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**call))
    for word in ("target", "cuda:0", "cpu"):
        assert word in message


@pytest.mark.parametrize("bad", [VOCAB, -1, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "cross_entropy"])
def test_target_out_of_range_on_the_cpu(function, bad):
    """Row, value and range, before any work."""
    call = arguments("cpu")
    call["target"][4] = bad
    if function == "cross_entropy":
        logits = torch.randn(TOKENS, VOCAB)
        message = raised(IndexError, lambda: flce.cross_entropy(logits, call["target"]))
    else:
        message = raised(IndexError, lambda: flce.linear_cross_entropy(**call))
    for word in ("target", "4", str(bad), str(VOCAB)):
        assert word in message, message


def test_out_of_range_is_relative_to_ignore_index():
    """-100 is a bad target where another value is the ignored one."""
    call = arguments("cpu")
    call["target"][4] = -100
    flce.linear_cross_entropy(**call)
    message = raised(IndexError, lambda: flce.linear_cross_entropy(**call, ignore_index=-1))
    assert "-100" in message


def test_environment_budget_is_named(device, monkeypatch):
    monkeypatch.setenv("FLCE_MAX_MEMORY", "plenty")
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**arguments(device)))
    assert "FLCE_MAX_MEMORY" in message and "plenty" in message


def test_unknown_keyword():
    with pytest.raises(TypeError, match="z_los"):
        flce.linear_cross_entropy(**arguments("cpu"), z_los=0.1)


def test_options_are_keywords_only():
    x, w, y = arguments("cpu").values()
    with pytest.raises(TypeError):
        flce.linear_cross_entropy(x, w, y, torch.ones(VOCAB))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": torch.ones(TOKENS, VOCAB, dtype=torch.int64)}, TypeError, ["logits", "int64"]),
        ({"logits": torch.ones(TOKENS, 0)}, ValueError, ["logits", f"({TOKENS}, 0)"]),
        ({"target": torch.zeros(TOKENS, VOCAB)}, TypeError, ["target", "int64", "float32"]),
        ({"target": torch.zeros(2, dtype=torch.int64)}, ValueError, ["target", "(2,)"]),
        ({"weight": torch.ones(VOCAB + 1)}, ValueError, ["weight", f"({VOCAB + 1},)"]),
        ({"reduction": "avg"}, ValueError, ["reduction", "avg"]),
        ({"label_smoothing": 2.0}, ValueError, ["label_smoothing", "2.0"]),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, dict) else None,
)
def test_cross_entropy(change, error, words):
    call = {"logits": torch.randn(TOKENS, VOCAB), "target": torch.arange(TOKENS), **change}
    message = raised(error, lambda: flce.cross_entropy(**call))
    assert "expected" in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("module", ["LinearCrossEntropyLoss", "LinearCrossEntropyHead"])
@pytest.mark.parametrize(
    ("name", "given"), [("reduction", "avg"), ("save", "all"), ("label_smoothing", 2.0)]
)
def test_modules_refuse_when_they_are_made(module, name, given):
    """Not at the first step of a long job."""
    with pytest.raises(ValueError, match=f"{name}: expected .* got .*{given}"):
        getattr(flce, module)(HIDDEN, VOCAB, **{name: given})


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("save", "all", ValueError),
        ("reduction", "avg", ValueError),
        ("max_memory", "lots", ValueError),
        ("max_memory", 1, ValueError),
        ("accum_dtype", torch.float64, ValueError),
    ],
)
def test_plan_refuses_what_the_call_would(name, given, error):
    with pytest.raises(error, match=f"{name}: expected .* got "):
        flce.plan(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device="cpu", **{name: given})


def test_errors_leave_the_engine_usable(device):
    """After a refusal deep in the engine the next call is right."""
    with pytest.raises(ValueError):
        flce.linear_cross_entropy(**arguments(device), max_memory=1)
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device=device)
    cases.check(flce.linear_cross_entropy, case)
