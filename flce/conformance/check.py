"""Runs an implementation on cases, compares with the truth, and counts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
import typing

import torch

from .calls import CALLS
from .cases import FEATURES, NAMES, Case
from .operands import Operands, build
from .truth import UNIT, Rounding, Truth, truth

LISTED = 5  # failures of a group that a record describes
GROSS = 4.0  # tolerances
PARALLEL = 2**18  # elements of x, w and logits from which a case uses all of torch's threads
MOVED = 0.5  # a case that passes is undecided if the declared rounding may move a logit by more


@dataclasses.dataclass
class Adapter:
    """An implementation: `loss(x, w, y, bias, options)` returns the loss, with its graph.

    x (N, H), w (V, H), y (N,), bias (V,) or None. options: `reduction` and `ignore_index` always,
    `softcap`, `label_smoothing`, `z_loss`, `weight` (V,) only where a case has them.

    offers: what it supports, of FEATURES and the names of dtypes. refuses: why it supports no such
    case for another reason that it states itself, such as sizes, or "". rounds(case, device): the
    Rounding that it declares. half_loss: the loss of bfloat16 or float16 operands may have their
    dtype, which rounds it once; without it, a loss that is not float32 or float64 is a failure."""

    name: str
    loss: typing.Callable[..., torch.Tensor]
    offers: frozenset[str] = frozenset((*FEATURES, *NAMES))
    rounds: typing.Callable[[Case, torch.device], Rounding] = lambda case, device: Rounding()
    refuses: typing.Callable[[Case], str] = lambda case: ""
    version: str = ""
    half_loss: bool = False

    def __post_init__(self) -> None:
        """Refuses unknown names: a misspelled feature would count as not offered."""
        known, self.offers = {*FEATURES, *NAMES}, frozenset(self.offers)
        if unknown := self.offers - known:
            expected = f"some of {', '.join(sorted(known))}"
            raise ValueError(f"offers: expected {expected}, got {', '.join(sorted(unknown))}")

    def lacks(self, case: Case) -> str:
        """What the case needs and this does not offer."""
        if self.half_loss and case.dtype == "float16" and case.upstream == "scaled":
            return "an upstream gradient of 65536 of a float16 loss, whose dtype ends at 65504"
        return ", ".join(sorted(case.needs() - self.offers)) or self.refuses(case)


def _constants(operands: Operands) -> dict[str, torch.Tensor]:
    """What an implementation reads and may not write, by name."""
    named = {"x": operands.x, "w": operands.w, "y": operands.y, "bias": operands.bias}
    named |= {"class weights": operands.options.get("weight"), "upstream": operands.upstream}
    return {name: tensor.detach() for name, tensor in named.items() if tensor is not None}


class Compared(typing.NamedTuple):
    """An elementwise error and its tolerance; or, in words, why nothing could be compared, with one
    infinite error."""

    error: torch.Tensor
    tolerance: torch.Tensor
    why: str = ""

    def ratio(self) -> torch.Tensor:
        """Error over tolerance; inf for NaN."""
        ratio = (self.error / self.tolerance).masked_fill(self.error == 0, 0.0)
        return ratio.masked_fill(ratio.isnan(), torch.inf)


def errors(
    adapter: Adapter, case: Case, operands: Operands, expected: Truth
) -> dict[str, Compared]:
    """By the result's name; of an operand that was written to, inf at the elements that were.
    Raises what the implementation raises."""
    before = {name: tensor.clone() for name, tensor in _constants(operands).items()}
    results = CALLS[case.call](adapter.loss, case, operands)
    comparisons = {}
    for name, value in _constants(operands).items():
        written = (value != before[name]) & ~(value.isnan() & before[name].isnan())
        error = torch.where(written, torch.inf, 0.0)
        comparisons[f"{name}, written to"] = Compared(error, torch.zeros_like(error))
    for name, value in results.items():
        comparisons[name] = _compared(adapter, case, operands, expected, name.split(",")[0], value)
    return comparisons


def _compared(adapter, case, operands, expected, name, value):
    """A result and the truth."""
    exact, tolerance = expected.exact[name], expected.tolerance[name]
    dtypes = _dtypes_of_loss(adapter, operands) if name == "loss" else [operands.leaves[name].dtype]
    why = value if isinstance(value, str) else ""
    if not why and value.shape != exact.shape:
        why = f"expected the shape {tuple(exact.shape)}, got {tuple(value.shape)}"
    if not why and value.dtype not in dtypes:
        why = f"expected {' or '.join(map(str, dtypes))}, got {value.dtype}"
    if why:
        return Compared(exact.new_full((1,), torch.inf), exact.new_zeros(1), why)
    right = tolerance.isinf()  # where a gradient overflows its dtype
    if name == "loss":
        tolerance = tolerance + UNIT[value.dtype] * exact.abs()
        if case.reduction == "mean":  # of no rows: 0, or NaN as torch has it
            right |= value.isnan() & (operands.y == case.ignore_index).all()
    return Compared((value.double() - exact).abs().masked_fill(right, 0.0), tolerance)


def _dtypes_of_loss(adapter: Adapter, operands: Operands) -> list[torch.dtype]:
    if operands.x.dtype == torch.float64:
        return [torch.float64]
    of_operands = [operands.x.dtype] if adapter.half_loss and operands.x.itemsize == 2 else []
    return [torch.float32, torch.float64, *of_operands]


def evaluate(adapter: Adapter, case: Case, device: torch.device) -> torch.Tensor:
    """The largest error over its tolerance (inf for NaN), and the largest `Truth.moved`: two
    numbers on the device, for which this does not wait."""
    with _threads(case):
        operands = build(case, device)
        expected = truth(case, operands, adapter.rounds(case, device))
        comparisons = errors(adapter, case, operands, expected).values()
        ratios = [comparison.ratio() for comparison in comparisons]
        return torch.stack([_largest(*ratios), _largest(expected.moved)])


@contextlib.contextmanager
def _threads(case: Case) -> typing.Iterator[None]:
    """One thread of the CPU for a small case: where other processes use the cores too, threads
    that wait for each other take many times as long as the case."""
    threads = torch.get_num_threads()
    elements = case.tokens * case.hidden + case.vocab * (case.tokens + case.hidden)
    torch.set_num_threads(threads if elements >= PARALLEL else 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _largest(*tensors: torch.Tensor) -> torch.Tensor:
    """Of all elements, 0 of none."""
    maxima = [tensor.amax().double() for tensor in tensors if tensor.numel()]
    return torch.stack(maxima).amax() if maxima else tensors[0].sum().double()


def explain(adapter: Adapter, case: Case, device: torch.device) -> list[str]:
    """A line for each result that is wrong: where, by how much, and the tolerance there."""
    with _threads(case):
        operands, lines = build(case, device), []
        expected = truth(case, operands, adapter.rounds(case, device))
        comparisons = errors(adapter, case, operands, expected)
    for name, comparison in comparisons.items():
        bad = ~(comparison.error <= comparison.tolerance)
        if comparison.why:
            lines.append(f"{name}: {comparison.why}")
        elif bad.any():
            at = int(comparison.ratio().argmax())
            place = [int(index) for index in torch.unravel_index(torch.tensor(at), bad.shape)]
            error, limit = (f"{values.flatten()[at].item():.2e}" for values in comparison[:2])
            count = f"{int(bad.sum())} of {bad.numel()} elements"
            lines.append(f"{name}{place or ''}: error {error}, tolerance {limit}; {count}")
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
        if sum(failure["group"] == case.group for failure in self.failures) < LISTED:
            described = {"index": index, "group": case.group, "case": str(case), "what": what}
            self.failures.append(described)


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
    values = torch.stack([outcome[2] for outcome in read]).tolist() if read else []
    for (index, case, _), (ratio, moved) in zip(read, values, strict=True):
        if not ratio <= 1.0:
            record.gross += ratio > GROSS
            record.fail("failed", index, case, explain(adapter, case, device))
            continue
        record.counts["undecided" if moved > MOVED else "passed"] += 1
        record.worst[case.dtype] = max(record.worst.get(case.dtype, 0.0), ratio)
