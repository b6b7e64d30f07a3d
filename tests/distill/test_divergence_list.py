"""A divergence is complete: the steps of "Add a divergence" in CONTRIBUTING.md, for each row of
FLCE_DIVERGENCES (csrc/problem.h)."""

import re
import typing

import pytest

import flce
from flce.distillation import sparse
from flce.packing import DIVERGENCES
from harness import ROOT, divergences
from harness.layout import body_of, text_of

LIST = (ROOT / "csrc/problem.h").read_text()
LIST = re.search(r"^#define FLCE_DIVERGENCES\(X\)(.*(?:\n  .*)*)", LIST, re.MULTILINE)[1]
ROWS = dict(re.findall(r'X\((\w+), "(\w+)", (?:true|false), [\d.]+\)', LIST))
every_name = pytest.mark.parametrize("name", ROWS.values())
every_row = pytest.mark.parametrize("row", ROWS)


def test_python_has_the_names_of_the_list():
    """In its order: a divergence is its index. This library has been built from the list."""
    assert ROWS and DIVERGENCES == tuple(ROWS.values())


@every_row
def test_its_terms(row):
    """A switch without its case is an error of the compiler too, and so are kernels without their
    FarTerms, where nvcc compiles."""
    case = f"case FLCE_{row}:"
    for function in ("flce_divergence_terms", "flce_gradient_bound"):
        assert case in body_of("csrc/divergence.h", function)
    assert f"struct FarTerms<FLCE_{row}> {{" in text_of("csrc/cuda/rows/far_rows.cuh")
    assert case in body_of("tests/c/test_divergence.c", "definition")


def test_no_switch_has_a_default():
    """It would take a divergence that it does not know for another one. And the build makes a
    switch that lacks one an error."""
    sources = [*(ROOT / "csrc").rglob("*.*"), ROOT / "tests/c/test_divergence.c"]
    switch = re.compile(r"^( *)switch \([^\n]*\{\n(.*?)^\1\}", re.MULTILINE | re.DOTALL)
    found = 0
    for path in sources:
        for match in switch.finditer(path.read_text()):
            if re.search(r"FLCE_(?:NO_DIVERGENCE|DIVERGENCES)\b", match[2]):
                assert "default:" not in match[2], path
                found += 1
    assert found >= 5
    assert '"-Werror=switch"' in text_of("setup.py")


def test_no_kernel_asks_for_one_by_name():
    """What kinds differ in is in the list, in divergence.h and in FarTerms."""
    for path in [*(ROOT / "csrc").rglob("*.c*"), *(ROOT / "csrc").rglob("*.h")]:
        asks = re.search(rf"[!=]= FLCE_(?:{'|'.join(ROWS)})\b", path.read_text())
        assert not asks, (path, asks)


@every_name
def test_its_definitions(name):
    assert set(sparse.DEFINITIONS) == set(divergences.DEFINITIONS) == set(DIVERGENCES)
    assert f'"{name}": lambda' in text_of("tests/loss/test_near_classes.py")


@every_name
def test_its_types_and_pages(name):
    assert typing.get_args(flce.options.Divergence) == DIVERGENCES
    assert f'"{name}"' in flce.linear_divergence.__doc__
    for page in ("docs/distillation.md", "docs/semantics.md"):
        assert re.search(rf'^\| `"{name}"`.* \| .+ \| .+ \|$', text_of(page), re.MULTILINE), page


def test_drawn_cases_take_each():
    """As many as tests/distill/test_divergence.py draws where FLCE_DRAWS does not say more."""
    draws = (divergences.draw(seed, "cpu")[1] for seed in range(120))
    assert {options["divergence"] for options in draws} == set(DIVERGENCES)
