"""KL divergences of two heads' deferred logits, by flce.linear_divergence inside the Modules of
both."""

import functools
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

_PARAMETERS = tuple(inspect.signature(F.kl_div).parameters)


@handles("kl_div", forms=(LOG_P,))
def _kl_div(function, node, args, kwargs):
    given = {"reduction": "mean", "log_target": False}
    given |= {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    target, record, reduction = node_of(given["target"]), node.record, given["reduction"]
    require(target is not None and given.get("size_average") is given.get("reduce") is None)
    require(target.record.form() == (LOG_P if given["log_target"] else P))
    require(record.factor() == target.record.factor() == 1)
    is_cast = torch.is_autocast_enabled(node.call.device.type)
    dtype = torch.promote_types(record.dtype, target.record.dtype)
    dtype = torch.float32 if is_cast and dtype != torch.float64 else dtype
    record = record.then(KL, 1, functools.partial(_of_each_class, node, target), dtype=dtype)
    if reduction == "none":
        return node.then(record)
    count = {"mean": math.prod(record.shape), "batchmean": record.shape[0], "sum": 1}
    require(reduction in count)
    return _summed(record, "sum", count[reduction]).to(dtype)


def _of_each_class(node, target, log_p):
    is_log = target.record.form() == LOG_P
    return F.kl_div(log_p, target.make(), reduction="none", log_target=is_log)


def _summed(record, reduction, count):
    """The sum of F.kl_div over the classes, by count, of each row or of all ("none" or "sum"). A
    target with a gradient is the student."""
    step = next(step for step in record.tail if step.kind == KL)
    (student, teacher), name = step.replay.args, "forward_kl"
    if teacher.call.requires_grad and teacher.call.grad:
        student, teacher, name = teacher, student, "reverse_kl"
    return divergence(student, teacher, name, reduction) * (record.factor() / count)


@handles("sum mean", forms=(KL,))
def _reduced(function, node, args, kwargs):
    record, is_mean = node.record, function.__name__ == "mean"
    if len(args) == 1 and not kwargs:
        count = math.prod(record.shape) if is_mean else 1
        return _summed(record, "sum", count).to(record.dtype)
    given = over_classes(node, "input dim keepdim", args, kwargs)
    values = _summed(record, "none", record.shape[-1] if is_mean else 1)
    values = values.to(dtype_by(function, node, given))
    return values.unsqueeze(-1) if given.get("keepdim") else values


def divergence(student, teacher, name, reduction, target=None, beta=0.5):
    """flce.linear_divergence of the logits of two Nodes, whatever their forms. target: rows of -100
    are ignored."""
    record, other, call = student.record, teacher.record, student.call
    require(student.is_pending() and teacher.is_pending() and record.shape == other.shape)
    require(not (teacher.call.requires_grad and teacher.call.grad and torch.is_grad_enabled()))
    chosen = {k: v for k, v in call.fusion.options.items() if k in OF_DIVERGENCE}
    if target is None:
        target = torch.zeros(record.shape[:-1], dtype=torch.int64, device=call.device)
    calls, records = (call, teacher.call), (record, other)

    def run(*sources):
        received = [one.changed(sources=given) for one, given in zip(records, sources, strict=True)]
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
        made = linear_divergence(x, weight, x_t, weight_t, **given, **biases, **numbers)
        for one, of in zip(calls, records, strict=True):
            one.fusion.note_loss(steps.key_of(of))
        return made

    teacher.call.check(False)
    call.loss_is_done = teacher.call.loss_is_done = True
    return loss.computed(call, record, lambda s: call_through(other.sources, lambda t: run(s, t)))
