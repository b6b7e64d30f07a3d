"""The loss and gradients of a case in float64, and how far a right implementation may be from them.

The tolerance is a bound of each element, from these roundings and no others; u is the unit roundoff of
the operands' dtype, s that of float32 (of float64 for float64 operands):

1. a gradient is rounded to its own dtype, `results` times: once, or twice where the implementation
   states that it makes gradients in the forward and multiplies them by grad_output later;
2. what the gradients' matrix products read is rounded to the operands' dtype, `factors` times: the
   gradient of the logits, once;
3. the logits are rounded to the operands' dtype, `logits` times, where the implementation states that;
4. exp(logits) is rounded to it, `exponentials` times, where the implementation states that its matrix
   products read these, and not the gradient of the logits: with label smoothing they are the larger;
5. arithmetic in float32: a few s for each operation, and for a sum of n terms sqrt(n) s of the sum of
   their absolute values (the probabilistic bound: Higham and Mary, SIAM J. Sci. Comput. 41, 2019). On
   CUDA 16-bit products count 2 s: tensor cores truncate (Fasi et al., PeerJ Comput. Sci. 7:e330, 2021).

An error of the logits reaches the probabilities by exact inequalities, not to first order.
"""

from __future__ import annotations

import dataclasses
import math

import torch

UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# Half the distance of subnormal numbers; the others may be flushed to zero.
TINY = {torch.float16: 2.0**-25, torch.float64: 2.0**-1022}
OPERATIONS = 4.0  # roundings of a few operations in the statistics' dtype


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How often an implementation rounds to the operands' dtype."""

    logits: int = 0
    exponentials: int = 0
    factors: int = 1
    results: int = 1


@dataclasses.dataclass
class Truth:
    """float64 tensors by name: `loss` and the leaves of the operands. `moved`: the largest error of a
    logit by its rounding to the operands' dtype."""

    exact: dict
    tolerance: dict
    moved: torch.Tensor


def sums(terms, unit):
    """The relative error of a sum, of the sum of absolute values."""
    return (math.sqrt(terms) + OPERATIONS) * unit


def rounded(error, value, dtype, times, scale=1.0):
    """A bound of the error after `value`, known up to `error`, was rounded to dtype."""
    tiny = TINY.get(dtype, 2.0**-126) * scale
    once = (UNIT[dtype] * (value.abs() + error)).clamp(min=tiny)
    return error + times * once


@torch.no_grad()
def truth(case, given, rounding):
    """The Truth of operands (`build`) for an implementation that rounds so."""
    dtype = given.x.dtype
    stat = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    unit = 2.0 * stat if given.x.is_cuda and dtype.itemsize == 2 else stat
    cut = given.y == case.ignore_index
    y = given.y.masked_fill(cut, 0).long().unsqueeze(-1)
    x = given.x.double().masked_fill(cut.unsqueeze(-1), 0.0)
    w = given.w.double()
    l, slope, l_error, slope_error, moved = _logits(case, given, x, w, rounding, stat, unit)
    exponentials = rounding.exponentials * UNIT[dtype]
    row, row_error, dl, dl_error = _rows(case, given, l, l_error, y, cut, stat, exponentials)
    # The gradient of the logits, also as a matrix product reads it.
    dz = dl * slope
    dz_error = dl_error * (slope + slope_error) + dl.abs() * slope_error
    upstream = given.upstream.double().expand(case.tokens).abs().unsqueeze(-1)
    read = rounded(dz_error, dz, dtype, rounding.factors, upstream.clamp(min=1.0))
    read = read.masked_fill(cut.unsqueeze(-1) | (upstream == 0), 0.0)
    size, rows, classes = dz.abs(), sums(case.tokens, unit), sums(case.vocab, unit)
    exact = {"input": dz @ w, "weight": dz.T @ x}
    tolerance = {
        "input": (read + classes * size) @ w.abs(),
        "weight": (read + rows * size).T @ x.abs(),
    }
    if given.bias is not None:
        exact["bias"] = dz.sum(0)
        tolerance["bias"] = (read + rows * size).sum(0)
    if given.rows is not None:  # x's gradient is added to its rows of w
        exact["weight"].index_add_(0, given.rows, exact["input"])
        error = rounded(tolerance["input"], exact["input"], dtype, rounding.results + 1)
        tolerance["weight"].index_add_(0, given.rows, error)
    some = (~cut & (upstream.squeeze(-1) != 0)).any()
    for name, value in exact.items():
        error = rounded(tolerance[name], value, dtype, rounding.results)
        tolerance[name] = error * some
        if name == "input":
            tolerance[name] *= ~(cut.unsqueeze(-1) | (upstream == 0))
    exact = {name: exact[name] for name in given.leaves}
    tolerance = {name: tolerance[name] for name in given.leaves}
    if case.reduction != "none":
        row_error = row_error.sum() + sums(case.tokens, stat) * row.abs().sum()
        row = row.sum()
    return Truth(exact | {"loss": row}, tolerance | {"loss": row_error}, moved.masked_fill(cut, 0.0))


def _logits(case, given, x, w, rounding, stat, unit):
    """l, dl/dz, bounds of their errors, and what the rounding of a row's logits alone may do."""
    z, bias = x @ w.T, 0.0 if given.bias is None else given.bias.double()
    size = x.abs() @ w.abs().T + abs(bias)
    largest = torch.maximum(z.abs(), (z + bias).abs())
    by_rounding = rounding.logits * UNIT[given.x.dtype] * largest
    z = z + bias
    error = by_rounding + sums(case.hidden, unit) * size
    moved = by_rounding.amax(-1)
    if case.softcap is None:
        return z, torch.ones_like(z), error, torch.zeros_like(z), moved
    t = torch.tanh(z / case.softcap)
    slope = 1.0 - t.square()
    # |d log slope / dz| <= 2 / softcap, and no slope exceeds 1.
    growth = (2.0 / case.softcap * error).clamp(max=80.0)
    slope_error = slope * torch.expm1(growth) + OPERATIONS * stat
    l_error = error * (slope * torch.exp(growth)).clamp(max=1.0) + OPERATIONS * stat * case.softcap
    return case.softcap * t, slope, l_error, slope_error, moved


def _rows(case, given, l, l_error, y, cut, stat, exponentials):
    """Losses of the rows, their part of the reduction included, gradients by l, and error bounds."""
    few, vocab = OPERATIONS * stat, case.vocab
    l_error = l_error + few * l.abs()
    lse = torch.logsumexp(l, -1, keepdim=True)
    log_p = l - lse
    p = log_p.exp()
    # |log sum p e^d| for any |d| <= l_error
    lse_error = torch.logsumexp(log_p + l_error, -1, keepdim=True)
    lse_error = lse_error + few * lse.abs() + sums(vocab, stat)
    p_error = p * torch.expm1((l_error + lse_error).clamp(max=80.0))
    p_error = p_error.clamp(max=1.0) + (few + exponentials) * p
    smooth, z_loss = case.label_smoothing, case.z_loss
    weight = given.options.get("weight")
    weight = l.new_ones(vocab) if weight is None else weight.double()
    own = (1.0 - smooth) * weight[y]
    spread = smooth / vocab * weight
    total = own + spread.sum()
    picked, picked_error = l.gather(-1, y), l_error.gather(-1, y)
    loss = total * lse - own * picked - (l @ spread).unsqueeze(-1)
    error = total * lse_error + own * picked_error + (l_error @ spread).unsqueeze(-1)
    apart = total * lse.abs() + own * picked.abs() + (l.abs() @ spread).unsqueeze(-1)
    error = error + sums(vocab if smooth else 1, stat) * apart
    square = z_loss * lse.square()
    square_error = z_loss * (2.0 * lse.abs() + lse_error) * lse_error + few * square
    # Factors of a row: the reduction's.
    valid = (~cut).unsqueeze(-1).double()
    of_loss = of_square = valid
    if case.reduction == "mean":
        of_loss = valid / (valid * weight[y]).sum().clamp(min=1e-300)
        of_square = valid / valid.sum().clamp(min=1.0)
    count = sums(case.tokens, stat)  # a sum of class weights is one
    row = (of_loss * loss + of_square * square).squeeze(-1)
    row_error = (of_loss * (error + count * apart) + of_square * (square_error + few * square))
    g = given.upstream.double().expand(case.tokens).unsqueeze(-1)
    a = of_loss * total + of_square * 2.0 * z_loss * lse
    q = of_loss * spread
    q = q.scatter_add(-1, y, of_loss * own)
    a_error = of_square * 2.0 * z_loss * lse_error
    size = of_loss * total + of_square * 2.0 * z_loss * lse.abs()
    dl = g * (a * p - q)
    dl_error = size * p_error + a_error * (p + p_error) + (few + count) * (size * p + q)
    return row, row_error.squeeze(-1), dl, g.abs() * dl_error
