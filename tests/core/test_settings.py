"""The options of the inner operators are passed as two lists, which C++ and the fakes must read
alike."""

import contextlib
import inspect
import re
from typing import Annotated

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flce
from flce.options import (
    LOGIT_OPTIONS,
    OPTIONS,
    RETURNS,
    TEACHER_OPTIONS,
    LogitsOptions,
    ModuleOptions,
    NemoOptions,
    Option,
    Options,
    defaults,
)
from flce.packing import INTEGERS, LAYOUT, NUMBERS, CallContext, DivergenceSettings, split, value_of
from harness import ROOT, cases, raw
from harness.raw import described

ONE = torch.ones(1, 1, dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.int64)


def test_the_slots_of_cpp_are_those_of_the_table():
    packed, _ = split({})
    assert sorted([*packed._values, *CallContext().values()]) == sorted(INTEGERS)
    rows = {**OPTIONS, **TEACHER_OPTIONS}.items()
    assert set(NUMBERS) == {name for name, row in rows if "float" in str(row.schema)}
    numbers = [name for name, row in TEACHER_OPTIONS.items() if row.schema != "Tensor?"]
    assert list(DivergenceSettings._fields) == numbers


def test_options_of_the_final_logits_are_those_of_the_definition():
    assert list(inspect.signature(flce.reference.final_logits).parameters)[2:] == [*LOGIT_OPTIONS]


def parameters(function, skipped):
    kept = list(inspect.signature(function).parameters.values())[skipped:]
    assert all(one.kind is one.KEYWORD_ONLY for one in kept)
    return {parameter.name: parameter.default for parameter in kept}


def test_public_signatures_follow_the_table():
    assert parameters(flce.linear_cross_entropy, 3) == defaults()
    assert parameters(flce.cross_entropy, 2) == defaults(LogitsOptions)
    logprobs = parameters(flce.linear_logprobs, 3)
    assert logprobs.pop("entropy") == "differentiable" and logprobs.pop("return_topk") == 0
    assert logprobs.pop("tail") is False
    assert logprobs.items() <= defaults().items()
    assert {"softcap", "gradient", "gradient_eps", "gradient_seed"} <= logprobs.keys()
    of_modules = defaults(ModuleOptions)
    assert defaults(NemoOptions).items() <= of_modules.items()
    del of_modules["vocab_parallel"]  # ranks and sequence instead
    assert of_modules.items() <= parameters(flce.plan, 3).items()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (flce.cross_entropy, "gradient"),
        (flce.cross_entropy, "shift"),
        (flce.linear_logprobs, "label_smoothing"),
        (flce.linear_logprobs, "return_lse"),
        (flce.plan, "gradient_seed"),
        (flce.plan, "vocab_parallel"),
    ],
)
def test_options_that_a_function_lacks_are_refused(function, name):
    operands = (8, 4, 16) if function is flce.plan else (ONE, ONE, ZERO)
    operands = (ONE, ZERO) if function is flce.cross_entropy else operands
    refusal = rf"{function.__name__}\(\) got an unexpected keyword argument '{name}'; .*softcap"
    with pytest.raises(TypeError, match=refusal):
        function(*operands, **{name: 0})


@pytest.mark.parametrize("name", ["linear_cross_entropy", "cross_entropy"])
def test_the_operators_schemas_follow_the_table(name):
    schema, of_logits = str(getattr(torch.ops.flce, name).default._schema), defaults(LogitsOptions)
    for option, row in OPTIONS.items():
        found = re.search(rf"(\S+) {option}=", schema)
        takes = row.schema is not None and (name == "linear_cross_entropy" or option in of_logits)
        assert (found is not None) == takes
        assert found is None or found[1] == row.schema
    assert "accumulate_into" not in schema


def test_the_table_has_the_outputs_that_a_flag_asks_for():
    assert [*defaults()] == [*OPTIONS, *RETURNS]
    assert not any(defaults()[name] for name in RETURNS)


def test_a_new_option_comes_after_the_others():
    class More(Options, total=False):
        added: Annotated[int, Option(3, "int")]

    assert [*defaults(More)] == [*OPTIONS, "added", *RETURNS]


def test_modules_hold_the_table():
    loss = flce.LinearCrossEntropyLoss(4, 5, label_smoothing=0.1)
    head = flce.LinearCrossEntropyHead(4, 5, softcap=2.0)
    for name, default in defaults(ModuleOptions).items():
        assert getattr(loss, name) == (0.1 if name == "label_smoothing" else default)
        assert getattr(head, name) == (2.0 if name == "softcap" else default)
    for module in (flce.LinearCrossEntropyLoss, flce.LinearCrossEntropyHead):
        with pytest.raises(TypeError, match="unexpected keyword argument 'smoothing'.*softcap"):
            module(4, 5, smoothing=0.1)


def test_every_option_is_documented():
    path = ROOT / "docs" / "semantics.md"
    page = path.read_text(encoding="utf-8")
    call = page[page.index("flce.linear_cross_entropy(") : page.index("loss.backward()")]
    named = re.findall(r"(\w+)=", call)
    assert sorted({*OPTIONS, *RETURNS} - {"options"}) == sorted(named)
    for name in (*OPTIONS, *RETURNS):
        assert re.search(rf"\b{name}\b.*:", flce.linear_cross_entropy.__doc__)


@pytest.mark.parametrize(
    "number", [5e-324, 1e-320, 2.2250738585072014e-308, 1e-5, 0.1, 1 / 3, 1e16, 1e308]
)
def test_numbers_arrive_to_the_last_bit(number):
    """A single logit of 1, so that the loss is z_loss."""
    options = {"z_loss": number, "reduction": "sum", "grads": (False,) * 3}
    loss, *_ = torch.ops.flce.forward(*raw.forward(ONE, ONE, ZERO, "nothing", **options))
    assert loss.item() == number


@pytest.mark.parametrize("number", [4096, 2**31, 2**63 - 1])
def test_integers_arrive(number):
    arguments = raw.settings("nothing", max_memory=number)
    assert value_of(arguments[2], "max_memory") == number
    torch.ops.flce.forward(ONE.float(), ONE.float(), ZERO, *(None,) * 7, *arguments)


def changed(integers, name, value):
    index = [*INTEGERS, "layout"].index(name)
    return [*integers[:index], value, *integers[index + 1 :]]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("reduction", 3), ("save", -1), ("autocast", 4), ("accum_dtype", 9), ("grad_bias", 2)],
)
def test_a_value_out_of_range_is_named(name, value, fake):
    *tensors, integers, numbers, _ = raw.forward(ONE, ONE, ZERO, "grads")
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode, pytest.raises(ValueError, match=rf"{name}: expected (0|-1) to "):
        torch.ops.flce.forward(*tensors, changed(integers, name, value), numbers)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("short", [0, 1])
def test_lists_of_another_length_are_refused(short, fake):
    *tensors, integers, numbers, _ = raw.forward(ONE, ONE, ZERO, "grads")
    lists = [list(integers), list(numbers)]
    lists[short].pop()
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode, pytest.raises(ValueError, match="expected .* values, got"):
        torch.ops.flce.forward(*tensors, *lists)


def test_a_graph_of_another_build_is_refused():
    *tensors, integers, numbers, _ = raw.forward(ONE, ONE, ZERO, "grads")
    with pytest.raises(ValueError, match="layout: expected .*compile the graph again"):
        torch.ops.flce.forward(*tensors, changed(integers, "layout", LAYOUT - 1), numbers)


SOFTCAP, SMOOTHING = {"softcap": 3.0}, {"label_smoothing": 0.1}


@cases.pairwise(
    dtype=cases.DTYPES,
    kind=["classes", "probabilities"],
    save=["nothing", *cases.SAVES],
    forms=[{}, SOFTCAP, SMOOTHING, SOFTCAP | SMOOTHING],
    output=[False, True],
    reduction=["mean", "sum", "none"],
    rows=[None, 6],
)
def test_fakes_give_what_the_operator_gives(
    device, dtype, kind, save, forms, output, reduction, rows
):
    """Shapes, dtypes and presence of the outputs: of the fakes compared with plan.c."""
    x, w = (torch.randn(size, 8, device=device).to(dtype) for size in (6, 21))
    target = torch.arange(6, device=device)
    if kind == "probabilities":
        target = torch.rand(6, 21, device=device).softmax(-1).to(dtype)
    if save == "grads" and reduction == "none":
        reduction = "mean"  # refused
    options = {**forms, "reduction": reduction}
    options |= dict.fromkeys(("wants_entropy", "wants_predictions", "wants_statistics"), output)
    options |= {"rows": rows, "valid_vocab": 19 if kind == "classes" else None}
    for of_input in (False, True):
        grads = (save != "nothing" and of_input, save != "nothing", False)
        arguments = raw.forward(x, w, target, save, grads=grads, **options)
        made = torch.ops.flce.forward(*arguments)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert described(torch.ops.flce.forward(*arguments)) == described(made)


def test_the_fakes_choose_the_strategy_of_the_call_at_the_bound(device):
    x, w = (torch.randn(size, 8, device=device) for size in (6, 21))
    y, found = torch.arange(6, device=device), []
    for memory in (6 * 128 - 1, 6 * 128):  # a row of logits takes 128 bytes
        arguments = raw.forward(x, w, y, "auto", max_memory=memory, reduction="none")
        found.append(described(torch.ops.flce.forward(*arguments)))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert described(torch.ops.flce.forward(*arguments)) == found[-1]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("name", "valid", "other"), [("ignore_index", 1, 1.0), ("shift", 0, False)]
)
def test_an_equal_value_of_another_type_is_refused(name, valid, other):
    """Although the packed options of the valid call are cached."""
    flce.linear_cross_entropy(ONE, ONE, ZERO, **{name: valid})
    with pytest.raises(TypeError, match=f"^{name}: expected"):
        flce.linear_cross_entropy(ONE, ONE, ZERO, **{name: other})
