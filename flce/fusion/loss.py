"""Losses of deferred logits, by flce.linear_cross_entropy inside the heads' Modules."""

import inspect

import torch
import torch.nn.functional as F

from ..functional import linear_cross_entropy
from ..options import DTYPES
from . import sharded, steps
from .node import Node, node_of, real_logits
from .reentry import call_through

_PARAMETERS = tuple(inspect.signature(F.cross_entropy).parameters)


def _unsupported(record, target, chosen):
    """Why flce's kernels cannot compute a loss of the record with `chosen`, options given to
    flce.fuse; None if they can. To be asked inside the Modules' hooks, where a sharded weight is
    whole."""
    sources = record.sources
    for linear, x, _ in sources:
        weight = linear.weight
        is_sharded = sharded.is_sharded(linear)
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) and not is_sharded:
            return f"the head's weight is a {type(weight).__name__}"
        if weight.dtype not in DTYPES or x.dtype not in DTYPES:
            return f"the head multiplies {x.dtype} by {weight.dtype}"
        if weight.is_meta:
            return "the head's weight is on the meta device"
        if is_sharded and (reason := sharded.unsupported(record, target, chosen)):
            return reason
    if len(sources) > 1 and chosen.get("accumulate_into") is not None:
        if torch.is_grad_enabled() and sources[0].linear.weight.requires_grad:
            return "accumulate_into does not serve an adapter"
    return None


def _fused(node, target, cuts_weight, options, logits_function):
    """linear_cross_entropy of the node's record; where flce cannot compute it, the
    result of `logits_function` on the real logits."""
    call, record = node.call, node.record
    chosen = _chosen(call, options)

    def run(sources):
        received = record._replace(sources=sources)
        if reason := _unsupported(received, target, chosen):
            call.fusion.fall_back(reason)
            return logits_function(steps.replayed(received, real_logits))
        dtype = call.product_dtype(sources[0].x)
        x, weight, bias, derived = steps.operands(received, dtype, cuts_weight)
        x = sharded.replicated(x, weight)
        output = linear_cross_entropy(
            x, weight, target, linear_bias=bias, **derived, **options, **chosen
        )
        call.fusion.note_loss(steps.key_of(record))
        return output

    call.check(False)
    with call.entered(call.grad and torch.is_grad_enabled()):
        return call_through(record.sources, run)


def _chosen(call, options):
    """The options given to flce.fuse, as far as they suit a loss for each row or a logsumexp."""
    dropped = ()
    if options.get("return_lse"):
        dropped = ("z_loss", "gradient", "gradient_eps", "accumulate_into")
    if options.get("reduction") == "none" and call.fusion.options.get("save") == "grads":
        dropped += ("save",)
    return {name: value for name, value in call.fusion.options.items() if name not in dropped}


def cross_entropy(function, node, args, kwargs):
    """F.cross_entropy(logits (N, V) or (V,), target, ...)."""
    arguments = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    target, weight = arguments["target"], arguments.get("weight")
    if not _is_known(node.record.shape, target, weight, arguments):
        return NotImplemented
    names = ("ignore_index", "reduction", "label_smoothing")
    options = {name: arguments[name] for name in names if name in arguments}
    cuts_weight = weight is not None or target.is_floating_point()
    dtype = node.record.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(node.call.device.type):
        dtype = torch.float32
    options["weight"] = weight
    loss = _fused(node, target, cuts_weight, options, lambda z: function(z, *args[1:], **kwargs))
    node.call.loss_is_done = True
    return loss if loss.dtype == dtype else loss.to(dtype)


def _is_known(shape, target, weight, arguments):
    """Whether flce computes F.cross_entropy with these arguments, of logits of this shape."""
    is_old = arguments.get("size_average") is not None or arguments.get("reduce") is not None
    is_new = arguments.get("reduction", "mean") in ("none", "mean", "sum") and not is_old
    if not is_new or target is None or len(shape) > 2:
        return False
    for value in (target, weight):
        is_constant = isinstance(value, torch.Tensor) and node_of(value) is None
        if value is not None and not (is_constant and not value.requires_grad):
            return False
    if target.is_floating_point():
        return tuple(target.shape) == tuple(shape)
    return target.dtype == torch.int64 and tuple(target.shape) == tuple(shape[:-1])


def cross_entropy_of_classes_second(function, node, args, kwargs):
    """F.cross_entropy((B, V, T), target (B, T)): that of the rows (B T, V)."""
    target = args[1] if len(args) > 1 else kwargs.get("target")
    batch, length, _ = node.record.shape
    if not isinstance(target, torch.Tensor) or target.shape != (batch, length):
        return NotImplemented
    rows = Node(node.call, node.record.of_rows(lambda x: x.flatten(0, 1)))
    options = {name: value for name, value in kwargs.items() if name != "target"}
    loss = cross_entropy(function, rows, (args[0], target.flatten(), *args[2:]), options)
    return loss.view(batch, length) if loss is not NotImplemented and loss.dim() else loss


def logsumexp(function, node, args, kwargs):
    """logsumexp over the classes: an output of the same kernels."""
    arguments = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    dim, shape = arguments.get("dim"), node.record.shape
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if not isinstance(dim, int) or dim not in (-1, len(shape) - 1) or "out" in arguments:
        return NotImplemented
    options = {"reduction": "none", "return_lse": True}
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=node.call.device)
    output = _fused(node, target, False, options, lambda z: torch.logsumexp(z, -1))
    lse = getattr(output, "lse", output).to(node.record.dtype)
    return lse.unsqueeze(-1) if arguments.get("keepdim") else lse
