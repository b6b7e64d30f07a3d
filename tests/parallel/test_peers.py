"""The copy engines' collectives (csrc/cuda/peers.cu) without a GPU."""

import shutil
import subprocess

import pytest

from harness import ROOT


def test_a_wait_is_for_what_a_failed_begin_has_queued(tmp_path):
    nvcc = shutil.which("nvcc") or pytest.skip("no nvcc")
    sources = "tests/parallel/failing_peers.cpp", "csrc/cuda/peers.cu", "csrc/core/status.c"
    program = tmp_path / "failing_peers"
    command = [nvcc, "-std=c++17", "-O3", "-cudart", "none", "-Icsrc", *sources, "-o", str(program)]
    subprocess.run(command, check=True, cwd=ROOT)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) == 39  # operations of a begin of six ranks
