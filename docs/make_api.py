#!/usr/bin/env python3
"""Writes docs/api.md, a page of the site, from the docstrings of flce's public names.

python docs/make_api.py

mkdocstrings does not serve here (2.0.11, tried 2026-11-27). From the source it shows the twins in
flce/plain.py, `**options` without their names, and the module flce.plan in place of the function;
by inspection it fails at the Modules. In both the examples and the fields of tuples run together.
"""

import inspect
import pathlib
import re
import textwrap

import flce

DOCS = pathlib.Path(__file__).parent
# What a user calls first comes first.
ORDER = ["linear_cross_entropy", "fuse", "explain", "linear_logprobs", "linear_logprobs_at"]
ORDER += [
    "linear_loss",
    "linear_divergence",
    "cross_entropy",
    "LinearCrossEntropyHead",
    "LinearCrossEntropyLoss",
]
SECTIONS = ("Args", "Returns", "Raises", "Shape")
INTRODUCTION = """# API

<!-- Written by docs/make_api.py from the docstrings. -->

The public names of `flce`, from their docstrings. Shapes are those of tensors; (...) stands for any
leading dimensions. Every example is run by a test, after `import flce, torch` and
`from torch import nn`. [What each option means](semantics.md) has
formulas and differences from other implementations, [errors](errors.md) every refusal.

"""


def signature_of(name, found):
    """The call, an argument a line where it is long; None of a module."""
    try:
        signature = inspect.signature(found)
    except TypeError:
        return None
    parameters = [
        re.sub(r": [^=]*?(?= ?=|$)", "", str(one)) for one in signature.parameters.values()
    ]
    parameters = [text.replace(" = ", "=") for text in parameters]
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"flce.{name}({', '.join(parameters)})"
    if len(line) <= 88:
        return line
    return "\n".join(
        [
            f"flce.{name}(",
            *textwrap.wrap(
                ", ".join(parameters) + ",",
                84,
                initial_indent="    ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            ),
            ")",
        ]
    )


def linked(text):
    """``code`` as `code`, names of pages as links; what Markdown would read, escaped."""
    text = re.sub(r"``(.+?)``", lambda m: f"`{m[1]}`", text, flags=re.DOTALL)
    text = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](\1.md)", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*<])", r"\\\1", p) for p in parts)


def items(lines):
    """A list of `name: text` entries, which are indented where they go on."""
    entries = []
    for line in lines:
        if line[:1].strip() or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    made = []
    for entry in entries:
        name, colon, text = entry.partition(": ")
        is_name = colon and re.fullmatch(r"[\w*`,. ]+", name)
        made.append(
            f"- **{name.replace('*', chr(92) + '*')}**: {linked(text)}"
            if is_name
            else f"- {linked(entry)}"
        )
    return "\n".join(made)


def with_fields(text, fields):
    """A list of what a paragraph says of fields: `name: text` from a line's or sentence's start."""
    names = "|".join(fields)
    head = re.compile(rf"(?:^|(?<=\. ))`?({names})`?(, with [^:]*)?: ", re.MULTILINE)
    first = head.search(text)
    if not fields or not first:
        return text
    before, rest = text[: first.start()], text[first.start() :]
    entries = head.sub(lambda m: f"\n- **{m[1]}**{m[2] or ''}: ", rest)
    entries = re.sub(r"\s*\n(?!- )", " ", entries)
    return f"{before.rstrip()}\n\n{entries.strip()}".strip()


def body_of(docstring, fields):
    """Markdown of a docstring: paragraphs, sections, the example. fields: of a tuple of results."""
    text, _, example = docstring.partition("\n>>> ")
    made = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        first, _, rest = paragraph.partition("\n")
        section, colon, tail = first.partition(":")
        section = section.partition(",")[0]
        if section in SECTIONS and colon and (rest or not tail.strip()) and not tail.strip():
            lines = textwrap.dedent(rest).splitlines()
            text = linked(" ".join(lines)) if section == "Returns" else items(lines)
            made += [f"**{first.rstrip(':')}**", text]
        else:
            made.append(with_fields(linked(textwrap.dedent(paragraph)), fields))
    if example:
        made += ["**Example**", f"```pycon\n>>> {example.rstrip()}\n```"]
    return "\n\n".join(made)


def page():
    """The text of docs/api.md."""
    names = [*ORDER, *(name for name in flce.__all__ if name not in ORDER)]
    made = []
    for name in names:
        found = getattr(flce, name)
        made.append(f"## flce.{name}")
        if signature := signature_of(name, found):
            made.append(f"```python\n{signature}\n```")
        fields = getattr(found, "_fields", getattr(found, "__dataclass_fields__", ()))
        made.append(body_of(inspect.getdoc(found), list(fields)))
    return INTRODUCTION + "\n\n".join(made) + "\n"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page(), encoding="utf-8")
