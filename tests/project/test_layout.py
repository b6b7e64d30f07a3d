"""The layout of csrc, flce and the tests: which file defines a backend function, which folders may
include or import from which, and that nothing does in a circle."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from harness import ROOT
from harness.layout import CSRC, MAY_INCLUDE, SOURCES

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


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
    """A file defines what its header declares: includes tell who calls whom."""
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


def test_calls_do_not_use_getenv():
    """It races setenv of another thread; these two files use it where Python's GIL is held."""
    users = {str(p.relative_to(CSRC)) for p in SOURCES if re.search(r"\bgetenv\(", p.read_text())}
    assert users == {"core/environment.c", "binding/module.cpp"}


def test_each_file_says_what_belongs_in_it():
    for path in SOURCES:
        assert path.read_text().startswith(("/* ", "// ")), f"{path} begins without a comment"


# ---- flce ----

FLCE = ROOT / "flce"
# Folders that a module may import from, in addition to its own; "core": flce/*.py, "flce": the
# public names of flce/__init__.py, which itself may import all, as a script may.
SCRIPTS = {"flce.info"}
MAY_IMPORT = {
    "core": set(),
    "distributed": {"core"},
    "distillation": {"core"},
    "fusion": {"core", "distributed", "distillation"},
    "integrations": {"core", "distributed", "fusion", "flce"},
    "estimate": {"flce"},
    "bench": {"flce"},
    "conformance": {"flce"},
}


def name_of(path):
    parts = path.relative_to(FLCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FLCE.rglob("*.py") if path != FLCE / "__init__.py"}


def is_for_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"


def imports_of(name):
    """The modules of flce that a module imports, in functions too, but not for type checkers
    alone."""
    package = name.split(".") if MODULES[name].stem == "__init__" else name.split(".")[:-1]
    tree = ast.parse(MODULES[name].read_text())
    parts = (node.orelse if is_for_checkers(node) else [node] for node in tree.body)
    tree.body = [*itertools.chain(*parts)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found = [one if one in MODULES else base for one in names]
        else:
            continue
        yield from (one for one in found if one.split(".")[0] == "flce")


def room_of(name):
    _, *parts = name.split(".")
    if not parts:
        return "flce"
    return parts[0] if (FLCE / parts[0]).is_dir() else "core"


def test_a_dotted_name_is_resolved():
    assert "flce.options" in imports_of("flce.functional")
    assert {"flce.functional", "flce.fusion.steps"} <= set(imports_of("flce.fusion.loss"))


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    room = room_of(name)
    for other in imports_of(name) if name not in SCRIPTS else ():
        assert room_of(other) in MAY_IMPORT[room] | {room}, f"{name} imports {other}"


def test_no_circle_in_fusion():
    fusion = [name for name in MODULES if room_of(name) == "fusion"]
    assert_no_circle({name: set(imports_of(name)) - {name} for name in fusion})


def test_core_does_not_know_deferred_logits():
    """It asks torch.overrides, not for the attribute that deferred logits have."""
    core = [path for name, path in MODULES.items() if room_of(name) == "core"]
    assert core and not [path for path in core if re.search(r"\b_flce\b", path.read_text())]


# ---- tests ----

TESTS = ROOT / "tests"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def named_in_table(first):
    """The names in the first column of the table of CONTRIBUTING.md that has it as its heading."""
    table = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w/.*]+)`", row.split("|")[1])}


def test_each_test_lies_in_a_folder_of_the_table():
    folders = {f"tests/{path.parent.relative_to(TESTS)}" for path in TESTS.rglob("test_*.py")}
    assert folders == named_in_table("tests of")


def test_the_table_has_each_file_of_the_harness():
    files = {path.name for path in (TESTS / "harness").glob("*.py")} - {"__init__.py"}
    assert files == named_in_table("harness")


def folders_of(path):
    return {folder.name for folder in path.iterdir() if folder.is_dir()} - {"__pycache__"}


def test_the_table_has_each_room():
    rooms = {f"flce/{name}/" for name in folders_of(FLCE)} | {"flce/*.py", "csrc/*.h"}
    rooms |= {f"csrc/{name}/" for name in folders_of(CSRC)}
    rooms |= {f"{name}/" for name in ("tests", "docs", "benchmarks", "tools")}
    assert rooms == named_in_table("room")


def test_the_tables_have_each_file_of_the_core():
    assert named_in_table("file of flce") == {path.name for path in FLCE.glob("*.py")} - {
        "__init__.py"
    }
    assert named_in_table("header of csrc") == {path.name for path in CSRC.glob("*.h")}
    core = {path.name for path in (CSRC / "core").glob("*.c")}
    assert named_in_table("file of csrc/core") == core
    assert named_in_table("folder of csrc/cuda") == folders_of(CSRC / "cuda")


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.stem)
def test_no_file_imports_a_test(path):
    """What two tests share is in the harness."""
    for node in ast.walk(ast.parse(path.read_text())):
        found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in found if name.split(".")[-1].startswith("test_")], path
