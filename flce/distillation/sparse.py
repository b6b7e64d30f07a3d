"""Divergences from a teacher of which K classes of each row are known, composed of the student's
log-probabilities of these."""

import math
import typing
from typing import Literal

import torch

from .. import class_losses, functional, validate
from ..options import OF_DIVERGENCE, check_names
from ..packing import code_of, divergence_code, ignore_index_of

Tail = Literal["class", "renormalize"]
TAILS = typing.get_args(Tail)
_NOTHING = -1e4  # log-probability of an absent class: finite, so 0 times it is 0; its exp is 0


def _tail_of(logprobs):
    """log of the probability (..., 1) of all classes but those of `logprobs` (..., K): 1 - sum, as
    exact as these allow. -inf where they sum to 1 or more."""
    others = -torch.expm1(logprobs.double().logsumexp(-1, keepdim=True))
    return others.clamp(min=0.0).log()


def _kl(log_q, log_p):
    q = log_q.exp()
    return (q * (log_q - log_p).masked_fill(q == 0.0, 0.0)).sum(-1)


def _jsd(log_p, log_q, beta):
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _kl(log_q, log_m) + (1.0 - beta) * _kl(log_p, log_m)


# Each of packing.DIVERGENCES, of the student's log_p and the teacher's log_q.
DEFINITIONS = {
    "forward_kl": lambda log_p, log_q, _: _kl(log_q, log_p),
    "reverse_kl": lambda log_p, log_q, _: _kl(log_p, log_q),
    "jsd": _jsd,
}


def _check(input, ids, logprobs):
    validate.check_tensor("input", input)
    validate.check_tensor("ids", ids)
    validate.check_tensor("teacher_logits", logprobs)
    validate.check_constant("teacher_logits", logprobs)
    validate.check_same_device("teacher_logits", logprobs, "input", input)
    validate.check_shape("teacher_logits", logprobs, ids.shape, ", that of the ids")
    code_of("teacher_logits", logprobs.dtype)


def sparse_divergence(input, linear_weight, ids, logprobs, divergence, beta, tail, options):
    """The loss as linear_divergence returns it; `options`: the student's."""
    caller = {"call": "linear_divergence of K classes", "ids": ids, "teacher_logits": logprobs}
    caller |= {"divergence": divergence, "beta": beta, "tail": tail, **options}
    options = dict(options)
    divergence_code(divergence)  # refuses what is none
    if tail not in TAILS:
        validate.refuse("tail", f"one of {TAILS}", repr(tail))
    if not 0.0 < validate.check_number("beta", beta) < 1.0:
        validate.refuse("beta", "0 < beta < 1", beta)
    known = {n: o for n, o in OF_DIVERGENCE.items() if n not in ("shift", "cu_seqlens")}
    check_names("linear_divergence", known, options)
    if (gradient := options.get("gradient", "exact")) != "exact":
        validate.refuse("gradient", '"exact" with (ids, log-probabilities)', repr(gradient))
    _check(input, ids, logprobs)
    rows = class_losses.RowLosses.of_options(options, input, ids.shape[:-1])
    has_tail = tail == "class"
    log_p = class_losses.logprobs_at(
        functional.call_by_composed_function, input, linear_weight, ids, options, has_tail, caller
    )
    absent = validate.is_equal(ids, ignore_index_of(options.get("ignore_index", -100)))
    ignored = absent.all(dim=-1)
    log_q = logprobs.masked_fill(absent, -math.inf)
    if has_tail:
        log_q = torch.cat((log_q, _tail_of(log_q)), dim=-1)
        absent = torch.cat((absent, ignored.unsqueeze(-1)), dim=-1)
    log_q = log_q.to(log_p.dtype)
    # No gradient of logaddexp(-inf, -inf), nor of -inf - -inf.
    none = absent | (log_p.isneginf() & log_q.isneginf())
    log_p, log_q = (log_r.masked_fill(none, _NOTHING) for log_r in (log_p, log_q))
    if not has_tail:
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    return rows.reduced(DEFINITIONS[divergence](log_p, log_q, beta), ignored)
