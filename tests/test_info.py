"""`python -m flce.info`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("damage", [None, "no table", "a folder"])
def test_it_prints_what_was_built(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FLCE_TUNE_FILE", raising=False)
    if damage == "a folder":
        (tmp_path / "flce" / "gemm.json").mkdir(parents=True)
    elif damage:
        (tmp_path / "flce").mkdir()
        (tmp_path / "flce" / "gemm.json").write_text(damage)
    command = [sys.executable, "-W", "ignore", "-m", "flce.info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("flce ") and any("default max_memory" in line for line in lines)
    (tuned,) = (line for line in lines if line.startswith("tuned products: none"))
    reason = {None: "there is no", "no table": "expected", "a folder": "directory"}[damage]
    assert "gemm.json" in tuned and reason in tuned, tuned
