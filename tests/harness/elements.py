"""A bound of each element of a float64 result, by the tolerance of flce.conformance, for calls that
can be told in its options. A norm hides one wrong element among many; in 16 bits and float32 the
bound of the worst case is wider than that of the norm, and nothing is added to it here."""

import torch

from flce.conformance.cases import Case
from flce.conformance.operands import Operands
from flce.conformance.truth import Rounding, truth
from flce.options import RETURNS
from flce.reference import ignored_rows, shifted

# Options that flce.conformance has, those that `bounds_of` tells otherwise, and those that change
# no number.
KNOWN = {"linear_bias", "weight", "reduction", "ignore_index", "label_smoothing", "softcap"}
KNOWN |= {"z_loss", "token_weight", "num_items", "logit_scale", "temperature", "shift"}
KNOWN |= {"cu_seqlens", "valid_vocab", "adapter_input", "adapter_weight"}
KNOWN |= {*RETURNS, "valid_bound", "accum_dtype"}
# Every strategy's: made in the forward and multiplied later. And as much for the truth's own error.
ROUNDING, TRUTHS = Rounding(exponentials=3, results=2), 2.0


def is_known(case, upstream):
    if case.dtype != torch.float64 or case.linear_weight is None or set(upstream) != {"loss"}:
        return False
    get = case.options.get
    others = [value for name, value in case.options.items() if name not in KNOWN]
    others = [value for value in others if value is not None and value is not False]
    if others or case.target.is_floating_point():
        return False
    temperature = torch.as_tensor(get("temperature", 1.0))
    if temperature.dim() > 0 or (get("softcap") is not None and temperature != 1.0):
        return False
    # Its mean divides by the sum of the weights, the z-loss by the number of rows.
    own_mean = get("reduction", "mean") == "mean" and get("num_items") is None
    return get("token_weight") is None or get("weight") is None or not own_mean


def factors_of(case, upstream, cut):
    """The upstream gradient, of each row where token_weight or num_items has to be told by it; and
    the reduction that remains."""
    get, reduction = case.options.get, case.options.get("reduction", "mean")
    grad = torch.as_tensor(1.0 if upstream["loss"] is None else upstream["loss"])
    grad = grad.to(cut.device, torch.float64)
    grad = grad.reshape(-1) if grad.dim() else grad
    tokens, items = get("token_weight"), get("num_items")
    if tokens is None and (items is None or reduction != "mean"):
        return grad, reduction
    if reduction == "mean":
        items = (~cut).sum() if items is None else torch.as_tensor(items, device=cut.device)
        grad = grad / items.double() if items > 0 else 0.0 * grad
    if tokens is not None:
        grad = grad * tokens.reshape(-1).double().masked_fill(cut, 0.0)
    return grad.expand(cut.shape), "none"


def products_of(case, scale):
    """x and w of the call: an adapter's columns are further ones of both, and classes from
    valid_vocab on are none."""
    get, shape = case.options.get, case.input.shape
    rows = case.target.numel()
    x, w = case.input.reshape(rows, shape[-1]), case.linear_weight
    if get("adapter_weight") is not None:
        low_rank = get("adapter_input")
        x = torch.cat([x, low_rank.reshape(rows, low_rank.shape[-1])], -1)
        w = torch.cat([w, get("adapter_weight")], -1)
    return x, w[: get("valid_vocab")] * scale


def bounds_of(case, upstream):
    """{name: bound of each element} of the gradients and, where its reduction is one of
    flce.conformance, the loss of a cases.Case; {} of a call that cannot be told in its options."""
    if not is_known(case, upstream):
        return {}
    get, valid, hidden = case.options.get, case.options.get("valid_vocab"), case.input.shape[-1]
    index = -100 if get("ignore_index", -100) is None else get("ignore_index", -100)
    y = shifted(case.target, get("shift", 0), get("cu_seqlens"), index).reshape(-1)
    grad, reduction = factors_of(case, upstream, ignored_rows(y, index))
    scale = float(get("logit_scale", 1.0) / torch.as_tensor(get("temperature", 1.0)))
    x, w = products_of(case, scale)
    numbers = {name: get(name) for name in ("softcap", "label_smoothing", "z_loss") if get(name)}
    named = {"reduction": reduction, "ignore_index": index, **numbers}
    call = Case("", len(y), x.shape[-1], len(w), "float64", **named)
    bias, weight = (
        None if get(name) is None else get(name)[:valid] for name in ("linear_bias", "weight")
    )
    bias = None if bias is None else bias * scale
    made = truth(call, Operands(x, w, y, bias, grad, {"weight": weight}, {}, None), ROUNDING)
    made = made.tolerance

    def of_classes(bound):  # none of the classes from valid_vocab on has a gradient
        whole = bound.new_zeros(len(case.linear_weight), *bound.shape[1:])
        whole[:valid] = bound * abs(scale)
        return whole

    rows, classes = (
        made["input"].reshape(*case.target.shape, x.shape[-1]),
        of_classes(made["weight"]),
    )
    bounds = {"input": rows[..., :hidden], "linear_weight": classes[:, :hidden]}
    bounds |= {"adapter_input": rows[..., hidden:], "adapter_weight": classes[:, hidden:]}
    bounds["linear_bias"] = of_classes(made["bias"])
    if reduction == get("reduction", "mean") and get("token_weight") is None:
        shape = case.target.shape if reduction == "none" else ()
        bounds["loss"] = made["loss"].reshape(shape)
    return {name: TRUTHS * bound for name, bound in bounds.items()}


def check(where, value, truth, bound):
    """`bound`: None, or inf for a mean over weights of 0, where there is none."""
    if bound is None:
        return
    bad = ~((value.double() - truth).abs() <= bound) & bound.isfinite()
    assert not bad.any(), (
        f"{where}: {int(bad.sum())} of {bad.numel()} elements, first {bad.nonzero()[0].tolist()}:"
        f" {value[bad][0]:.17g}, expected {truth[bad][0]:.17g} +- {bound[bad][0]:.1e}"
    )
