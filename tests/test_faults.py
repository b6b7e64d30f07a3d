"""Faults and what a caller sees of them: the rows of docs/faults.md."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What a step allocates for itself, by the names in its errors.
BUFFERS = ("loss", "stats", "scalars", "saved", "predictions", "classes", "class_logits")
BUFFERS += ("grad_input", "grad_weight", "grad_bias", "scaled gradient", "grad_logits")
BUFFERS += ("forward workspace", "backward workspace", "workspace")
COPIES = ("input", "linear_weight", "linear_bias", "target", "weight")
COPIES += ("token_weight", "temperature")


def run_python(*arguments, **env):
    """A process of Python that finds this clone's flce, with one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLCE_POISON": "0", **env}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A function: the lines of a process whose allocations or GEMMs fail one after the other."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("failing") / "failing_torch.so"
    flags = ["-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    source = TESTS / "c" / "failing_torch.c"
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl", "-lpthread"], check=True)

    def lines(what):
        done = run_python(TESTS / "fault_steps.py", what, LD_PRELOAD=str(library))
        assert done.returncode == 0, done.stderr
        return set(done.stdout.splitlines())

    return lines


# ---- the CPU ----


def test_every_allocation_fails_once(failing):
    """The error names the buffer or the argument; .grad is what it was, nothing stays allocated,
    and the next step has the same bits."""
    expected = {f"buffer {name}" for name in BUFFERS}
    assert failing("memory") == expected | {f"a contiguous copy of {name}" for name in COPIES}


def test_every_product_fails_once(failing):
    """As above; where accumulate_into has begun to add, the error says so."""
    lines = failing("gemm")
    assert {line for line in lines if line.endswith("partial")} == {"accumulate: partial"}
    assert {"accumulate: untouched", "grads: untouched", "sampled: untouched"} <= lines
