"""flce.torch_private: torch has each name of its record, the record is that of the file, and no
other file of flce has a private name of torch. It needs no compiled module of flce: with any torch,

python -m pytest --noconftest tests/core/test_torch_private.py
"""

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

FLCE = Path(__file__).parents[2] / "flce"
OWNER = FLCE / "torch_private.py"
TREES = {path: ast.parse(path.read_text()) for path in sorted(FLCE.rglob("*.py"))}


def record(name):
    """NAMES or ATTRIBUTES, read and not imported: that would import all of flce."""
    for node in TREES[OWNER].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            versions, texts = node.value.keys, [value.func.value for value in node.value.values]
            pairs = zip(map(ast.literal_eval, versions), texts, strict=True)
            return {versions: ast.literal_eval(text).split() for versions, text in pairs}
    raise AssertionError(f"{OWNER} has no {name}")


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


RUNNING = version(torch.__version__)
NEWEST = max(last for _, last in record("NAMES"))


def expected(table):
    """The names that the running torch has: also one that is newer than all that were tried."""
    for (first, last), names in table.items():
        if version(first) <= RUNNING and (RUNNING <= version(last) or last == NEWEST):
            yield from names


def resolved(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("name", [*expected(record("NAMES"))])
def test_torch_has_the_name(name):
    resolved(name)


def of_parameter():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.register_hook(lambda grad: None)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    return parameter


def of_module():
    module = torch.nn.Linear(1, 1)._replicate_for_data_parallel()
    # Sharding needs a process group. The only place where it is set:
    from torch.distributed.fsdp import _dynamo_utils

    name = "_is_fsdp_managed_module"
    if f".{name} = True" in inspect.getsource(_dynamo_utils):
        setattr(module, name, True)
    return module


OBJECTS = {
    "Tensor": of_parameter,
    "Module": of_module,
    "OptimizedModule": lambda: torch.compile(torch.nn.Linear(1, 1), backend="eager"),
    "Function": lambda: torch.autograd.Function,
    "OpOverload": lambda: torch.ops.aten.mul.Tensor,
}


@pytest.mark.parametrize("name", [*expected(record("ATTRIBUTES"))])
def test_objects_have_the_attribute(name):
    kind, attribute = name.split(".")
    assert getattr(OBJECTS[kind](), attribute) is not None


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imported(tree):
    """{name in a module: what it is of torch}"""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: origin for name, origin in found.items() if origin.split(".")[0] == "torch"}


def names_of_torch(tree):
    """The private names of torch in a module: what it imports, or names by a dotted expression.
    Operators of torch.ops.aten, such as aten._softmax, are named by their schemas."""
    origins = imported(tree)
    names = {*origins.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in origins and re.fullmatch(r"[\w.]+", rest):
                names.add(f"{origins[root]}.{rest}")
    return {name for name in names if is_private(name) and not name.startswith("torch.ops.aten.")}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._is_tracing()", "torch._C._is_tracing"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.utils._pytree as tree\ntree.tree_map(f, x)", "torch.utils._pytree.tree_map"),
        ("def f():\n    from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch import nn\nnn.modules.loss._Loss", "torch.nn.modules.loss._Loss"),
    ],
)
def test_a_private_name_would_be_found(source, name):
    assert name in names_of_torch(ast.parse(source))
    assert not names_of_torch(ast.parse("import torch\ntorch.ops.aten._softmax(torch.float32)"))


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(FLCE)))
def test_private_names_of_torch_stand_in_one_file(path):
    assert path == OWNER or not names_of_torch(TREES[path])


def test_the_record_is_that_of_the_file():
    """A name, or what is taken from it: flce.distributed.inductor gets modules of Inductor."""
    named = names_of_torch(TREES[OWNER])
    listed = [name for names in record("NAMES").values() for name in names]
    assert len(listed) == len({*listed})
    for name in named:
        assert [one for one in listed if f"{one}.".startswith(f"{name}.")], f"{name}: not listed"
    for one in listed:
        is_named = [name for name in named if f"{one}.".startswith(f"{name}.")]
        assert is_named, f"{one}: listed, and not in the file"


NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def own_names():
    """Names that flce itself gives to functions, classes and attributes."""
    for node in itertools.chain.from_iterable(map(ast.walk, TREES.values())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_the_attributes_of_objects_are_listed():
    listed = {one.partition(".")[2] for names in record("ATTRIBUTES").values() for one in names}
    own, found = {*own_names()} | NAMED_TUPLES, set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            is_dotted = any(name.endswith(f".{node.attr}") for name in names_of_torch(tree))
            is_operator = ast.unparse(node.value) in ("_aten", "torch.ops.aten")
            if not (is_dotted or is_operator or node.attr in own or node.attr.startswith("_flce")):
                found.add(node.attr)
                assert node.attr in listed, f"{path}:{node.lineno}: {node.attr}"
    texts = "\n".join(path.read_text() for path in TREES if path != OWNER)
    for attribute in listed - found:  # by getattr, hasattr or a table of names
        assert f'"{attribute}"' in texts + OWNER.read_text(), attribute
