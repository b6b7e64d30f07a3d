"""The pages of the site that need a framework: their code blocks, each page in a process of its
own, because frameworks change torch and each other.

Pages that need transformers are children of one process that has imported it, which takes longer
than most pages."""

import importlib.util
import os
import subprocess
import sys

import pytest

from harness import pages

FRAMEWORKS = [page for page in pages.PAGES if pages.needs_of(page)]
SHARED = ("transformers", "peft", "trl", "datasets", "accelerate")
FAMILY = [page for page in FRAMEWORKS if set(pages.needs_of(page)) & {"transformers", "trl"}]
PROGRAM = """
import importlib, os, pathlib, sys, traceback
from harness import pages
found, paths = sys.argv[1].split(), list(map(pathlib.Path, sys.argv[2:]))
for name in found:
    importlib.import_module(name)
failed = []
for path in paths:
    if not (child := os.fork()):
        try:
            pages.run(path, {"__name__": "page"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # a normal exit would run what the parent has registered
    if os.waitpid(child, 0)[1]:
        failed.append(pages.name_of(path))
sys.exit(f"failed: {failed}" if failed else 0)
"""


def run(paths, imported, folder):
    places = [str(pages.ROOT / "tests"), str(pages.ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(imported), *map(str, paths)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def is_there(page):
    return all(importlib.util.find_spec(name.split(".")[0]) for name in pages.needs_of(page))


def test_pages_with_transformers(tmp_path):
    pytest.importorskip("transformers")
    found = [name for name in SHARED if importlib.util.find_spec(name)]
    there = [page for page in FAMILY if is_there(page)]
    assert there
    run(there, found, tmp_path)


@pytest.mark.parametrize("page", [p for p in FRAMEWORKS if p not in FAMILY], ids=pages.name_of)
def test_other_pages(page, tmp_path):
    if not is_there(page):
        pytest.skip(f"without {pages.needs_of(page)}")
    run([page], [], tmp_path)
