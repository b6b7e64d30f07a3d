"""Shared by the tests: shapes, logit distributions, tolerances.

The ground truth is the reference in float64. The reference in the dtype of the call gives the error
of eager PyTorch. flce may have twice that error, or FLOORS if eager's is smaller by chance.
"""

import copy
import dataclasses
import gc
import inspect
import math

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import flce
from flce import reference
from harness import elements
from harness.pairs import covering_rows, pairwise  # noqa: F401  cases.pairwise in the tests

SAVES = ("logits", "grads", "stats")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = ("input", "linear_weight", "linear_bias")
LEAVES = (*GRADIENTS, "adapter_input", "adapter_weight")  # what may have a gradient
# Relative error of float16 gradients: dz and the result are rounded once each, and with
# save="logits" E.
F16_BAR = 6e-4
HAS_CUDA = torch.cuda.is_available()

# Relative errors that are always allowed, for a whole tensor and for a single row, whatever eager's
# error. float64: the error of the truth itself. Others: a few roundings of operands and result
# (2**-8 for bfloat16, 2**-11 for float16, 2**-24 for float32, where the order of the sums matters
# more).
FLOORS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (4e-6, 2e-5),
    torch.bfloat16: (4e-3, 1.2e-2),
    torch.float16: (1e-3, 3e-3),
}
# Rounding error of one logit relative to its size, a lower bound of any row's error. On the CPU
# torch's bfloat16 GEMM writes bfloat16 logits, for eager and for flce.
LOGIT_ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# float64 computes p - 1 with cancellation: an absolute error of this times the other operand's row.
TRUTH_ROUNDING = 2.0**-51


@dataclasses.dataclass
class Case:
    """One call: input (..., H), linear_weight (V, H), target (...), and keyword options.

    Without a linear_weight `input` are the logits (..., V) of a call of cross_entropy.
    """

    input: torch.Tensor
    linear_weight: torch.Tensor | None
    target: torch.Tensor
    options: dict = dataclasses.field(default_factory=dict)

    def to(self, dtype):
        return self.map(lambda one: one.to(dtype) if one.is_floating_point() else one)

    def map(self, function):
        """The case of `function` of each tensor."""

        def made(value):
            return function(value) if isinstance(value, torch.Tensor) else value

        options = {name: made(value) for name, value in self.options.items()}
        return Case(made(self.input), made(self.linear_weight), made(self.target), options)

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


def ignore_some(case, index=-100, every=3):
    """Ignores every third row and fills it with NaN, which must not reach any result."""
    x, target = case.input.clone(), case.target.clone()
    target.view(-1)[::every] = index
    x.view(-1, x.shape[-1])[::every] = float("nan")
    return Case(x, case.linear_weight, target, {**case.options, "ignore_index": index})


def outcome(function, case, *, wants=GRADIENTS, grad_output=None, upstream=None, **knobs):
    """Loss, further outputs and gradients of one call, by name.

    `wants`: the inputs that require a gradient; `upstream`: maps the outputs that are
    differentiated together to their upstream gradients. By default that is the loss alone with
    `grad_output` (1).
    """
    named = {"input": case.input, "linear_weight": case.linear_weight}
    named |= {name: case.options.get(name) for name in LEAVES[2:]}
    leaves = {
        name: tensor.detach().requires_grad_(name in wants)
        for name, tensor in named.items()
        if tensor is not None
    }
    wanted = [name for name in leaves if name in wants]
    options = {**case.options, **knobs, **leaves}
    operands = [options.pop(n) for n in ("input", "linear_weight") if n in leaves]
    made = function(*operands, case.target, **options)
    made = made._asdict() if isinstance(made, flce.LinearCrossEntropyOutput) else {"loss": made}
    outputs = {name: value for name, value in made.items() if value is not None}
    results = {name: value.detach() for name, value in outputs.items()}
    if wanted:
        upstream = {"loss": grad_output} if upstream is None else upstream
        grads = torch.autograd.grad(
            [outputs[name] for name in upstream],
            [leaves[name] for name in wanted],
            [
                torch.ones_like(outputs[name]) if one is None else one.to(outputs[name].dtype)
                for name, one in upstream.items()
            ],
        )
        results.update(zip(wanted, grads, strict=True))
    return results


def relative_error(value, truth):
    """|value - truth| / |truth|, in float64; 0 where both are zero."""
    difference = (value.double() - truth).norm().item()
    return difference / max(truth.norm().item(), torch.finfo(torch.float64).tiny)


class Yardstick:
    """Ground truth and tolerance for one call; `check` compares a result with them.

    `cancels`: the gradient of a row may be much smaller than its terms (probabilities near the
    softmax, an entropy near its maximum, gradients of several outputs), where eager's error may be
    small by chance. Then the full rounding error of each logit, probability and statistic is
    allowed.
    """

    def __init__(
        self, case, *, wants=GRADIENTS, grad_output=None, upstream=None, logits_dtype=None,
        cancels=False,
    ):  # fmt: skip
        self.case = case
        self.wide = wide = case.to(torch.float64)
        upstream = {"loss": grad_output} if upstream is None else upstream
        call = {"wants": wants, "upstream": upstream}
        function = reference.cross_entropy
        if case.linear_weight is not None:
            function = reference.linear_cross_entropy
        self.truth = outcome(function, wide, **call)
        self.eager = outcome(function, case, **call)
        self.elements = elements.bounds_of(case, upstream)
        self.logit_error = _logit_error(case, wide, logits_dtype)
        # Absolute errors allowed for a row (or element) of a tensor, whatever its size.
        self.granted = _truth_errors(wide, upstream)
        if cancels and case.input.numel():
            self._grant_roundings(upstream)

    def granting(self, **errors):
        """The same with an additional absolute error for each row of the named tensors."""
        other = copy.copy(self)
        other.granted = {**self.granted}
        for name, error in errors.items():
            other.granted[name] = other.granted[name] + error
        return other

    def check(self, results, context=""):
        assert results.keys() == self.truth.keys()
        for name, truth in self.truth.items():
            value = results[name]
            where = f"{name} {context}"
            assert value.shape == truth.shape, where
            assert value.dtype == self._dtype_of(name), where
            if name in ("predictions", "accuracy"):
                self._check_choice(where, name, value)
                continue
            self._check_tensor(where, name, value)
            self._check_rows(where, name, value)
            elements.check(where, value, truth, self.elements.get(name))

    def _dtype_of(self, name):
        if name == "predictions":
            return torch.int64
        if name in LEAVES:
            return self.case.dtype
        return torch.float64 if self.case.dtype == torch.float64 else torch.float32

    def _grant_roundings(self, upstream):
        """Allows half a ulp of each logit and each probability as the GEMM reads it, and a few
        roundings of each statistic, times the factors that multiply them."""
        options = self.wide.options
        logits, cut, target = final_logits(self.wide)
        size = 1.0 + logits.masked_fill(logits.isinf(), 0.0).abs().max().item()
        stat = LOGIT_ROUNDING[self._dtype_of("loss")]
        rounding = 0.5 * self.logit_error["input"] + 4.0 * stat * size
        spread = size + math.log(logits.shape[-1])  # bounds lse and entropy
        of_loss = _largest(options.get("token_weight")) * _largest(options.get("weight"))
        of_loss *= 1.0 + 2.0 * options.get("z_loss", 0.0) * spread
        if options.get("reduction", "mean") == "mean":
            of_loss /= _divisor(options, cut, target)
        factors = {"loss": of_loss, "lse": 1.0, "entropy": 1.0 + spread, "z_loss": of_loss * spread}
        factors["class_logits"] = 1.0
        reach = sum(factors[name] * _largest(gradient) for name, gradient in upstream.items())
        rows = rounding + 0.5 * LOGIT_ROUNDING[self.case.dtype]
        rows = rows * reach * _largest(_logit_factor(self.wide))
        x, w = self.wide.input.nan_to_num(), self.wide.linear_weight
        extra = {name: rounding * factor for name, factor in factors.items()}
        if options.get("reduction", "mean") != "none":
            extra.update({name: extra[name].sum() for name in ("loss", "z_loss")})
        extra["input"] = rows * (1.0 if w is None else _longest_row(w))
        extra["linear_bias"] = rows.norm()
        extra["linear_weight"] = rows.norm() * _longest_row(x)
        if options.get("adapter_weight") is not None:
            low_rank = options["adapter_input"].nan_to_num()
            extra["adapter_input"] = rows * _longest_row(options["adapter_weight"])
            extra["adapter_weight"] = rows.norm() * _longest_row(low_rank)
        for name, error in extra.items():
            self.granted[name] = self.granted[name] + error

    def _check_tensor(self, where, name, value):
        truth, eager = self.truth[name], self.eager[name]
        error = (value.double() - truth).norm()
        granted = torch.as_tensor(self.granted[name]).max().item()
        limit = self._limit(
            FLOORS[self.case.dtype][0],
            truth.norm(),
            (eager.double() - truth).norm(),
            granted * math.sqrt(truth.numel()),
            truth.numel(),
        )
        assert error <= limit, f"{where}: error {error:.3e} > {limit:.3e} of {truth.norm():.3e}"

    def _check_rows(self, where, name, value):
        """Checks single rows of dX and dW and single losses, so that one bad row cannot hide in
        a norm. A gradient of the bias, or of a head with few columns, has one value per row (or
        few), which cancels, and a reduced loss is one row: there the norm is sufficient."""
        truth, eager = self.truth[name], self.eager[name]
        is_output = name not in LEAVES
        is_row = (not is_output or name == "class_logits") and truth.dim() > 0
        width = truth.shape[-1] if is_row else 1
        if truth.dim() == 0 or name == "linear_bias" or (not is_output and width < 8):
            return
        value, truth, eager = (t.double().reshape(-1, width) for t in (value, truth, eager))
        logit_error = self.logit_error["linear_weight" if name.endswith("_weight") else "input"]
        # A loss has the full error of its logits, a gradient a share in proportion to its size.
        absolute = logit_error if is_output else 0.0
        error = (value - truth).norm(dim=-1)
        limit = self._limit(
            FLOORS[self.case.dtype][1] + 2.0 * logit_error,
            truth.norm(dim=-1),
            (eager - truth).norm(dim=-1),
            2.0 * absolute + self.granted[name],
            width,
        )
        bad = ~(error <= limit)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise AssertionError(
                f"{where}: {int(bad.sum())} of {len(bad)} rows, first {row}:"
                f" error {error[row]:.3e} > {limit[row]:.3e} of {truth[row].norm():.3e}"
            )

    def _check_choice(self, where, name, value):
        """Predictions and accuracy: exact where rounding cannot change which logit is largest."""
        logits, cut, _ = final_logits(self.wide)
        logits, cut = logits.reshape(-1, logits.shape[-1]), cut.reshape(-1)
        top = logits.topk(min(2, logits.shape[-1])).values
        stat = LOGIT_ROUNDING[self._dtype_of("loss")]
        unsure = 2.0 * self.logit_error["input"] + 8.0 * stat * top.abs().amax(dim=-1)
        close = (top[:, 0] - top[:, -1] <= unsure) & ~cut & (logits.shape[-1] > 1)
        if name == "accuracy":
            limit = (close.sum() / (~cut).sum().clamp(min=1)).item() + 4.0 * stat
            assert abs(value - self.truth[name]) <= limit, f"{where}: {value}"
            return
        value, truth = value.reshape(-1), self.truth[name].reshape(-1)
        bad = (value != truth) & ~close
        assert not bad.any(), f"{where}: rows {bad.nonzero().flatten().tolist()}"
        chosen = logits.gather(-1, value.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        assert (~close | (top[:, 0] - chosen <= unsure)).all(), where

    def _limit(self, granted, size, eager_error, absolute, width):
        # Below the smallest normal number no relative accuracy can be expected. float16's smallest
        # normal number is a common size of gradients: there the spacing of its subnormals is the
        # tolerance.
        limits = torch.finfo(self.case.dtype)
        tiny = limits.tiny * (limits.eps if self.case.dtype == torch.float16 else 1.0)
        tiny *= math.sqrt(width)
        eager_error = eager_error.nan_to_num(nan=0.0)  # of 16 bits that overflow
        return torch.maximum(2.0 * eager_error, granted * size + absolute + tiny)


def _longest_row(matrix):
    return matrix.reshape(-1, matrix.shape[-1]).norm(dim=-1).max().item() if matrix.numel() else 0.0


def _largest(factor):
    """The largest magnitude in a number or tensor; 1 for None."""
    if factor is None:
        return 1.0
    factor = torch.as_tensor(factor).double()
    return factor.abs().max().item() if factor.numel() else 0.0


def _truth_errors(wide, upstream):
    """The possible error of the float64 truth itself, for the rows of each tensor."""
    size = TRUTH_ROUNDING * max(map(_largest, upstream.values()), default=0.0)
    weight = wide.linear_weight
    return {
        "input": size * (1.0 if weight is None else _longest_row(weight)),
        "linear_weight": size * _longest_row(wide.input.nan_to_num()),
        "linear_bias": size,
        **dict.fromkeys(("adapter_input", "adapter_weight"), 0.0),
        **dict.fromkeys(("loss", "lse", "entropy", "z_loss", "class_logits"), TRUTH_ROUNDING),
    }


def _logit_factor(case):
    """From a logit of the linear layer to the final logit: of each row, or of all."""
    scale = abs(case.options.get("logit_scale", 1.0))
    temperature = torch.as_tensor(case.options.get("temperature", 1.0), dtype=torch.float64)
    return scale / temperature.reshape(-1)


_OF_LOGITS = inspect.signature(reference.final_logits).parameters.keys() - {"logits", "cut"}


def final_logits(case):
    """The final logits (..., V), the mask of the ignored rows (...), and the targets."""
    options = case.options
    target, ignore_index = case.target, options.get("ignore_index")
    target = reference.shifted(
        target, options.get("shift", 0), options.get("cu_seqlens"), ignore_index
    )
    cut = reference.ignored_rows(target, ignore_index)
    product = case.input.masked_fill(cut.unsqueeze(-1), 0.0)
    if case.linear_weight is not None:
        product = F.linear(product, case.linear_weight, options.get("linear_bias"))
    if options.get("adapter_weight") is not None:
        low_rank = options["adapter_input"].masked_fill(cut.unsqueeze(-1), 0.0)
        product = product + F.linear(low_rank, options["adapter_weight"])
    product = product[..., : options.get("valid_vocab")]
    of_logits = {name: options[name] for name in _OF_LOGITS if name in options}
    logits = reference.final_logits(product, cut, **of_logits)
    return logits, cut, target


def _divisor(options, cut, target):
    """The denominator of a mean, or 1 if that is 0."""
    if options.get("num_items") is not None:
        return float(options["num_items"]) or 1.0
    divisor = reference.denominator(target, options.get("weight"), cut, torch.float64)
    return min(divisor.item(), (~cut).sum().item()) or 1.0


def _logit_error(case, wide, logits_dtype):
    """What rounding the logits alone can cause, for each row of dX (and the loss) and of dW."""
    on_cpu = case.input.device.type == "cpu" and case.linear_weight is not None
    held = case.dtype if case.dtype == torch.float64 or on_cpu else torch.float32
    held = logits_dtype or held
    rounding = LOGIT_ROUNDING.get(held, LOGIT_ROUNDING[torch.float32])
    logits = wide.input.reshape(-1, wide.input.shape[-1]).nan_to_num()
    if wide.linear_weight is not None:
        logits = logits @ wide.linear_weight.T
    if wide.options.get("adapter_weight") is not None:
        low_rank, narrow = (
            wide.options["adapter_input"].nan_to_num(),
            wide.options["adapter_weight"],
        )
        logits = logits + low_rank.reshape(-1, low_rank.shape[-1]) @ narrow.T
    if not logits.numel():
        return {"input": logits.new_zeros(len(logits)), "linear_weight": 0.0}
    rows = rounding * logits.abs().amax(dim=-1) * _logit_factor(wide).to(logits.device)
    return {"input": rows, "linear_weight": rows.max()}


def check(function, case, *, wants=GRADIENTS, grad_output=None, **knobs):
    """Runs `function` with `knobs` and checks the result against the Yardstick of the case."""
    logits_dtype = knobs.get("logits_dtype")
    yardstick = Yardstick(case, wants=wants, grad_output=grad_output, logits_dtype=logits_dtype)
    results = outcome(function, case, wants=wants, grad_output=grad_output, **knobs)
    yardstick.check(results, f"{knobs}")


def leaves(device, *shape, hidden=12, vocab=41, dtype=torch.float64):
    """Input (..., H), weight (V, H) and targets (...) of `shape`; input and weight are leaves."""
    random = generator()
    x = torch.randn(*shape, hidden, generator=random, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=random, dtype=torch.float64) / 2
    y = torch.randint(vocab, shape, generator=random).to(device)
    x, w = (tensor.to(device, dtype).requires_grad_() for tensor in (x, w))
    return x, w, y


def per_row(device, *shape, low=0.5, high=2.0):
    """One number for each row, uniform in [low, high]."""
    random = generator(7)
    return (low + (high - low) * torch.rand(shape, generator=random)).to(device, torch.float64)


def assert_same(ours, theirs, inputs, tolerance=1e-12, retain_graph=False):
    """Two results, tensors or sequences of tensors, and their gradients agree; `theirs` may have
    other dtypes."""
    ours, theirs = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (ours, theirs))
    grads = []
    for side in (ours, theirs):
        upstream = [torch.linspace(0.3, -1.1, t.numel()).to(t).reshape(t.shape) for t in side]
        grads.append(torch.autograd.grad(side, inputs, upstream, retain_graph=retain_graph))
    for value, expected in zip([*ours, *grads[0]], [*theirs, *grads[1]], strict=True):
        assert value.shape == expected.shape
        assert relative_error(value.detach(), expected.detach().double()) <= tolerance


def chunked_truth(case, rows):
    """Losses of rows, and dX, dW and db of their mean, in float64, `rows` tokens at a time: for
    N x V too large for a tensor."""
    tokens, parts, sums = len(case.target), [], {}
    for begin in range(0, tokens, rows):
        part = slice(begin, begin + rows)
        chunk = dataclasses.replace(case, input=case.input[part], target=case.target[part])
        chunk = chunk.to(torch.float64).with_options(reduction="none")
        upstream = torch.full((len(chunk.target),), 1.0 / tokens, dtype=torch.float64)
        made = outcome(
            reference.linear_cross_entropy, chunk, grad_output=upstream.to(case.input.device)
        )
        for name in made.keys() & {"linear_weight", "linear_bias"}:
            sums[name] = sums.get(name, 0.0) + made[name]
        parts.append(made)
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("loss", "input")}
    return {**joined, **sums}


def gemms_of(function):
    """The number of GEMMs that the engine requested while `function` ran."""
    before = torch.ops.flce.gemm_count()
    function()
    return torch.ops.flce.gemm_count() - before


def peak_bytes(function, device):
    """Peak of the bytes held by tensors that `function` allocated, as requested (without the
    allocator's rounding). What `function` returns is kept until the end."""
    if torch.device(device).type == "cuda":
        gc.collect()  # else earlier tests' cycles, freed during the call, lower it
        # Autograd's thread may still hold tensors of the last backward. It frees them before it
        # runs another one.
        torch.ones((), device=device, requires_grad=True).backward()
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
