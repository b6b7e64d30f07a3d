"""The loss and gradients of a case in float64, and how far a right implementation may be from them.

The tolerance is a bound for each element. It has these roundings (docs/conformance.md): to the
operands' dtype as `Rounding` states them; in the statistics' dtype a few for each operation, and
sqrt(n) for a sum of n terms, relative to the sum of their absolute values (probabilistic bound:
Higham and Mary, SIAM J. Sci. Comput. 41, 2019; twice that for 16-bit products on CUDA, as tensor
cores truncate: Fasi et al., PeerJ Comput. Sci. 7:e330, 2021)."""

from __future__ import annotations

import math
import typing

import torch

from .cases import Case
from .operands import Operands

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
UNIT |= {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Half the distance of subnormal numbers; others than float16's may be flushed to zero.
TINY = {torch.float16: 2.0**-25, torch.float64: 2.0**-1022}
OPERATIONS = 4.0  # roundings of a few operations in the statistics' dtype
MANY = 2**16  # terms


class Rounding(typing.NamedTuple):
    """How often an implementation rounds to the operands' dtype."""

    logits: int = 0
    exponentials: int = 0  # where its products read these, and not the gradient of the logits
    factors: int = 1  # of the gradients' matrix products: the gradient of the logits
    results: int = 1  # 2: made in the forward, multiplied by the upstream gradient later


class Truth(typing.NamedTuple):
    """float64 tensors by name: loss, input, weight, bias. `moved`: for each row, what the stated
    rounding of the logits may change one by."""

    exact: dict[str, torch.Tensor]
    tolerance: dict[str, torch.Tensor]
    moved: torch.Tensor


def sums(terms: int, unit: float) -> float:
    """The error of a sum, relative to the sum of absolute values. Of more than MANY terms most are
    nearly equal, so their roundings are not independent (docs/conformance.md)."""
    probable = math.sqrt(terms) * (1.0 if terms <= MANY else 8.0)
    return (probable + OPERATIONS) * unit


def rounded(error, value, dtype, times, scale=1.0):
    """A bound of the error after `value` +- `error` is rounded to dtype; inf if it may overflow."""
    tiny, size = TINY.get(dtype, 2.0**-126) * scale, value.abs() + error
    bound = error + times * (UNIT[dtype] * size).clamp(min=tiny)
    return bound.masked_fill(size > torch.finfo(dtype).max, torch.inf)


@torch.no_grad()
def truth(case: Case, operands: Operands, rounding: Rounding) -> Truth:
    """The Truth of operands for an implementation that rounds so."""
    dtype, upstream = operands.x.dtype, operands.upstream.double().expand(case.tokens).unsqueeze(-1)
    stat = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    unit = 2.0 * stat if operands.x.is_cuda and dtype.itemsize == 2 else stat
    cut = (operands.y == case.ignore_index).unsqueeze(-1)
    y = operands.y.unsqueeze(-1).masked_fill(cut, 0).long()
    x, w = operands.x.double().masked_fill(cut, 0.0), operands.w.double()
    logits, slope, error, slope_error, moved = _logits(case, operands, x, w, rounding, stat, unit)
    exponentials = rounding.exponentials * UNIT[dtype]
    row, row_error, dl, dl_error = _rows(case, operands, logits, error, y, cut, stat, exponentials)
    dl, dl_error = upstream * dl, upstream.abs() * dl_error
    dz = dl * slope
    dz_error = dl_error * (slope + slope_error) + dl.abs() * slope_error
    # As a matrix product reads it. Rows without a gradient have exact zeros.
    read = rounded(dz_error, dz, dtype, rounding.factors, upstream.abs().clamp(min=1.0))
    none = cut | (upstream == 0)
    read, size = read.masked_fill(none, 0.0), dz.abs()
    of_rows = read + sums(case.tokens, unit) * size
    exact = {"input": dz @ w, "weight": dz.T @ x, "bias": dz.sum(0)}
    bounds = {"input": (read + sums(case.vocab, unit) * size) @ w.abs()}
    bounds |= {"weight": of_rows.T @ x.abs(), "bias": of_rows.sum(0)}
    # A gradient of the forward is rounded before it is multiplied.
    sizes = torch.cat([upstream.abs().flatten(), upstream.new_ones(1)])
    scale = sizes.amax() if rounding.results > 1 else 1.0
    for name, value in exact.items():
        # inf * 0: of a product whose operand may have overflowed.
        bound = bounds[name].masked_fill(bounds[name].isnan(), torch.inf)
        bound = rounded(bound, value, dtype, rounding.results, scale)
        bounds[name] = bound.masked_fill(none if name == "input" else none.all(), 0.0)
    if operands.rows is not None:  # autograd adds x's gradient to its rows of w's
        exact["weight"].index_add_(0, operands.rows, exact["input"])
        bounds["weight"].index_add_(0, operands.rows, bounds["input"])
        bounds["weight"] = rounded(bounds["weight"], exact["weight"], dtype, 1)
        bounds["weight"] = bounds["weight"].masked_fill(none.all(), 0.0)
    if case.reduction != "none":
        row_error = row_error.sum() + sums(case.tokens, stat) * row.abs().sum()
        row = row.sum()
    exact["loss"], bounds["loss"] = row, row_error
    undefined = _is_undefined(case, operands, cut, y)
    bounds = {name: bound.masked_fill(undefined, torch.inf) for name, bound in bounds.items()}
    return Truth(exact, bounds, moved.masked_fill(cut.squeeze(-1), 0.0))


def _is_undefined(case, operands, cut, y):
    """Whether the loss is a mean whose denominator, a sum of class weights, is 0."""
    weight = operands.options.get("weight")
    if weight is None or case.reduction != "mean":
        return torch.zeros((), dtype=torch.bool, device=y.device)
    return (weight.double()[y].masked_fill(cut, 0.0).sum() == 0) & ~cut.all()


def _logits(case, operands, x, w, rounding, stat, unit):
    """l, dl/dz, bounds of their errors, and what the rounding of a row's logits alone may do."""
    z, bias = x @ w.T, x.new_zeros(case.vocab) if operands.bias is None else operands.bias.double()
    out = bias.isinf()  # classes whose logit is -inf, without an error
    size = x.abs() @ w.abs().T + bias.abs()
    by_rounding = torch.maximum(z.abs(), (z + bias).abs()).masked_fill(out, 0.0)
    by_rounding *= rounding.logits * UNIT[operands.x.dtype]
    z, moved = z + bias, by_rounding.amax(-1)
    error = (by_rounding + sums(case.hidden, unit) * size).masked_fill(out, 0.0)
    if case.softcap is None:
        return z, torch.ones_like(z), error, torch.zeros_like(z), moved
    t = torch.tanh(z / case.softcap)
    slope = 1.0 - t.square()
    # |d log slope / dz| <= 2 / softcap, and no slope exceeds 1.
    growth = (2.0 / case.softcap * error).clamp(max=80.0)
    slope_error = slope * torch.expm1(growth) + OPERATIONS * stat
    error = error * (slope * torch.exp(growth)).clamp(max=1.0) + OPERATIONS * stat * case.softcap
    return case.softcap * t, slope, error, slope_error, moved


def _rows(case, operands, logits, error, y, cut, stat, exponentials):
    """The rows' parts of the loss, their gradients by the logits, bounds of the errors of both."""
    few, vocab, count = OPERATIONS * stat, case.vocab, sums(case.tokens, stat)
    finite = logits.masked_fill(logits.isinf(), 0.0)  # of a class of -inf, no product is needed
    error = error + few * finite.abs()
    lse = torch.logsumexp(logits, -1, keepdim=True)
    log_p = logits - lse
    p = log_p.exp()
    # log sum p e^d for |d| <= error
    lse_error = torch.logsumexp(log_p + error, -1, keepdim=True)
    lse_error = lse_error + few * lse.abs() + sums(vocab, stat)
    p_error = p * torch.expm1((error + lse_error).clamp(max=80.0))
    flushed = TINY.get(operands.x.dtype, 2.0**-126) if exponentials else 2.0**-126
    p_error = p_error.clamp(max=1.0) + (few + exponentials) * p + flushed
    # A row's loss: total lse - at_target l_y - sum_j spread_j l_j + z_loss lse^2.
    weight = operands.options.get("weight")
    weight = logits.new_ones(vocab) if weight is None else weight.double()
    at_target = (1.0 - case.label_smoothing) * weight[y]
    spread = case.label_smoothing / vocab * weight
    total, total_size = at_target + spread.sum(), at_target.abs() + spread.abs().sum()

    def combined(at_target, spread, values):
        return at_target * values.gather(-1, y) + (values @ spread).unsqueeze(-1)

    loss = total * lse - combined(at_target, spread, finite)
    sizes = at_target.abs(), spread.abs()
    apart = total_size * lse.abs() + combined(*sizes, finite.abs())
    terms = vocab if case.label_smoothing else 1
    loss_error = total_size * lse_error + combined(*sizes, error)
    loss_error = loss_error + (sums(terms, stat) + count) * apart
    square = case.z_loss * lse.square()
    square_error = case.z_loss * (2.0 * lse.abs() + lse_error) * lse_error + 2.0 * few * square
    # The reduction's factors of the two terms.
    of_loss = of_square = valid = (~cut).double()
    if case.reduction == "mean":
        denominator = (valid * weight[y]).sum()
        of_loss = valid / denominator.masked_fill(denominator == 0, 1.0)
        of_square = valid / valid.sum().clamp(min=1.0)
    row = of_loss * loss + of_square * square
    row_error = of_loss.abs() * loss_error + of_square * square_error
    of_lse = 2.0 * case.z_loss * of_square
    q = (of_loss * spread).scatter_add(-1, y, of_loss * at_target)
    q_size = (of_loss * spread).abs().scatter_add(-1, y, (of_loss * at_target).abs())
    size = of_loss.abs() * total_size + of_lse * lse.abs()
    dl = (of_loss * total + of_lse * lse) * p - q
    dl_error = size * p_error + of_lse * lse_error * (p + p_error)
    dl_error = dl_error + (few + count) * (size * p + q_size)
    return row.squeeze(-1), row_error.squeeze(-1), dl, dl_error
