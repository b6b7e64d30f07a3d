"""Divergences from a teacher of which K classes of each row are known, composed of the student's
log-probabilities of these."""

import math

import torch

from .. import functional, validate
from ..options import CHOICES, check_names, code_of, ignore_index_of

TAILS = ("class", "renormalize")
_NOTHING = -1e4  # log-probability of an absent class: finite, so 0 times it is 0; its exp is 0


def _with_tail(logprobs, tail, least):
    """(..., K + 1) log-probabilities with the rest as one class, or (..., K) of those given that
    it is one of them. least: lower bound of the rest's probability, which rounding may make 0."""
    if tail == "renormalize":
        return logprobs.log_softmax(-1)
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-least)
    return torch.cat((logprobs, torch.log(-torch.expm1(total))), dim=-1)


def _kl(log_q, log_p):
    q = log_q.exp()
    return (q * (log_q - log_p).masked_fill(q == 0.0, 0.0)).sum(-1)


def _divergence_of(log_p, log_q, divergence, beta):
    if divergence != "jsd":
        return _kl(log_q, log_p) if divergence == "forward_kl" else _kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _kl(log_q, log_m) + (1.0 - beta) * _kl(log_p, log_m)


def _check(input, ids, logprobs, factor):
    validate.check_tensor("input", input)
    validate.check_tensor("ids", ids)
    given = [("teacher_logits", logprobs, ids.shape, ", that of the ids")]
    if factor is not None:
        given.append(("token_weight", factor, ids.shape[:-1], ", a number for each row of input"))
    for name, tensor, *shape in given:
        validate.check_tensor(name, tensor)
        validate.check_constant(name, tensor)
        validate.check_same_device(name, tensor, "input", input)
        validate.check_shape(name, tensor, *shape)
    code_of("teacher_logits", logprobs.dtype)


def sparse_divergence(input, linear_weight, ids, logprobs, divergence, beta, tail, options):
    """The loss as linear_divergence returns it; `options`: the student's."""
    asked = {"call": "linear_divergence of K classes", **locals(), **options}
    options = dict(options)
    if tail not in TAILS:
        validate.refuse("tail", f"one of {TAILS}", repr(tail))
    if not 0.0 < validate.check_number("beta", beta) < 1.0:
        validate.refuse("beta", "0 < beta < 1", beta)
    reduction = options.pop("reduction", "mean")
    if reduction not in CHOICES["reduction"]:
        validate.refuse("reduction", f"one of {CHOICES['reduction']}", repr(reduction))
    factor, items = options.pop("token_weight", None), options.pop("num_items", None)
    known = {n: o for n, o in functional.OF_DIVERGENCE.items() if n not in ("shift", "cu_seqlens")}
    check_names("linear_divergence", known, options)
    if (gradient := options.get("gradient", "exact")) != "exact":
        validate.refuse("gradient", '"exact" with (ids, log-probabilities)', repr(gradient))
    _check(input, ids, logprobs, factor)
    made = functional.logprobs_at_of(input, linear_weight, ids, options, asked)
    absent = validate.is_equal(ids, ignore_index_of(options.get("ignore_index", -100)))
    none = absent | (made.isneginf() & logprobs.isneginf())  # no gradient of logaddexp(-inf, -inf)
    pair = (one.to(made.dtype).masked_fill(none, _NOTHING) for one in (made, logprobs))
    is_wide = made.dtype == logprobs.dtype == torch.float64
    least = torch.finfo(torch.float64 if is_wide else torch.float32).eps
    rows = _divergence_of(*(_with_tail(one, tail, least) for one in pair), divergence, beta)
    rows = rows if factor is None else rows * factor.to(rows.dtype)
    ignored = absent.all(dim=-1)
    rows = rows.masked_fill(ignored, 0.0)
    return functional.reduced(rows, ignored, reduction, items, input)
