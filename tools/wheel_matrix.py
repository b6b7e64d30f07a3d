"""Installs one wheel in several environments and runs tests/wheel_smoke.py in each:

    python tools/wheel_matrix.py dist/flce-*.whl --json RECORD 2.10.0@python3.10 ENV/bin/python

TORCH@PYTHON makes an environment with that torch and removes it afterwards (up to 20 GB); a path
names the interpreter of one that has torch, numpy and pytest, where the wheel is left installed.
The tests run in a folder with README.md alone, with no compiler on PATH; README's blocks that need
a framework run where it is installed. Exit status 1 if one fails.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

SMOKE = Path(__file__).resolve().parents[1] / "tests" / "wheel_smoke.py"
FACTS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def pip(python, *arguments):
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*command, "--no-cache-dir", *arguments], check=True)


def make_environment(folder, torch, python):
    """The interpreter of a new environment with that torch."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    made = str(folder / "bin" / "python")
    pip(made, f"torch=={torch}", "numpy", "pytest")
    return made


def smoke(python, wheel, folder):
    """Installs the wheel and runs the tests; the environment's entry in the record."""
    pip(python, "--no-deps", "--force-reinstall", str(wheel))
    shutil.copy(SMOKE, folder)
    shutil.copy(SMOKE.parents[1] / "README.md", folder)
    (folder / "tests" / "harness").mkdir(parents=True)
    for name in ("__init__.py", "pages.py"):
        shutil.copy(SMOKE.parent / "harness" / name, folder / "tests" / "harness")
    environment = {"PATH": str(Path(python).parent), "HOME": str(folder), "OMP_NUM_THREADS": "2"}
    kept = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    environment |= {name: os.environ[name] for name in kept if name in os.environ}

    def run(*arguments):
        command = [python, "-W", "ignore", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    version, torch = run("-c", FACTS).stdout.split()
    start = time.time()
    tests = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=r.xml", SMOKE.name)
    if tests.returncode:
        print(tests.stdout[-4000:], tests.stderr[-2000:])
    (suite,) = xml.etree.ElementTree.parse(folder / "r.xml").getroot().iter("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    return {
        "torch": torch,
        "python": version,
        **counts,
        "seconds": round(time.time() - start, 1),
        "info": re.sub(r"/\S*/site-packages/", "", run("-m", "flce.info").stdout).splitlines(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("environments", nargs="+", metavar="TORCH@PYTHON or interpreter")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--note", help="of the record: which commit was built, and how")
    arguments = parser.parse_args()
    wheel, runs = arguments.wheel.resolve(), []
    for name in arguments.environments:
        with tempfile.TemporaryDirectory(prefix="flce-wheel-") as folder:
            torch, _, python = name.partition("@")
            made = make_environment(Path(folder, "env"), torch, python) if python else name
            Path(folder, "empty").mkdir()
            runs.append(smoke(made, wheel, Path(folder, "empty")))
        one = runs[-1]
        print(f"wheel: torch {one['torch']}, Python {one['python']}:", end=" ")
        print(", ".join(f"{one[key]} {key}" for key in ("tests", "failures", "errors", "skipped")))
    if arguments.json:
        record = {
            "wheel": wheel.name,
            "note": arguments.note,
            "bytes": wheel.stat().st_size,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "machine": f"{platform.machine()}, {' '.join(platform.libc_ver())}",
            "runs": runs,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return any(run["failures"] or run["errors"] or not run["tests"] for run in runs)


if __name__ == "__main__":
    sys.exit(main())
