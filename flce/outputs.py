"""From the outputs of an operator to what the caller gets: the loss, or a LinearCrossEntropyOutput
where more was asked for."""

import math

import torch

from . import calls, fakes, operators, reference, torch_private, validate
from .modes import has_values, is_traced
from .options import LinearCrossEntropyOutput


def _of_ranks(packed, tensor):
    """The tensors of all ranks that divide the vocabulary; this rank's own is differentiable."""
    sent = tensor.detach().contiguous()
    if is_traced():
        functional = torch_private.functional_collectives
        received = functional.all_gather_into_tensor(sent.unsqueeze(0), packed.ranks, packed.group)
        gathered = list(functional.wait_tensor(received))
    else:  # torch 2.11's functional collectives end the process for CUDA tensors over gloo
        received = sent.new_empty((packed.ranks, *sent.shape))
        exchange = packed.group, operators.COLLECTIVE_STATISTICS
        operators.inner.comm_all_gather(*exchange, received.view(-1), sent.view(-1))
        operators.inner.comm_wait(*exchange)
        gathered = list(received)
    gathered[packed.rank] = tensor
    return gathered


def _final_logits(packed, z, temperature, ignored):
    """The final logits of z (..., K); `ignored`: mask of ignored rows."""
    options = packed.logit_options
    if temperature is not None:
        options = {**options, "temperature": temperature}
    return reference.final_logits(z, ignored, **options)


def _top_values(packed, logits, classes, tail_lse):
    """class_logits, classes and tail_lse of the topk largest of the candidates' `logits`.

    `tail_lse`: of all classes but the candidates, or None; those that are not chosen join it.
    """
    absent = classes < 0
    finite = logits.detach().clamp(min=torch.finfo(logits.dtype).min)  # above what is absent
    _, best = finite.masked_fill(absent, -math.inf).topk(packed.topk, dim=-1)
    if tail_lse is not None:
        others = logits.masked_fill(absent.scatter(-1, best, True), -math.inf)
        tail_lse = _logaddexp(tail_lse, others)
    return logits.gather(-1, best), classes.gather(-1, best), tail_lse


def _logaddexp(lse, others):
    """logsumexp of lse (...) and others (..., K). Where all are -inf, so is the result, with the
    gradient 0 and not the NaN of torch's."""
    terms = torch.cat((lse.unsqueeze(-1), others), dim=-1)
    empty = terms.detach().isneginf().all(dim=-1)
    return terms.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty, -math.inf)


def _class_values(packed, outputs, temperature, target, tail_lse):
    """{"class_logits", "classes" (None without topk), "tail_lse"} from an operator's class_logits
    and, with topk, its candidates."""
    z, classes = outputs.class_logits, outputs.top_classes
    if packed.ranks > 1 and packed.topk:
        z, classes = (torch.cat(_of_ranks(packed, of_rank), dim=-1) for of_rank in (z, classes))
    elif packed.ranks > 1:
        z = sum(_of_ranks(packed, z))  # 0 for the classes of other ranks
    ignored = reference.ignored_rows(target, packed.ignore_index)
    logits = _final_logits(packed, z, temperature, ignored)
    classes = classes if packed.topk else None
    if packed.topk:
        logits, classes, tail_lse = _top_values(packed, logits, classes, tail_lse)
        tail_lse = None if tail_lse is None else tail_lse.masked_fill(ignored, 0.0)
    return {"class_logits": logits, "classes": classes, "tail_lse": tail_lse}


def _accuracy(target, ignored, predictions, valid, bound):
    """`bound`: how many rows were computed; NaN with more valid rows, as the loss is."""
    # An ignored row never counts as right: its prediction is -1, which may equal ignore_index.
    right = ((predictions == target) & ~ignored).sum().to(valid.dtype)
    accuracy = right / valid.clamp(min=1.0)
    if bound is None or bound == calls.COUNTED:
        return accuracy
    return accuracy.masked_fill(valid > bound, math.nan)


def _z_loss(packed, lse, loss_tensors, ignored, valid):
    """The z-loss's part of the loss. lse: of each row, (...); `valid`: the number of valid rows."""
    rows = packed.z_loss * lse.detach().square()
    if loss_tensors.token_weight is not None:
        rows = rows * loss_tensors.token_weight.to(rows.dtype)
        rows = rows if ignored is None else rows.masked_fill(ignored, 0.0)
    if packed.reduction == "mean":
        return mean_of(rows.sum(), valid, loss_tensors.num_items)
    return rows.sum() if packed.reduction == "sum" else rows


def mean_of(total, valid, num_items):
    """`total` over num_items, or the `valid` rows where that is None: 0 of no valid rows, NaN where
    there are some and 0 items, as in the operators."""
    count = valid if num_items is None else num_items.to(total.dtype)
    of_none = torch.where(valid == 0, 0.0, math.nan)
    return total * torch.where(count == 0, of_none, 1.0 / count)


def results(packed, outputs, target, loss_tensors, rows, none_counted):
    """The loss, or a LinearCrossEntropyOutput if more outputs are wanted.

    packed: packing.PackedOptions; outputs: calls.ForwardOutputs; target: after the shift;
    loss_tensors: composite.LossTensors; rows: as in calls.OperatorOptions; none_counted: whether
    the loss is a mean over no row, as all labels are ignored, if that is known.
    """
    if none_counted and has_values(target):
        _warn_of_no_label(packed.ignore_index)
    has_classes = outputs.class_logits is not None
    if not packed.wants_outputs and not has_classes:
        return outputs.loss
    wanted, values = packed.wanted, _row_values(packed, outputs, target)
    if wanted.accuracy or wanted.z_loss:
        values |= _row_means(packed, outputs, target, loss_tensors, rows)
    if has_classes:
        tail_lse = values.get("tail_lse")
        values |= _class_values(packed, outputs, loss_tensors.temperature, target, tail_lse)
    return LinearCrossEntropyOutput(outputs.loss, **values)


def _warn_of_no_label(ignore_index):
    validate.warn_once(
        f"flce: every label is ignore_index, {ignore_index}: the loss is 0, without gradients; "
        "check the labels and ignore_index (shown once)"
    )


def _row_means(packed, outputs, target, loss_tensors, rows):
    """The wanted ones of accuracy and z_loss, by name."""
    values, ignored = {}, None
    if not target.is_floating_point():
        ignored = validate.is_equal(target, packed.ignore_index)
    valid = outputs.scalars[operators.SCALAR_VALID]
    if packed.wanted.accuracy:
        values["accuracy"] = _accuracy(target, ignored, outputs.predictions, valid, rows)
    if packed.wanted.z_loss:
        values["z_loss"] = _z_loss(packed, _lse_of(outputs, target), loss_tensors, ignored, valid)
    return values


def _lse_of(outputs, target):
    """The logsumexp of each row, (...)."""
    return outputs.stats[operators.STAT_LSE].reshape(fakes.rows_shape(target))


def _row_values(packed, outputs, target):
    """The wanted ones of lse, entropy, predictions and tail_lse, (...), by name."""
    shape, wanted, values = fakes.rows_shape(target), packed.wanted, {}
    if wanted.lse:
        values["lse"] = _lse_of(outputs, target)
    if wanted.entropy:
        entropy = outputs.stats[operators.STAT_ENTROPY].reshape(shape)
        values["entropy"] = entropy.detach() if packed.detaches_entropy else entropy
    if wanted.predictions:
        values["predictions"] = outputs.predictions
    if wanted.tail_lse:
        values["tail_lse"] = outputs.stats[operators.STAT_TAIL_LSE].reshape(shape)
    return values
