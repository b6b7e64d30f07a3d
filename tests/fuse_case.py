"""A model with flce.fuse against the same model without: loss, gradients, logits, tensors made."""

import contextlib
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flce


class LogitsMade(TorchDispatchMode):
    """Notes tensors of all logits' size among the results of operators: at least `rows` times
    `classes` elements, in a shape with the classes as a dimension or flat."""

    def __init__(self, rows, classes):
        super().__init__()
        self.rows, self.classes, self.found = rows, classes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, torch.Tensor) and self.is_logits(value):
                self.found.append((str(function), tuple(value.shape)))
        return made

    def is_logits(self, value):
        has_classes = self.classes in value.shape or value.dim() == 1
        return not value.is_meta and has_classes and value.numel() >= self.rows * self.classes


def step(model, inputs, mode=None):
    """(loss, {name: gradient}, output) of a training step, with the same random numbers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with mode or contextlib.nullcontext():
        output = model(**inputs)
        output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def worst_error(got, expected):
    """The largest error of a gradient relative to the largest element of that parameter's, or to
    1e-3 of the largest of all: smaller gradients are sums that cancel."""
    if got.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(got.keys() ^ expected.keys())} in one only")
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.values())
    worst = 0.0
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), floor)
        error = float((got[name] - gradient).abs().max()) / scale
        worst = error if not error <= worst else worst
    return worst


class Comparison:
    """What came out of one model. made: tensors of the logits' size in the fused training step,
    as (operator, shape); rows: the least number of them that the loss is computed from."""

    def __init__(self, model, inputs, rows, classes, **options):
        model.train()
        loss, gradients, output = step(model, inputs)
        mode = LogitsMade(rows, classes)
        with warnings.catch_warnings(record=True), flce.fuse(model, **options) as handle:
            fused_loss, fused_gradients, fused_output = step(model, inputs, mode)
            self.losses, self.fallbacks = dict(handle.losses), dict(handle.fallbacks)
            difference = (fused_output.logits - output.logits).detach().abs().max()
        self.made = mode.found
        self.loss_error = float((fused_loss - loss).abs() / loss.abs())
        self.gradient_error = worst_error(fused_gradients, gradients)
        self.logits_error = float(difference / output.logits.detach().abs().max())
        self.is_fused = bool(self.losses) and not self.fallbacks
