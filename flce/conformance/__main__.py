"""`python -m flce.conformance`: runs implementations, prints what is wrong; see `--help`."""

import argparse
import json
import pathlib
import sys

import torch

from . import adapters, report
from .cases import NAMES, draw, suite

MARK = "<!-- table -->"


def arguments():
    parser = argparse.ArgumentParser("flce.conformance", description=__doc__)
    known = ", ".join(adapters.ADAPTERS)
    parser.add_argument("--impl", default="flce", help=f"names by commas, of {known}; or all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", default=".peers", help="a folder with other packages' wheels")
    parser.add_argument("--cases", type=int, help="draw so many cases, instead of the suite's")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cases")
    parser.add_argument("--sizes", choices=("small", "large"), help="of drawn cases (by the device)")
    parser.add_argument("--dtypes", default=",".join(NAMES), help="of drawn cases")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this case alone")
    parser.add_argument("--seconds", type=float, help="start no case of an implementation later")
    parser.add_argument("--json", type=pathlib.Path, help="write the records there")
    parser.add_argument("--table", nargs="+", type=pathlib.Path, help="print these records' table")
    parser.add_argument("--write", type=pathlib.Path, help=f"put it between the {MARK} of this file")
    return parser.parse_args()


def numbered_cases(given, names):
    """For each name its (index, Case): all of the suite's, or its share of those drawn."""
    if given.cases is None:
        listed = list(enumerate(suite()))
        shares = {name: listed for name in names}
    else:
        sizes = given.sizes or ("small" if given.device == "cpu" else "large")
        dtypes = tuple(given.dtypes.split(","))
        indices = range(given.cases) if given.only is None else [given.only]
        drawn = [(index, draw(given.seed, index, sizes, dtypes)) for index in indices]
        shares = {
            name: [one for one in drawn if one[0] % len(names) == position]
            for position, name in enumerate(names)
        }
    if given.only is None:
        return shares
    return {name: [one for one in share if one[0] == given.only] for name, share in shares.items()}


def records(given):
    names = given.impl.split(",")
    if given.impl == "all":
        names = adapters.ON_CPU if given.device == "cpu" else list(adapters.ADAPTERS)
    sys.path.append(str(given.peers))
    label = "suite" if given.cases is None else f"seed {given.seed}, {given.cases} cases"
    batch = 1 if given.cases is None else 256
    for name, share in numbered_cases(given, names).items():
        if not share:
            continue
        try:
            adapter = adapters.adapter(name, given.peers)
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            print(f"{name}: not loaded: {type(error).__name__}: {error}")
            continue
        yield report.run(
            adapter, share, given.device, seconds=given.seconds, batch=batch, label=label
        )


def show(given):
    read = [one for path in given.table for one in json.loads(path.read_text())]
    lines = "\n".join(report.table(read))
    if given.write is None:
        return print(lines)
    before, _, after = given.write.read_text().split(MARK)
    given.write.write_text(f"{before}{MARK}\n\n{lines}\n{MARK}{after}")


def main():
    given = arguments()
    if given.table:
        return show(given)
    made, wrong = [], 0
    for record in records(given):
        print("\n".join(report.text(record)), flush=True)
        made.append(vars(record))
        wrong += record.counts["failed"] + record.counts["raised"]
        if given.json:
            given.json.write_text(json.dumps(made, indent=1) + "\n")
    sys.exit(1 if wrong or not made else 0)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
