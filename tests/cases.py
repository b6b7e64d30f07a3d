"""Shapes, logit distributions and the three-way tolerance that the tests share.

The truth is the reference in float64. The yardstick is the reference in the dtype of the call: what
eager PyTorch loses. Ours may lose twice that, or what FLOORS allows where eager is lucky.
"""

import dataclasses
import math

import torch
from torch.profiler import ProfilerActivity, profile

from flce import reference

SAVES = ("logits", "grads", "stats")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = ("input", "linear_weight", "linear_bias")
HAS_CUDA = torch.cuda.is_available()

# Relative errors that are granted to a tensor, and to one row of it, whatever eager loses. float64:
# the truth itself has these. Others: a few roundings of operands and result (2**-8 for bfloat16,
# 2**-11 for float16, 2**-24 for float32, where the sums' own order counts more).
FLOORS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (4e-6, 2e-5),
    torch.bfloat16: (4e-3, 1.2e-2),
    torch.float16: (1e-3, 3e-3),
}
# Rounding of one logit relative to its size: what no row can undercut. On the CPU torch's bfloat16
# GEMM gives bfloat16 logits, to eager and to us.
LOGIT_ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# float64 forms p - 1 by cancellation: an absolute error of this times the other operand's row.
TRUTH_ROUNDING = 2.0**-51


@dataclasses.dataclass
class Case:
    """One call: input (..., H), linear_weight (V, H), target (...), and keyword options."""

    input: torch.Tensor
    linear_weight: torch.Tensor
    target: torch.Tensor
    options: dict = dataclasses.field(default_factory=dict)

    def to(self, dtype):
        """The same values in another floating dtype."""
        options = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) else value
            for name, value in self.options.items()
        }
        return Case(self.input.to(dtype), self.linear_weight.to(dtype), self.target, options)

    def with_options(self, **options):
        return dataclasses.replace(self, options={**self.options, **options})

    @property
    def dtype(self):
        return self.input.dtype


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_case(
    tokens, hidden, vocab, *, dtype, device="cpu", std=1.0, targets="random", bias=False, seed=0
):
    """Logits of standard deviation `std`; targets uniform, or drawn from the model's softmax."""
    random = generator(seed)
    x = torch.randn(tokens, hidden, generator=random) * math.sqrt(std)
    w = torch.randn(vocab, hidden, generator=random) * math.sqrt(std / hidden)
    x, w = (tensor.to(device, dtype) for tensor in (x, w))
    target = torch.randint(vocab, (tokens,), generator=random).to(device)
    if targets == "sampled":
        noise = torch.rand(tokens, vocab, generator=random).log_().neg_().log_().neg_().to(device)
        target = (x.float() @ w.float().T + noise).argmax(-1)
    case = Case(x, w, target)
    if bias:
        case.options["linear_bias"] = torch.randn(vocab, generator=random).to(device, dtype)
    return case


def plant(case, gaps):
    """Turns row i into one whose target is beaten by another column by gaps[i] (a negative gap: the
    target wins by that much). The margin is exact up to the rounding of x."""
    w = case.linear_weight.double()
    x, target = case.input.double().clone(), case.target.clone()
    vocab = w.shape[0]
    for row, gap in enumerate(gaps):
        other = (int(target[row]) + 1 + row) % vocab
        step = w[other] - w[target[row]]
        x[row] = gap * step / step.square().sum()
    return dataclasses.replace(case, input=x.to(case.dtype), target=target)


def ignore_some(case, index=-100, every=3):
    """Ignores every third row and fills it with NaN, which must reach nothing."""
    x, target = case.input.clone(), case.target.clone()
    target.view(-1)[::every] = index
    x.view(-1, x.shape[-1])[::every] = float("nan")
    return Case(x, case.linear_weight, target, {**case.options, "ignore_index": index})


def outcome(function, case, *, wants=GRADIENTS, grad_output=None, **knobs):
    """Loss and gradients of one call, by name; `wants` are the inputs that require a gradient."""
    named = {"input": case.input, "linear_weight": case.linear_weight}
    if "linear_bias" in case.options:
        named["linear_bias"] = case.options["linear_bias"]
    leaves = {
        name: tensor.detach().clone().requires_grad_(name in wants)
        for name, tensor in named.items()
    }
    wanted = [name for name in leaves if name in wants]
    options = {**case.options, **knobs}
    options.pop("linear_bias", None)
    loss = function(
        leaves["input"],
        leaves["linear_weight"],
        case.target,
        linear_bias=leaves.get("linear_bias"),
        **options,
    )
    results = {"loss": loss.detach()}
    if wanted:
        upstream = None if grad_output is None else grad_output.to(loss.dtype)
        if upstream is None and loss.dim() > 0:
            upstream = torch.ones_like(loss)
        grads = torch.autograd.grad(loss, [leaves[name] for name in wanted], upstream)
        results.update(zip(wanted, grads, strict=True))
    return results


def relative_error(value, truth):
    """|value - truth| / |truth|, in float64; 0 where both are zero."""
    difference = (value.double() - truth).norm().item()
    return difference / max(truth.norm().item(), torch.finfo(torch.float64).tiny)


class Yardstick:
    """Truth and tolerance for one call; `check` compares a result with them."""

    def __init__(self, case, *, wants=GRADIENTS, grad_output=None, logits_dtype=None):
        self.case = case
        wide = case.to(torch.float64)
        call = {"wants": wants, "grad_output": grad_output}
        self.truth = outcome(reference.linear_cross_entropy, wide, **call)
        self.eager = outcome(reference.linear_cross_entropy, case, **call)
        self.logit_error = _logit_error(case, wide, logits_dtype)
        upstream = 1.0 if grad_output is None else grad_output.abs().max().item()
        self.truth_error = {
            "input": TRUTH_ROUNDING * upstream * _longest_row(wide.linear_weight),
            "linear_weight": TRUTH_ROUNDING * upstream * _longest_row(wide.input.nan_to_num()),
            "linear_bias": TRUTH_ROUNDING * upstream,
            "loss": TRUTH_ROUNDING,
        }

    def check(self, results, context=""):
        assert results.keys() == self.truth.keys()
        for name, truth in self.truth.items():
            value = results[name]
            where = f"{name} {context}"
            assert value.shape == truth.shape, where
            assert value.dtype == self._dtype_of(name), where
            self._check_tensor(where, name, value)
            self._check_rows(where, name, value)

    def _dtype_of(self, name):
        if name == "loss":
            return torch.float64 if self.case.dtype == torch.float64 else torch.float32
        return self.case.dtype

    def _check_tensor(self, where, name, value):
        truth, eager = self.truth[name], self.eager[name]
        error = (value.double() - truth).norm()
        limit = self._limit(
            FLOORS[self.case.dtype][0],
            truth.norm(),
            (eager.double() - truth).norm(),
            self.truth_error[name] * math.sqrt(truth.numel()),
            truth.numel(),
        )
        assert error <= limit, f"{where}: error {error:.3e} > {limit:.3e} of {truth.norm():.3e}"

    def _check_rows(self, where, name, value):
        """Rows of dX and dW, single losses: one bad row cannot hide in a norm. A gradient of the
        bias, or of a head with few columns, is one number a row (or few), which cancels, and a
        reduced loss is one row: the norm serves."""
        truth, eager = self.truth[name], self.eager[name]
        width = 1 if name == "loss" or truth.dim() == 0 else truth.shape[-1]
        if truth.dim() == 0 or name == "linear_bias" or (name != "loss" and width < 8):
            return
        value, truth, eager = (t.double().reshape(-1, width) for t in (value, truth, eager))
        logit_error = self.logit_error["linear_weight" if name == "linear_weight" else "input"]
        # A loss carries the error of its logits whole, a gradient in proportion to its size.
        absolute = logit_error if name == "loss" else 0.0
        error = (value - truth).norm(dim=-1)
        limit = self._limit(
            FLOORS[self.case.dtype][1] + 2.0 * logit_error,
            truth.norm(dim=-1),
            (eager - truth).norm(dim=-1),
            2.0 * absolute + self.truth_error[name],
            width,
        )
        bad = ~(error <= limit)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise AssertionError(
                f"{where}: {int(bad.sum())} of {len(bad)} rows, first {row}:"
                f" error {error[row]:.3e} > {limit[row]:.3e} of {truth[row].norm():.3e}"
            )

    def _limit(self, granted, size, eager_error, absolute, width):
        # Below the smallest normal number there is no relative accuracy to hold. float16 ends at
        # numbers that gradients have: it is held to their spacing.
        limits = torch.finfo(self.case.dtype)
        tiny = limits.tiny * (limits.eps if self.case.dtype == torch.float16 else 1.0)
        tiny *= math.sqrt(width)
        return torch.maximum(2.0 * eager_error, granted * size + absolute + tiny)


def _longest_row(matrix):
    return matrix.reshape(-1, matrix.shape[-1]).norm(dim=-1).max().item() if matrix.numel() else 0.0


def _logit_error(case, wide, logits_dtype):
    """What the rounding of the logits alone can do, per row of dX (and the loss) and of dW."""
    on_cpu = case.input.device.type == "cpu"
    held = case.dtype if case.dtype == torch.float64 or on_cpu else torch.float32
    held = logits_dtype or held
    rounding = LOGIT_ROUNDING.get(held, LOGIT_ROUNDING[torch.float32])
    x = wide.input.reshape(-1, wide.input.shape[-1]).nan_to_num()
    logits = x @ wide.linear_weight.T
    if not logits.numel():
        return {"input": torch.zeros(len(x), device=x.device), "linear_weight": 0.0}
    rows = rounding * logits.abs().amax(dim=-1)
    return {"input": rows, "linear_weight": rows.max()}


def check(function, case, *, wants=GRADIENTS, grad_output=None, **knobs):
    """One call of `function` with `knobs` against the yardstick of the case."""
    logits_dtype = knobs.get("logits_dtype")
    yardstick = Yardstick(case, wants=wants, grad_output=grad_output, logits_dtype=logits_dtype)
    results = outcome(function, case, wants=wants, grad_output=grad_output, **knobs)
    yardstick.check(results, f"{knobs}")


def chunked_truth(case, rows):
    """Mean loss, dX and dW in float64, `rows` tokens at a time, where N x V is too much at once."""
    tokens = case.input.shape[0]
    parts = []
    dw = torch.zeros_like(case.linear_weight, dtype=torch.float64)
    for begin in range(0, tokens, rows):
        part = slice(begin, begin + rows)
        chunk = dataclasses.replace(case, input=case.input[part], target=case.target[part])
        chunk = chunk.to(torch.float64).with_options(reduction="sum")
        part = outcome(reference.linear_cross_entropy, chunk)
        dw += part.pop("linear_weight")
        parts.append(part)
    return {
        "loss": sum(part["loss"] for part in parts) / tokens,
        "input": torch.cat([part["input"] for part in parts]) / tokens,
        "linear_weight": dw / tokens,
    }


def gemms_of(function):
    """How many GEMMs the engine asked for while `function` ran."""
    before = torch.ops.flce.gemm_count()
    function()
    return torch.ops.flce.gemm_count() - before


def peak_bytes(function, device):
    """The most bytes that tensors allocated by `function` held at one time, as asked for (without
    the allocator's rounding). What `function` returns is kept until the end."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        kept = function()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = function()
    del kept
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def same_bits(left, right):
    """Whether two results are equal bit for bit, NaN included."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].nan_to_num(nan=12345.0), right[name].nan_to_num(nan=12345.0))
        for name in left
    )
