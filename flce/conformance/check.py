"""Runs an implementation on cases, compares with the truth, and counts."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
import typing

import torch

from .cases import FEATURES, NAMES, Case, Operands, build
from .truth import UNIT, Rounding, Truth, truth

LISTED, GROSS = 20, 4.0  # failures that a record describes; tolerances
MOVED = 0.5  # an error of a logit by its rounding that leaves a case undecided which does not fail


@dataclasses.dataclass
class Adapter:
    """An implementation: `loss(x, w, y, bias, options)` returns the loss, with its graph.

    x (N, H), w (V, H), y (N,), bias (V,) or None. options: `reduction` and `ignore_index` always,
    `softcap`, `label_smoothing`, `z_loss`, `weight` (V,) only where a case has them.

    offers: what it supports, of FEATURES and the names of dtypes. refuses: why it supports no such
    case for another reason that it states itself, such as sizes, or "". rounds: how often it says
    that it rounds."""

    name: str
    loss: typing.Callable[..., torch.Tensor]
    offers: frozenset[str] = frozenset((*FEATURES, *NAMES))
    rounds: typing.Callable[[Case, torch.device], Rounding] = lambda case, device: Rounding()
    refuses: typing.Callable[[Case], str] = lambda case: ""
    version: str = ""

    def __post_init__(self) -> None:
        """A misspelled name would count as not offered what it was to offer."""
        known, self.offers = {*FEATURES, *NAMES}, frozenset(self.offers)
        if unknown := self.offers - known:
            expected = f"some of {', '.join(sorted(known))}"
            raise ValueError(f"offers: expected {expected}, got {', '.join(sorted(unknown))}")

    def lacks(self, case: Case) -> str:
        """What the case needs and this does not offer."""
        return ", ".join(sorted(case.needs() - self.offers)) or self.refuses(case)


def _constants(given: Operands) -> dict[str, torch.Tensor]:
    """What an implementation reads and may not write, by name."""
    named = {"x": given.x, "w": given.w, "y": given.y, "bias": given.bias}
    named |= {"class weights": given.options.get("weight"), "upstream": given.upstream}
    return {name: one.detach() for name, one in named.items() if one is not None}


def errors(adapter: Adapter, case: Case, given: Operands, expected: Truth | None = None) -> dict:
    """(error, tolerance) by the result's name. A gradient that is missing, or not of its operand's
    shape and dtype, is infinitely wrong, and so is an element of an operand that was written to.
    Raises what the implementation raises."""
    expected = expected or truth(case, given, adapter.rounds(case, given.x.device))
    before = {name: one.clone() for name, one in _constants(given).items()}
    loss = adapter.loss(given.x, given.w, given.y, given.bias, dict(given.options))
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}")
    upstream, leaves = given.upstream.to(loss.dtype), list(given.leaves.values())
    grads = torch.autograd.grad(loss, leaves, upstream, allow_unused=True)
    made = dict(zip(given.leaves, grads, strict=True)) | {"loss": loss.detach()}
    found = {}
    for name, value in _constants(given).items():
        written = (value != before[name]) & ~(value.isnan() & before[name].isnan())
        error = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        found[f"{name}, written to"] = (
            error.masked_fill(written, torch.inf),
            torch.zeros_like(error),
        )
    for name, value in made.items():
        exact, tolerance = expected.exact[name], expected.tolerance[name]
        dtype = given.leaves[name].dtype if name != "loss" else loss.dtype
        if value is None or value.shape != exact.shape or value.dtype != dtype:
            found[name] = torch.full_like(exact, torch.inf), tolerance
            continue
        right = tolerance.isinf()  # where a gradient overflows its dtype
        if name == "loss":
            tolerance = tolerance + UNIT[dtype] * exact.abs()
            if case.reduction == "mean":  # of no rows: 0, or NaN as torch has it
                right |= value.isnan() & (given.y == case.ignore_index).all()
        found[name] = (value.double() - exact).abs().masked_fill(right, 0.0), tolerance
    return found


def _ratio(error, tolerance):
    return (error / tolerance).masked_fill(error == 0, 0.0).nan_to_num(nan=torch.inf)


def evaluate(adapter: Adapter, case: Case, device: torch.device) -> torch.Tensor:
    """The largest error over its tolerance (inf for NaN), and the largest `Truth.moved`: two
    numbers on the device, for which this does not wait."""
    given = build(case, device)
    expected = truth(case, given, adapter.rounds(case, device))
    zero = expected.moved.new_zeros(1)
    ratios = [_ratio(*pair).flatten() for pair in errors(adapter, case, given, expected).values()]
    return torch.stack(
        [torch.cat([zero, *ratios]).amax(), torch.cat([zero, expected.moved]).amax()]
    )


def explain(adapter: Adapter, case: Case, device: torch.device) -> list[str]:
    """A line for each result that is wrong: where, by how much, and the tolerance there."""
    given, lines = build(case, device), []
    for name, (error, tolerance) in errors(adapter, case, given).items():
        bad = ~(error <= tolerance)
        if bad.any():
            at = int(_ratio(error, tolerance).argmax())
            place = [int(one) for one in torch.unravel_index(torch.tensor(at), error.shape)]
            one, limit = (f"{values.flatten()[at].item():.2e}" for values in (error, tolerance))
            count = f"{int(bad.sum())} of {bad.numel()} elements"
            lines.append(f"{name}{place or ''}: error {one}, tolerance {limit}; {count}")
    return lines


@dataclasses.dataclass
class Record:
    """What a run found. counts: cases that passed, failed (a wrong result), raised, are undecided
    (passed, but the rounding of logits that the implementation states may move one by more than
    MOVED), are not offered (`missing` says what), or were not run for want of time. gross: of those
    that failed, how many by more than GROSS tolerances. wrong: numbers by the case's group. worst:
    the largest error over its tolerance of those that passed. rounds: the largest `Rounding`."""

    impl: str
    version: str
    device: str
    machine: str
    cases: str
    torch: str = torch.__version__
    gross: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    wrong: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    missing: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    rounds: dict[str, tuple] = dataclasses.field(default_factory=dict)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[dict] = dataclasses.field(default_factory=list)

    def fail(self, how: str, index: int, case: Case, what: list[str]) -> None:
        self.counts[how] += 1
        self.wrong[f"{case.group}: {how}"] += 1
        if len(self.failures) < LISTED:
            self.failures.append({"index": index, "case": str(case), "what": what})


def run(
    adapter: Adapter, cases: typing.Sequence, device, seconds=math.inf, batch=1, label="suite"
) -> Record:
    """The Record of an adapter over numbered cases. seconds: no case starts later; batch: cases
    between two waits for the device."""
    device = torch.device(device)
    cuda, started, pending = device.type == "cuda", time.perf_counter(), []
    name = torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()
    record = Record(adapter.name, adapter.version, device.type, name, label)
    for done, (index, case) in enumerate(cases):
        if time.perf_counter() - started > seconds:
            record.counts["not run"] = len(cases) - done
            break
        if lacking := adapter.lacks(case):
            record.counts["not offered"] += 1
            record.missing[lacking] += 1
            continue
        rounds = adapter.rounds(case, device)
        record.rounds[case.dtype] = tuple(map(max, record.rounds.get(case.dtype, rounds), rounds))
        try:
            pending.append((index, case, evaluate(adapter, case, device)))
            if len(pending) >= batch:
                _settle(record, adapter, device, pending)
        except Exception as error:  # an implementation may raise anything
            record.fail("raised", index, case, [f"{type(error).__name__}: {error}"[:200]])
            if cuda and "CUDA error" in str(error):  # so will every later call
                record.counts["not run"] = len(cases) - done - 1
                break
    _settle(record, adapter, device, pending)
    record.seconds = round(time.perf_counter() - started, 1)
    return record


def _settle(record, adapter, device, pending):
    """Reads the outcomes with one wait for the device, and counts them."""
    read, pending[:] = list(pending), []
    values = torch.stack([one[2] for one in read]).tolist() if read else []
    for (index, case, _), (ratio, moved) in zip(read, values, strict=True):
        if not ratio <= 1.0:
            record.gross += ratio > GROSS
            record.fail("failed", index, case, explain(adapter, case, device))
            continue
        record.counts["undecided" if moved > MOVED else "passed"] += 1
        record.worst[case.dtype] = max(record.worst.get(case.dtype, 0.0), ratio)
