"""Losses of deferred logits, by flce.linear_cross_entropy inside the heads' Modules."""

import inspect

import torch
import torch.nn.functional as F

from ..functional import linear_cross_entropy
from ..options import DTYPES
from . import steps
from .divided import is_divided, rows_for, unserved
from .node import node_of, real_logits
from .reentry import call_through

_PARAMETERS = tuple(inspect.signature(F.cross_entropy).parameters)
_REDUCTIONS = ("none", "mean", "sum")


def unfit(sources):
    """Why the weights of the sources cannot be multiplied by flce's kernels; None if they can.
    To be asked inside the Modules' hooks, where a sharded weight is whole."""
    for source in sources:
        weight = source.linear.weight
        is_plain = type(weight) in (torch.nn.Parameter, torch.Tensor)
        if not is_plain and not is_divided(source.linear):
            return f"the head's weight is a {type(weight).__name__}"
        if weight.dtype not in DTYPES or source.x.dtype not in DTYPES:
            return f"the head multiplies {source.x.dtype} by {weight.dtype}"
        if weight.is_meta:
            return "the head's weight is on the meta device"
    return None


def _unserved(sources, chosen):
    """Why `chosen`, options given to flce.fuse, do not suit the sources; None if they do."""
    is_adapter = len(sources) > 1 and chosen.get("accumulate_into") is not None
    if is_adapter and torch.is_grad_enabled() and sources[0].linear.weight.requires_grad:
        return "accumulate_into does not serve an adapter"
    return None


def _fused(node, target, cuts_weight, options, logits_function):
    """linear_cross_entropy of the node's record; where the weights turn out to be unfit, the
    result of `logits_function` on the real logits."""
    call, record = node.call, node.record
    chosen = _chosen(call, options)

    def run(sources):
        made = record._replace(sources=sources)
        reason = unfit(sources) or _unserved(sources, chosen) or unserved(made, target, chosen)
        if reason:
            call.fusion.fall_back(reason)
            return logits_function(steps.replayed(made, real_logits))
        dtype = call.product_dtype(sources[0].x)
        x, weight, bias, derived = steps.operands(made, dtype, cuts_weight)
        output = linear_cross_entropy(
            rows_for(weight, x), weight, target, linear_bias=bias, **derived, **options, **chosen
        )
        call.fusion.note_fused(record)
        return output

    call.check(False)
    with call.entered(call.grad and torch.is_grad_enabled()):
        return call_through(record.sources, run)


def _chosen(call, options):
    """The options given to flce.fuse, as far as they suit a loss for each row or a logsumexp."""
    chosen = dict(call.fusion.options)
    if options.get("reduction") == "none" and chosen.get("save") == "grads":
        del chosen["save"]
    if options.get("return_lse"):
        for name in ("z_loss", "gradient", "gradient_eps", "accumulate_into"):
            chosen.pop(name, None)
    return chosen


def cross_entropy(node, args, kwargs):
    """F.cross_entropy(logits (N, V) or (V,), target, ...)."""
    given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if not _is_known(node.record.shape, target, weight, given):
        return NotImplemented
    names = ("ignore_index", "reduction", "label_smoothing")
    options = {name: given[name] for name in names if name in given}
    cuts_weight = weight is not None or target.is_floating_point()
    dtype = node.call.loss_dtype(node.record.dtype)

    def of_logits(logits):
        return F.cross_entropy(logits, *args[1:], **kwargs)

    loss = _fused(node, target, cuts_weight, {"weight": weight, **options}, of_logits)
    node.call.loss_is_done = True
    return loss if loss.dtype == dtype else loss.to(dtype)


def _is_known(shape, target, weight, given):
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    if is_old or given.get("reduction", "mean") not in _REDUCTIONS or not is_real_tensor(target):
        return False
    if weight is not None and (not is_real_tensor(weight) or weight.requires_grad):
        return False
    if len(shape) > 2 or target.requires_grad:
        return False
    expected = shape if target.is_floating_point() else shape[:-1]
    return tuple(target.shape) == tuple(expected) and (
        target.is_floating_point() or target.dtype == torch.int64
    )


def is_real_tensor(value):
    return isinstance(value, torch.Tensor) and node_of(value) is None


def logsumexp(node, args, kwargs):
    """logsumexp over the classes: an output of the same kernels."""
    given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    shape = node.record.shape
    if not isinstance(dim, int) or dim not in (-1, len(shape) - 1) or given.get("out") is not None:
        return NotImplemented
    options = {"reduction": "none", "return_lse": True}
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=node.call.device)
    made = _fused(node, target, False, options, lambda z: torch.logsumexp(z, -1))
    lse = getattr(made, "lse", made).to(node.record.dtype)
    return lse.unsqueeze(-1) if given.get("keepdim") else lse
