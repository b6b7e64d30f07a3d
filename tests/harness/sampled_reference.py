"""gradient="sampled" in torch's own operations (docs/sampled-reference.md): the loss and outputs of
flce.reference, with the estimated gradients that flce gives for the same seed."""

import functools

import torch

from flce import reference
from flce.options import LOGIT_OPTIONS


def linear_cross_entropy(
    input, linear_weight, target, *, gradient, gradient_eps, gradient_seed, **options
):
    """As flce.reference.linear_cross_entropy, of class targets; gradient_seed: an int."""
    assert gradient == "sampled"
    of_logits = reference.as_logits(input, linear_weight, target, **options)
    return cross_entropy(**of_logits, sampling=(gradient_eps, gradient_seed))


def cross_entropy(
    logits,
    target,
    *,
    sampling,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,
    num_items=None,
    **outputs,
):
    """As flce.reference.cross_entropy. sampling: (gradient_eps, gradient_seed)."""
    cut = reference.ignored_rows(target, ignore_index)
    finite = logits.masked_fill(cut.unsqueeze(-1), 0.0)
    of_logits = {name: outputs[name] for name in LOGIT_OPTIONS if name in outputs}
    of_rows = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    asks = {"return_lse": True, "return_entropy": True}
    exact = reference.cross_entropy(
        finite, target, reduction="none", **of_rows, **{**outputs, **asks}
    )
    at = target.masked_fill(cut, 0)
    derivative = sampled_derivative(finite, at, cut, of_logits, *sampling)
    derivative = derivative.masked_fill(cut.unsqueeze(-1), 0.0)
    final = reference.final_logits(finite, cut, **of_logits)
    lse = with_derivative(exact.lse, finite, derivative)
    # The same value. The row's loss has lse times this factor; its other terms have no p.
    rows = exact.loss + factor_of_lse(final, at, weight, label_smoothing) * (lse - exact.lse)
    reduced = functools.partial(reference.sum_of_rows, reduction, cut, token_weight, num_items)
    z_part = reduced(z_loss * lse.square(), (~cut).sum())
    loss = reduced(rows, reference.denominator(target, weight, cut, rows.dtype)) + z_part
    results = {"lse": lse, "entropy": entropy_of(exact.entropy, final, finite, derivative)}
    results["z_loss"] = z_part.detach()
    wanted = {name: one for name, one in results.items() if outputs.get(f"return_{name}")}
    made = exact._replace(lse=None, entropy=None, z_loss=None)._replace(loss=loss, **wanted)
    return made if any(one is not None for one in made[1:]) else loss


def entropy_of(exact, final, finite, derivative):
    """The entropy (...) with its estimated gradient: d entropy / d l_j is -p_j (log p_j + entropy),
    and the estimate of d lse / d z has the p_j."""
    log_p = final.log_softmax(dim=-1)
    log_p = log_p.masked_fill(log_p.exp() == 0, 0.0)
    of_lse = (log_p + exact.unsqueeze(-1)).detach()
    return with_derivative(exact, finite, -derivative * of_lse)


def philox(key, counter):
    """Philox4x32-10 (Salmon et al., SC 2011): the four output words, int64 tensors below 2^32.
    `key`: two ints; `counter`: four int64 tensors or ints, all of them below 2^32."""
    mask = 0xFFFFFFFF

    def product(factor, word):
        """The high and low word of a product, by halves: it may not fit into int64."""
        low, high = factor * (word & 0xFFFF), factor * (word >> 16)
        return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & mask

    a, b, c, d = counter
    for step in range(10):
        first = (key[0] + step * 0x9E3779B9) & mask
        second = (key[1] + step * 0xBB67AE85) & mask
        high_a, low_a = product(0xD2511F53, a)
        high_c, low_c = product(0xCD9E8D57, c)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def offsets_of_rows(rows, seed, device, bits):
    """u of docs/sampled-reference.md, so many random bits, up to 62, for each of `rows` rows."""
    row = torch.arange(rows, device=device)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    first, second, *_ = philox(key, (row & 0xFFFFFFFF, row >> 32, 0, 0))
    return (first << 30 | second >> 2) >> (62 - bits)


@torch.no_grad()
def sampled_derivative(z, target, cut, of_logits, eps, seed):
    """The estimate of d lse / d z (..., V), computed in float64 (docs/sampled-reference.md).

    z: the linear layer's logits (..., V); `target` (...): classes; `cut`, `of_logits`: the other
    arguments of `flce.reference.final_logits`.
    """
    z = z.double()
    slopes, scales = (_dl_dz(at, cut, of_logits) for at in (z, torch.zeros_like(z)))
    # E / S is p times the softcap's slope. d l / d z also has the scales; its value at z = 0, where
    # the slope is 1, removes them.
    share = reference.final_logits(z, cut, **of_logits).softmax(dim=-1) * (slopes / scales)
    share = share.reshape(-1, share.shape[-1])
    bits = 23 if share.shape[-1] <= 2**20 else 40
    fixed = (share / eps).clamp(max=1.0).mul(2.0**bits).round().to(torch.int64)
    at_target = target.reshape(-1, 1).long()
    fixed.scatter_(-1, at_target, 0)
    end = fixed.cumsum(dim=-1)
    offset = offsets_of_rows(len(end), seed, z.device, bits).unsqueeze(-1)
    # The number of m with m 2^bits + u below the end, and below the begin, of a class.
    below, below_begin = ((edge - offset + 2**bits - 1) >> bits for edge in (end, end - fixed))
    estimate = share.clamp(min=eps).masked_fill(below == below_begin, 0.0)
    estimate = estimate.scatter(-1, at_target, share.gather(-1, at_target)).reshape(z.shape)
    return estimate * scales


@torch.enable_grad()
def _dl_dz(z, cut, of_logits):
    """d l / d z of each logit."""
    z = z.detach().requires_grad_()
    return torch.autograd.grad(reference.final_logits(z, cut, **of_logits).sum(), z)[0]


def with_derivative(value, z, derivative):
    """`value` (...), with `derivative` (..., V) as its derivative by `z`."""
    linear = (z * derivative).sum(dim=-1)
    return value.detach() + (linear - linear.detach()).to(value.dtype)


def factor_of_lse(logits, target, weight, label_smoothing):
    """What a row's cross entropy with class targets multiplies lse by, a number or (...)."""
    if weight is None:
        return 1.0
    weight = weight.to(logits.dtype)
    of_target = (1.0 - label_smoothing) * weight[target.long()]
    return of_target + label_smoothing / logits.shape[-1] * weight.sum()
