"""Every refusal names the argument, what was expected and what came, and modifies nothing."""

import math

import cases
import pytest
import torch

import flce
from flce.options import INTEGERS

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


def sparse(*shape, **options):
    return lambda device: torch.ones(*shape, device=device, **options).to_sparse()


# What ZeRO-3 leaves of a parameter.
PARTITIONED = ["(0,)", "ZeRO-3", "flce.LinearCrossEntropyHead", "flce.fuse", "GatheredParameters"]
# Argument, its value, the error, and what the message contains besides the argument's name.
REFUSALS = [
    ("input", ones(TOKENS, HIDDEN, dtype=torch.int64), TypeError, ["float32", "int64"]),
    ("input", ones(TOKENS, HIDDEN, dtype=torch.complex64), TypeError, ["float32", "complex64"]),
    ("input", ones((), dtype=torch.float32), ValueError, ["dimension"]),
    ("input", sparse(TOKENS, HIDDEN), TypeError, ["dense", "sparse_coo"]),
    ("linear_weight", sparse(VOCAB, HIDDEN), TypeError, ["dense", "sparse_coo"]),
    ("target", sparse(TOKENS, dtype=torch.int64), TypeError, ["dense", "sparse_coo"]),
    ("linear_bias", sparse(VOCAB), TypeError, ["dense", "sparse_coo"]),
    ("weight", sparse(VOCAB), TypeError, ["dense", "sparse_coo"]),
    ("token_weight", sparse(TOKENS), TypeError, ["dense", "sparse_coo"]),
    ("temperature", sparse(TOKENS), TypeError, ["dense", "sparse_coo"]),
    ("num_items", sparse(()), TypeError, ["dense", "sparse_coo"]),
    ("linear_weight", ones(VOCAB, HIDDEN + 1), ValueError, [f"(V, {HIDDEN})", f"{HIDDEN + 1})"]),
    ("linear_weight", ones(VOCAB), ValueError, ["(V, ", f"({VOCAB},)"]),
    ("linear_weight", ones(0, HIDDEN), ValueError, [f"(0, {HIDDEN})"]),
    ("linear_weight", ones(0), ValueError, [f"(V, {HIDDEN})", *PARTITIONED]),
    ("linear_bias", ones(0), ValueError, [f"({VOCAB},)", *PARTITIONED]),
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
    ("target", ones(TOKENS, dtype=torch.int16), TypeError, ["int64", "int32", "int16"]),
    ("target", ones(TOKENS, dtype=torch.uint8), TypeError, ["int64", "int32", "uint8"]),
    ("target", ones(TOKENS, dtype=torch.bool), TypeError, ["int64", "bool"]),
    ("target", ones(TOKENS, VOCAB, dtype=torch.complex64), TypeError, ["floating", "complex64"]),
    ("target", ones(TOKENS), ValueError, [f"({TOKENS}, {VOCAB})", "probabilities", f"({TOKENS},)"]),
    (
        "target",
        ones(TOKENS, VOCAB + 1),
        ValueError,
        [f"({TOKENS}, {VOCAB})", "probabilities", f"({TOKENS}, {VOCAB + 1})"],
    ),
    ("target", ones(TOKENS, VOCAB, requires_grad=True), ValueError, ["requires_grad"]),
    ("linear_bias", ones(VOCAB + 1), ValueError, [f"({VOCAB},)", f"({VOCAB + 1},)"]),
    ("linear_bias", ones(1, VOCAB), ValueError, [f"({VOCAB},)", f"(1, {VOCAB})"]),
    ("linear_bias", ones(VOCAB, dtype=torch.int64), TypeError, ["float32", "int64"]),
    ("linear_bias", ones(VOCAB, dtype=torch.float64), TypeError, ["float32", "float64"]),
    ("linear_bias", ones(VOCAB, dtype=torch.bfloat16), TypeError, ["float32", "bfloat16"]),
    ("linear_bias", value([0.0] * VOCAB), TypeError, ["tensor", "list"]),
    ("input", value([[0.0]]), TypeError, ["tensor", "list"]),
    ("input", value(None), TypeError, ["tensor", "NoneType"]),
    ("linear_weight", value(None), TypeError, ["tensor", "NoneType"]),
    ("target", value(None), TypeError, ["tensor", "NoneType"]),
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
    ("softcap", value(0.0), ValueError, ["positive", "None", "0.0"]),
    ("softcap", value(-30.0), ValueError, ["positive", "-30.0"]),
    ("softcap", value(math.inf), ValueError, ["finite", "inf"]),
    ("softcap", value(math.nan), ValueError, ["positive", "nan"]),
    ("softcap", value("30"), TypeError, ["number", "str"]),
    ("logit_scale", value(0.0), ValueError, ["finite", "other than 0", "0.0"]),
    ("logit_scale", value(math.inf), ValueError, ["finite", "inf"]),
    ("logit_scale", value(math.nan), ValueError, ["finite", "nan"]),
    ("logit_scale", ones(2), TypeError, ["number", "Tensor"]),
    ("temperature", value(0.0), ValueError, ["positive", "0.0"]),
    ("temperature", value(-1.0), ValueError, ["positive", "-1.0"]),
    ("temperature", value(math.inf), ValueError, ["finite", "inf"]),
    ("temperature", value(math.nan), ValueError, ["positive", "nan"]),
    ("temperature", value(None), TypeError, ["number", "NoneType"]),
    ("temperature", ones(TOKENS + 1), ValueError, [f"({TOKENS},)", f"({TOKENS + 1},)"]),
    ("temperature", ones(TOKENS, 1), ValueError, [f"({TOKENS},)", f"({TOKENS}, 1)"]),
    ("temperature", ones(TOKENS, requires_grad=True), ValueError, ["requires_grad"]),
    ("temperature", ones((), requires_grad=True), ValueError, ["requires_grad"]),
    ("logit_scale", ones((), requires_grad=True), ValueError, ["requires_grad"]),
    ("softcap", ones((), requires_grad=True), ValueError, ["requires_grad"]),
    ("z_loss", ones((), requires_grad=True), ValueError, ["requires_grad"]),
    ("temperature", ones(TOKENS, dtype=torch.complex64), TypeError, ["real", "complex64"]),
    ("z_loss", value(-1e-4), ValueError, ["at least 0", "-0.0001"]),
    ("z_loss", value(math.inf), ValueError, ["finite", "inf"]),
    ("z_loss", value(math.nan), ValueError, ["at least 0", "nan"]),
    ("token_weight", ones(TOKENS + 1), ValueError, [f"({TOKENS},)", f"({TOKENS + 1},)"]),
    ("token_weight", ones(()), ValueError, [f"({TOKENS},)", "()"]),
    ("token_weight", ones(TOKENS, requires_grad=True), ValueError, ["requires_grad"]),
    ("token_weight", ones(TOKENS, dtype=torch.complex64), TypeError, ["real", "complex64"]),
    ("token_weight", value(1.0), TypeError, ["tensor", "float"]),
    ("num_items", value(-1), ValueError, ["at least 0", "-1"]),
    ("num_items", value(math.inf), ValueError, ["finite", "inf"]),
    ("num_items", value(math.nan), ValueError, ["at least 0", "nan"]),
    ("num_items", value(True), TypeError, ["number", "bool"]),
    ("num_items", value("7"), TypeError, ["number", "str"]),
    ("num_items", ones(1), ValueError, ["0-d", "(1,)"]),
    ("num_items", ones((), requires_grad=True), ValueError, ["requires_grad"]),
    ("num_items", ones((), dtype=torch.complex64), ValueError, ["real", "complex64"]),
    ("shift", value(-1), ValueError, ["at least 0", "-1"]),
    ("shift", value(True), TypeError, ["int", "True"]),
    ("shift", value(1.0), TypeError, ["int", "1.0"]),
    ("shift", value(1), ValueError, ["3 dimensions", "cu_seqlens", "2 dimensions"]),
    ("valid_vocab", value(0), ValueError, [f"from 1 to {VOCAB}", "0"]),
    ("valid_vocab", value(VOCAB + 1), ValueError, [f"from 1 to {VOCAB}", str(VOCAB + 1)]),
    ("valid_vocab", value(2.0), TypeError, ["int", "2.0"]),
    ("valid_vocab", value(True), TypeError, ["int", "True"]),
    ("valid_bound", value(-1), ValueError, ["at least 0", "-1"]),
    ("valid_bound", value("auto"), ValueError, ['"count"', "'auto'"]),
    ("valid_bound", value(3.0), TypeError, ["int", "3.0"]),
    ("valid_bound", value(True), TypeError, ["int", "True"]),
    ("softcap", value(10**400), ValueError, ["finite", "float64"]),
    ("logit_scale", value(10**400), ValueError, ["finite", "float64"]),
    ("temperature", value(-(10**400)), ValueError, ["finite", "float64"]),
    ("num_items", value(10**400), ValueError, ["finite", "float64"]),
    ("return_lse", value(2), TypeError, ["True", "2"]),
    ("return_entropy", value(1), TypeError, ["True", "1"]),
    ("return_accuracy", value("x"), TypeError, ["True", "'x'"]),
    ("return_predictions", value(None), TypeError, ["True", "None"]),
    ("return_z_loss", ones(2), TypeError, ["True", "tensor"]),
    ("options", value(object()), TypeError, ["LinearCrossEntropyOptions", "object"]),
]


def probabilities(device):
    return torch.full((TOKENS, VOCAB), 1.0 / VOCAB, device=device)


def offsets(*given, **options):
    return lambda device: torch.tensor(given, device=device, **options)


WHOLE = offsets(0, TOKENS, dtype=torch.int32)
PROBABLE = {"target": probabilities}
NONE, SUM = {"reduction": value("none")}, {"reduction": value("sum")}
SHIFTED = {"shift": value(1)}
# As REFUSALS, with the other arguments of the call: each value is valid without them.
COMBINED_REFUSALS = [
    ("num_items", value(7), NONE, ValueError, ["None", "'none'", "7"]),
    ("num_items", value(7), SUM, ValueError, ["None", "'sum'", "7"]),
    ("num_items", ones(()), SUM, ValueError, ["None", "'sum'"]),
    ("save", value("grads"), NONE, ValueError, ["logits", "stats", "none", "grads"]),
    ("shift", value(1), {**PROBABLE, "cu_seqlens": WHOLE}, ValueError, ["0", "probabilities", "1"]),
    ("ignore_index", value(3), PROBABLE, ValueError, ["-100", "None", "probabilities", "3"]),
    ("valid_bound", value(6), PROBABLE, ValueError, ["None", "probabilities", "6"]),
    ("valid_bound", value("count"), PROBABLE, ValueError, ["None", "probabilities", "count"]),
    ("return_accuracy", value(True), PROBABLE, ValueError, ["False", "probabilities", "True"]),
    (
        "valid_bound",
        value(0),
        {"reduction": value("mean")},
        ValueError,
        [f"at least {TOKENS}", "0"],
    ),
    ("cu_seqlens", WHOLE, {}, ValueError, ["None", "shift"]),
    ("cu_seqlens", offsets(0.0, 6.0), SHIFTED, ValueError, ["int32", "int64", "float32"]),
    ("cu_seqlens", offsets(0, 6, dtype=torch.int16), SHIFTED, ValueError, ["int32", "int16"]),
    ("cu_seqlens", offsets([0, 6]), SHIFTED, ValueError, ["vector", "(1, 2)"]),
    ("cu_seqlens", offsets(6), SHIFTED, ValueError, ["two", "1"]),
    ("cu_seqlens", value([0, 6]), SHIFTED, TypeError, ["tensor", "list"]),
]


def raised(error, call):
    """The message of the error; checks that no GEMM ran."""
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
    # The same call with a valid argument succeeds, so the argument was the reason. And it is
    # refused again after that, although a similar call is now in the cache.
    flce.linear_cross_entropy(**arguments(device)).backward()
    assert raised(error, lambda: flce.linear_cross_entropy(**call)) == message


@pytest.mark.parametrize(
    ("name", "given", "others", "error", "words"), COMBINED_REFUSALS, ids=label
)
def test_combined_refusal(device, name, given, others, error, words):
    if name == "valid_bound" and not others.keys() & {"target"} and device == "cuda":
        pytest.skip("nothing counts the rows on CUDA: test_single_options.py has the NaN it gives")
    others = {key: make(device) for key, make in others.items()}
    call = {**arguments(device), **others, name: given(device)}
    message = raised(error, lambda: flce.linear_cross_entropy(**call))
    assert message.startswith(f"{name}: expected")
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("k", [1, 2])
def test_shift_and_probabilities_of_three_dimensions(device, k):
    """Also where the shape would permit the shift."""
    x = torch.randn(2, TOKENS, HIDDEN, device=device)
    w = torch.randn(VOCAB, HIDDEN, device=device)
    t = torch.full((2, TOKENS, VOCAB), 1.0 / VOCAB, device=device)
    message = raised(ValueError, lambda: flce.linear_cross_entropy(x, w, t, shift=k))
    assert message.startswith("shift: expected 0") and str(k) in message


@pytest.mark.parametrize(
    "name",
    ["linear_weight", "target", "linear_bias", "weight", "token_weight", "temperature"],
)
def test_other_device(device, name):
    """A tensor on another device is refused by name (the meta device differs from every other)."""
    call = arguments(device)
    call["linear_bias"] = torch.ones(VOCAB, device=device)
    call["weight"] = torch.ones(VOCAB, device=device)
    call["token_weight"] = torch.ones(TOKENS, device=device)
    call["temperature"] = torch.ones(TOKENS, device=device)
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


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"),
    [
        (torch.float64, torch.float32, "torch.float64"),
        (torch.float32, torch.float16, "torch.float32"),
        (torch.float32, torch.float64, "torch.float32"),
        (torch.bfloat16, torch.float16, "torch.bfloat16, or torch.float32"),
        (torch.float16, torch.bfloat16, "torch.float16, or torch.float32"),
    ],
    ids=str,
)
def test_a_bias_of_another_dtype_names_each_once(device, dtype, bias, expected):
    call = arguments(device)
    for name in ("input", "linear_weight"):
        call[name] = call[name].detach().to(dtype)
    call["linear_bias"] = torch.ones(VOCAB, dtype=bias, device=device)
    message = raised(TypeError, lambda: flce.linear_cross_entropy(**call))
    assert message == (
        f"linear_bias: expected the dtype of input, {expected}, got {bias}; torch.autocast casts it"
    )


@pytest.mark.parametrize("bad", [VOCAB, -1, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "cross_entropy"])
def test_target_out_of_range_on_the_cpu(function, bad):
    """The message names row, value and range, before any work."""
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
    """-100 is out of range if ignore_index has another value."""
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
        ({"target": torch.zeros(TOKENS)}, ValueError, ["target", "probabilities", f"({TOKENS},)"]),
        ({"target": torch.zeros(2, dtype=torch.int64)}, ValueError, ["target", "(2,)"]),
        ({"target": torch.zeros(TOKENS, dtype=torch.int8)}, TypeError, ["target", "int32", "int8"]),
        ({"logits": None}, TypeError, ["logits", "tensor", "NoneType"]),
        ({"target": None}, TypeError, ["target", "tensor", "NoneType"]),
        ({"return_lse": 2}, TypeError, ["return_lse", "True", "2"]),
        ({"num_items": 10**400}, ValueError, ["num_items", "finite", "float64"]),
        ({"softcap": 0.0}, ValueError, ["softcap", "positive"]),
        ({"logit_scale": 0.0}, ValueError, ["logit_scale", "other than 0"]),
        ({"temperature": -1.0}, ValueError, ["temperature", "positive", "-1.0"]),
        ({"temperature": torch.ones(2)}, ValueError, ["temperature", f"({TOKENS},)", "(2,)"]),
        ({"z_loss": -1.0}, ValueError, ["z_loss", "at least 0"]),
        ({"token_weight": torch.ones(2)}, ValueError, ["token_weight", f"({TOKENS},)", "(2,)"]),
        ({"num_items": 3, "reduction": "sum"}, ValueError, ["num_items", "None", "'sum'"]),
        ({"num_items": -3}, ValueError, ["num_items", "at least 0", "-3"]),
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


def test_cross_entropy_with_probabilities():
    logits = torch.randn(TOKENS, VOCAB)
    for name, given in (("return_accuracy", True), ("ignore_index", 3)):
        with pytest.raises(ValueError, match=f"^{name}: expected .* probabilities.* got {given}"):
            flce.cross_entropy(logits, logits.softmax(-1), **{name: given})


def test_logprobs_of_probabilities(device):
    """Probabilities do not determine one class whose log-probability to return."""
    x, w, _ = arguments(device).values()
    message = raised(
        (TypeError, ValueError), lambda: flce.linear_logprobs(x, w, probabilities(device))
    )
    assert message.startswith("target: expected class indices")


def test_logprobs_refuse_grads(device):
    message = raised(ValueError, lambda: flce.linear_logprobs(**arguments(device), save="grads"))
    assert message.startswith("save: expected") and "grads" in message


@pytest.mark.parametrize("module", ["LinearCrossEntropyLoss", "LinearCrossEntropyHead"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("reduction", "avg"),
        ("save", "all"),
        ("label_smoothing", 2.0),
        ("softcap", -1.0),
        ("logit_scale", 0.0),
        ("temperature", 0.0),
        ("z_loss", -1.0),
        ("shift", -1),
        ("valid_vocab", VOCAB + 1),
    ],
)
def test_modules_refuse_when_they_are_made(module, name, given):
    """At construction, not at the first step of a long job."""
    with pytest.raises(ValueError, match=f"{name}: expected .* got .*{given}"):
        getattr(flce, module)(HIDDEN, VOCAB, **{name: given})


@pytest.mark.parametrize(
    ("given", "error"),
    [([1.0] * VOCAB, TypeError), (torch.ones(VOCAB - 1), ValueError)],
    ids=["list", "shape"],
)
def test_modules_refuse_class_weights_when_they_are_made(given, error):
    with pytest.raises(error, match="^weight: expected .* got "):
        flce.LinearCrossEntropyLoss(HIDDEN, VOCAB, weight=given)
    with pytest.raises(error, match="^class_weight: expected .* got "):
        flce.LinearCrossEntropyHead(HIDDEN, VOCAB, class_weight=given)


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("save", "all", ValueError),
        ("bias", "x", TypeError),
        ("grad_input", "x", TypeError),
        ("grad_weight", 2, TypeError),
        ("return_entropy", 2, TypeError),
        ("reduction", "avg", ValueError),
        ("max_memory", "lots", ValueError),
        ("max_memory", 1, ValueError),
        ("accum_dtype", torch.float64, ValueError),
        ("probabilities", torch.int64, ValueError),
        ("probabilities", torch.float8_e4m3fn, ValueError),
        ("dtype", torch.int8, TypeError),
        ("weight_dtype", "float32", TypeError),
        ("tokens", 8.0, TypeError),
        ("tokens", -1, ValueError),
        ("hidden", 0, ValueError),
        ("vocab", 2**60, ValueError),
        ("valid_vocab", 0, ValueError),
        ("valid_vocab", VOCAB + 1, ValueError),
        ("valid_vocab", True, TypeError),
        ("device", "meta", ValueError),
        ("device", "cuda:99", ValueError),
    ],
)
def test_plan_refuses_what_the_call_would(name, given, error):
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}
    call = {**sizes, "dtype": torch.float32, "device": "cpu", name: given}
    with pytest.raises(error, match=f"{name}: expected .* got "):
        flce.plan(**call)


def test_errors_leave_the_engine_usable(device):
    """After a refusal inside the engine the next call is right."""
    with pytest.raises(ValueError):
        flce.linear_cross_entropy(**arguments(device), max_memory=1)
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device=device)
    cases.check(flce.linear_cross_entropy, case)


@pytest.mark.parametrize("how", ["eager", "operator", "compiled"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_c_refuses_has_its_class(how, mode):
    """However torch translates an exception of C++, which differs between its versions."""
    call = torch.ops.flce.linear_cross_entropy if how == "operator" else flce.linear_cross_entropy

    def loss(x, w, target):
        return call(x, w, target, save="logits", max_memory=2**60)

    if how == "compiled":
        torch._dynamo.reset()
        loss = torch.compile(loss, backend="aot_eager", dynamic=True)
    with mode():
        out_of_range = torch.ones(3, 1), torch.ones(4, 1), torch.tensor([0, 4, 1])
        with pytest.raises(IndexError, match=r"^target\[1\] is 4: expected 0 <= target < 4 or"):
            loss(*(leaf(t) if t.is_floating_point() else t for t in out_of_range))
        if mode is torch.enable_grad:  # it keeps 2^50 bytes of logits
            x, target = torch.ones(2**24, 1), torch.zeros(2**24, dtype=torch.int64)
            with pytest.raises(torch.OutOfMemoryError, match='^[0-9]+ bytes for buffer "saved"; '):
                loss(leaf(x), x, target)


@pytest.mark.parametrize("argument", ["integers", "numbers"])
def test_inner_operators_refuse_with_their_class(argument):
    x, w = torch.ones(3, 1), torch.ones(4, 1)
    lists = {"integers": [0] * (len(INTEGERS) + 1), "numbers": [0.0] * 6, argument: [0]}
    with pytest.raises(ValueError, match=f"^{argument}: expected [0-9]+ values, got 1"):
        torch.ops.flce.forward(x, w, torch.zeros(3).long(), *(None,) * 8, *lists.values())


def leaf(tensor):
    return tensor.clone().requires_grad_()


META_CASES = {
    "target": {"target": torch.zeros(3).long()},
    "linear_weight": {"linear_weight": torch.ones(5, 3)},
    "linear_bias": {"linear_bias": torch.ones(4)},
    "weight": {"weight": torch.ones(4)},
    "token_weight": {"token_weight": torch.ones(3)},
    "input": {"input": torch.ones(8, 4, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", META_CASES)
def test_meta_tensors_are_refused_by_name(name):
    """Where shapes are all there is, as in torch.export, nothing later would refuse."""
    call = {"input": torch.ones(8, 4), "linear_weight": torch.ones(5, 4)}
    call |= {"target": torch.zeros(8).long(), **META_CASES[name]}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
        flce.linear_cross_entropy(**{key: value.to("meta") for key, value in call.items()})


@pytest.mark.parametrize("name", ["target", "weight", "token_weight", "temperature"])
def test_logits_beside_a_meta_tensor(name):
    """A meta tensor takes the call to the fake, whose result has no values."""
    vectors = {"weight": torch.ones(4), "token_weight": torch.ones(3), "temperature": torch.ones(3)}
    call = {"target": torch.zeros(3).long()} | vectors
    call = {key: call[key] for key in ("target", name)}
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: expected the device of logits, cpu, got meta"):
        flce.cross_entropy(torch.ones(3, 4), **call)


def test_a_subclass_is_not_blamed_for_another_argument():
    class Marked(torch.Tensor):
        pass

    x, w = torch.ones(3, 2).as_subclass(Marked), torch.ones(4, 2).double()
    with pytest.raises(TypeError, match="^linear_weight: expected the dtype of input"):
        flce.linear_cross_entropy(x, w, torch.zeros(3).long())


def test_options_that_no_list_can_hold():
    x, w, target = torch.ones(3, 2), torch.ones(4, 2), torch.zeros(3).long()
    with pytest.raises(ValueError, match="^gradient_eps: expected from 2.*-12 to 1, got 0.0"):
        flce.linear_cross_entropy(x, w, target, gradient_eps=0)
    with pytest.raises(ValueError, match="^valid_vocab: expected an int"):
        flce.linear_cross_entropy(x, w, target, valid_vocab=2**70)
