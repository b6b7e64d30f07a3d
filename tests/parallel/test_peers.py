"""The copy engines' collectives (csrc/cuda/peers.cu) without a GPU."""

import shutil
import subprocess

import pytest

from harness import ROOT


def run_on(runtime, folder):
    """peers.cu on a CUDA runtime of a file here; what it prints."""
    nvcc = shutil.which("nvcc") or pytest.skip("no nvcc")
    sources = f"tests/parallel/{runtime}", "csrc/cuda/peers.cu", "csrc/core/status.c"
    program = folder / "program"
    command = [nvcc, "-std=c++17", "-O3", "-cudart", "none", "-Icsrc", *sources, "-o", str(program)]
    subprocess.run(command, check=True, cwd=ROOT)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_wait_is_for_what_a_failed_begin_has_queued(tmp_path):
    assert int(run_on("failing_peers.cpp", tmp_path)) == 37  # calls of a begin of six ranks


def test_ranks_in_any_order_of_what_they_have_queued(tmp_path):
    assert run_on("simulated_peers.cpp", tmp_path) == ""
