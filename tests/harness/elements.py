"""A bound of each element of a float64 result, by the tolerance of flce.conformance, for the calls
that it knows. A norm hides one wrong element among many; in 16 bits and float32 the bound of the
worst case is wider than that of the norm, and nothing is added to it here."""

import torch

from flce.conformance.cases import Case
from flce.conformance.operands import Operands
from flce.conformance.truth import Rounding, truth
from flce.options import RETURNS

KNOWN = {"linear_bias", "weight", "reduction", "ignore_index", "label_smoothing", "softcap"}
KNOWN |= {"z_loss", *RETURNS, "valid_bound", "accum_dtype"}  # the last ones change no number
DEFAULTS = {"logit_scale": 1.0, "temperature": 1.0, "shift": 0}  # others: None, False or 0
# Every strategy's: made in the forward and multiplied later. And as much for the truth's own error.
ROUNDING, TRUTHS = Rounding(exponentials=3, results=2), 2.0


def is_known(case, upstream):
    if case.dtype != torch.float64 or case.linear_weight is None or set(upstream) != {"loss"}:
        return False
    options = case.options.items()
    others = [value for name, value in options if name not in KNOWN and name not in DEFAULTS]
    if any(value is not None and value is not False for value in others):
        return False
    named = [(case.options.get(name, value), value) for name, value in DEFAULTS.items()]
    is_default = all(not isinstance(one, torch.Tensor) and one == value for one, value in named)
    return is_default and not case.target.is_floating_point()


def bounds_of(case, upstream):
    """{name: bound of each element} of the loss and the gradients of a cases.Case; {} of calls that
    flce.conformance does not have."""
    if not is_known(case, upstream):
        return {}
    options, shape = case.options, case.input.shape
    x, y = case.input.reshape(-1, shape[-1]), case.target.reshape(-1)
    index = options.get("ignore_index", -100)
    given = {
        name: options[name] for name in ("softcap", "label_smoothing", "z_loss") if name in options
    }
    call = Case(
        "", len(y), shape[-1], len(case.linear_weight), "float64",
        reduction=options.get("reduction", "mean"), ignore_index=-100 if index is None else index,
        **given,
    )  # fmt: skip
    grad = torch.as_tensor(1.0 if upstream["loss"] is None else upstream["loss"])
    grad = grad.to(x.device, torch.float64)
    grad = grad.reshape(-1) if grad.dim() else grad
    operands = Operands(
        x, case.linear_weight, y, options.get("linear_bias"), grad,
        {"weight": options.get("weight")}, {}, None,
    )  # fmt: skip
    made = truth(call, operands, ROUNDING).tolerance
    shapes = {"input": shape, "loss": case.target.shape if call.reduction == "none" else ()}
    named = {"loss": "loss", "input": "input", "linear_weight": "weight", "linear_bias": "bias"}
    bounds = {name: TRUTHS * made[other] for name, other in named.items()}
    return {name: bound.reshape(shapes.get(name, bound.shape)) for name, bound in bounds.items()}


def check(where, value, truth, bound):
    """`bound`: None, or inf for a mean over weights of 0, where there is none."""
    if bound is None:
        return
    bad = ~((value.double() - truth).abs() <= bound) & bound.isfinite()
    assert not bad.any(), (
        f"{where}: {int(bad.sum())} of {bad.numel()} elements, first {bad.nonzero()[0].tolist()}:"
        f" {value[bad][0]:.17g}, expected {truth[bad][0]:.17g} +- {bound[bad][0]:.1e}"
    )
