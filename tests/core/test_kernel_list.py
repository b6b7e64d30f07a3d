"""A kernel is complete: the steps of "Add a kernel" in CONTRIBUTING.md, for each function of the
backend table (csrc/backend.h) and for each buffer of a plan (csrc/flce.h). test_layout.py checks
that a function is in the table's list and that both backends define it in files of one name. A test
is named after its step."""

import re

import pytest

from harness import ROOT
from harness.layout import text_of, without_comments

TABLE = text_of("csrc/backend.h")
FUNCTIONS = re.findall(r"^  flce_status \(\*(\w+)\)\(void\* self", TABLE, re.MULTILINE)
FUSED = re.search(r"#define FLCE_FUSED_FUNCTIONS\(X\)(.*)", TABLE)[1]
FUSED = re.findall(r"X\((\w+)\)", FUSED)
# Called by the binding, and not by a step: with save=grads the backward is a kernel alone.
BY_BINDING = ("facts", "scale_grads")
OF_CALLER = ("LOSS", "PREDICTIONS", "GRAD_INPUT", "GRAD_WEIGHT", "GRAD_BIAS", "ROUNDED")
CORE = text_of("csrc/core/*.[ch]")
BUFFERS = re.search(
    r"enum flce_buffer_id \{(.*?)\n\} flce_buffer_id;", text_of("csrc/flce.h"), re.S
)
BUFFERS = re.findall(r"\b(FLCE_BUF_\w+)\b(?=,)", without_comments(BUFFERS[1]))
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_buffer = pytest.mark.parametrize("buffer", BUFFERS)


def test_the_lists_of_this_file():
    assert len(FUNCTIONS) > 30 and {*FUSED} < {*FUNCTIONS} and len(BUFFERS) > 30


@every_function
def test_1_its_comment(name):
    """Above it, or above the function that it belongs to."""
    before = TABLE[: TABLE.index(f"(*{name})(")].rsplit("\n", 1)[0]
    assert before.endswith("*/"), f"{name}: expected shapes, dtypes and what may alias above it"


@every_function
def test_1_few_arguments(name):
    """More than six, `self` included, are a struct."""
    arguments = re.search(rf"\(\*{name}\)\(([^;]*)\);", TABLE)[1]
    assert arguments.count(",") < 7


@every_function
def test_2_a_test_without_torch_calls_it(name):
    """Of the CPU's; fused functions are not the CPU's, and plain_fused.c stands for them."""
    tests = text_of("tests/c/*.c")
    calls = re.search(rf"(?:\b(?:flce_cpu_|fused_)?|->|\.){name}\b *[(,;=]", tests)
    assert calls or f"plain_{name}" in tests


def with_headers(path):
    """The text of a file and of the headers of csrc/cuda that it includes."""
    text = path.read_text(encoding="utf-8")
    headers = re.findall(r'^#include "(cuda/[^"]+)"', text, re.MULTILINE)
    return text + "".join((ROOT / "csrc" / name).read_text(encoding="utf-8") for name in headers)


def test_3_a_dependent_kernel_waits():
    """What launch_dependent starts may run before the kernel before it has ended."""
    checked = 0
    for path in (ROOT / "csrc/cuda").rglob("*.cu"):
        text = with_headers(path)
        for name in re.findall(r"launch_dependent\(\s*self,\s*(\w+)[<,]", path.read_text()):
            kernel = rf"__global__[^{{;]*\b{name}\([^{{;]*\{{\n(.*?)^\}}"
            body = re.search(kernel, text, re.DOTALL | re.MULTILINE)
            if name != "kernel":  # a pointer from a table
                assert "pdl_wait()" in body[1], (path, name)
                checked += 1
    assert checked > 5


@every_function
def test_4_a_step_calls_it(name):
    """Through CALL, which passes the backend's message on."""
    if name in BY_BINDING:
        assert re.search(rf"->{name}\(", CORE + text_of("csrc/binding/*"))
        return
    assert re.search(rf"\bCALL\(\w+, {name},", CORE)


@every_buffer
def test_4_a_buffer_has_its_row(buffer):
    """In the table of buffers.c."""
    assert re.search(rf"\{{{buffer},\s", text_of("csrc/core/buffers.c"))


@every_buffer
def test_4_a_buffer_has_its_name(buffer):
    short = buffer.removeprefix("FLCE_BUF_")
    assert len(re.findall(rf"\bX\({short}, \w+\)", text_of("csrc/core/plan_text.c"))) == 1


@every_buffer
def test_4_a_step_uses_a_buffer(buffer):
    """By its id, in the core or in the binding; tensors of the caller are in flce_tensors."""
    if buffer.removeprefix("FLCE_BUF_") in OF_CALLER:
        return
    paths = [*(ROOT / "csrc/core").glob("*.[ch]"), *(ROOT / "csrc/binding").iterdir()]
    paths = [path for path in paths if path.name not in ("buffers.c", "plan_text.c")]
    assert any(re.search(rf"\b{buffer}\b", path.read_text()) for path in paths)
