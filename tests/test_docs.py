"""README.md and the site: code blocks run, links lead somewhere, pictures are those of the records.

Pages that need a framework run in test_docs_frameworks.py."""

import importlib.util
import json
import subprocess
import sys

import messages
import pages
import pytest
import torch.distributed as dist


def loaded(path):
    """A script of docs/ or benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_every_block_runs_or_says_why_not(page):
    for block in pages.blocks_of(page):
        assert not pages.unmarked(block), f"{pages.name_of(page)}:{block.line}"
        if block.reason.startswith("tested by "):
            path = pages.ROOT / block.reason.removeprefix("tested by ")
            assert path.is_file(), f"{pages.name_of(page)}:{block.line} names {path}"


PLAIN = [
    p for p in pages.PAGES if any(map(pages.runs, pages.blocks_of(p))) and not pages.needs_of(p)
]


@pytest.mark.parametrize("page", PLAIN, ids=pages.name_of)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        pages.run(page, {"__name__": "__main__"})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_wrong_block_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup\nx = 1\n-->\n\n```python\nassert x == 2, 'wrong'\n```\n\n```sh\nls\n```\n"
    )
    with pytest.raises(AssertionError, match="wrong"):
        pages.run(page, {})
    assert [pages.unmarked(block) for block in pages.blocks_of(page)] == [False, False, True]


@pytest.mark.parametrize("page", [*pages.PAGES, pages.ROOT / "CONTRIBUTING.md"], ids=pages.name_of)
def test_links_inside_resolve(page):
    made = loaded(pages.DOCS / "make_api.py").page()
    for path, anchor in pages.links_of(page):
        text = made if path == pages.GENERATED else None
        if text is None:
            assert path.exists(), f"{pages.name_of(page)} links to {path}"
            text = path.read_text(encoding="utf-8") if path.suffix == ".md" else ""
        assert not anchor or anchor in pages.anchors_of(text), f"{path}#{anchor}"


def test_every_page_is_in_the_navigation():
    """mkdocs tells with --strict; this test needs no mkdocs."""
    text = (pages.ROOT / "mkdocs.yml").read_text()
    for page in (*pages.PAGES[1:], pages.GENERATED):
        assert f" {page.relative_to(pages.DOCS)}\n" in text, f"{page} is not in mkdocs.yml"


def test_the_api_page_has_every_name():
    import flce

    made = loaded(pages.DOCS / "make_api.py").page()
    for name in flce.__all__:
        assert f"\n## flce.{name}\n" in made
    assert made.count("```pycon") == len(flce.__all__)


def test_the_page_of_errors_has_every_text_and_no_other():
    """`python tests/messages.py` prints what lacks and what is left over."""
    lacking, left_over = messages.compared()
    assert not lacking and not left_over


def test_texts_are_read_from_the_source(tmp_path):
    """Of a call of each form, against what they say when they are raised."""
    python, c = tmp_path / "a.py", tmp_path / "a.c"
    python.write_text(
        "LEAST = 'a number'\n"
        "def f(x, y):\n"
        "    got = 'first'\n"
        "    if x:\n"
        "        got = f'second {x}'\n"
        "    refuse('x', LEAST, got + '; see y')\n"
        "    got = 'third'\n"
        "    raise ValueError(f'y: expected {LEAST}, got {got} or {y!r}')\n"
    )
    c.write_text(
        'EXPECT(x > 0, "x: expected %s, "\n  "got %lld", name(")"), x); flce_fail(S, "no %d");'
    )
    assert messages.of_python(python) == {
        "x: expected a number, got first; see y",
        "x: expected a number, got second …; see y",
        "y: expected a number, got third or …",
    }
    assert messages.of_c(c) == {"x: expected …, got …", "no …"}


def test_pictures_are_those_of_the_records(tmp_path):
    script = pages.ROOT / "benchmarks" / "pictures.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, timeout=300)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (pages.DOCS / "pictures").iterdir()}
    assert made == committed, "run `make pictures`"


def test_the_notebook(tmp_path, monkeypatch):
    """Its code cells, in order; outputs are not committed."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((pages.ROOT / "examples" / "flce.ipynb").read_text())
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), "flce.ipynb", "exec"), namespace)
