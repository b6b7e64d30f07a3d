"""Losses of deferred logits, by calls of flce where the weights of the heads are whole
(reentry.py)."""

import functools
import inspect

import torch
import torch.nn.functional as F

from ..distillation import linear_divergence
from ..functional import linear_cross_entropy
from ..options import DTYPES, OF_DIVERGENCE, LinearCrossEntropyOutput
from . import sharded, steps
from .reentry import with_whole_weights
from .steps import require
from .values import deferred_value_of

# Of the values of save, flce.fuse's "stats" alone applies to a divergence.
_OF_DIVERGENCE = {*OF_DIVERGENCE} - {"save"}
_PARAMETERS = tuple(inspect.signature(F.cross_entropy).parameters)


def _unsupported(record, fuse_options, has_probabilities=False):
    """Why flce cannot compute a loss of the record with these options of flce.fuse, or None. To be
    asked where the weights are whole."""
    sources = record.sources
    for source in sources:
        (weight, _), x, is_sharded = source.parameters(), source.x, sharded.is_sharded(source)
        if type(weight) not in (torch.nn.Parameter, torch.Tensor) and not is_sharded:
            return f"the head's weight is a {type(weight).__name__}"
        if weight.dtype not in DTYPES or x.dtype not in DTYPES:
            return f"the head multiplies {x.dtype} by {weight.dtype}"
        if weight.is_meta:
            return "the head's weight is on the meta device"
        if is_sharded and (reason := sharded.unsupported(record, fuse_options, has_probabilities)):
            return reason
    if len(sources) > 1 and fuse_options.get("accumulate_into") is not None:
        if torch.is_grad_enabled() and sources[0].parameters()[0].requires_grad:
            return "accumulate_into does not serve an adapter"
    return None


def _run_with_whole_weights(deferred, record, run):
    """run(sources of the record), where the weights are whole and in the modes of the head's
    call. Raises Unknown where `run` returns None, which means that real logits are needed."""
    head_call = deferred.head_call
    head_call.check(compares_elements=False)
    with head_call.entered(deferred.wants_gradient()):
        result = with_whole_weights(record.sources, run)
    head_call.loss_is_settled = head_call.loss_is_settled or result is None
    require(result is not None)
    return result


def _cross_entropy_by_flce(deferred, record, target, options, dropped=()):
    """linear_cross_entropy of the record's logits, with the options of flce.fuse but those that
    `dropped` names. Where flce cannot compute it: notes a fall-back and raises Unknown."""
    head_call = deferred.head_call
    if options["reduction"] == "none" and head_call.fusion.options.get("save") == "grads":
        dropped = (*dropped, "save")
    fuse_options = {k: value for k, value in head_call.fusion.options.items() if k not in dropped}

    def run(sources):
        record_with_whole_weights = record.changed(sources=sources)
        has_probabilities = target.is_floating_point()
        if reason := _unsupported(record_with_whole_weights, fuse_options, has_probabilities):
            return head_call.fusion.note_fall_back(reason)
        dtype = head_call.product_dtype(sources[0].x)
        needs_slice = has_probabilities or options.get("weight") is not None
        x, weight, bias, derived = steps.operands(record_with_whole_weights, dtype, needs_slice)
        is_slice = weight.requires_grad and not weight.is_leaf
        if is_slice and sources[0].parameters()[0].is_leaf and fuse_options.get("accumulate_into"):
            return head_call.fusion.note_fall_back(
                "accumulate_into does not serve a slice of the classes"
            )
        arguments = {"linear_bias": bias, **derived, **options, **fuse_options}
        result = linear_cross_entropy(sharded.replicated(x, weight), weight, target, **arguments)
        head_call.fusion.note_loss(steps.hashable_steps(record))
        return result

    return _run_with_whole_weights(deferred, record, run)


def cross_entropy(function, deferred, args, kwargs):
    """F.cross_entropy of logits, or F.nll_loss of their log_softmax, (N, V), (V,) or (B, V, T)."""
    arguments = {"reduction": "mean", **dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    record, head_call, is_nll = deferred.record, deferred.head_call, function is F.nll_loss
    target, weight = arguments["target"], arguments.get("weight")
    for value in (target, weight):
        is_constant = isinstance(value, torch.Tensor) and deferred_value_of(value) is None
        require(value is None or (is_constant and not value.requires_grad))
    require(target is not None and arguments["reduction"] in ("none", "mean", "sum"))
    require(arguments.get("size_average") is None and arguments.get("reduce") is None)
    if is_second := record.form() == steps.SECOND:
        batch, classes, length = record.shape
        require(target.shape == (batch, length))
        record = record.changed(form_steps=record.form_steps[:-1], shape=(batch, length, classes))
        record, target = record.of_rows(lambda x: x.flatten(0, 1)), target.flatten()
    require(len(record.shape) <= 2 and record.factor() == 1 and (record.form_steps or not is_nll))
    has_probabilities = target.is_floating_point() and not is_nll
    require(has_probabilities or target.dtype == torch.int64)
    require(tuple(target.shape) == record.shape[: None if has_probabilities else -1])
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    options = {name: arguments[name] for name in names if name in arguments}
    loss = _cross_entropy_by_flce(deferred, record, target, options)
    head_call.loss_is_settled = True
    is_cast = record.dtype != torch.float64 and torch.is_autocast_enabled(head_call.device.type)
    loss = loss.to(torch.float32 if is_cast else record.dtype)
    return loss.view(batch, length) if is_second and loss.dim() else loss


def statistic(deferred, record, name, target=None):
    """A number for each of the record's rows, (...), from what `record.rows` knows or by a call of
    flce. name: one of

    "lse"           logsumexp of the logits
    "entropy"       of their softmax
    "predictions"   the class of the largest logit
    "mean_log_p"    the mean of log_softmax over the classes
    "log_p"         log_softmax at the class `target` of each row
    "class_logits"  the logits at the K classes `target` of each row, (..., K)

    Each call of flce gives lse too, and the entropy where that costs little. `record.rows` keeps
    these under their names, and log_p and class_logits under the target's number: all Records of
    the same rows, of some of them and of pieces of them find them there.
    """
    head_call, rows, grad = deferred.head_call, record.rows, deferred.wants_gradient()
    key = name if target is None else rows.target_number(target)
    known = rows.lookup(key)
    if known is not None and known.requires_grad >= grad:  # it has a graph, or none is needed
        return known if grad else known.detach()
    if target is None and rows.is_piece:  # one call for the rows of all pieces
        return rows.select_values(statistic(deferred, rows.parent_record, name))
    outputs = _statistics_by_flce(deferred, record, name, target)
    fields = {field: getattr(outputs, field) for field in ("lse", "entropy", "predictions")}
    statistics = {field: values for field, values in fields.items() if values is not None}
    if name in statistics:
        requested = statistics[name]
    else:
        requested = outputs.class_logits if name == "class_logits" else -outputs.loss
        if key is not None:  # a target has no number while torch.compile traces
            statistics[key] = requested
    # Without a graph the new values replace no old ones, which may have one.
    rows.statistics.update(statistics if grad else {**statistics, **rows.statistics})
    head_call.loss_is_settled = head_call.loss_is_settled or target is not None
    return requested


def _statistics_by_flce(deferred, record, name, target):
    """The LinearCrossEntropyOutput of the call of flce for a statistic. Its loss is -log p of the
    target, or -mean_log_p; for the other names it is that of class 0, and is not read."""
    options = {"reduction": "none", "label_smoothing": float(name == "mean_log_p")}
    options["ignore_index"] = -(2**63)  # no class has this index
    dropped = ("z_loss", "valid_bound")
    is_sampled = name == "log_p" and deferred.head_call.fusion.options.get("gradient") == "sampled"
    if not is_sampled:
        # The gradient of an entropy needs a cap's slope: the forward would keep float32 logits.
        entropy_is_cheap = not (deferred.wants_gradient() and steps.is_capped(record.steps))
        options |= {"return_lse": True, "return_entropy": entropy_is_cheap or name == "entropy"}
        options["return_predictions"] = name == "predictions"
        options["classes"] = target if name == "class_logits" else None
        dropped += ("gradient", "gradient_eps")
    if name != "log_p":
        target = torch.zeros(record.shape[:-1], dtype=torch.int64, device=deferred.head_call.device)
    outputs = _cross_entropy_by_flce(deferred, record, target, options, dropped)
    return LinearCrossEntropyOutput(outputs) if is_sampled else outputs


# ---- KL divergences of two heads ----


def kl_elements(deferred, target, dtype, _):
    """F.kl_div of two DeferredValues, for each class; each is computed under the modes of the call
    of its own head."""
    is_log, values = target.record.form() == steps.LOG_P, [deferred.recompute(), target.recompute()]
    values = [value.to(dtype) for value in values]
    return F.kl_div(*values, reduction="none", log_target=is_log)


def kl_sum(record, reduction):
    """The sum of `kl_elements` over the classes, of each row or of all ("none" or "sum"). A target
    with a gradient is the student."""
    step = next(step for step in record.form_steps if step.kind == steps.KL)
    (student, teacher), name = step.compute.args[:2], "forward_kl"  # arguments of `kl_elements`
    if teacher.has_gradient:
        student, teacher, name = teacher, student, "reverse_kl"
    return divergence(student, teacher, name, reduction)


def divergence(student, teacher, name, reduction, target=None, beta=0.5):
    """flce.linear_divergence of the logits of two DeferredValues, whatever their forms. target:
    rows of -100 are ignored."""
    both, fusion = (student, teacher), student.head_call.fusion
    records = student.record, teacher.record
    require(student.is_pending() and teacher.is_pending() and records[0].shape == records[1].shape)
    require(not teacher.wants_gradient())
    fuse_options = {
        option: value
        for option, value in fusion.options.items()
        if option in _OF_DIVERGENCE or (option, value) == ("save", "stats")
    }
    if target is None:
        fuse_options.pop("valid_bound", None)

    def run(*sources):
        pairs = zip(records, sources, strict=True)
        records_with_whole_weights = [record.changed(sources=whole) for record, whole in pairs]
        pairs = zip(both, records_with_whole_weights, strict=True)
        dtypes = [
            deferred.head_call.product_dtype(record.sources[0].x) for deferred, record in pairs
        ]
        reasons = [_unsupported(record, fuse_options) for record in records_with_whole_weights]
        reasons += [
            "a divergence of an adapter" for r in records_with_whole_weights if len(r.sources) > 1
        ]
        reasons += ["teacher and student of other dtypes"] * (dtypes[0] != dtypes[1])
        if reason := next(filter(None, reasons), None):
            return fusion.note_fall_back(reason)
        x, weight, bias, derived = steps.operands(records_with_whole_weights[0], dtypes[0], True)
        x_t, weight_t, bias_t, derived_t = steps.operands(
            records_with_whole_weights[1], dtypes[1], True
        )
        numbers = {f"teacher_{k}": v for k, v in derived_t.items()} | derived | fuse_options
        biases = {"linear_bias": bias, "teacher_bias": bias_t}
        arguments = {"divergence": name, "beta": beta, "target": target, "reduction": reduction}
        loss = linear_divergence(x, weight, x_t, weight_t, **arguments, **biases, **numbers)
        for deferred, record in zip(both, records, strict=True):
            deferred.head_call.fusion.note_loss(steps.hashable_steps(record))
        return loss

    teacher.head_call.check(compares_elements=False)
    student.head_call.loss_is_settled = teacher.head_call.loss_is_settled = True

    def run_in_teacher(student_sources):
        run_with_student = functools.partial(run, student_sources)
        return with_whole_weights(teacher.record.sources, run_with_student)

    return _run_with_whole_weights(student, student.record, run_in_teacher)
