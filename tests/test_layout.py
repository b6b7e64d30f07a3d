"""The layout of csrc: which file defines a backend function, and which folders may include
which."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = [path for path in CSRC.rglob("*") if path.suffix in (".c", ".cpp", ".cu", ".h", ".cuh")]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# Folders that a file may include from, in addition to its own. ".": csrc itself.
MAY_INCLUDE = {
    ".": set(),
    "core": {"."},
    "binding": {"."},
    "cpu": {".", "cpu/simd"},
    "cpu/simd": {".", "cpu"},
    "cuda": {".", "cuda/common"},
    "cuda/common": {"."},
    "cuda/rows": {".", "cuda", "cuda/common"},
    "cuda/passes": {"cuda", "cuda/common"},
    "cuda/gemm": {".", "cuda"},
    "cuda/samples": {".", "cuda", "cuda/common"},
    "cuda/sm90": {".", "cuda", "cuda/common", "cuda/rows"},
}


def files_of(functions, prefix, folder):
    """{function of the backend table: stem of the file that defines it}."""
    sources = [path for path in (CSRC / folder).rglob("*") if path.suffix in (".c", ".cu")]
    found = {}
    for function in functions:
        defines = re.compile(rf"^flce_status {prefix}{function}\([^;]*\{{", re.MULTILINE)
        found[function], *others = [p.stem for p in sources if defines.search(p.read_text())]
        assert not others, f"{function} is defined twice"
    return found


def test_a_function_has_one_file_name_in_both_backends():
    text = (CSRC / "backend.h").read_text()
    lists = re.findall(
        r"^#define FLCE_(?:BACKEND|FUSED)_FUNCTIONS(.*(?:\n  .*)*)", text, re.MULTILINE
    )
    every, fused = [re.findall(r"\b[a-z]\w+", names) for names in lists]
    assert sorted(re.findall(r"\(\*(\w+)\)\(void\* self", text)) == sorted(every + fused)
    cuda = files_of(every + fused, "cuda_", "cuda")
    for function, file in files_of(every, "flce_cpu_", "cpu").items():
        assert file == cuda[function]


def test_includes_go_one_way():
    for path in SOURCES:
        folder = str(path.parent.relative_to(CSRC))
        for name in INCLUDE.findall(path.read_text()):
            included = CSRC / name
            assert included.exists(), f"{path}: {name} is no path from csrc"
            other = str(included.parent.relative_to(CSRC))
            assert other == folder or other in MAY_INCLUDE[folder], f"{path} includes {name}"


def assert_no_circle(includes):
    """includes: {name: the names that it includes}"""
    while includes:
        leaves = [name for name, others in includes.items() if not set(others) & set(includes)]
        assert leaves, f"a circle among {sorted(includes)}"
        for name in leaves:
            del includes[name]


def test_no_includes_in_a_circle():
    headers = [path for path in SOURCES if path.suffix in (".h", ".cuh")]
    assert_no_circle(
        {str(path.relative_to(CSRC)): INCLUDE.findall(path.read_text()) for path in headers}
    )


def test_files_of_the_core_use_each_other_one_way():
    """A file and the header of its name are one: it defines what that declares, so that includes
    tell which file calls which."""
    uses = {}
    for path in (CSRC / "core").iterdir():
        text = path.read_text()
        others = {Path(name).stem for name in INCLUDE.findall(text) if name.startswith("core/")}
        uses.setdefault(path.stem, set()).update(others - {path.stem})
        declared = re.findall(r"^\w[\w ]* \*?(\w+)\([^;{]*\);", text, re.MULTILINE)
        for name in declared if path.suffix == ".h" else []:
            source = path.with_suffix(".c").read_text()
            assert re.search(rf"^\w.*\b{name}\([^;]*\{{", source, re.MULTILINE), f"{path}: {name}"
    assert len(uses) > 10
    assert_no_circle(uses)


def test_each_file_says_what_belongs_in_it():
    for path in SOURCES:
        assert path.read_text().startswith(("/* ", "// ")), f"{path} begins without a comment"
