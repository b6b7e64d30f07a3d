"""How a case calls an implementation: `CALLS`, functions (loss, case, operands) -> results, by the
name that `Case.call` has. `loss` is that of an Adapter. Results are tensors by name, or words that
say why there is none; after a comma, the name says how it was computed, if not by the first call
and its backward."""

from __future__ import annotations

import dataclasses
import functools
import typing

import torch

from .cases import Case
from .operands import Operands, build

Results = dict[str, torch.Tensor | str]
Loss = typing.Callable[..., torch.Tensor]


def forward(loss: Loss, given: Operands) -> torch.Tensor:
    value = loss(given.x, given.w, given.y, given.bias, dict(given.options))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(value).__name__}")
    return value


def backward(value: torch.Tensor, given: Operands, again: bool = False) -> Results:
    """The leaves' gradients; `again`: the graph is kept."""
    upstream, leaves = given.upstream_in(value.dtype), list(given.leaves.values())
    if value.shape != upstream.shape:
        return dict.fromkeys(given.leaves, "no gradient, as the loss has another shape")
    if not leaves or not value.requires_grad:
        return dict.fromkeys(given.leaves, "no gradient")
    grads = torch.autograd.grad(value, leaves, upstream, retain_graph=again, allow_unused=True)
    grads = ["no gradient" if grad is None else grad for grad in grads]
    return dict(zip(given.leaves, grads, strict=True))


def once(loss: Loss, case: Case, given: Operands, again: bool = False) -> Results:
    value = forward(loss, given)
    return {"loss": value.detach(), **backward(value, given, again)}


def second_backward(loss: Loss, case: Case, given: Operands) -> Results:
    """Between the two, as an optimizer may do, writes to the gradients of the first."""
    value = forward(loss, given)
    first = backward(value, given, again=True)
    results: Results = dict(first)
    for name, grad in first.items():
        if isinstance(grad, torch.Tensor):
            results[name] = grad.clone()
            if grad.is_contiguous():  # an expanded one cannot be written to
                grad.fill_(torch.nan)
    second = backward(value, given)
    results |= {f"{name}, second backward": grad for name, grad in second.items()}
    return {"loss": value.detach(), **results}


def separate_backwards(loss: Loss, case: Case, given: Operands) -> Results:
    """One for each leaf, as pipeline schedules have them."""
    value, results = forward(loss, given), {}
    for name, leaf in given.leaves.items():
        results |= backward(value, given._replace(leaves={name: leaf}), again=True)
    return {"loss": value.detach(), **results}


def interleaved(loss: Loss, case: Case, given: Operands) -> Results:
    """A call with other operands of the same sizes between the forward and the backward."""
    value = forward(loss, given)
    others = build(dataclasses.replace(case, seed=case.seed + 1), given.w.device)
    backward(forward(loss, others), others)
    return {"loss": value.detach(), **backward(value, given)}


def no_grad(loss: Loss, case: Case, given: Operands) -> Results:
    with torch.no_grad():
        return {"loss, no_grad": forward(loss, given)}


def repeated(loss: Loss, case: Case, given: Operands) -> Results:
    """The results of two equal calls; in place of those of the second whose bits differ, a text."""
    first, second = once(loss, case, given, again=True), once(loss, case, given)

    def compared(one: torch.Tensor | str, other: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(one, str) or isinstance(other, str):
            return other
        same = (one == other) | (one.isnan() & other.isnan())
        return other if same.all() else "other bits than those of the first call"

    return first | {f"{name}, repeated": compared(first[name], second[name]) for name in second}


def changed(operand: str, loss: Loss, case: Case, given: Operands) -> Results:
    """The operand is written to between the forward and the backward, in place: autograd's error,
    or the gradients of what it was."""
    value, tensor = forward(loss, given), {"x": given.x, "w": given.w, "y": given.y}[operand]
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(before.roll(1, 0))
    try:
        results = {f"{name}, {operand} changed": g for name, g in backward(value, given).items()}
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        results = {}
    finally:
        with torch.no_grad():
            tensor.copy_(before)
    return {"loss": value.detach(), **results}


CALLS: dict[str, typing.Callable[[Loss, Case, Operands], Results]] = {
    "once": once,
    "second backward": second_backward,
    "separate backwards": separate_backwards,
    "interleaved": interleaved,
    "no_grad": no_grad,
    "repeated": repeated,
    **{f"{name} changed": functools.partial(changed, name) for name in ("x", "w", "y")},
}
