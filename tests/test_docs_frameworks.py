"""The pages of the site that need a framework: their code blocks, each page in a process of its
own, because frameworks change torch and each other."""

import subprocess
import sys

import pages
import pytest

FRAMEWORKS = [page for page in pages.PAGES if pages.needs_of(page)]


@pytest.mark.parametrize("page", FRAMEWORKS, ids=pages.name_of)
def test_blocks_run(page, tmp_path):
    for name in pages.needs_of(page):
        pytest.importorskip(name, exc_type=ImportError)
    program = f"import sys; sys.path[:0] = {[str(pages.ROOT / 'tests'), str(pages.ROOT)]!r}; "
    program += f"import pages, pathlib; pages.run(pathlib.Path({str(page)!r}), {{'__name__': 'a'}})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
