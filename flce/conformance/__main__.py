"""Runs implementations on the suite, or on drawn cases. The exit status is 1 if any is wrong."""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import sys
import typing

from .adapters import ADAPTERS
from .cases import draw, suite
from .check import LISTED, Record, run


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("flce.conformance", description=__doc__)
    parser.add_argument("--impl", default="flce", help=f"{', '.join(ADAPTERS)}, --adapters' names")
    parser.add_argument("--adapters", help="a Python file with ADAPTERS, {name: function of it}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, help="draw so many, divided among the implementations")
    parser.add_argument("--seed", type=int, default=0, help="of drawn cases")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this case alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case later")
    parser.add_argument("--json", type=pathlib.Path, help="write the records there")
    return parser.parse_args()


def adapters_of(path: str | None) -> dict[str, typing.Callable]:
    """The ADAPTERS of a user's file."""
    if path is None:
        return {}
    if not pathlib.Path(path).is_file():
        sys.exit(f"--adapters: expected a Python file, got {path}")
    found = runpy.run_path(path).get("ADAPTERS")
    if not isinstance(found, dict):
        sys.exit(
            f"--adapters: expected ADAPTERS, {{name: function of it}}, in {path}, got {found!r}"
        )
    return found


def records(given: argparse.Namespace) -> typing.Iterator[Record]:
    names, drawn = given.impl.split(","), given.cases is not None
    sizes = "small" if given.device == "cpu" else "large"
    label = f"{given.cases} {sizes} cases of seed {given.seed}" if drawn else "suite"
    listed = range(given.cases) if drawn else suite()
    known = ADAPTERS | adapters_of(given.adapters)
    if unknown := set(names) - known.keys():
        sys.exit(f"--impl: one of {', '.join(known)}, got {', '.join(unknown)}")
    for at, name in enumerate(names):
        cases = list(enumerate(listed))
        cases = cases if given.only is None else cases[given.only : given.only + 1]
        if drawn:
            mine = [n for n, _ in cases if n % len(names) == at]
            cases = [(n, draw(given.seed, n, sizes)) for n in mine]
        settings = {"seconds": given.seconds, "batch": 256 if drawn else 1, "label": label}
        if cases:
            yield run(known[name](name), cases, given.device, **settings)


def show(record: Record) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in record.counts.items())
    print(f"{record.impl} {record.version} on {record.device}, {record.cases}: {counts}")
    print(f"  {record.seconds} s; largest error / tolerance of those that passed: {record.worst}")
    for missing, number in record.missing.items():
        print(f"  not offered, {number} cases: {missing}")
    if record.wrong:
        wrong = (f"{name} {number}" for name, number in record.wrong.items())
        print(f"  by group: {', '.join(wrong)}; the first {LISTED} of each:")
    for failure in record.failures:
        print(f"  case {failure['index']}: {failure['case']}")
        print(*(f"    {line}" for line in failure["what"]), sep="\n", flush=True)


def main() -> int:
    given, made = options(), []
    if given.json and not given.json.absolute().parent.is_dir():  # before hours of cases
        sys.exit(f"--json: expected a file in a folder that exists, got {given.json}")
    for record in records(given):
        show(record)
        made.append(vars(record))
        if given.json:
            given.json.write_text(json.dumps(made, indent=1) + "\n")
    if not made:
        sys.exit("--cases, --only: expected to leave a case, got none")
    for record in made:
        if not record["counts"].keys() - {"not offered", "not run"}:
            sys.exit(f"--impl: expected {record['impl']} to be run on a case, got none")
    return int(any(record["wrong"] for record in made))


if __name__ == "__main__":
    sys.exit(main())
