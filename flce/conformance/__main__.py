"""Runs implementations on the suite, or on drawn cases. The exit status is 1 if any is wrong."""

from __future__ import annotations

import argparse
import json
import pathlib
import runpy
import sys
import typing
import warnings

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
    adapters = runpy.run_path(path).get("ADAPTERS")
    if not isinstance(adapters, dict):
        sys.exit(
            f"--adapters: expected ADAPTERS, {{name: function of it}}, in {path}, got {adapters!r}"
        )
    return adapters


def records(arguments: argparse.Namespace) -> typing.Iterator[Record]:
    names, drawn = arguments.impl.split(","), arguments.cases is not None
    sizes = "small" if arguments.device == "cpu" else "large"
    label = f"{arguments.cases} {sizes} cases of seed {arguments.seed}" if drawn else "suite"
    listed = range(arguments.cases) if drawn else suite()
    known = ADAPTERS | adapters_of(arguments.adapters)
    if unknown := set(names) - known.keys():
        sys.exit(f"--impl: one of {', '.join(known)}, got {', '.join(unknown)}")
    for at, name in enumerate(names):
        cases = list(enumerate(listed))
        cases = cases if arguments.only is None else cases[arguments.only : arguments.only + 1]
        if drawn:
            mine = [n for n, _ in cases if n % len(names) == at]
            cases = [(n, draw(arguments.seed, n, sizes)) for n in mine]
        settings = {"seconds": arguments.seconds, "batch": 256 if drawn else 1, "label": label}
        if cases:
            yield run(known[name](name), cases, arguments.device, **settings)


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
    arguments, results = options(), []
    if arguments.json and not arguments.json.absolute().parent.is_dir():  # before hours of cases
        sys.exit(f"--json: expected a file in a folder that exists, got {arguments.json}")
    warnings.filterwarnings("ignore", "flce: every label is ignore_index")  # some cases have that
    for record in records(arguments):
        show(record)
        results.append(vars(record))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if not results:
        sys.exit("--cases, --only: expected to leave a case, got none")
    for record in results:
        if not record["counts"].keys() - {"not offered", "not run"}:
            sys.exit(f"--impl: expected {record['impl']} to be run on a case, got none")
    return int(any(record["wrong"] for record in results))


if __name__ == "__main__":
    sys.exit(main())
