"""The pages of README.md and docs/: their code blocks, what of these runs, and their links.

A page's ```python blocks run in order in one namespace. Comments of HTML say the rest:

    <!-- setup
    code that runs in its place, unseen by a reader
    -->
    <!-- needs: transformers peft -->       packages without which the page is not run
    <!-- not run: reason -->                before a block
    <!-- tested by tests/test_x.py -->      before a block that this file runs by other means
    <!-- continues -->                      before a block that goes on from the one before it: what
                                            that one imports and assigns is used without being shown

A reader pastes a block: it imports what it uses, unless it continues. Values that a setup assigns
(a model, hidden states) are those that a reader has.

Blocks without a language and ```text hold what a program prints; every other language needs
"not run" or "tested by".
"""

import ast
import builtins
import re
import symtable
import textwrap
from typing import NamedTuple

from harness import ROOT

DOCS = ROOT / "docs"
GENERATED = DOCS / "api.md"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if p != GENERATED)]
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (.*?)-->", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*([^)\s]+)\s*\)")


class Block(NamedTuple):
    """language: "setup" for a comment. reason: of the comments right before it, or ""."""

    language: str
    code: str
    line: int
    reason: str
    continues: bool = False


def name_of(page):
    return str(page.relative_to(ROOT))


def needs_of(page):
    """The packages without which a page is not run."""
    found = re.findall(r"^<!-- needs: (.*?) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for names in found for name in names.split()]


def _marks_before(text):
    """The comments that stand right before the end of the text, the last one first."""
    comments = {m.end(): m for m in _COMMENT.finditer(text)}
    found = []
    while comment := comments.get(len(text.rstrip())):
        found.append(comment.group(1).strip())
        text = text[: comment.start()]
    return found


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        marks = _marks_before(text[: match.start()])
        reasons = [mark for mark in marks if mark.startswith(("not run: ", "tested by "))]
        line = text.count("\n", 0, match.start(2)) + 1
        reason, continues = "".join(reasons[:1]), "continues" in marks
        found.append(Block(match.group(1), match.group(2), line, reason, continues))
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
        code = "\n" * (block.line - 1) + textwrap.dedent(block.code)
        exec(compile(code, name_of(page), "exec"), namespace)


def imported(code):
    """The names that a block's imports bind."""
    nodes = ast.walk(ast.parse(textwrap.dedent(code)))
    aliases = [a for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def assigned(code):
    """The names that a block binds, by an import or otherwise."""
    table = symtable.symtable(textwrap.dedent(code), "block", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def used(code):
    """The names that a block reads and does not bind, functions and classes in it included."""
    code = textwrap.dedent(code)
    tables, found = [symtable.symtable(code, "block", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outer = table.get_type() == "module"
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (outer or symbol.is_global())
        }
    return found - assigned(code) - set(dir(builtins))


def unexplained(page, everywhere):
    """(line, names) of each visible block of Python that reads what a reader has not seen: a name
    that it neither imports nor assigns, nor a block that it continues, although it is one that
    pages import (everywhere) or that the block before assigned."""
    blocks = [b for b in blocks_of(page) if b.language in ("setup", "python")]
    given, seen, before = set(), set(), set()
    for block in blocks:
        if block.language == "setup":
            given |= assigned(block.code)
            continue
        known = seen if block.continues else set()
        missing = used(block.code) - known
        missing = {n for n in missing if n in everywhere or (n in before and n not in given)}
        if missing:
            yield block.line, sorted(missing)
        seen = known | assigned(block.code)
        before |= seen


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
