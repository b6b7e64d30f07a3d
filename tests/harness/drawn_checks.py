"""Results of a drawn call against its definition: values and gradients, each element within a bound
that counts roundings, and in float64 within 1e-9 of the largest."""

import dataclasses
import math

import torch
import torch.distributed as dist

import flce
from harness import cases
from harness.drawn import OF_CLASSES, OF_ROWS, ROUNDING, case_of, definition, run


def upstream_of(call):
    return {"loss": call.grad_output} if call.loss_fn else call.upstream


def differentiate(outputs, upstream, leaves=()):
    """Runs the backward of the outputs that have an upstream gradient. Returns the gradients of an
    earlier one of each of the `leaves` alone, which has to leave the graph as it was."""
    pairs = [
        (outputs[name], grad.to(outputs[name].dtype))
        for name, grad in upstream.items()
        if grad is not None and outputs[name] is not None and outputs[name].requires_grad
    ]
    if not pairs:
        return []
    outputs, upstream = zip(*pairs, strict=True)
    kept = {"retain_graph": True, "allow_unused": True}
    alone = [torch.autograd.grad(outputs, leaf, upstream, **kept)[0] for leaf in leaves]
    torch.autograd.backward(outputs, upstream)
    return alone


def moved(value, device):
    """On the device, with the same strides: a tensor, or those of a dict or of a call."""
    if isinstance(value, torch.Tensor):
        if value.device.type == device:
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.copy_(value)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    return tuple(moved(one, device) for one in value) if isinstance(value, tuple) else value


def on_device(call, device):
    fields = ("leaves", "target", "ids", "options", "meant", "upstream", "grad_output")
    made = {name: moved(getattr(call, name), device) for name in fields}
    return dataclasses.replace(call, **made)


def results(call, ranks=None):
    """Outputs, the classes of topk and the gradients of the leaves, of one call of flce. `ranks`:
    functions that slice an operand's classes and make the options of a rank."""
    leaves, into = {}, call.options.get("accumulate_into")
    for name, tensor in call.leaves.items():
        own = ranks.sliced(call, name, tensor) if ranks else tensor
        leaves[name] = own.detach().requires_grad_(name in call.needs)
    weight, before, accumulated = leaves["linear_weight"], 0.0, None
    if into == "main_grad" or into and call.seed % 2:  # an absent .grad is made
        wide = into == "main_grad" and weight.dtype != torch.float64
        before = 0.5 if weight.dtype == torch.float64 else 0.0  # float32 would round the sum to it
        accumulated = torch.full_like(weight, before, dtype=torch.float32 if wide else weight.dtype)
        setattr(weight, into, accumulated)
    outputs, found = run(call, leaves, **(ranks.options(call) if ranks else {}))
    names = sorted(call.needs)
    repeats = [leaves[name] for name in names] if into is None and call.seed % 4 == 0 else []
    alone = differentiate(outputs, upstream_of(call), repeats)
    grads = [(name, leaves[name].grad) for name in names]
    grads += [(name, grad) for name, grad in zip(names, alone, strict=False) if grad is not None]
    if ranks:
        grads = [(name, ranks.summed(call, name, grad)) for name, grad in grads]
    if accumulated is not None:
        assert getattr(weight, into) is accumulated
        assert into == "grad" or weight.grad is None or not weight.grad.any()
        grads = [(n, accumulated - before if n == "linear_weight" else g) for n, g in grads]
    return outputs, found, grads


def truths(call, found):
    leaves = {
        name: tensor.detach().double().clone().requires_grad_(name in call.needs)
        for name, tensor in call.leaves.items()
    }
    outputs = definition(call, leaves, found)
    upstream = upstream_of(call)
    differentiate(outputs, {k: g if g is None else g.double() for k, g in upstream.items()})
    return outputs, {name: leaves[name].grad for name in call.needs}


class Bounds:
    """Errors that roundings can cause, to first order: for a row of outputs, and for each leaf."""

    def __init__(self, call, device):
        leaves = {name: t.detach().double() for name, t in call.leaves.items()}
        logits, cut, _ = cases.final_logits(case_of(call, leaves))
        self.call, self.dtype = call, call.dtype
        own, of_logit = ROUNDING[call.dtype]
        self.stat = stat = 2.0 ** (-53 if call.dtype == torch.float64 else -24)
        of_logit = of_logit if device == "cpu" else stat  # a GPU's logits are in float32
        meant, valid = call.meant, logits.shape[-1]
        parts = [(leaves["input"], leaves["linear_weight"][:valid])]
        if "adapter_input" in leaves:
            parts.append((leaves["adapter_input"], leaves["adapter_weight"]))
        sizes = sum(x.masked_fill(cut.unsqueeze(-1), 0.0).abs() @ w.abs().T for x, w in parts)
        exact = call.kind == "extreme"
        terms = sum(x.shape[-1] for x, _ in parts) + 4
        bias = leaves.get("linear_bias", torch.zeros(valid))[:valid]
        bias = bias.masked_fill(bias.isinf(), 0.0).abs()
        error = 0.0 if exact else (2.0 * of_logit + terms * stat) * sizes
        error = error + 2.0 * stat * (sizes + bias)
        scale = abs(meant.get("logit_scale", 1.0)) / self._temperature(cut)
        finite = logits.masked_fill(logits.isinf(), 0.0).abs()
        # Of a final logit, of what follows from a row's, and of the slope of the cap.
        row = (error * scale).amax(-1) + 6.0 * stat * (finite.amax(-1) + 1.0)
        self.row = row.masked_fill(cut, 0.0)
        spread = 2.0 + math.log(valid)
        curve = 1.0 + (2.0 / meant["softcap"] if "softcap" in meant else 0.0)
        self.outputs = 4.0 * self.row
        self.vague = bool((self.row > 0.2).any())  # to first order is not enough
        reach = self._reach(cut.shape, spread)
        dz = reach * scale.squeeze(-1) * spread * 2.0 * (self.row * curve + own)
        dz, most = dz.masked_fill(cut, 0.0), (2.0 * reach * scale.squeeze(-1)).masked_fill(cut, 0.0)
        self.leaves, chunks = {}, max(cut.numel(), 1)
        accum = stat if call.options.get("accum_dtype") or self.dtype == torch.float16 else own
        for x, w in (("input", "linear_weight"), ("adapter_input", "adapter_weight")):
            if x not in leaves:
                continue
            longest = leaves[w][:valid].abs().max()
            own_x = leaves[x].masked_fill(cut.unsqueeze(-1), 0.0).abs()
            own_x = own_x.reshape(-1, own_x.shape[-1])
            rows = (dz + most * stat * valid).unsqueeze(-1) * longest
            self.leaves[x] = rows.reshape(*cut.shape, 1)
            sums = (dz + most * (stat * chunks + accum * chunks)).reshape(-1, 1)
            self.leaves[w] = (sums * own_x).sum(0)
        self.leaves["linear_bias"] = (dz + most * (stat + accum) * chunks).sum()

    def _temperature(self, cut):
        temperature = torch.as_tensor(self.call.meant.get("temperature", 1.0)).double()
        if temperature.dim() == 0:
            return temperature.expand(cut.shape).unsqueeze(-1)
        return temperature.masked_fill(cut, 1.0).unsqueeze(-1)

    def _reach(self, shape, spread):
        """The sum of |upstream gradient| of a row's log-probabilities."""
        call, rows = self.call, math.prod(shape)
        reach = torch.zeros(rows, dtype=torch.float64)
        for name, grad in call.upstream.items():
            if grad is None:
                continue
            grad = grad.double().abs()
            if name == "loss":
                meant = call.meant
                factor = meant.get("probabilities", torch.ones(())).double().sum(-1)
                size = 1.0 + 2.0 * meant.get("z_loss", 0.0) * (spread + 1e4)
                factor = factor * meant.get("token_weight", torch.ones(())).double().abs() * size
                grad = grad * factor
                if meant["reduction"] == "mean":
                    count = meant.get("num_items", 1.0)
                    grad = grad / count if count else grad * 0.0
            of_rows = 1 if call.loss_fn else len(shape)
            if name == "loss":
                grad = grad.expand(shape)
            elif grad.dim() > of_rows:
                grad = grad.sum(-1)
            grad = grad.reshape(rows)
            reach += grad * (spread if name == "entropy" else 1.0)
        if call.loss_fn:
            reach *= call.grad_output.abs()
        return reach.reshape(shape)


def check_choice(call, bounds, found, device):
    """The classes of topk are the largest, no class twice, -1 in ignored rows alone."""
    leaves = {name: tensor.detach() for name, tensor in call.leaves.items()}
    logits, cut, _ = cases.final_logits(case_of(call, leaves))
    count = call.options["topk"]
    assert found.shape == (*cut.shape, count) and found.dtype == torch.int64
    assert (found[cut] == -1).all()
    kept = found[~cut]
    assert ((kept >= 0) & (kept < logits.shape[-1])).all(), "a class that does not exist"
    assert (kept.sort(-1).values.diff(dim=-1) > 0).all(), "a class twice"
    best = logits[~cut].topk(count, dim=-1).values
    chosen = logits[~cut].gather(-1, kept)
    slack = 2.0 * bounds.row[~cut].unsqueeze(-1)
    if device == "cuda":  # which compares float32
        slack = slack + 2.0**-22 * best.abs().masked_fill(best.isinf(), 0.0)
    short = (chosen < best - slack) & ~(chosen == best)
    if device == "cuda" and call.dtype.itemsize == 2:
        # Hopper finds candidates by E, which holds l - max to 2^-8 and nothing far below it.
        largest, far = best[:, :1], 80.0 if call.dtype == torch.bfloat16 else 16.0
        short &= (best > largest - far) & (chosen < best - 2.0**-7 * (largest - best + 1.0))
    assert not short.any(), f"smaller classes: {chosen[short][:3]}, {best[short][:3]}"


class Shards:
    """The operands and results of a rank that has a part of the classes."""

    def __init__(self, group):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def sliced(self, call, name, tensor):
        begin = call.ends[self.rank - 1] if self.rank else 0
        if name in OF_CLASSES:
            return tensor[begin : call.ends[self.rank]]
        if call.how.get("sequence") and name in OF_ROWS:
            return tensor.chunk(self.ranks)[self.rank] if len(tensor) else tensor
        return tensor

    def options(self, call):
        start = call.ends[self.rank - 1] if self.rank else 0
        vocab = {"start": start, "vocab": call.ends[-1]}
        return {"vocab_parallel": flce.VocabParallel(self.group, **vocab, **call.how)}

    def summed(self, call, name, grad):
        """The whole gradient of an input that the call leaves unsummed."""
        if grad is None or name not in OF_ROWS or call.how.get("reduce_input_grad", True):
            return grad
        total = grad.double().clone(memory_format=torch.contiguous_format)  # gloo ignores strides
        dist.all_reduce(total, group=self.group)
        return total.to(grad.dtype)


class Record:
    """The largest errors of many calls: relative to the largest, in float64; else to the bound."""

    def __init__(self):
        self.worst, self.calls, self.vague = {}, 0, 0

    def note(self, name, value, seed):
        if value > self.worst.get(name, (0.0, 0))[0]:
            self.worst[name] = value, seed

    def text(self):
        worst = {name: f"{value:.1e} ({seed})" for name, (value, seed) in self.worst.items()}
        return f"{self.calls} calls, {self.vague} without a bound, largest errors (seed): {worst}"


def compare(call, name, value, truth, bound, record):
    assert value.shape == truth.shape, f"{name}: {tuple(value.shape)}, not {tuple(truth.shape)}"
    value, truth = value.detach().double(), truth.detach()
    finite = truth.isfinite()
    if call.dtype == torch.float16 and name in call.leaves:  # what it cannot hold
        most = truth.abs() < 0.5 * torch.finfo(torch.float16).max
        value, truth = value.masked_fill(~most, 0.0), truth.masked_fill(~most, 0.0)
    assert torch.equal(value[~finite].nan_to_num(nan=7.0), truth[~finite].nan_to_num(nan=7.0)), (
        f"{name}: other infinities or NaN"
    )
    assert value[finite].isfinite().all(), f"{name}: not finite"
    error = (value - truth).abs()[finite]
    size = truth[finite].abs().max().item() if error.numel() else 0.0
    own, _ = ROUNDING[call.dtype]
    wide = call.dtype == torch.float64
    allowed = torch.as_tensor(bound, dtype=torch.float64).expand(truth.shape)[finite]
    allowed = allowed + (1e-9 * size if wide else 2.0 * own * truth[finite].abs())
    allowed = allowed + torch.finfo(call.dtype).tiny
    bad = ~(error <= allowed)
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {bad.numel()}, error {error[bad][0]:.3e} >"
        f" {allowed[bad][0]:.3e}, of {truth[finite][bad][0]:.3e}, largest {size:.3e}"
    )
    if error.numel():
        ratio = error.max().item() / max(size, 1.0) if wide else (error / allowed).max().item()
        record.note(name, ratio, call.seed)


def check(call, record, ranks=None, device="cpu"):
    """Runs a call and compares it with its definition; what fails carries the call's name."""
    try:
        if call.loss_fn:  # sets the log-probabilities that a ratio compares with
            truths(call, None)
        outputs, found, grads = results(on_device(call, device), ranks)
        outputs, found, grads = moved((outputs, found, tuple(grads)), "cpu")
        bounds = Bounds(call, device)
        if found is not None:
            check_choice(call, bounds, found, device)
        true_outputs, true_grads = truths(call, found)
        wide = torch.float64 if call.dtype == torch.float64 else torch.float32
        vague = bounds.vague and call.dtype != torch.float64
        record.vague += vague
        for name, value in outputs.items():
            if value is None:
                assert call.options.get("entropy", 0) is None or name == "entropy"
                continue
            assert value.dtype == wide, name
            bound = bounds.outputs
            bound = bound.unsqueeze(-1) if name in ("top", "class_logits") else bound
            bound = bound.unsqueeze(-1) if call.function == "at" and name != "tail" else bound
            if name == "loss":
                bound = bound_of_loss(call, bounds)
            if vague:
                assert torch.equal(value.isfinite(), true_outputs[name].isfinite()), name
            else:
                compare(call, name, value, true_outputs[name], bound, record)
        for name, value in grads:
            truth = true_grads[name]
            truth = torch.zeros_like(call.leaves[name]).double() if truth is None else truth
            truth = ranks.sliced(call, name, truth) if ranks else truth
            value = torch.zeros_like(truth) if value is None else value
            bound = bounds.leaves[name]
            if name == "linear_weight" and "accumulate_into" in call.options:
                bound = bound + bounds.stat  # of the sum with what was there before
            if ranks and name in OF_ROWS:
                bound = bound * ranks.ranks  # each part is rounded
                bound = ranks.sliced(call, name, bound)
            if vague:
                assert torch.equal(value.isfinite(), truth.isfinite()), name
            else:
                compare(call, name, value, truth, bound, record)
    except Exception as error:
        raise AssertionError(f"{call.name}\n{type(error).__name__}: {error}") from error
    record.calls += 1


def bound_of_loss(call, bounds):
    """Of the loss of a row, or of their sum."""
    meant, bound = call.meant, bounds.outputs
    if call.loss_fn:
        reach = bound.new_zeros(bound.numel())
        for grad in call.upstream.values():
            if grad is not None:
                reach += grad.abs().sum(-1) if grad.dim() == 2 else grad.abs()
        return (bound.reshape(-1) * reach).sum()
    size = meant.get("probabilities", torch.ones(())).double().sum(-1)
    size = size * meant.get("token_weight", torch.ones(())).double().abs()
    rows = bound * size * (1.0 + 2.0 * meant.get("z_loss", 0.0) * 1e4)
    if meant["reduction"] == "none":
        return rows
    count = meant.get("num_items", 1.0) if meant["reduction"] == "mean" else 1.0
    return rows.sum() / count if count else 0.0
