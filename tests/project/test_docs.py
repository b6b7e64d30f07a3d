"""README.md and the site: code blocks run, links lead somewhere, pictures are those of the records.

Pages that need a framework run in test_docs_frameworks.py."""

import importlib
import importlib.util
import itertools
import json
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

import messages
from harness import pages

OTHERS = [pages.ROOT / "CONTRIBUTING.md", pages.ROOT / "CHANGELOG.md"]


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [*pages.PAGES, *OTHERS], ids=pages.name_of)
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


IMPORTED = {
    name
    for page in pages.PAGES
    for block in pages.blocks_of(page)
    if block.language in ("setup", "python")
    for name in pages.imported(block.code)
}


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_a_block_imports_what_it_uses_or_continues_one(page):
    assert list(pages.unexplained(page, IMPORTED)) == []


def test_a_name_that_was_not_shown_is_found(tmp_path):
    page = tmp_path / "page.md"
    setup = "<!-- setup\nimport torch\nlabels = 1\n-->\n"
    first = "```python\nx = torch.ones(labels)\n```\n"
    page.write_text(f"{setup}{first}")
    assert list(pages.unexplained(page, {"torch"})) == [(6, ["torch"])]
    first = first.replace("x =", "import torch\nx =")
    second = "```python\ndef f():\n    return torch.sum(x)\n```\n"
    page.write_text(f"{setup}{first}{second}")
    assert list(pages.unexplained(page, {"torch"})) == [(10, ["torch", "x"])]
    page.write_text(f"{setup}{first}\n<!-- continues -->\n{second}")
    assert list(pages.unexplained(page, {"torch"})) == []


def test_the_start_pages_blocks_run_when_they_are_pasted():
    """Each alone, with nothing that the page does not show."""
    for block in pages.blocks_of(pages.DOCS / "index.md"):
        if block.language == "python":
            exec(compile(block.code, f"index.md:{block.line}", "exec"), {"__name__": "pasted"})


WIDTH = 88  # a column of the site, on a screen of 1440 pixels


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_code_is_not_cut_off(page):
    """What a program prints (no language) is as wide as it is."""
    for block in pages.blocks_of(page):
        if block.language not in ("", "setup"):
            for number, line in enumerate(block.code.splitlines(), block.line):
                assert len(line) <= WIDTH, f"{pages.name_of(page)}:{number}"


@pytest.mark.parametrize("page", [*pages.PAGES, *OTHERS], ids=pages.name_of)
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


def test_the_warnings_that_the_page_explains_exist():
    page = (pages.DOCS / "errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^\| ("[^|]*") \|', page, re.MULTILINE)
    phrases = [
        p for row in quoted for p in re.split(r'"(?:, ")?|\.\.\.', row) if len(p.strip()) > 5
    ]
    source = "".join(path.read_text() for path in (pages.ROOT / "flce" / "fusion").glob("*.py"))
    assert len(phrases) >= 5
    for phrase in phrases:
        assert phrase.strip(" :") in source, phrase


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


def shown(path):
    """A picture's text without its numbers, and these; without the names that are hashes."""
    text = re.sub(r"[mp][0-9a-f]{10}", "", path.read_text(encoding="utf-8"))
    number = r"-?\d+(?:\.\d+)?"
    return re.sub(number, "#", text), [float(one) for one in re.findall(number, text)]


def test_pictures_are_those_of_the_records(tmp_path):
    """Versions of matplotlib differ by a third of a point in the heights of texts."""
    script = pages.ROOT / "benchmarks" / "pictures.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, timeout=300)
    committed = pages.DOCS / "pictures"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in committed.iterdir())
    for path in tmp_path.iterdir():
        (text, numbers), (expected, others) = shown(path), shown(committed / path.name)
        assert text == expected, f"{path.name}: run `make pictures`"
        assert numbers == pytest.approx(others, rel=0, abs=0.4), f"{path.name}: `make pictures`"


def test_pictures_are_legible_on_dark_pages(pictures):
    """Each colour of a picture has one for dark pages."""
    dark = pictures.style.DARK
    for path in (pages.DOCS / "pictures").iterdir():
        text = path.read_text(encoding="utf-8")
        colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text))
        assert len(colours) > 3 and colours <= set(dark), path.name
        for light in colours:
            assert f"fill:{dark[light]} !important" in text, path.name


@pytest.fixture
def pictures(scripts):
    return scripts("pictures")


def test_the_table_of_measurements_has_the_pictures_figures(pictures):
    text = (pages.DOCS / "performance.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ x \d+ x \d{5}", line)][:7]
    compared = 0
    for name in pictures.SHAPES:
        rows, _ = pictures.rows_of(name)
        sizes = " x ".join(str(rows[0][key]) for key in ("tokens", "hidden", "vocab"))
        (line,) = (line for line in lines if line.startswith(f"| {sizes}"))
        known = [(f"{row['ratio']:.2f}", row["peak_bytes"] / 1e9) for row in rows]
        for ratio, size in re.findall(r"([\d.]+)x(?: to [\d.]+x)?, ([\d.]+) GB", line):
            digits = len(size.partition(".")[2])
            assert (ratio, size) in [(r, f"{s:.{digits}f}") for r, s in known], (name, ratio, size)
            compared += 1
    assert compared >= 3 * len(pictures.SHAPES)


def cells_of(text, first):
    """The cells of the rows of a table whose header begins with `first`."""
    lines = iter(text.splitlines())
    header = next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    cells = [row.replace("**", "").strip("|").split("|") for row in (header, *rows)]
    return [[cell.strip() for cell in row] for row in cells]


def figures(row, digits=1):
    return f"{row['ms']:.{digits}f}", f"{row['peak_bytes'] / 1e9:.2f} GB"


def test_readmes_tables_are_those_of_the_records(pictures):
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    made = pictures.record("25-h200-readme")["rows"]
    header, *rows = cells_of(text, "tokens x hidden x classes")
    names = ["gemms", "eager", "torch.compile", "liger", "cce", "flce auto"]
    assert len(rows) >= 4 and len(header) == 1 + len(names)
    for shape, *cells in rows:
        sizes = [int(size) for size in shape.split(" x ")]
        here = [r for r in made if [r["tokens"], r["hidden"], r["vocab"]] == sizes]
        found = {r["contestant"]: figures(r, 2 if r["ms"] < 5 else 1) for r in here}
        assert cells == [found["gemms"][0], *(", ".join(found[name]) for name in names[1:])]
    made = pictures.record("25-h200-logprobs")["rows"]
    made = [r for r in made if r["shape"] == "head" and r["kind"] == "policy"]
    found = {row["contestant"]: figures(row) for row in made}
    header, cells = cells_of(text, "GEMMs alone")
    names = ["eager", "compile", "TRL's chunks", "verl's kernel", "Liger's GRPO", "linear_loss"]
    assert len(header) == 1 + len(names)
    assert cells == [found["GEMMs"][0], *(", ".join(found[name]) for name in names)]


def test_readmes_step_is_that_of_the_record(pictures):
    text = " ".join((pages.ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = pictures.record("23-h200-models")["rows"]
    for loss in ("plain", "liger", "fuse"):
        (row,) = (
            r
            for r in rows
            if (r["model"], r["tokens"], r["contestant"]) == ("llama-1b", 8192, loss)
        )
        assert f"{row['peak_bytes'] / 1e9:.1f} GB and {row['ms']:.0f} ms" in text, loss


def test_the_target_bench_readme_measures_readmes_table(scripts):
    makefile = (pages.ROOT / "Makefile").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^bench-readme:.*\n\t\$\(PYTHON\) \S+ (.*)$", makefile, re.MULTILINE)
    options = scripts("bench").parse_options(command.split())
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    _, *rows = cells_of(text, "tokens x hidden x classes")
    made = [f"{s.tokens} x {s.hidden} x {s.vocab}" for _, s in options.shapes]
    assert made == [row[0] for row in rows]
    assert options.budget == ["default"] and options.passes == ["step"]


def test_readme_is_short():
    assert len((pages.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_readmes_picture_has_the_figures_of_fuses_tables(pictures):
    text = (pages.DOCS / "fuse.md").read_text(encoding="utf-8")
    steps, longest, _ = pictures.of_llama()
    short, _, long = re.findall(r"\| Llama 3.2 1B \| (.*) \|", text)
    names = ("plain", "compile", "liger", "fuse"), ("plain", "liger", "fuse")
    cells = [
        dict(zip(of, row.split(" | "), strict=False))
        for of, row in zip(names, (short, long), strict=True)
    ]
    shown = (pages.DOCS / "pictures" / "readme.svg").read_text()
    bounded = steps[0].pop("256MiB")
    assert f">{bounded / 1e9:.1f} GB<" in shown
    for peaks, row in zip(steps, cells, strict=True):
        for loss, peak in peaks.items():
            assert f", {peak / 1e9:.1f} GB" in row[loss] and f">{peak / 1e9:.1f} GB<" in shown
    assert f"{longest:,} tokens" in shown and f"| {longest:,} |" in text


def test_the_notebook(tmp_path, monkeypatch, capsys):
    """Its code cells, in order: each prints its output, but for the numbers. What makes these:

    jupyter nbconvert --to notebook --execute --inplace examples/flce.ipynb \\
        --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.coalesce_streams=True
    """
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((pages.ROOT / "examples" / "flce.ipynb").read_text())
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = []
    for cell in cells:
        exec(compile("".join(cell["source"]), "flce.ipynb", "exec"), namespace)
        printed.append(capsys.readouterr().out)
        assert {one.get("name") for one in cell["outputs"]} <= {"stdout"}
        output = "".join(text for one in cell["outputs"] for text in one["text"])
        number = r"-?\d[\d.]*(e-\d+)?"
        assert re.sub(number, "#", output) == re.sub(number, "#", printed[-1])
    assert len(list(filter(None, printed))) >= 5
