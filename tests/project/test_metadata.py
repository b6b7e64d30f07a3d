"""What a package index and a forge show of the project: versions, links, forms of issues."""

import re
import runpy

import pytest

import flce
from harness import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
HOME = "https://forge.example/flce"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("csrc/flce.h", r'^#define FLCE_VERSION "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
    ],
)
def test_there_is_one_version(file, pattern):
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [flce.__version__]


@pytest.fixture
def setup(monkeypatch, request):
    pytest.importorskip("setuptools", "77")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FLCE_URL", getattr(request, "param", ""))
    return runpy.run_path("setup.py")


@pytest.mark.parametrize("setup", [HOME, f"{HOME}/"], indirect=True)
def test_an_index_gets_absolute_links(setup):
    """To files that the clone has."""
    text = setup["links"]((ROOT / "README.md").read_text())
    targets = re.findall(r"\]\(([^)]+)\)", text)
    relative = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(targets) == len(relative) and f"{HOME}/raw/HEAD/docs/pictures/readme.svg" in targets
    for target, before in zip(targets, relative, strict=True):
        if ":" in before:
            assert target == before
            continue
        path = re.sub(rf"^{HOME}/(raw|blob)/HEAD/", "", target)
        assert path == before and (ROOT / path.split("#")[0]).exists()
    urls = setup["project_urls"]()
    assert urls["Source"] == HOME and urls["Issues"] == f"{HOME}/issues"
    for url in urls.values():
        path = re.sub(rf"^{HOME}/?((blob|tree)/HEAD/)?", "", url)
        assert path == "issues" or (ROOT / path).exists()


def test_without_an_address_there_are_no_urls(setup):
    text = (ROOT / "README.md").read_text()
    assert setup["links"](text) == text and setup["project_urls"]() == {}


def test_forms_of_issues_ask_for_what_is_needed():
    yaml = pytest.importorskip("yaml")
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in FORMS}
    asked = {
        name: [item["attributes"]["label"] for item in form["body"]]
        for name, form in forms.items()
        if name != "config"
    }
    assert asked.keys() == {"fault", "speed"}
    assert all("python -m flce.info" in labels for labels in asked.values())
    assert "python -m flce.bench" in asked["speed"]


def test_other_files_are_yaml():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["cff-version"] == "1.2.0"
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repo["hooks"]
    assert hook["entry"] == "make lint" and "\nlint:" in (ROOT / "Makefile").read_text()
