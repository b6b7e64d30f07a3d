"""Losses of log-probabilities, for drawn calls of flce.linear_loss: of a call (drawn.Call), the
log-probabilities and the entropy of its rows `rows`, and log-probabilities of all rows, `base`,
that a ratio compares with. A gradient of theirs is finite also at extreme logits."""

import torch


def linear(call, logprobs, entropy, rows, base):
    grads = call.upstream
    loss = (grads["logprobs"][rows].to(logprobs.dtype) * logprobs).sum()
    if entropy is not None and grads.get("entropy") is not None:
        loss = loss + (grads["entropy"][rows].to(logprobs.dtype) * entropy).sum()
    return loss


def with_entropy(call, loss, entropy, rows):
    return loss if entropy is None else loss - 0.01 * call.options["share"] * entropy.sum()


def ppo(call, logprobs, entropy, rows, base):
    advantage, noise = (values[rows] for values in call.options["data"])
    ratio = (logprobs - base[rows] - 0.3 * noise).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    return with_entropy(call, loss * call.options["share"], entropy, rows)


def focal(call, logprobs, entropy, rows, base):
    loss = -((1 - logprobs.exp()).square() * logprobs).sum() * call.options["share"]
    return with_entropy(call, loss, entropy, rows)


def dft(call, logprobs, entropy, rows, base):
    loss = -(logprobs.detach().exp() * logprobs).sum() * call.options["share"]
    return with_entropy(call, loss, entropy, rows)


def sums(call, values, rows):
    """Sums over the sequences that begin in `rows`, and their indices and lengths."""
    bounds = [(m, b, e) for m, (b, e) in enumerate(zip(call.bounds, call.bounds[1:], strict=False))]
    own = [(m, b, e) for m, b, e in bounds if b < e and rows.start <= b and e <= rows.stop]
    parts = [values[b - rows.start : e - rows.start].sum() for _, b, e in own]
    return (
        torch.stack(parts) if parts else values.new_zeros(0),
        torch.tensor([m for m, _, _ in own], dtype=torch.int64, device=values.device),
        torch.tensor([e - b for _, b, e in own], dtype=values.dtype, device=values.device),
    )


def gspo(call, logprobs, entropy, rows, base):
    advantage, noise = call.options["data"]
    ratio, own, lengths = sums(call, logprobs - base[rows] - 0.3 * noise[rows], rows)
    loss = -((ratio / lengths).exp() * advantage[own]).sum()
    return with_entropy(call, loss, entropy, rows)


def dpo(call, logprobs, entropy, rows, base):
    advantage, noise = call.options["data"]
    given = (logprobs - base[rows] - noise[rows]) * advantage[rows].sign()
    margin, _, _ = sums(call, given, rows)
    loss = -torch.nn.functional.logsigmoid(0.1 * margin).sum()
    return with_entropy(call, loss, entropy, rows)


LOSSES, OF_SEQUENCES = (ppo, focal, dft), (gspo, dpo)
