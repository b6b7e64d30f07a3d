"""`python -m flce.info`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flce


def test_it_prints_what_was_built():
    command = [sys.executable, "-W", "ignore", "-m", "flce.info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("flce ") and any("default max_memory" in line for line in lines)


def test_it_says_why_there_is_no_cuda_library():
    library = Path(flce.__file__).with_name("libflce_cuda.so")
    if library.exists():
        pytest.skip("the CUDA library was built")
    why = library.with_suffix(".txt").read_text(encoding="utf-8")
    assert why.startswith("left out of the build: ") and why.count("\n") == 1
    assert torch.ops.flce.cuda_describe() == f"not loaded: {library}: {why.strip()}"


def test_it_says_what_was_built_and_why_it_is_of_no_use():
    described = torch.ops.flce.cuda_describe()
    if described.startswith("not loaded: "):
        pytest.skip("the CUDA library was not built")
    path, built, *device = described.splitlines()
    assert Path(path) == Path(flce.__file__).with_name("libflce_cuda.so")
    start = rf"flce_cuda {flce.__version__}, nvcc \d+\.\d+, driver (525|580) or later, GPUs sm_\d+"
    assert re.match(start, built)
    if torch.cuda.is_available():
        assert device[0].startswith("CUDA driver ") and device[1].startswith("device ")
    else:
        (line,) = device
        assert line.startswith("not usable: ")
        assert line.endswith("this torch is built without CUDA") == (torch.version.cuda is None)
