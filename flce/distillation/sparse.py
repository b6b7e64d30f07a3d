"""Divergences from a teacher of which K classes of each row are known, composed of the student's
log-probabilities of these."""

import math

import torch

from .. import functional
from ..options import check_names, ignore_index_of
from ..validate import check_constant, check_shape, check_tensor, num_items_tensor, refuse

TAILS = ("class", "renormalize")
_NOTHING = -1e4  # log-probability of an absent class: its exp is 0, and 0 times it too
_LEAST_TAIL = 2.0**-23  # of float32's log-probabilities


def _with_tail(logprobs, tail):
    """(..., K + 1) log-probabilities with the rest as one class, or (..., K) of those given that
    it is one of them."""
    if tail == "renormalize":
        return logprobs.log_softmax(-1)
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-_LEAST_TAIL)
    return torch.cat((logprobs, torch.log(-torch.expm1(total))), dim=-1)


def _kl(log_q, log_p):
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _divergence_of(log_p, log_q, divergence, beta):
    if divergence != "jsd":
        return _kl(log_q, log_p) if divergence == "forward_kl" else _kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _kl(log_q, log_m) + (1.0 - beta) * _kl(log_p, log_m)


def sparse_divergence(input, linear_weight, ids, logprobs, divergence, beta, tail, options):
    """The loss as linear_divergence returns it; `options`: the student's."""
    options = dict(options)
    if tail not in TAILS:
        refuse("tail", f"one of {TAILS}", repr(tail))
    if divergence == "jsd" and not 0.0 < beta < 1.0:
        refuse("beta", "0 < beta < 1", beta)
    check_tensor("teacher_logits", logprobs)
    check_constant("teacher_logits", logprobs)
    check_shape("teacher_logits", logprobs, ids.shape, ", that of the ids")
    reduction = options.pop("reduction", "mean")
    factor, items = options.pop("token_weight", None), options.pop("num_items", None)
    into = options.pop("accumulate_into", None)
    check_names("linear_divergence", functional.OF_LOGPROBS_AT, options)
    options["accumulate_into"] = into
    made = functional.logprobs_at_of(input, linear_weight, ids, options)
    absent = ids == ignore_index_of(options.get("ignore_index", -100))
    pair = (one.to(made.dtype).masked_fill(absent, _NOTHING) for one in (made, logprobs))
    rows = _divergence_of(*(_with_tail(one, tail) for one in pair), divergence, beta)
    ignored = absent.all(dim=-1)
    rows = rows.masked_fill(ignored, 0.0)
    rows = rows if factor is None else rows * factor.to(rows.dtype)
    loss = rows if reduction == "none" else rows.sum()
    if items is not None:
        items = num_items_tensor(items, reduction, input)
    if reduction == "mean":
        count = (~ignored).sum().to(loss.dtype) if items is None else items
        loss = loss * torch.where(count == 0, 0.0, 1.0 / count)
    return loss
