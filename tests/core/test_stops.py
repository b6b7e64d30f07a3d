"""How many Python functions a call's input passes before the operator runs. To see them:
python tests/core/test_stops.py."""

import sys
from pathlib import Path

import torch

import flce

MOST = 8
PACKAGE = str(Path(flce.__file__).parent) + "/"  # the folder of a clone is called flce too


def stops_of(call, tensor):
    """Functions of flce that get `tensor`, or hold it in a sequence, before the operator."""
    names, running = [], True

    def gets(value):
        held = isinstance(value, (tuple, list)) and any(one is tensor for one in value)
        return value is tensor or held

    def note(frame, event, arg):
        nonlocal running
        code = frame.f_code
        if running and event == "call" and code.co_filename.startswith(PACKAGE):
            count = code.co_argcount + code.co_kwonlyargcount
            count += bool(code.co_flags & 4) + bool(code.co_flags & 8)
            if any(gets(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
                names.append(code.co_name)
        if names and names[-1] == "run_plain":  # which calls the operator
            running = False

    sys.setprofile(note)
    try:
        call(tensor)
    finally:
        sys.setprofile(None)
    return names


def stops():
    w, target = torch.randn(32, 16, requires_grad=True), torch.arange(8)

    def call(x):
        return flce.linear_cross_entropy(x, w, target)

    call(torch.randn(8, 16, requires_grad=True))  # the first call fills caches
    return stops_of(call, torch.randn(8, 16, requires_grad=True))


def test_a_call_has_few_stops():
    names = stops()
    assert names[0] == "linear_cross_entropy" and names[-1] == "run_plain"
    assert len(names) <= MOST, names


if __name__ == "__main__":
    print(*stops(), sep="\n")
