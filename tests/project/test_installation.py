"""flce/installation.py: what `import flce` and `python -m flce.info` say of an installation that
cannot be used."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flce
from harness import ROOT

MODULE = "_C.abi3.so"
OLD_TORCH = "__version__ = '2.9.1+cpu'"
BROKEN_TORCH = "raise OSError('libcudart.so.99: cannot open shared object file')"


@pytest.fixture
def site(tmp_path):
    """A folder with the package, without what was compiled."""
    ignored = shutil.ignore_patterns("*.so", "libflce_cuda.txt", "__pycache__")
    shutil.copytree(ROOT / "flce", tmp_path / "flce", ignore=ignored)
    return tmp_path


def without_module(site):
    return [f"flce: no compiled module flce._C in {site / 'flce'}. In a clone, run `pip install "]


def broken_module(site):
    path = site / "flce" / MODULE
    path.write_bytes(b"not a library" * 100)
    return [f"flce: the compiled module {path} cannot be loaded with torch ", "invalid ELF header"]


def module_without_its_symbols(site):
    """As of a module for another torch: it takes a function that this torch does not have."""
    path = site / "flce" / MODULE
    binary = Path(flce.__file__).with_name(MODULE).read_bytes()
    name = re.search(rb"\0(aoti_torch_\w+)\0", binary)[1]
    absent = name[:-1] + b"0"
    path.write_bytes(binary.replace(b"\0" + name + b"\0", b"\0" + absent + b"\0"))
    return [f"flce: the compiled module {path} cannot be loaded", f"symbol: {absent.decode()}"]


def old_torch(site):
    (site / "torch.py").write_text(OLD_TORCH)
    return ["flce needs torch 2.10 or later, got 2.9.1+cpu"]


def broken_torch(site):
    (site / "torch.py").write_text(BROKEN_TORCH)
    return ["libcudart.so.99: cannot open shared object file"]


def no_torch(site):
    (site / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    return ["No module named 'torch'"]


FAULTS = [without_module, broken_module, module_without_its_symbols]
FAULTS += [old_torch, broken_torch, no_torch]


def python(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_import_says_what_is_wrong(site, fault):
    said = fault(site)
    done = python(site, "-c", "import flce")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and all(text in last for text in said), done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_info_reports_what_is_wrong(site, fault):
    said = fault(site)
    done = python(site, "-W", "ignore", "-m", "flce.info")
    assert done.returncode == 1 and done.stderr == ""
    first, torch, *built, last = done.stdout.splitlines()
    assert first == f"flce {flce.__version__}" and "torch" in torch and "python 3." in torch
    assert last.startswith("not usable: ") and all(text in last for text in said)
    has_module = (site / "flce" / MODULE).exists()
    assert len(built) == 1 and ("nothing in" in built[0]) != has_module


def test_a_program_that_is_called_info_gets_the_error(site):
    """Only Python's own search for the module of `-m` makes the report."""
    without_module(site)
    (site / "program.py").write_text("import flce")
    done = python(site, "program.py", "-m", "flce.info")
    assert done.returncode == 1 and done.stdout == ""
    assert "ImportError: flce: no compiled module" in done.stderr


def test_a_missing_numpy_is_no_matter(site):
    shutil.copy(Path(flce.__file__).with_name(MODULE), site / "flce")
    (site / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    done = python(site, "-m", "flce.info")
    assert done.returncode == 0 and done.stderr == ""
