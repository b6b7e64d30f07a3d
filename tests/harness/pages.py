"""The pages of README.md and docs/: their code blocks, what of these runs, and their links.

A page's ```python blocks run in order in one namespace. Comments of HTML say the rest:

    <!-- setup
    code that runs in its place, unseen by a reader
    -->
    <!-- needs: transformers peft -->       packages without which the page is not run
    <!-- not run: reason -->                before a block
    <!-- tested by tests/test_x.py -->      before a block that this file runs by other means

Blocks without a language and ```text hold what a program prints; every other language needs one of
the last two comments.
"""

import re
from typing import NamedTuple

from harness import ROOT

DOCS = ROOT / "docs"
GENERATED = DOCS / "api.md"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if p != GENERATED)]
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (.*?)-->", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*([^)\s]+)\s*\)")


class Block(NamedTuple):
    """language: "setup" for a comment. reason: the comment right before it, or ""."""

    language: str
    code: str
    line: int
    reason: str


def name_of(page):
    return str(page.relative_to(ROOT))


def needs_of(page):
    """The packages without which a page is not run."""
    found = re.findall(r"^<!-- needs: (.*?) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for names in found for name in names.split()]


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip()
        marks = [m for m in _COMMENT.finditer(before) if m.end() == len(before)]
        mark = marks[0].group(1).strip() if marks else ""
        reason = mark if mark.startswith(("not run: ", "tested by ")) else ""
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(match.group(1), match.group(2), line, reason))
    for match in _COMMENT.finditer(text):
        if match.group(1).startswith("setup\n"):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block("setup", match.group(1).partition("\n")[2], line, ""))
    return sorted(found, key=lambda block: block.line)


def runs(block):
    return block.language in ("setup", "python") and not block.reason


def unmarked(block):
    """Whether a block is code that nothing runs, without a reason."""
    return block.language not in ("", "text") and not block.reason and not runs(block)


def run(page, namespace):
    """Runs a page's blocks. An error's traceback has the page's line."""
    for block in filter(runs, blocks_of(page)):
        indent = re.match(" *", block.code).group()
        code = re.sub(f"^{indent}", "", block.code, flags=re.MULTILINE)
        exec(compile("\n" * (block.line - 1) + code, name_of(page), "exec"), namespace)


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", _COMMENT.sub("", text)))


def anchors_of(text):
    """The anchors of a page's headings, as Python-Markdown and forges make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *#*$", _FENCE.sub("", text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", slug))
    return found


def links_of(page):
    """(file, anchor) of each link inside the repository."""
    for target in _LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor
