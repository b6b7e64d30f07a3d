"""An option is complete: the steps of "Add an option" in CONTRIBUTING.md, for each row of
FLCE_LOSS_NUMBERS (csrc/problem.h) and for each output that a flag asks for. A test is named after
its step."""

import inspect
import re

import pytest
import torch

import flce
from flce import modules, options, outputs, overloads
from flce.options import LOGIT_OPTIONS, OPTIONS, RETURNS, TEACHER_OPTIONS, defaults
from flce.packing import INTEGERS, LAYOUT, NUMBERS, DivergenceSettings
from harness.layout import text_of, without_comments


def code_of(*patterns):
    """Of all files of these patterns, without the comments of C."""
    return without_comments(text_of(*patterns))


LIST = re.search(
    r"^#define FLCE_LOSS_NUMBERS\(X\)(.*(?:\n  .*)*)", code_of("csrc/problem.h"), re.MULTILINE
)[1]
ROWS = dict(re.findall(r'X\((\w+), .+?, "(.+?)"\)', LIST))
# A value other than the default for each row: a new one needs its line here.
VALUES = {
    "label_smoothing": 0.2,
    "softcap": 1.5,
    "logit_scale": 0.7,
    "temperature": 1.7,
    "z_loss": 0.3,
}
every_row = pytest.mark.parametrize("name", ROWS)
every_flag = pytest.mark.parametrize("flag", RETURNS)


def test_the_values_of_this_file():
    assert VALUES.keys() == ROWS.keys()


# ---- a number ----


@every_row
def test_1_its_line_in_the_table(name):
    """Of options; and in _Settings, if Modules hold it."""
    assert name in OPTIONS and OPTIONS[name].schema in ("float", "float?")
    if name in defaults(options.ModuleOptions):
        assert name in modules._Settings.__annotations__


@every_row
def test_2_its_docstring(name):
    assert re.search(rf"\b{name}\b.*:", flce.linear_cross_entropy.__doc__)


def test_3_its_row_in_the_list():
    """Every number of the table has one but gradient_eps, which is no number of the loss. The
    library has been built from the list, and with the layout of packing.py."""
    numbers = {name for name, row in OPTIONS.items() if row.schema in ("float", "float?")}
    assert numbers - {"gradient_eps"} == {*ROWS} and NUMBERS[: len(ROWS)] == tuple(ROWS)
    assert re.findall(r"kLayout = (\d+);", code_of("csrc/binding/options.h")) == [str(LAYOUT)]


def operands():
    made = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(n, 5, generator=made, dtype=torch.float64) for n in (6, 9))
    return x.requires_grad_(), weight.requires_grad_(), torch.arange(6)


def outcome(function, **given):
    x, weight, target = operands()
    loss = function(x, weight, target, **given)
    return torch.cat([part.detach().flatten() for part in (loss, *grads(loss, x, weight))])


def grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@every_row
def test_4_its_definition(name):
    """reference reads it; an option of the final logits is one of final_logits."""
    changed = {name: VALUES[name]}
    plain, made = (outcome(flce.reference.linear_cross_entropy, **given) for given in ({}, changed))
    assert (plain - made).abs().max() > 1e-3
    rows = inspect.signature(flce.reference.final_logits).parameters
    assert (name in LOGIT_OPTIONS) == (name in rows)


@every_row
def test_5_the_core_or_both_backends_read_it(name):
    """csrc/loss.h has what follows from it for both, or each backend reads it itself."""
    reads = re.compile(rf"(?:->|\.){name}\b")
    of_both = reads.search(code_of("csrc/loss.h"))
    for folder in ("csrc/cpu/*.[ch]", "csrc/cuda/*/*.cu*"):
        assert of_both or reads.search(code_of(folder)), folder


@every_row
@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_6_what_it_does(name, save):
    changed = {name: VALUES[name]}
    truth = outcome(flce.reference.linear_cross_entropy, **changed)
    made = outcome(flce.linear_cross_entropy, save=save, **changed)
    torch.testing.assert_close(made, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOGIT_OPTIONS)
def test_6_that_of_a_teacher(name):
    """What maps logits maps those of a teacher too, by an option of its own."""
    own = f"teacher_{name}"
    assert own in TEACHER_OPTIONS and own in DivergenceSettings._fields and own in NUMBERS
    assert own in inspect.signature(flce.linear_divergence).parameters
    assert f"NumberSlot::{own}" in code_of("csrc/binding/options.cpp")
    assert f"loss.{name} = options.teacher.{name}" in code_of("csrc/binding/call.cpp")


# Options other than numbers by which a plan may choose the rows of a chunk.
OF_CHUNKS = {"max_memory": 4000, "valid_vocab": 50, "accum_dtype": torch.float32}
OF_CHUNKS["logits_dtype"] = torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*ROWS, *OF_CHUNKS])
def test_6_chunks_of_linear_loss(device, name, dtype):
    """loss_fn gets the rows of a chunk of linear_cross_entropy with the same options."""
    if name not in defaults(options.LinearLossOptions):
        return
    rows, hidden, vocab = 64, 8, 300
    given = {"max_memory": 8000, name: {**VALUES, **OF_CHUNKS}[name]}
    chunks = []

    def loss_fn(logprobs, _, rows):
        chunks.append((rows.start, rows.stop))
        return logprobs.sum()

    x = torch.randn(rows, hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, device=device, requires_grad=True)
    flce.linear_loss(x, weight, torch.arange(rows, device=device) % 50, loss_fn, **given)
    plan = flce.plan(rows, hidden, vocab, device=device, dtype=dtype, save="grads", **given)
    assert 1 < plan.chunks < rows
    ends = [*range(plan.chunk_rows, rows, plan.chunk_rows), rows]
    assert chunks == list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("name", ["max_memory", "valid_vocab"])
def test_6_a_plan_has_other_chunks(name):
    """By these two on every device: the test above fails where linear_loss leaves one out."""
    plans = [
        flce.plan(64, 8, 300, device="cpu", dtype=torch.float32, **{"max_memory": 8000, **given})
        for given in ({}, {name: OF_CHUNKS[name]})
    ]
    assert plans[0].chunk_rows != plans[1].chunk_rows


@every_row
def test_7_its_pages_and_tests(name):
    page = code_of("docs/semantics.md")
    call = page[page.index("flce.linear_cross_entropy(") : page.index("loss.backward()")]
    assert re.search(rf"\b{name}=", call)
    assert f"`{name}: expected {ROWS[name]}, got …`" in code_of("docs/errors.md")
    assert f'"{name}"' in code_of("tests/**/test_properties.py", "tests/**/drawn_options.py")
    assert re.search(rf"\.{name} = one_in", code_of("tests/c/test_plans.c"))


# ---- an output that a flag asks for ----


@every_flag
def test_7_the_flag_of_an_output(flag):
    for kind in (options._Returns, overloads._NoReturns, overloads._Asked):
        assert flag in kind.__annotations__
    assert re.search(rf"\b{flag}\b.*:", flce.linear_cross_entropy.__doc__)


@every_flag
def test_7_an_output(flag):
    """A field of the tuple, with a line of its docstring; of both functions, with one value."""
    field = flag.removeprefix("return_")
    assert re.search(rf"^ *{field}: |\. {field}: ", flce.LinearCrossEntropyOutput.__doc__, re.M)
    made, truth = (
        getattr(function(*operands(), z_loss=0.1, topk=2, **{flag: True}), field)
        for function in (flce.linear_cross_entropy, flce.reference.linear_cross_entropy)
    )
    torch.testing.assert_close(made, truth, check_dtype=False)
    assert f".{field}" in inspect.getsource(outputs) or f"{field}=" in inspect.getsource(outputs)


def test_7_the_statistics_of_a_row():
    """STATS of operators.py is the number of the rows of stats."""
    rows = re.search(r"enum flce_stat_row \{(.*?)\}", code_of("csrc/*.h"), re.DOTALL)[1]
    names = re.findall(r"\bFLCE_STAT_\w+", rows)
    assert names.pop() == "FLCE_STAT_COUNT"
    assert len(names) == flce.operators.STATS
    for name in ("LSE", "ENTROPY", "TAIL_LSE"):
        assert names[getattr(flce.operators, f"STAT_{name}")] == f"FLCE_STAT_{name}"


# ---- what the operators take ----


def test_each_slot_is_read():
    """By options.cpp: an option that is packed and not read would do nothing."""
    text = code_of("csrc/binding/options.cpp").replace("NumberSlot::name", "")
    read = {*re.findall(r"\b(?:IntegerSlot|NumberSlot)::(\w+)", text)} - {"count"}
    assert "FLCE_LOSS_NUMBERS(FLCE_READ)" in text
    assert read == {*INTEGERS, "layout", *NUMBERS} - {*ROWS}
