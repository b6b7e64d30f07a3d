"""Counts of a run over cases, and the table of several runs."""

from __future__ import annotations

import collections
import dataclasses
import platform
import time

import torch

import flce

from .check import evaluate, explain

LISTED = 20  # failures that a record describes
GROSS = 4.0
MOVED = 0.5  # an error of a logit by its rounding that leaves a passed case undecided


@dataclasses.dataclass
class Record:
    """What a run found. counts: numbers of cases that passed, failed (a wrong result), raised, are
    undecided (passed, but the rounding of logits that the implementation states may move one by more
    than MOVED), are not offered, or were not run for want of time or of a device. gross: of those
    that failed, the number that did by more than GROSS tolerances. worst: the largest error over its
    tolerance of the cases that did not fail, by dtype. missing: what was not offered."""

    impl: str
    version: str
    device: str
    cases: str
    rounds: dict = dataclasses.field(default_factory=dict)
    counts: dict = dataclasses.field(default_factory=collections.Counter)
    wrong: dict = dataclasses.field(default_factory=collections.Counter)
    gross: int = 0
    worst: dict = dataclasses.field(default_factory=dict)
    missing: dict = dataclasses.field(default_factory=collections.Counter)
    failures: list = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    torch: str = torch.__version__
    flce: str = flce.__version__
    python: str = platform.python_version()
    machine: str = ""


def run(adapter, cases, device, *, seconds=None, batch=1, label="suite"):
    """The Record of an adapter over `cases`, Cases or (index, Case).

    seconds: no case starts later. batch: cases between two waits for the device.
    """
    device = torch.device(device)
    record = Record(adapter.name, adapter.version, str(device), label, machine=_machine(device))
    started, pending = time.perf_counter(), []
    numbered = [one if isinstance(one, tuple) else (n, one) for n, one in enumerate(cases)]
    for done, (index, case) in enumerate(numbered):
        late = seconds is not None and time.perf_counter() - started > seconds
        if late or (device.type == "cuda" and not _works(record, batch)):
            record.counts["not run"] = len(numbered) - done
            break
        if lacking := adapter.lacks(case):
            record.counts["not offered"] += 1
            record.missing[lacking] += 1
            continue
        rounds = dataclasses.astuple(adapter.rounds(case, device))
        known = record.rounds.get(case.dtype, rounds)
        record.rounds[case.dtype] = tuple(map(max, known, rounds))
        pending.append((index, case, evaluate(adapter, case, device)))
        if len(pending) >= batch:
            _settle(record, adapter, device, pending)
    _settle(record, adapter, device, pending)
    record.seconds = round(time.perf_counter() - started, 1)
    return record


def _works(record, batch):
    """Whether the device still does: an illegal access ends every later call. Looked for after a
    case that failed, where each one is waited for."""
    if batch > 1 or not record.failures:
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _settle(record, adapter, device, pending):
    """Reads the outcomes with one wait for the device, and counts them."""
    made = [outcome for _, _, outcome in pending if not outcome.raised]
    try:
        pairs = [torch.stack([outcome.ratio, outcome.moved]) for outcome in made]
        read = iter(torch.stack(pairs).tolist() if made else [])
    except RuntimeError as error:  # of the device
        for _, _, outcome in pending:
            outcome.raised = outcome.raised or f"RuntimeError: {error}".split("\n")[0]
    for index, case, outcome in pending:
        if outcome.raised:
            _fail(record, "raised", index, case, [outcome.raised])
            continue
        ratio, moved = next(read)
        if not ratio <= 1.0:
            _fail(record, "failed", index, case, explain(adapter, case, device))
            record.gross += ratio > GROSS
            continue
        record.counts["undecided" if moved > MOVED else "passed"] += 1
        worst = max(record.worst.get(case.dtype, 0.0), ratio)
        record.worst[case.dtype] = float(f"{worst:.3g}")
    pending.clear()


def _fail(record, how, index, case, what):
    record.counts[how] += 1
    record.wrong[f"{case.group}: {how}"] += 1
    if len(record.failures) < LISTED:
        record.failures.append({"index": index, "case": str(case), "what": what})


def _machine(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def text(record):
    """The lines that a run prints."""
    counts = ", ".join(f"{number} {name}" for name, number in record.counts.items())
    yield f"{record.impl} {record.version} on {record.device}, {record.cases}: {counts}"
    yield f"  {record.seconds} s; largest error / tolerance of what passed: {record.worst}"
    for missing, number in record.missing.items():
        yield f"  not offered, {number} cases: {missing}"
    for failure in record.failures:
        yield f"  case {failure['index']}: {failure['case']}"
        yield from (f"    {line}" for line in failure["what"])
    unlisted = record.counts["failed"] + record.counts["raised"] - len(record.failures)
    if unlisted > 0:
        yield f"  and {unlisted} more"


HEAD = "| implementation | rounds | passed | failed | by more than 4 tolerances | raised |"
HEAD += " undecided | not offered | largest of those passed | what is wrong |"


def table(records):
    """Markdown lines: a table for each machine, of records as dictionaries."""
    machines = list(dict.fromkeys((one["device"].split(":")[0], one["machine"]) for one in records))
    for device, machine in machines:
        rows = [one for one in records if one["machine"] == machine]
        torches = ", ".join(dict.fromkeys(one["torch"] for one in rows))
        yield f"On {device} ({machine}), torch {torches}:"
        yield ""
        yield HEAD
        yield "|---" * (HEAD.count("|") - 1) + "|"
        for one in rows:
            counts = one["counts"]
            counts |= {"gross": one["gross"]}
            names = ("passed", "failed", "gross", "raised", "undecided", "not offered")
            cells = [f"{one['impl']} {one['version']}".strip(), _rounds(one["rounds"])]
            cells += [str(counts.get(name, 0)) for name in names]
            cells.append(f"{max(one['worst'].values(), default=0.0):.2f}")
            wrong = "; ".join(f"{name} {number}" for name, number in one["wrong"].items())
            late = f"{counts['not run']} not run" if counts.get("not run") else ""
            cells.append("; ".join(filter(None, (wrong, late))) or "nothing")
            yield f"| {' | '.join(cells)} |"
        yield ""


def _rounds(rounds):
    """Such as "bfloat16 1 0 1 1", of 16-bit operands."""
    of_halves = {name: " ".join(map(str, rounds[name])) for name in rounds if "16" in name}
    if len(set(of_halves.values())) == 1:
        return next(iter(of_halves.values()))
    return ", ".join(f"{name} {numbers}" for name, numbers in of_halves.items())
