"""Faults and what a caller sees of them: the rows of docs/faults.md."""

import os
import re
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


# ---- the CUDA library ----

FOREIGN = {
    "no file": (None, "cannot open shared object file"),
    "no library": ("text", "file too short|invalid ELF header"),
    "another library": ("int other;", "it lacks a function of this version of flce"),
    "another build": ("{functions}", "it was built from other sources than "),
}
EXPORTS = ("backend", "describe", "tuning_table", "peers_begin", "peers_wait", "headers")
# A library is loaded once in a process, so each has a child. sys.path has a relative entry, and the
# folder then changes.
DESCRIBE = """
import os, shutil, sys
sys.path.insert(0, ".")
import torch, flce
library = os.path.abspath("flce/libflce_cuda.so")
os.chdir(sys.argv[1])
for given in sys.argv[2:]:
    if given != "none":
        shutil.copy(given, library)
    if os.fork() == 0:
        print(torch.ops.flce.cuda_describe().splitlines()[0], flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def copied_module(tmp_path):
    """A folder with a copy of flce, whose CUDA library may be another."""
    own, folder = TESTS.parent / "flce", tmp_path / "here"
    (folder / "flce").mkdir(parents=True)
    for path in own.iterdir():
        if path.suffix not in (".so", ".txt"):
            (folder / "flce" / path.name).symlink_to(path)
    shutil.copy(next(own.glob("_C*.so")), folder / "flce")
    return folder


def test_a_foreign_cuda_library_is_named(copied_module, tmp_path):
    """Its file, and why it is not loaded. What lies in the working folder is not looked at."""
    files = []
    for kind, (source, _) in FOREIGN.items():
        path = tmp_path / kind
        if source == "text":
            path.write_text(source)
        elif source:
            functions = "".join(f"long flce_cuda_{name}(void) {{ return 0; }}" for name in EXPORTS)
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
            subprocess.run(command, input=source.format(functions=functions), text=True, check=True)
        files.append(path if source else "none")
    planted = tmp_path / "there" / "flce" / "libflce_cuda.so"
    planted.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "another library", planted)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", DESCRIBE, planted.parents[1], *files]
    done = subprocess.run(command, env=env, cwd=copied_module, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = copied_module / "flce" / "libflce_cuda.so"
    said = done.stdout.splitlines()
    for line, (kind, (_, why)) in zip(said, FOREIGN.items(), strict=True):
        assert line.startswith(f"not loaded: {library}: "), kind
        assert re.search(why, line), (kind, line)


# ---- processes ----


def test_interrupts_threads_forks_and_exits():
    done = run_python(TESTS / "fault_process.py")
    assert done.returncode == 0, done.stderr
    said = ["interrupts", "threads", "fork", "exit", "the thread's steps"]
    assert done.stdout.splitlines() == said, done.stderr
