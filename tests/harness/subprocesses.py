"""Scripts of the harness in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT

HARNESS = Path(__file__).parent


def start_python(*arguments, **env):
    """A process of Python that finds this clone's flce, with one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLCE_POISON": "0", **env}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def end_of(process):
    try:
        out, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out.splitlines(), errors
