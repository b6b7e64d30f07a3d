"""KL divergences of two heads' deferred logits, by flce.linear_divergence inside both Modules."""

import inspect
import math

import torch
import torch.nn.functional as F

from ..distillation import linear_divergence
from ..options import OF_DIVERGENCE
from . import loss, steps
from .node import node_of
from .operations import dtype_by, handles, over_classes
from .reentry import call_through
from .steps import KL, LOG_P, P, require

_OPTIONS = {*OF_DIVERGENCE} - {"save"}  # of flce.fuse; and save="stats"
_PARAMETERS = tuple(inspect.signature(F.kl_div).parameters)


class _Elements:
    """F.kl_div of each class, not computed yet: of log_p, or of a target with a gradient, which is
    the student then."""

    def __init__(self, log_p, target):
        self.log_p, self.target = log_p, target

    def __call__(self, log_p):
        is_log = self.target.record.form() == LOG_P
        return F.kl_div(log_p, self.target.make(), reduction="none", log_target=is_log)

    def reduced(self, reduction):
        if self.target.call.requires_grad and self.target.call.grad:
            return divergence(self.target, self.log_p, "reverse_kl", reduction)
        return divergence(self.log_p, self.target, "forward_kl", reduction)


@handles("kl_div", forms=(LOG_P,))
def _kl_div(function, node, args, kwargs):
    given = {"reduction": "mean", "log_target": False}
    given |= {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    target, record, reduction = node_of(given["target"]), node.record, given["reduction"]
    require(target is not None and given.get("size_average") is given.get("reduce") is None)
    require(target.record.form() == (LOG_P if given["log_target"] else P))
    require(record.factor() == target.record.factor() == 1)
    elements, is_cast = _Elements(node, target), torch.is_autocast_enabled(node.call.device.type)
    dtype = torch.promote_types(record.dtype, target.record.dtype)
    dtype = torch.float32 if is_cast and dtype != torch.float64 else dtype
    if reduction == "none":
        return node.then(record.then(KL, 1, elements, dtype=dtype))
    require(reduction in ("mean", "batchmean", "sum"))
    total = elements.reduced("sum").to(dtype)
    return total / {"mean": math.prod(record.shape), "batchmean": record.shape[0]}.get(reduction, 1)


@handles("sum mean", forms=(KL,))
def _reduced(function, node, args, kwargs):
    record, name = node.record, function.__name__
    factor = record.factor() / {"sum": 1, "mean": record.shape[-1]}[name]
    elements = next(step.replay for step in record.tail if step.kind == KL)
    if len(args) == 1 and not kwargs:
        rows = math.prod(record.shape) // record.shape[-1] if name == "mean" else 1
        return (elements.reduced("sum") * (factor / rows)).to(record.dtype)
    given = over_classes(node, "input dim keepdim", args, kwargs)
    values = (elements.reduced("none") * factor).to(dtype_by(function, node, given))
    return values.unsqueeze(-1) if given.get("keepdim") else values


def divergence(student, teacher, name, reduction, target=None, beta=0.5):
    """flce.linear_divergence of the logits of two Nodes, whatever their forms. target: rows of -100
    are ignored."""
    record, other, call = student.record, teacher.record, student.call
    require(student.is_pending() and teacher.is_pending() and record.shape == other.shape)
    require(not (teacher.call.requires_grad and teacher.call.grad and torch.is_grad_enabled()))
    chosen = {k: v for k, v in call.fusion.options.items() if k in _OPTIONS or v == "stats"}
    if target is None:
        chosen.pop("valid_bound", None)
        target = torch.zeros(record.shape[:-1], dtype=torch.int64, device=call.device)

    def run(sources, taught):
        received = record.changed(sources=sources), other.changed(sources=taught)
        dtypes = [one.product_dtype(r.sources[0].x) for one, r in zip(calls, received, strict=True)]
        reasons = [loss.unsupported(r, target, chosen) for r in received]
        reasons += ["a divergence of an adapter" for r in received if len(r.sources) > 1]
        reasons += ["teacher and student of other dtypes"] * (dtypes[0] != dtypes[1])
        if reason := next(filter(None, reasons), None):
            return call.fusion.fall_back(reason)
        x, weight, bias, derived = steps.operands(received[0], dtypes[0], True)
        x_t, weight_t, bias_t, derived_t = steps.operands(received[1], dtypes[1], True)
        numbers = {f"teacher_{k}": v for k, v in derived_t.items()} | derived | chosen
        biases = {"linear_bias": bias, "teacher_bias": bias_t}
        given = {"divergence": name, "beta": beta, "target": target, "reduction": reduction}
        return linear_divergence(x, weight, x_t, weight_t, **given, **biases, **numbers)

    calls = call, teacher.call
    for one in calls:
        one.check(False)
    with call.entered(call.grad and torch.is_grad_enabled()):
        made = call_through(
            other.sources, lambda t: call_through(record.sources, lambda s: run(s, t))
        )
    for one, of in zip(calls, (record, other), strict=True):
        one.loss_is_done = True
        if made is not None:
            one.fusion.note_loss(steps.key_of(of))
    require(made is not None)
    return made
