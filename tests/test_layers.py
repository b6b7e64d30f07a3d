"""The layers of flce: which folders a module may import from, wherever in it the import stands."""

import ast
import re
from pathlib import Path

import pytest

FLCE = Path(__file__).parents[1] / "flce"
# Folders that a module may import from, in addition to its own; "core": flce/*.py, "flce": the
# public names of flce/__init__.py, which itself may import all, as a script may.
SCRIPTS = {"flce.info"}
MAY_IMPORT = {
    "core": set(),
    "distributed": {"core"},
    "fusion": {"core", "distributed"},
    "compat": {"core", "distributed", "flce"},
    "integrations": {"core", "distributed", "compat", "fusion", "flce"},
}


def name_of(path):
    parts = path.relative_to(FLCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FLCE.rglob("*.py") if path != FLCE / "__init__.py"}


def imports_of(name):
    """The modules of flce that a module imports, in functions too."""
    package = name.split(".") if MODULES[name].stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
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
    left = {name: set(imports_of(name)) for name in MODULES if room_of(name) == "fusion"}
    while left:
        leaves = [name for name, others in left.items() if not others & (left.keys() - {name})]
        assert leaves, f"a circle among {sorted(left)}"
        for name in leaves:
            del left[name]


def test_core_does_not_know_deferred_logits():
    """It asks torch.overrides, not for the attribute that deferred logits have."""
    core = [path for name, path in MODULES.items() if room_of(name) == "core"]
    assert core and not [path for path in core if re.search(r"\b_flce\b", path.read_text())]
