"""Runs an implementation on a case and compares with the truth."""

from __future__ import annotations

import dataclasses
import typing

import torch

from .cases import FEATURES, NAMES, Case, build
from .truth import UNIT, Rounding, truth

PASSED, FAILED, RAISED, UNDECIDED, NOT_OFFERED = RESULTS = (
    "passed",
    "failed",
    "raised",
    "undecided",
    "not offered",
)


@dataclasses.dataclass
class Adapter:
    """An implementation: `loss(x, w, y, bias, options)` returns the loss, with its graph.

    x (N, H), w (V, H), y (N,), bias (V,) or None. options: `reduction` and `ignore_index` always,
    `softcap`, `label_smoothing`, `z_loss`, `weight` (V,) only where a case has them.

    offers: what it supports, of `FEATURES` and the names of dtypes; every one must support "mean", an
    ignore_index of -100, and an upstream gradient. refuses: why it does not support a case for
    another reason that it states itself (sizes), or "". rounds: how often it says it rounds the
    logits, the factors of the gradients' products and the gradients.
    """

    name: str
    loss: typing.Callable
    offers: frozenset = frozenset((*FEATURES, *NAMES))
    rounds: typing.Callable[[Case, torch.device], Rounding] = lambda case, device: Rounding()
    refuses: typing.Callable[[Case], str] = lambda case: ""
    version: str = ""

    def lacks(self, case):
        """What the case needs and this does not offer, as text, or ""."""
        return ", ".join(sorted(case.needs() - self.offers)) or self.refuses(case)


@dataclasses.dataclass
class Outcome:
    """`ratio`: the largest error over its tolerance (inf for NaN), on the device, and `moved`, the
    largest error of a logit by its rounding; or the text of an exception."""

    ratio: torch.Tensor | None = None
    moved: torch.Tensor | None = None
    raised: str = ""


def values(adapter, given):
    """Loss and gradients by name; None where no gradient came."""
    loss = adapter.loss(given.x, given.w, given.y, given.bias, dict(given.options))
    upstream = given.upstream.to(loss.dtype)
    leaves = list(given.leaves.values())
    grads = torch.autograd.grad(loss, leaves, upstream, allow_unused=True)
    return {"loss": loss.detach(), **dict(zip(given.leaves, grads, strict=True))}


def errors(case, given, made, expected):
    """By name (error, tolerance), float64 tensors; a result of another shape or dtype than the
    operand has is infinitely wrong."""
    found = {}
    for name, exact in expected.exact.items():
        value, tolerance = made[name], expected.tolerance[name]
        leaf = given.leaves.get(name)
        if value is None or value.shape != exact.shape or (leaf is not None and value.dtype != leaf.dtype):
            found[name] = torch.full_like(exact, torch.inf), tolerance
            continue
        right = value == exact.to(value.dtype)  # also where that overflows
        error = (value.double() - exact).abs().masked_fill(right, 0.0)
        if name == "loss":  # the rounding of the exact loss to its own dtype
            tolerance = tolerance + UNIT[value.dtype] * exact.abs()
            if case.reduction == "mean":  # NaN, as torch has it, or 0 of no rows
                none = (given.y == case.ignore_index).all()
                error = torch.where(none & value.isnan(), 0.0, error)
        found[name] = error, tolerance
    return found


def evaluate(adapter, case, device):
    """The Outcome of a case that the adapter offers. Does not wait for the device."""
    given = build(case, device)
    try:
        made = values(adapter, given)
    except Exception as error:  # an implementation may raise anything
        return Outcome(raised=f"{type(error).__name__}: {error}".split("\n")[0][:200])
    expected = truth(case, given, adapter.rounds(case, device))
    ratios = [_largest(*pair) for pair in errors(case, given, made, expected).values()]
    moved = expected.moved.amax() if case.tokens else expected.exact["loss"].new_zeros(())
    return Outcome(torch.stack(ratios).amax(), moved)


def _largest(error, tolerance):
    ratio = (error / tolerance).masked_fill(error == 0, 0.0)
    ratio = ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return ratio.amax() if ratio.numel() else ratio.new_zeros(())


def explain(adapter, case, device):
    """One line for each result that is wrong: where, by how much, and the tolerance there."""
    given = build(case, device)
    made = values(adapter, given)
    expected = truth(case, given, adapter.rounds(case, device))
    lines = []
    for name, (error, tolerance) in errors(case, given, made, expected).items():
        bad = ~(error <= tolerance)
        if not bad.any():
            continue
        ratio = (error / tolerance).nan_to_num(nan=torch.inf, posinf=torch.inf)
        at = int(ratio.masked_fill(~bad, -1.0).argmax())
        place = tuple(int(one) for one in torch.unravel_index(torch.tensor(at), error.shape))
        exact = expected.exact[name].reshape(-1)[at].item()
        size, limit = error.reshape(-1)[at].item(), tolerance.reshape(-1)[at].item()
        lines.append(
            f"{name}{list(place) if place else ''}: error {size:.2e}, tolerance {limit:.2e}, "
            f"exact value {exact:.4e}, {int(bad.sum())} of {bad.numel()} elements"
        )
    return lines
