"""An architecture with GEMMs of its own is complete: the steps of "Add an architecture" in
CONTRIBUTING.md, for each index of csrc/architectures.h. tests/c/test_architectures.c plans for rows
without kernels."""

import re
import runpy

import pytest

from harness import ROOT, layout

CSRC = ROOT / "csrc"
HEADER = (CSRC / "architectures.h").read_text()
NAMES = re.search(r"^enum \{ ((?:FLCE_SM\d+, )+)FLCE_ARCHITECTURES \};$", HEADER, re.MULTILINE)[1]
NAMES = re.findall(r"FLCE_SM(\d+)", NAMES)
GEMMS = {"logits_gemm": ".logits = {", "grad_weight_gemm": ".weight = {"}


def rows():
    """{capability: the text of its row}, in the order of the table."""
    table = HEADER[HEADER.index("flce_architectures[FLCE_ARCHITECTURES] = {") :]
    starts = [*re.finditer(r"\.capability = (\d+)", table[: table.index("\n};")])]
    ends = [start.start() for start in starts[1:]] + [table.index("\n};")]
    return {m[1]: table[m.start() : end] for m, end in zip(starts, ends, strict=True)}


def test_each_index_has_a_row_in_its_order():
    assert list(rows()) == NAMES


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", NAMES)
def test_each_gemm_has_its_launch(name, gemm):
    """And sizes of 0 have none. A static_assert of architectures.cu says so where nvcc compiles."""
    launch = f"launch_{gemm}_sm{name}"
    table = (CSRC / "cuda/fused/architectures.cu").read_text()
    declared = f"_launch {launch};" in (CSRC / "cuda/fused/architectures.cuh").read_text()
    (kernels,) = re.findall(rf"\{{&flce_architectures\[FLCE_SM{name}\], (\w+), (\w+)\}}", table)
    source = CSRC / f"cuda/sm{name}/{gemm}.cu"
    has = GEMMS[gemm] in rows()[name]
    assert kernels[[*GEMMS].index(gemm)] == (launch if has else "NULL")
    assert declared == source.exists() == has
    if has:
        text = "".join(path.read_text() for path in source.parent.iterdir())
        assert f"flce_status {launch}(" in text and f"flce_architectures[FLCE_SM{name}]" in text


@pytest.mark.parametrize("name", NAMES)
def test_its_folder_is_known(name):
    """To nvcc and to the rules of includes. No other folder is of one architecture."""
    pytest.importorskip("setuptools", "77")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    known = setup["OWN_ARCHS"]
    assert name in setup["CUDA_ARCHS"]
    folders = {path.name for path in (CSRC / "cuda").glob("sm*") if path.is_dir()}
    assert set(known) == folders
    if (CSRC / f"cuda/sm{name}").exists():
        assert re.fullmatch(rf"{name}[af]?", known[f"sm{name}"])
        assert {"cuda/fused", "cuda/common"} <= layout.MAY_INCLUDE[f"cuda/sm{name}"]


def test_the_table_decides():
    """No code of the core or of csrc/cuda compares a capability with the number of a row; kRules
    of gemm/heuristics.cu are rules for cuBLASLt."""
    compares = re.compile(rf"capability *[!=]= *(?:{'|'.join(NAMES)})\b")
    users = [path for path in layout.SOURCES if compares.search(path.read_text())]
    assert users == []
