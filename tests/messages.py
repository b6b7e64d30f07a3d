"""The texts of flce's errors, read from its source, with … in the place of what varies.

Python: `refuse(name, expected, got)`, `raise Error(text)`, and what a function assigns to the names
in these. C: flce_fail and EXPECT of check.c, and the ranges of FLCE_LOSS_NUMBERS.
"""

import ast
import re
from itertools import product

from harness.pages import DOCS, ROOT

ANY = "…"
_MOST = 12  # texts of one expression that branches
# What is left of a message that another function words.
_FORM = re.compile(r"[…:,()\s]|expected|got|shapes|and|flce\.fuse|strict=True|of 64 bits|teacher_")
_CALLS = re.compile(r"\b(?:flce_fail\(\s*\w+\s*,|EXPECT\((?!rule))")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def tidy(text):
    """… for each run of what varies, and no white space that a line's end has made."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(f"{ANY}+", ANY, text)


def _blocks(tree):
    """The lists of statements in a function, each with its first and last line."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block[0].lineno, block[-1].end_lineno, block


def _assigned(tree):
    """{name: [(line, first and last line of its block, value)]}; a value that is added to the name
    has the operator."""
    names = {}
    for first, last, block in _blocks(tree):
        for statement in block:
            if isinstance(statement, ast.AugAssign):
                pairs = [(statement.target, statement)]
            elif isinstance(statement, ast.Assign):
                target, value = statement.targets[0], statement.value
                both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                parts = zip(target.elts, value.elts, strict=True) if both else [(target, value)]
                pairs = list(parts)
            else:
                continue
            for target, value in pairs:
                if isinstance(target, ast.Name):
                    known = names.setdefault(target.id, [])
                    known.append((statement.lineno, first, last, value))
    return {name: sorted(known, key=lambda one: -one[0]) for name, known in names.items()}


class _Function(ast.NodeVisitor):
    """The texts that a function raises."""

    def __init__(self, constants, names):
        self.constants, self.names, self.found = constants, names, []

    def texts(self, node, line=None, depth=0):
        """Every text that an expression on a line may be."""
        line = line or node.lineno
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str) else [ANY]
        if isinstance(node, ast.JoinedStr):
            parts = [self._part(value, line, depth) for value in node.values]
            return ["".join(one) for one in product(*parts)][:_MOST]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (self.texts(side, line, depth) for side in (node.left, node.right))
            return [a + b for a, b in product(*sides)][:_MOST]
        if isinstance(node, ast.IfExp):
            return [t for one in (node.body, node.orelse) for t in self.texts(one, line, depth)]
        if isinstance(node, ast.Name) and depth < 4:
            return self._named(node.id, line, depth) or [ANY]
        return [ANY]

    def _part(self, value, line, depth):
        if isinstance(value, ast.Constant):
            return [value.value]
        return self.texts(value.value, line, depth) if value.conversion == -1 else [ANY]

    def _named(self, name, line, depth):
        """The texts that were last assigned to a name before a line: of each branch."""
        found = []
        for at, first, last, value in self.names.get(name, []):
            if at >= line:
                continue
            if isinstance(value, ast.AugAssign):
                before = self._named(name, at, depth + 1)
                pairs = product(before, self.texts(value.value, at, depth + 1))
                found += [a + b for a, b in pairs]
            else:
                found += self.texts(value, at, depth + 1)
            if first <= line <= last:
                return found[:_MOST]
        for _, _, _, value in [] if found else self.constants.get(name, []):
            found += self.texts(value, None, depth + 1)
        return found[:_MOST]

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "refuse" and len(node.args) >= 3:
            parts = map(self.texts, node.args[:3])
            self.found += ["{}: expected {}, got {}".format(*one) for one in product(*parts)]
        self.generic_visit(node)

    def visit_Raise(self, node):
        call = node.exc
        if isinstance(call, ast.Call) and getattr(call.func, "id", "").endswith("Error"):
            self.found += [text for arg in call.args[:1] for text in self.texts(arg)]
        self.generic_visit(node)


def of_python(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = _assigned(ast.Module([n for n in tree.body if isinstance(n, ast.Assign)], []))
    inside = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            visitor = _Function(constants, _assigned(function))
            visitor.visit(function)
            inside.update(map(tidy, visitor.found))
    visitor = _Function(constants, {})
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            visitor.visit(node)
    return inside | set(map(tidy, visitor.found))


def _argument(text, start):
    """The text of a call's arguments from `start`, its first character after the bracket."""
    depth, i = 1, start
    while depth:
        if text[i] == '"':
            i = _STRING.match(text, i).end() - 1
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        i += 1
    return text[start : i - 1]


def _pieces(text, separator):
    """The parts of an expression of C++ between separators that are in no brackets and no text."""
    made, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == '"':
            i = _STRING.match(text, i).end() - 1
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[i], 0)
        if text[i] == separator and depth == 0:
            made.append(text[start:i])
            start = i + 1
        i += 1
    return [*made, text[start:]]


def _shown(expression):
    """The text of a sum of strings of C++, … for what is no literal."""
    parts = []
    for piece in _pieces(expression, "+"):
        literal = re.fullmatch(r'\s*(?:std::string\()?((?:"(?:[^"\\]|\\.)*"\s*)+)\)?\s*', piece)
        parts.append("".join(_STRING.findall(literal[1])) if literal else ANY)
    return "".join(parts).replace('\\"', '"')


def of_c(path):
    text = path.read_text(encoding="utf-8")
    found = set()
    for match in _CALLS.finditer(text):
        start = text.index("(", match.start()) + 1
        strings = re.search(r'("(?:[^"\\]|\\.)*"(?:\s|\w+|\\)*)+', _argument(text, start))
        if strings:
            shown = "".join(_STRING.findall(strings.group()))
            found.add(re.sub(r"%(?:\.\*)?(?:ll)?[a-z]", ANY, shown.replace('\\"', '"')))
    for match in re.finditer(r"\b(refuse|throw Failure)\(", text):
        arguments = _pieces(_argument(text, match.end()), ",")
        if match[1] == "refuse" and not arguments[0].startswith("const std::string&"):
            found.add("{}: expected {}, got {}".format(*map(_shown, arguments[:3])))
        elif len(arguments) > 1:
            found.add(_shown(arguments[1]))
    numbers = re.findall(r'^ +X\((\w+), value [^"]*"([^"]+)"', text, re.MULTILINE)
    found |= {f"{name}: expected {expected}, got {ANY}" for name, expected in numbers}
    return set(map(tidy, found))


def every():
    """{text: the files that have it}."""
    found = {}
    sources = sorted((ROOT / "flce").rglob("*.py"))
    sources += sorted(
        p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".c", ".cpp", ".cu", ".h", ".cuh")
    )
    for path in sources:
        for text in of_python(path) if path.suffix == ".py" else of_c(path):
            if _FORM.sub("", text):
                found.setdefault(text, []).append(str(path.relative_to(ROOT)))
    return found


def on_page():
    """The texts of docs/errors.md: in the first column of its tables, and in its last block."""
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith(("| `", "| ``"))]
    found = {one or two for row in rows for one, two in re.findall(r"`` (.+?) ``|`(.+?)`", row)}
    return found | set(re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)[-1].splitlines())


def compared():
    """(texts that docs/errors.md lacks, those that no source has)."""
    sources, page = set(every()), on_page()
    return sorted(sources - page), sorted(page - sources)


if __name__ == "__main__":
    for title, texts in zip(("lacking", "left over"), compared(), strict=True):
        print(title, *texts, sep="\n  ")
