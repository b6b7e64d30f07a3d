"""Losses and log-probabilities of K classes of each row, composed of one call of
linear_cross_entropy with `classes`. That function is a parameter, `call`: linear_loss passes the
one of a part of its rows."""

import math
import typing

import torch

from . import composite, validate
from .modes import is_traced
from .options import OUTPUTS, defaults
from .outputs import mean_of
from .packing import ignore_index_of

_DEFAULTS = defaults()


def check_ids(name, ids):
    validate.check_tensor(name, ids)
    if ids.dim() < 1 or ids.shape[-1] < 1 or ids.dtype not in (torch.int64, torch.int32):
        got = f"shape {tuple(ids.shape)} and dtype {ids.dtype}"
        validate.refuse(name, "int64 or int32 class indices of shape (..., K), K at least 1", got)


def _target_of(ids, ignore_index, probabilities=None):
    """(target, index, absent) of `ids` (..., K): for each row the class of the largest probability,
    without `probabilities` the first id that is not ignore_index, or ignore_index if all are; its
    index (..., 1) in ids; the mask of ids that are ignore_index."""
    check_ids("ids", ids)
    absent = validate.is_equal(ids, ignore_index_of(ignore_index))
    order = (~absent).byte()
    if probabilities is not None:
        order = probabilities.masked_fill(absent, -math.inf)
    at = order.argmax(dim=-1, keepdim=True)
    return ids.gather(-1, at).squeeze(-1), at, absent


_LIKELY_NLL = 0.7  # a target with a smaller -log p has a probability of about 1/2 or more


def _logprobs_of_classes(outputs, at):
    """log p (..., K) of a call's class_logits; `at`: index of the target among the classes.

    The values are l_k - l_y + log p_y, as l_k - lse would have the rounding error of a large lse;
    where l_y is -inf they are l_k - lse. The gradient takes the same way where the target y is
    likely, as the operator computes p_y - 1 without cancellation. Elsewhere it goes through lse:
    through log p_y the classes' gradients would cancel in the target's column.
    """
    of_target = outputs.class_logits.gather(-1, at)
    nll, lse = outputs.loss.unsqueeze(-1), outputs.lse.unsqueeze(-1)
    from_lse = outputs.class_logits - lse
    from_target = outputs.class_logits - of_target - nll
    rounding = (lse - of_target - nll).detach()  # of lse
    finite = torch.where(nll < _LIKELY_NLL, from_target, from_lse + rounding)
    return torch.where(of_target.isinf(), from_lse, finite)


def logprobs_at(call, input, linear_weight, ids, options, tail=False, caller=None):
    """As linear_logprobs_at, without its checks; `options`: any of linear_cross_entropy; `caller`:
    see sharding.ShardedCall; None: linear_logprobs_at."""
    validate.check_flag("tail", tail)
    target, at, absent = _target_of(ids, options.get("ignore_index"))
    options = {**options, "reduction": "none", "classes": ids, "return_lse": True}
    options["return_tail_lse"] = tail
    caller = caller or {"call": "linear_logprobs_at", "ids": ids, "tail": tail}
    outputs = call(input, linear_weight, target, caller=caller, **options)
    logprobs = _logprobs_of_classes(outputs, at).masked_fill(absent, 0.0)
    if not tail:
        return logprobs
    return torch.cat((logprobs, (outputs.tail_lse - outputs.lse).unsqueeze(-1)), dim=-1)


_NOT_OF_SPARSE = ("weight", "label_smoothing", "shift", "cu_seqlens", "classes", "topk")
_NOT_OF_SPARSE += ("return_accuracy", "return_z_loss", "return_tail_lse")


def of_sparse_target(call, input, linear_weight, ids, probabilities, options):
    """linear_cross_entropy with probabilities of K classes of each row. `call`:
    functional.call_by_composed_function or a stand-in; `options`: all of linear_cross_entropy,
    defaults included."""
    caller = {"call": "linear_cross_entropy of K classes", "ids": ids, **options}
    for name in _NOT_OF_SPARSE:
        value = options.pop(name)
        if isinstance(value, torch.Tensor) or value != _DEFAULTS[name]:
            validate.refuse(name, f"{_DEFAULTS[name]} with (ids, probabilities)", value)
    validate.check_tensor("ids", ids)
    validate.check_tensor("target", probabilities)
    validate.check_constant("target", probabilities)
    if not probabilities.is_floating_point():
        validate.refuse("target", "floating probabilities", probabilities.dtype, TypeError)
    validate.check_shape("target", probabilities, ids.shape, ", that of the ids")
    validate.check_same_device("target", probabilities, "ids", ids)
    target, at, absent = _target_of(ids, options["ignore_index"], probabilities)
    of_rows = RowLosses.of_options(options, input, ids.shape[:-1])
    z_loss, return_lse = options.pop("z_loss"), options.pop("return_lse")
    options |= {"reduction": "none", "classes": ids, "return_lse": True}
    outputs = call(input, linear_weight, target, caller=caller, **options)
    probabilities = probabilities.masked_fill(absent, 0.0)
    gaps = -_logprobs_of_classes(outputs, at).masked_fill(probabilities == 0, 0.0)
    rows = (probabilities * gaps).sum(dim=-1).to(outputs.lse.dtype) + z_loss * outputs.lse.square()
    loss = of_rows.reduced(rows, absent.all(dim=-1))
    outputs = outputs._replace(
        loss=loss, class_logits=None, lse=outputs.lse if return_lse else None
    )
    has_outputs = any(getattr(outputs, name) is not None for name in OUTPUTS)
    return outputs if has_outputs else loss


_OF_ROW_LOSSES = ("reduction", "z_loss", "return_lse")


@torch.compiler.assume_constant_result  # torch.compile cannot trace the checks of C
def _are_allowed(**options):
    try:
        composite.check_options(options, 1)
    except (TypeError, ValueError):
        return False
    return True


class RowLosses(typing.NamedTuple):
    """What becomes of the losses of rows that are composed of log-probabilities in Python: the
    options that linear_cross_entropy would apply to them, checked as there."""

    reduction: str
    token_weight: torch.Tensor | None
    num_items: torch.Tensor | None

    @classmethod
    def of_options(cls, options, input, shape):
        """Pops its three options from `options` and checks them; checks z_loss and return_lse too,
        but leaves these. `shape`: of the rows."""
        checked = {name: options[name] for name in _OF_ROW_LOSSES if name in options}
        validate.check_tensor("input", input)
        if not _are_allowed(**checked):
            composite.check_options(checked, 1)
        reduction = options.pop("reduction", "mean")
        factor, items = options.pop("token_weight", None), options.pop("num_items", None)
        if factor is not None:
            validate.check_tensor("token_weight", factor)
            validate.check_constant("token_weight", factor)
            meaning = ", a number for each row of input"
            validate.check_vector("token_weight", factor, shape, "input", input, meaning)
        if items is not None:
            items = validate.num_items_tensor(items, reduction, input.device, input.dtype)
        return cls(reduction, factor, items)

    def reduced(self, rows, ignored):
        """The loss of rows (...), 0 where `ignored`, whatever they and token_weight hold there."""
        if self.token_weight is not None:
            rows = rows * self.token_weight.to(rows.dtype).masked_fill(ignored, 0.0)
        rows = rows.masked_fill(ignored, 0.0)
        if self.reduction != "mean":
            return rows if self.reduction == "none" else rows.sum()
        valid = (~ignored).sum().to(rows.dtype)
        items = self.num_items
        if type(items) is torch.Tensor and not is_traced():
            if items.is_cpu or validate.checks_values():
                validate.check_items(items, valid)
        return mean_of(rows.sum(), valid, items)
