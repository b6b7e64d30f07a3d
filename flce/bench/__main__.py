"""`python -m flce.bench`: thirty seconds on this machine; a table, a picture, a JSON to send."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import torch

from . import CONTESTANTS, Case, default_case, machine, run
from .machine import load_warning
from .progress import Progress
from .report import describe, draw, record, table

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m flce.bench", description=__doc__)
    add = arguments.add_argument
    cuda = torch.cuda.is_available()
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    add("--tokens", type=int, help="N; the default depends on the device, as H, V and the dtype")
    add("--hidden", type=int, help="H")
    add("--vocab", type=int, help="V")
    add("--dtype", choices=_DTYPES)
    add("--seconds", type=float, default=30.0, help="of all rounds; a few rounds are run anyway")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    add("--json", type=pathlib.Path, default=pathlib.Path("flce-bench.json"))
    add("--picture", type=pathlib.Path, default=pathlib.Path("flce-bench.png"))
    return arguments


def _case(options: argparse.Namespace) -> Case:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device that torch can use, got none")
    default = default_case(options.device)
    sizes = {}
    for name in ("tokens", "hidden", "vocab"):
        size = getattr(options, name)
        sizes[name] = getattr(default, name) if size is None else size
        if not 1 <= sizes[name] < 1 << 31:
            raise ValueError(f"{name}: expected 1 to {(1 << 31) - 1}, got {sizes[name]}")
    if not options.seconds >= 0:  # nor NaN
        raise ValueError(f"seconds: expected 0 or more, got {options.seconds}")
    for name in ("json", "picture"):
        folder = getattr(options, name).absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{name}: expected a file in a folder that exists, got {folder}")
    dtype = _DTYPES[options.dtype] if options.dtype else default.dtype
    return Case(sizes["tokens"], sizes["hidden"], sizes["vocab"], options.device, dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        case = _case(options)
    except ValueError as error:
        print(f"flce.bench: {error}", file=sys.stderr)
        return 2
    facts = machine(case.device)
    print(describe(case, facts), flush=True)
    if warning := load_warning():
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    with Progress(options.seconds) as progress:
        results = run(case, options.seconds, tuple(options.contestants), progress)
    print(table(results))
    options.json.write_text(json.dumps(record(case, facts, results), indent=1) + "\n")
    print(f"wrote {options.json}")
    if all(result.failed for result in results):
        return 1
    try:
        draw(options.picture, case, facts, results)
        print(f"wrote {options.picture}")
    except ImportError as error:
        print(f"no picture: {error}; `pip install matplotlib` and run it again", file=sys.stderr)
    except (OSError, ValueError) as error:  # a format that matplotlib does not know
        print(f"no picture: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
