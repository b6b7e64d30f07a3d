"""Every refusal names the argument, what was expected and what came, and modifies nothing.

The same value is given to every function, Module and operator that has the argument.
"""

import functools
import inspect
import math
import re

import pytest
import torch

import flce
from flce.options import DTYPES, RETURNS, ModuleOptions, defaults
from harness.refused_call import HIDDEN, TOKENS, VOCAB, arguments, tensors

BF16, INT64 = torch.bfloat16, torch.int64
INF, NAN, HUGE = math.inf, math.nan, 10**400


OPERANDS = {  # of each function; `plan` and the Modules, which are made before a call, have sizes
    flce.linear_cross_entropy: ("input", "linear_weight", "target"),
    flce.linear_logprobs: ("input", "linear_weight", "target"),
    flce.cross_entropy: ("logits", "target"),
}
MODULES = (flce.LinearCrossEntropyLoss, flce.LinearCrossEntropyHead)
OF_MODULES = defaults(ModuleOptions)


def callers(device, name, of_sizes=True):
    """Functions of options alone, for everything that has the argument `name`."""
    valid = tensors(device)
    made = [
        functools.partial(function, **{one: valid[one] for one in operands})
        for function, operands in OPERANDS.items()
        if name in inspect.signature(function).parameters
    ]
    if of_sizes and name in inspect.signature(flce.plan).parameters:
        sizes = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": torch.float32}
        made.append(functools.partial(flce.plan, **sizes, device=device))
    if of_sizes and name in OF_MODULES:
        made += [functools.partial(module, HIDDEN, VOCAB) for module in MODULES]
    assert made
    return made


def raised(error, call):
    """The message of the error; checks that no GEMM ran."""
    before = torch.ops.flce.gemm_count()
    with pytest.raises(error) as caught:
        call()
    assert torch.ops.flce.gemm_count() == before
    return str(caught.value)


# ---- values ----

BYTES = 'a positive number of bytes or text such as "512MiB" (B, KB, MB, GB, TB of 1000, KiB, MiB, '
BYTES += "GiB, TiB of 1024, in any letter case)"
SAVES = "one of ('auto', 'logits', 'grads', 'stats')"
AN_INT64 = f"an int from {-(2**63)} to {2**63 - 1}"
# Option, error, what is expected, and values.
VALUES = [
    ("label_smoothing", ValueError, "0 <= label_smoothing <= 1", [-0.1, 1.5, NAN, INF]),
    ("label_smoothing", TypeError, "a number", ["0.1", True]),
    ("softcap", ValueError, "a positive finite number or None", [0.0, -30.0, INF, NAN, HUGE]),
    ("softcap", TypeError, "a number", ["30", False]),
    ("logit_scale", ValueError, "a finite number other than 0", [0.0, INF, NAN]),
    ("temperature", ValueError, "a positive finite number", [0.0, -1.0, INF, NAN, -HUGE]),
    ("temperature", TypeError, "a number", [None]),
    ("z_loss", ValueError, "a finite number of at least 0", [-1e-4, INF, NAN]),
    ("num_items", ValueError, "a finite number of at least 0", [-1, INF, NAN, HUGE]),
    ("num_items", TypeError, "a number or a 0-d tensor", [True, "7"]),
    ("ignore_index", TypeError, "an int", [3.0]),
    ("ignore_index", ValueError, "an int, of 64 bits", [2**63]),
    ("reduction", ValueError, "one of ('none', 'mean', 'sum')", ["average", ""]),
    ("save", ValueError, SAVES, ["everything", "nothing", "samples"]),
    ("max_memory", ValueError, BYTES, [0, -1, NAN, INF, "lots", "12 parsecs", "-1MiB", "nan"]),
    ("max_memory", TypeError, BYTES, [True, [1]]),
    ("accum_dtype", TypeError, f"one of {DTYPES}", ["float32"]),
    ("accum_dtype", ValueError, f"one of {DTYPES}", [torch.int64]),
    ("shift", ValueError, "an int of at least 0", [-1]),
    ("shift", TypeError, "an int of at least 0", [True, 1.0]),
    ("valid_vocab", ValueError, f"an int from 1 to {VOCAB}", [0, VOCAB + 1]),
    ("valid_vocab", ValueError, "an int, of 64 bits", [2**70]),
    ("valid_vocab", TypeError, "an int", [2.0, True]),
    ("valid_bound", ValueError, "an int of at least 0", [-1]),
    ("valid_bound", TypeError, "an int of at least 0", [3.0, True]),
    ("accumulate_into", ValueError, "one of ('grad', 'main_grad') or None", ["main"]),
    ("gradient", ValueError, "one of ('exact', 'sampled')", ["some"]),
    ("gradient_eps", ValueError, "from 2**-12 to 1", [0, 0.0, 2**-13, 1.01, NAN]),
    ("gradient_eps", TypeError, "a number", ["6", None]),
    ("gradient_seed", TypeError, AN_INT64, [1.0, True]),
    ("gradient_seed", ValueError, f"{AN_INT64}, of 64 bits", [2**63]),
    *((name, TypeError, "True or False", [2, None, "x"]) for name in RETURNS),
]
# As VALUES, with operands in float32: a Module takes them, for operands of other dtypes and sizes.
VALUES_OF_A_CALL = [
    ("accum_dtype", ValueError, "torch.float32", [BF16, torch.float64]),
    ("logits_dtype", ValueError, "torch.float32", [torch.float16]),
    ("valid_bound", ValueError, 'an int, "count" or None', ["auto"]),
]


def label(item):
    return item if isinstance(item, str) else None


@pytest.mark.parametrize(("name", "error", "expected", "values"), VALUES, ids=label)
def test_values(device, name, error, expected, values):
    """Modules refuse them when they are made, not at the first step of a long job."""
    check_values(callers(device, name), name, error, expected, values)


@pytest.mark.parametrize(("name", "error", "expected", "values"), VALUES_OF_A_CALL, ids=label)
def test_values_of_a_call(device, name, error, expected, values):
    check_values(callers(device, name, of_sizes=False), name, error, expected, values)


def check_values(calls, name, error, expected, values):
    for call in calls:
        call()  # so the value was the reason, also after a call whose options are cached
        for value in values:
            begin = f"{name}: expected {expected}, got "
            message = raised(error, functools.partial(call, **{name: value}))
            assert message.startswith(begin)
            shown = (repr(value), str(value), f"{value}.0", type(value).__name__)
            if value in (HUGE, -HUGE):
                shown = ("inf", "-inf")  # beyond the range of float64
            got, _, _ = message.removeprefix(begin).partition("; use ")
            assert got in shown


# ---- tensors ----


def ones(*shape, **options):
    return lambda device: torch.ones(*shape, device=device, **options)


def nested(tensor):
    return torch.nested.nested_tensor([tensor.detach()] * 2)


# What every tensor argument refuses: the change of a valid one, the error, what is expected, and
# of which arguments.
NAMED = ("linear_weight", "target", "linear_bias", "weight", "token_weight")
THREE, SCALARS = ("input", "linear_weight", "target"), ("temperature", "num_items")
OF_ROWS = ("weight", "token_weight", *SCALARS)
ELSEWHERE = (*NAMED, "temperature", "adapter_input", "adapter_weight")
NO_GRAD = "(a tensor|class weights) that do(es)? not require grad"
MISTAKES = {
    "sparse": (lambda t: t.detach().to_sparse(), TypeError, "a dense tensor", tensors("cpu")),
    "nested": (nested, TypeError, "a dense tensor, got a nested", THREE),
    "list": (lambda t: t.tolist(), TypeError, "a tensor", ("input", "logits", *NAMED)),
    "None": (lambda t: None, TypeError, "a tensor", ("logits", *THREE)),
    "requires grad": (lambda t: t.float().requires_grad_(), ValueError, NO_GRAD, OF_ROWS),
    "complex": (
        lambda t: t.to(torch.complex64),
        (TypeError, ValueError),
        "",
        ("input", "logits", *NAMED, *SCALARS),
    ),
    "meta": (lambda t: t.detach().to("meta"), ValueError, "the device of ", ELSEWHERE),
}


@pytest.mark.parametrize(
    ("mistake", "name"), [(mistake, name) for mistake, row in MISTAKES.items() for name in row[3]]
)
def test_tensors(device, mistake, name):
    """A meta tensor differs from every device, and would take the call to the fakes."""
    change, error, expected, _ = MISTAKES[mistake]
    valid = tensors(device)
    for call in callers(device, name, of_sizes=False):
        given = {name: change(valid[name])}
        if name.startswith("adapter"):
            given = {one: valid[one] for one in valid if one.startswith("adapter")} | given
        message = raised(error, functools.partial(call, **given))
        assert re.match(f"{name}: expected {expected}", message), message
        assert mistake != "meta" or message.endswith(f"{valid['target'].device}, got meta")


def offsets(*given, **options):
    return lambda device: torch.tensor(given, device=device, **options)


def probabilities(device):
    return torch.full((TOKENS, VOCAB), 1.0 / VOCAB, device=device)


def adapter(**changed):
    pair = {"adapter_input": ones(TOKENS, 4), "adapter_weight": ones(VOCAB, 4)}
    return {**pair, **changed}


# What ZeRO-3 leaves of a parameter.
PARTITIONED = ["(0,)", "ZeRO-3", "flce.LinearCrossEntropyHead", "flce.fuse", "GatheredParameters"]
WHOLE = offsets(0, TOKENS, dtype=torch.int32)
NONE, SUM, SHIFTED = {"reduction": "none"}, {"reduction": "sum"}, {"shift": 1}
BATCHED = {"input": ones(1, TOKENS, HIDDEN), "target": ones(1, TOKENS, VOCAB)}
ROW = {"input": ones(HIDDEN), "target": ones((), dtype=INT64), "cu_seqlens": WHOLE}
PROBABLE, SAMPLED = {"target": probabilities}, {"gradient": "sampled"}


def operands(dtype):
    shapes = {"input": (TOKENS, HIDDEN), "linear_weight": (VOCAB, HIDDEN)}
    return {name: ones(*shape, dtype=dtype) for name, shape in shapes.items()}


def cast(operand, bias):
    """The whole refusal of a bias: it names each dtype once."""
    return [f"dtype of input, torch.{operand}, got torch.{bias}; torch.autocast casts it"]


F64_BIAS = ones(VOCAB, dtype=torch.float64)
WIDE, HALF, BF16S = operands(torch.float64), operands(torch.float16), operands(BF16)
SOFTCAP = {"softcap": 3.0, **SAMPLED}
# Argument, error, what the message contains, the argument's value, the other arguments: each value
# is valid without them.
CALLS = [
    ("input", TypeError, ["float32", "int64"], ones(TOKENS, HIDDEN, dtype=INT64), {}),
    ("input", ValueError, ["dimension"], ones(()), {}),
    ("logits", TypeError, ["float32", "int64"], ones(TOKENS, VOCAB, dtype=INT64), {}),
    ("logits", ValueError, [f"({TOKENS}, 0)"], ones(TOKENS, 0), {}),
    ("linear_weight", ValueError, [f"(V, {HIDDEN})", "9)"], ones(VOCAB, HIDDEN + 1), {}),
    ("linear_weight", ValueError, ["(V, ", f"({VOCAB},)"], ones(VOCAB), {}),
    ("linear_weight", ValueError, [f"(0, {HIDDEN})"], ones(0, HIDDEN), {}),
    ("linear_weight", ValueError, [f"(V, {HIDDEN})", *PARTITIONED], ones(0), {}),
    ("linear_weight", TypeError, ["float32", "int8"], ones(VOCAB, HIDDEN, dtype=torch.int8), {}),
    ("linear_weight", TypeError, ["float32", "bfloat16"], ones(VOCAB, HIDDEN, dtype=BF16), {}),
    ("target", ValueError, [f"({TOKENS},)", "(7,)"], ones(TOKENS + 1, dtype=INT64), {}),
    ("target", ValueError, [f"({TOKENS},)", f"({TOKENS}, 1)"], ones(TOKENS, 1, dtype=INT64), {}),
    ("target", TypeError, ["int64", "int32", "uint8"], ones(TOKENS, dtype=torch.uint8), {}),
    ("target", TypeError, ["int64", "bool"], ones(TOKENS, dtype=torch.bool), {}),
    ("target", TypeError, ["probabilities"], ones(TOKENS, VOCAB, dtype=torch.float8_e4m3fn), {}),
    ("target", ValueError, [f"({TOKENS}, {VOCAB})", "probabilities", "(6,)"], ones(TOKENS), {}),
    ("target", ValueError, ["(6, 11)", "probabilities", "(6, 12)"], ones(TOKENS, VOCAB + 1), {}),
    ("target", ValueError, ["requires_grad"], ones(TOKENS, VOCAB, requires_grad=True), {}),
    ("linear_bias", ValueError, [f"({VOCAB},)", f"({VOCAB + 1},)"], ones(VOCAB + 1), {}),
    ("linear_bias", ValueError, [f"({VOCAB},)", *PARTITIONED], ones(0), {}),
    ("linear_bias", TypeError, ["float32", "int64"], ones(VOCAB, dtype=INT64), {}),
    ("linear_bias", TypeError, cast("float64", "float32"), ones(VOCAB), WIDE),
    ("linear_bias", TypeError, cast("float32", "float16"), ones(VOCAB, dtype=torch.float16), {}),
    ("linear_bias", TypeError, cast("float32", "float64"), F64_BIAS, {}),
    ("linear_bias", TypeError, cast("bfloat16, or torch.float32", "float64"), F64_BIAS, BF16S),
    ("linear_bias", TypeError, cast("float16, or torch.float32", "float64"), F64_BIAS, HALF),
    ("weight", ValueError, [f"({VOCAB},)", f"({VOCAB - 1},)"], ones(VOCAB - 1), {}),
    ("weight", TypeError, ["float32", "int64"], ones(VOCAB, dtype=INT64), {}),
    ("token_weight", ValueError, [f"({TOKENS},)", "(7,)"], ones(TOKENS + 1), {}),
    ("temperature", ValueError, [f"({TOKENS},)", "(7,)"], ones(TOKENS + 1), {}),
    *(
        (name, ValueError, ["requires_grad"], ones((), requires_grad=True), {})
        for name in ("temperature", "logit_scale", "softcap", "z_loss")
    ),
    ("temperature", TypeError, ["real", "complex"], ones(TOKENS, dtype=torch.complex64), {}),
    ("logit_scale", TypeError, ["number", "Tensor"], ones(2), {}),
    ("num_items", ValueError, ["0-d", "(1,)"], ones(1), {}),
    ("max_memory", ValueError, ["at least one row of logits", "43"], VOCAB * 4 - 1, {}),
    ("return_z_loss", TypeError, ["True", "tensor"], ones(2), {}),
    ("options", TypeError, ["LinearCrossEntropyOptions", "object"], object(), {}),
    ("gradient_seed", ValueError, ["int64", "float32"], ones(()), SAMPLED),
    ("gradient_seed", ValueError, ["one element", "(2,)"], ones(2, dtype=INT64), SAMPLED),
    ("gradient_seed", ValueError, ["meta"], lambda _: torch.tensor(1, device="meta"), SAMPLED),
    ("num_items", ValueError, ["None", "'none'", "7"], 7, NONE),
    ("num_items", ValueError, ["None", "'sum'", "7"], 7, SUM),
    ("num_items", ValueError, ["None", "'sum'"], ones(()), SUM),
    ("save", ValueError, ["logits", "stats", "none", "grads"], "grads", NONE),
    ("save", ValueError, ['"auto"', "sampled", '"logits"'], "logits", SAMPLED),
    ("save", ValueError, ['"auto"', '"grads"'], "grads", SAMPLED),
    ("save", ValueError, ['"auto"', "sampled", '"stats"'], "stats", SAMPLED),
    ("gradient", ValueError, ['"exact" with probabilities as target'], "sampled", PROBABLE),
    ("gradient", ValueError, ['"exact" with float64 operands'], "sampled", WIDE),
    ("label_smoothing", ValueError, ["0 with a softcap", "0.1"], 0.1, SOFTCAP),
    ("shift", ValueError, ["3 dimensions", "cu_seqlens", "2 dimensions"], 1, {}),
    ("shift", ValueError, ["of 2 and cu_seqlens", "1 dimensions"], 1, ROW),
    ("shift", ValueError, ["0", "probabilities", "1"], 1, {**PROBABLE, "cu_seqlens": WHOLE}),
    # Also where the shape would permit the shift.
    ("shift", ValueError, ["0", "probabilities", "2"], 2, BATCHED),
    ("ignore_index", ValueError, ["-100", "None", "probabilities", "3"], 3, PROBABLE),
    ("valid_bound", ValueError, ["None", "probabilities", "6"], 6, PROBABLE),
    ("valid_bound", ValueError, ["None", "probabilities", "count"], "count", PROBABLE),
    ("return_accuracy", ValueError, ["False", "probabilities", "True"], True, PROBABLE),
    ("cu_seqlens", ValueError, ["None", "shift"], WHOLE, {}),
    ("cu_seqlens", ValueError, ["int32", "int64", "float32"], offsets(0.0, 6.0), SHIFTED),
    ("cu_seqlens", ValueError, ["vector", "(1, 2)"], offsets([0, 6]), SHIFTED),
    ("cu_seqlens", ValueError, ["two", "1"], offsets(6), SHIFTED),
    ("cu_seqlens", TypeError, ["tensor", "list"], [0, 6], SHIFTED),
    ("adapter_weight", TypeError, ["tensor", "NoneType"], None, adapter()),
    ("adapter_input", TypeError, ["tensor", "NoneType"], None, adapter()),
    ("adapter_weight", ValueError, ["(12, 4)"], ones(VOCAB + 1, 4), adapter()),
    ("adapter_weight", ValueError, ["(11, 0)"], ones(VOCAB, 0), adapter()),
    ("adapter_weight", TypeError, ["int64"], ones(VOCAB, 4, dtype=INT64), adapter()),
    ("adapter_weight", TypeError, ["bfloat16"], ones(VOCAB, 4, dtype=BF16), adapter()),
    ("adapter_input", ValueError, ["(6, 5)"], ones(TOKENS, 5), adapter()),
    ("adapter_input", ValueError, ["(6,"], ones(1, TOKENS, 4), adapter()),
    ("accumulate_into", ValueError, ["adapter"], "grad", adapter()),
]
# Not all of these are refused on the meta device.
OF_CLASSES = [
    ("topk", ValueError, [f"0 to {VOCAB}", "-1"], -1, {}),
    ("topk", ValueError, [f"0 to {VOCAB}", "12"], VOCAB + 1, {}),
    ("topk", TypeError, ["an int", "2.0"], 2.0, {}),
    ("topk", TypeError, ["an int", "True"], True, {}),
    ("topk", ValueError, ["0 with classes", "3"], 3, {"classes": ones(TOKENS, 2, dtype=INT64)}),
    ("classes", TypeError, ["tensor", "list"], [1], {}),
    ("classes", TypeError, ["int64"], ones(TOKENS, 1), {}),
    ("classes", ValueError, ["(6, 2)"], ones(TOKENS + 1, 2, dtype=INT64), {}),
    ("classes", ValueError, ["(6, 6)"], ones(TOKENS, dtype=INT64), {}),
    ("classes", ValueError, ["(6, 1)"], ones(TOKENS, 0, dtype=INT64), {}),
]


@pytest.mark.parametrize(
    ("name", "error", "words", "value", "others"), CALLS + OF_CLASSES, ids=label
)
def test_calls(device, name, error, words, value, others):
    given = {one: make(device) if callable(make) else make for one, make in others.items()}
    given[name] = value(device) if callable(value) else value
    for function, operands in OPERANDS.items():
        if not given.keys() <= inspect.signature(function).parameters.keys():
            continue
        if function is flce.linear_logprobs and given.get("target", value) is not value:
            continue  # test_logprobs_of_probabilities
        valid = {one: tensors(device)[one] for one in operands}
        message = raised(error, functools.partial(function, **{**valid, **given}))
        assert message.startswith(f"{name}: expected"), message
        assert all(word in message for word in words), message


# A plan is for a device, and a meta seed is right for meta operands.
OF_SHAPES = [row for row in CALLS if row[0] != "max_memory" and row[2] != ["meta"]]


@pytest.mark.parametrize(("name", "error", "_", "value", "others"), OF_SHAPES, ids=label)
def test_calls_on_the_meta_device(name, error, _, value, others):
    """Where shapes are all there is, as in torch.export, nothing later would refuse."""
    test_calls("meta", name, error, [], value, others)


# ---- others ----


def test_cpu_targets_with_a_cuda_model(cuda):
    call = arguments(cuda)
    call["target"] = call["target"].cpu()
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**call))
    for word in ("target", "cuda:0", "cpu"):
        assert word in message


@pytest.mark.parametrize("bad", [VOCAB, -1, -100, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("function", [flce.linear_cross_entropy, flce.cross_entropy])
def test_target_out_of_range_on_the_cpu(function, bad):
    """Row, value and range, before any work; -100 too under another ignore_index."""
    valid = tensors("cpu")
    valid["target"][4] = bad
    call = functools.partial(function, **{name: valid[name] for name in OPERANDS[function]})
    options = {"ignore_index": -2} if bad == -100 else {}
    message = raised(IndexError, functools.partial(call, **options))
    assert message.startswith(f"target[4] is {bad}: expected 0 <= target < {VOCAB} or ignore_index")
    call(ignore_index=bad)


def test_environment_budget_is_named(device, monkeypatch):
    monkeypatch.setenv("FLCE_MAX_MEMORY", "plenty")
    message = raised(ValueError, lambda: flce.linear_cross_entropy(**arguments(device)))
    assert "FLCE_MAX_MEMORY" in message and "plenty" in message


def test_logprobs_of_probabilities(device):
    """Probabilities do not determine one class whose log-probability to return."""
    x, w, _ = arguments(device).values()
    message = raised(
        (TypeError, ValueError), lambda: flce.linear_logprobs(x, w, probabilities(device))
    )
    assert message.startswith("target: expected class indices")


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


@pytest.mark.parametrize("name", ["weight", "class_weight"])
def test_modules_on_the_meta_device_take_class_weights_later(name):
    """to_empty() would leave them without values."""
    module, given = MODULES[name == "class_weight"], {name: torch.rand(VOCAB)}
    for device, values in (("meta", given), (None, {name: given[name].to("meta")})):
        with pytest.raises(
            ValueError, match=f"^{name}: expected None on the meta device, .* got a"
        ):
            module(HIDDEN, VOCAB, device=device, **values)
    with torch.device("meta"):
        with pytest.raises(
            ValueError, match=f"^{name}: expected None on the meta device, .* got a"
        ):
            module(HIDDEN, VOCAB, **given)
        made = module(HIDDEN, VOCAB)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.1)
    setattr(made, name, given[name])
    x, y = torch.randn(3, HIDDEN), torch.arange(3)
    loss = made(x, y, reduction="none")
    assert torch.allclose(loss, given[name][:3] * math.log(VOCAB))


SIZES = {"tokens": 64, "hidden": 16, "vocab": 100, "dtype": torch.float32}
# Of flce.plan alone: the argument, its values, the error.
PLANS = [
    ("bias", ["x"], TypeError),
    ("grad_input", ["x"], TypeError),
    ("grad_weight", [2], TypeError),
    ("sequence", [1], TypeError),
    ("dtype", [torch.int8], TypeError),
    ("weight_dtype", ["float32"], TypeError),
    ("tokens", [8.0], TypeError),
    ("tokens", [-1], ValueError),
    ("hidden", [0], ValueError),
    ("vocab", [2**60], ValueError),
    ("max_memory", [1], ValueError),
    ("accum_dtype", [torch.float64], ValueError),
    ("probabilities", [INT64, torch.float8_e4m3fn], ValueError),
    ("device", ["meta", "cuda:99"], ValueError),
    ("ranks", [2.0], TypeError),
    ("ranks", [0], ValueError),
    ("reduce_dtype", [torch.float16], ValueError),
]


@pytest.mark.parametrize(("name", "values", "error"), PLANS, ids=label)
def test_plan(name, values, error):
    for value in values:
        with pytest.raises(error, match=f"{name}: expected .* got .*{value}"):
            flce.plan(**{**SIZES, "device": "cpu", name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient": "sampled", "save": "stats"}, 'save: expected "auto"'),
        ({**SOFTCAP, "label_smoothing": 0.1}, "label_smoothing: expected 0 with a softcap and"),
        ({**SAMPLED, "dtype": torch.float64}, 'gradient: expected "exact" with float64 operands'),
        ({**SAMPLED, "probabilities": True}, 'gradient: expected "exact" with probabilities'),
        ({"ranks": 3, "sequence": True}, "target: expected a multiple of the 3 ranks"),
        ({"ranks": 2, "probabilities": True}, "target: expected class indices"),
        ({"accumulate_into": "grad", "save": "grads"}, "save: expected .* with accumulate_into"),
    ],
)
def test_plan_of_several_options(options, message):
    """What Modules have, they refuse too, when they are made."""
    with pytest.raises(ValueError, match=f"^{message}"):
        flce.plan(**{**SIZES, "device": "cpu", **options})
    for module in MODULES if options.keys() <= OF_MODULES.keys() else ():
        with pytest.raises(ValueError, match=f"^{message}"):
            module(HIDDEN, VOCAB, **options)
