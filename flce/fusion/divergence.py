"""KL divergences of two heads' deferred logits, by flce.linear_divergence inside both Modules."""

import torch
import torch.nn.functional as F

from ..distillation import linear_divergence
from ..options import OF_DIVERGENCE
from . import loss, steps
from .reentry import call_through
from .steps import require

# Of the values of save, flce.fuse's "stats" alone applies to a divergence.
_OPTIONS = {*OF_DIVERGENCE} - {"save"}


def has_gradient(node):
    return node.call.requires_grad and node.call.grad


def elements(node, target, _):
    """F.kl_div of two Nodes, for each class: each is made under the modes of its own call."""
    is_log = target.record.form() == steps.LOG_P
    return F.kl_div(node.again(), target.again(), reduction="none", log_target=is_log)


def kl_sum(record, reduction):
    """The sum of `elements` over the classes, of each row or of all ("none" or "sum"). A target
    with a gradient is the student."""
    step = next(step for step in record.tail if step.kind == steps.KL)
    (student, teacher), name = step.replay.args, "forward_kl"
    if has_gradient(teacher):
        student, teacher, name = teacher, student, "reverse_kl"
    return divergence(student, teacher, name, reduction)


def divergence(student, teacher, name, reduction, target=None, beta=0.5):
    """flce.linear_divergence of the logits of two Nodes, whatever their forms. target: rows of -100
    are ignored."""
    record, other, call = student.record, teacher.record, student.call
    require(student.is_pending() and teacher.is_pending() and record.shape == other.shape)
    require(not (has_gradient(teacher) and torch.is_grad_enabled()))
    given = call.fusion.options
    chosen = {k: v for k, v in given.items() if k in _OPTIONS or (k, v) == ("save", "stats")}
    if target is None:
        chosen.pop("valid_bound", None)
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
