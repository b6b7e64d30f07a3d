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


def forward(loss: Loss, operands: Operands) -> torch.Tensor:
    value = loss(operands.x, operands.w, operands.y, operands.bias, dict(operands.options))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(value).__name__}")
    return value


def backward(value: torch.Tensor, operands: Operands, again: bool = False) -> Results:
    """The leaves' gradients; `again`: the graph is kept."""
    upstream, leaves = operands.upstream_in(value.dtype), list(operands.leaves.values())
    if value.shape != upstream.shape:
        return dict.fromkeys(operands.leaves, "no gradient, as the loss has another shape")
    if not leaves or not value.requires_grad:
        return dict.fromkeys(operands.leaves, "no gradient")
    grads = torch.autograd.grad(value, leaves, upstream, retain_graph=again, allow_unused=True)
    grads = ["no gradient" if grad is None else grad for grad in grads]
    return dict(zip(operands.leaves, grads, strict=True))


def once(loss: Loss, case: Case, operands: Operands, again: bool = False) -> Results:
    value = forward(loss, operands)
    return {"loss": value.detach(), **backward(value, operands, again)}


def second_backward(loss: Loss, case: Case, operands: Operands) -> Results:
    """Between the two, as an optimizer may do, writes to the gradients of the first."""
    value = forward(loss, operands)
    first = backward(value, operands, again=True)
    results: Results = dict(first)
    for name, grad in first.items():
        if isinstance(grad, torch.Tensor):
            results[name] = grad.clone()
            if grad.is_contiguous():  # an expanded one cannot be written to
                grad.fill_(torch.nan)
    second = backward(value, operands)
    results |= {f"{name}, second backward": grad for name, grad in second.items()}
    return {"loss": value.detach(), **results}


def separate_backwards(loss: Loss, case: Case, operands: Operands) -> Results:
    """One for each leaf, as pipeline schedules have them."""
    value, results = forward(loss, operands), {}
    for name, leaf in operands.leaves.items():
        results |= backward(value, operands._replace(leaves={name: leaf}), again=True)
    return {"loss": value.detach(), **results}


def interleaved(loss: Loss, case: Case, operands: Operands) -> Results:
    """A call with other operands of the same sizes between the forward and the backward."""
    value = forward(loss, operands)
    others = build(dataclasses.replace(case, seed=case.seed + 1), operands.w.device)
    backward(forward(loss, others), others)
    return {"loss": value.detach(), **backward(value, operands)}


def no_grad(loss: Loss, case: Case, operands: Operands) -> Results:
    with torch.no_grad():
        return {"loss, no_grad": forward(loss, operands)}


def repeated(loss: Loss, case: Case, operands: Operands) -> Results:
    """The results of two equal calls; in place of those of the second whose bits differ, a text."""
    first, second = once(loss, case, operands, again=True), once(loss, case, operands)

    def compared(before: torch.Tensor | str, after: torch.Tensor | str) -> torch.Tensor | str:
        if isinstance(before, str) or isinstance(after, str):
            return after
        same = (before == after) | (before.isnan() & after.isnan())
        return after if same.all() else "other bits than those of the first call"

    return first | {f"{name}, repeated": compared(first[name], second[name]) for name in second}


def changed(operand_name: str, loss: Loss, case: Case, operands: Operands) -> Results:
    """The operand is written to between the forward and the backward, in place: autograd's error,
    or the gradients of what it was."""
    tensor = {"x": operands.x, "w": operands.w, "y": operands.y}[operand_name]
    value = forward(loss, operands)
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(before.roll(1, 0))
    try:
        gradients = backward(value, operands)
        results = {f"{name}, {operand_name} changed": grad for name, grad in gradients.items()}
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
