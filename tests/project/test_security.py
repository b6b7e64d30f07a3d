"""What flce's sources do not do: the rows of SECURITY.md that are not tested elsewhere."""

import ast
import re

import pytest

from harness import ROOT

PYTHON = sorted((ROOT / "flce").rglob("*.py"))
NATIVE = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".map"]
# Functions that run or load what they are given, by name or by the end of a dotted one.
RUNS = {"eval", "exec", "compile", "__import__", "load_library", "CDLL", "LoadLibrary"}
RUNS |= {"pickle.load", "pickle.loads", "Unpickler", "torch.load", "marshal.loads", "yaml.load"}
RUNS |= {"dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "shelve.open"}
RUNS |= {"os.system", "os.popen", "os.execv", "Popen", "subprocess.run", "torch.hub.load", "open"}
# all_gather_object unpickles what ranks of one group send.
OBJECTS = {"all_gather_object": {"flce/distributed/collectives.py", "flce/distributed/parallel.py"}}
OBJECTS |= dict.fromkeys(
    ("broadcast_object_list", "scatter_object_list", "recv_object_list"), set()
)
# import_module of a constant, or of a name that the module's own table has.
IMPORTS = {"flce/__init__.py", "flce/integrations/__init__.py", "flce/integrations/skyrl.py"}


def calls_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def ends_with(name, known):
    return any(name == one or name.endswith(f".{one}") for one in known if "." in one) or (
        name in known or name.rsplit(".", 1)[-1] in known - {"compile", "open", "eval"}
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("eval(text)", "eval"),
        ("pickle.loads(data)", "pickle.loads"),
        ("torch.load(path)", "torch.load"),
        ("ctypes.CDLL(path)", "ctypes.CDLL"),
        ("torch.ops.load_library(path)", "torch.ops.load_library"),
    ],
)
def test_a_call_that_runs_data_would_be_found(source, name):
    assert ends_with(ast.unparse(ast.parse(source).body[0].value.func), RUNS), name
    assert not ends_with("torch.compile", RUNS) and not ends_with("model.eval", RUNS)


def test_no_code_comes_from_data():
    for path in PYTHON:
        where = str(path.relative_to(ROOT))
        for name, node in calls_of(path):
            last = name.rsplit(".", 1)[-1]
            assert not ends_with(name, RUNS), f"{where}:{node.lineno}: {name}"
            assert where in OBJECTS.get(last, {where}), f"{where}:{node.lineno}: {name}"
            assert last != "import_module" or where in IMPORTS, f"{where}:{node.lineno}: {name}"


def test_no_variable_is_a_path():
    """flce reads the variables that docs/environment.md lists for a run, and no other."""
    table = re.findall(r"^\| `(\w+)` \| run \|", (ROOT / "docs/environment.md").read_text(), re.M)
    reads = re.compile(r'(?:getenv|environ\.get|environ)[(\[]\s*"(\w+)"')
    found = set()
    for path in [*PYTHON, *NATIVE]:
        found |= set(reads.findall(path.read_text()))
    assert found == set(table)
    assert not [name for name in found if re.search("PATH|DIR|FILE|HOME|LIB|CMD", name)]


def test_no_unbounded_string_function():
    """Nor anything that starts a process or writes to a temporary file."""
    banned = (
        r"\b(strcpy|strcat|sprintf|vsprintf|gets|scanf|alloca|system|popen|fork|exec\w+|tmpnam)\("
    )
    for path in NATIVE:
        found = re.search(banned, path.read_text())
        assert not found, f"{path}: {found[0]}"


def test_libraries_are_opened_by_known_names():
    """dlopen: the module's own folder, and names of torch's, CUDA's and cuBLASLt's libraries."""
    places = {path.name: len(re.findall(r"\bdlopen\(", path.read_text())) for path in NATIVE}
    assert {name: count for name, count in places.items() if count} == {
        "device.cpp": 2,
        "cublaslt.cu": 2,
    }
