"""The operators of torch.ops.flce, called directly with drawn arguments, most of them damaged: no
call ends the process, and each exception is a refusal. FLCE_DRAWS sets how many calls; a failure
has its seed in its message, and FLCE_DRAW=SEED runs that one alone."""

import os

import pytest

from harness.subprocesses import HARNESS, end_of, start_python

DRAWS = int(os.environ.get("FLCE_DRAWS", "1500"))


@pytest.mark.parametrize("part", range(2))
def test_damaged_arguments(tmp_path, part):
    first, count = (part * DRAWS // 2, DRAWS // 2)
    if "FLCE_DRAW" in os.environ:
        first, count = int(os.environ["FLCE_DRAW"]), 1
    path = tmp_path / "seed"
    script = HARNESS / "drawn_operators.py"
    status, lines, errors = end_of(start_python(script, path, first, count))
    assert status == 0, f"seed {path.read_text().strip()} ends the process: {status}\n{errors}"
    assert not lines, "\n".join(lines)
