"""What the wrong implementations of wrong_sizes.py, wrong_rows.py, wrong_options.py and
wrong_calls.py share: each is `right` with one thing changed; test_conformance_wrong.py."""

import typing

import torch
import torch.nn.functional as F

import flce


class Wrong(typing.NamedTuple):
    """group: of flce.conformance's suite, has to find it; fields: those of the cases that do."""

    name: str
    loss: typing.Callable
    group: str
    fields: dict


WRONG: list[Wrong] = []


class Raised(Exception):
    """By a wrong implementation that is to raise."""


def found_by(group, **fields):
    """Adds the implementation below it, or an instance of the class below it, to WRONG."""

    def add(loss):
        implementation = loss() if isinstance(loss, type) else loss
        WRONG.append(Wrong(loss.__name__, implementation, group, fields))
        return loss

    return add


class Changed(torch.autograd.Function):
    """The value, whose gradient is changed."""

    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def same(tensor):
    return tensor


def right(x, w, y, bias, options, logits=same, of_logits=same):
    """flce.reference in float64, so that gradients are rounded once, to the operands' dtype.
    logits, of_logits: functions of the logits and of their gradient."""
    x, w, bias = (None if one is None else one.double() for one in (x, w, bias))
    x = x.masked_fill((y == options["ignore_index"]).unsqueeze(-1), 0.0)
    z = Changed.apply(logits(F.linear(x, w, bias)), of_logits)
    return flce.reference.cross_entropy(z, y, **options)


def ignored(y, options):
    return y == options["ignore_index"]


def zero_from(row, grad):
    """The gradient with zeros in its rows from `row` on."""
    return torch.cat([grad[:row], torch.zeros_like(grad[row:])])
