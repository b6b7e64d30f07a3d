"""Ways in which programs write log-probabilities and entropies of logits, for flce.fuse."""

import torch
import torch.nn.functional as F

import flce
from harness.tiny_models import IDS, ROWS, VOCAB, Model, run, same

Y = (IDS * 7 + 3) % VOCAB


def pick(values, y, dim=-1):
    return values.gather(dim, y.unsqueeze(-1)).squeeze(-1)


def log_p(z, y):
    return pick(z.log_softmax(-1), y)


def entropy(z, y=None):
    logp = F.log_softmax(z, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def selective(z, y):
    """TRL's selective_log_softmax: its branch for float32, then the one for bfloat16."""
    index = y.unsqueeze(-1)
    if z.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(z, dim=-1, index=index)
        lse = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
        return (chosen - lse.unsqueeze(-1)).squeeze(-1)
    rows = zip(z, index, strict=True)
    rows = [F.log_softmax(row, dim=-1).gather(dim=-1, index=one) for row, one in rows]
    return torch.stack(rows).squeeze(-1)


def entropy_of_chunks(z, y=None):
    """TRL's entropy_from_logits."""
    made = []
    for chunk in z.reshape(-1, z.shape[-1]).split(4, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        made.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(made, dim=0).reshape(z.shape[:-1])


def entropy_of_means(z, y=None):
    """verl's entropy_from_logits."""
    p = torch.nn.functional.softmax(z, dim=-1)
    return torch.logsumexp(z, dim=-1) - torch.sum(p * z, dim=-1)


def rows_of_one_pass(z, y):
    """Each row's own, as bfloat16 has them in TRL."""
    rows = [
        F.log_softmax(row, -1).gather(-1, one) for row, one in zip(z, y[..., None], strict=True)
    ]
    return torch.stack(rows)[..., 0]


def several(values, y):
    """Some of which are the same."""
    ids = torch.stack((y, y * 0, y, y * 3 % 11), -1)
    return (values.gather(-1, ids) * torch.arange(1.0, 5.0, dtype=values.dtype)).sum(-1)


def sum_of_log_p(z, y):
    """transformers' LabelSmoother."""
    log_probs = -F.log_softmax(z, dim=-1)
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=log_probs.dtype)
    return (0.9 * log_probs.gather(-1, y[..., None]) + 0.1 / VOCAB * smoothed)[..., 0]


# Values of rows.
FORMS = {
    "Tensor.log_softmax": log_p,
    "torch.log_softmax": lambda z, y: torch.gather(torch.log_softmax(z, 2), 2, y[..., None])[
        ..., 0
    ],
    "F.log_softmax": lambda z, y: pick(F.log_softmax(z, dim=-1, dtype=z.dtype), y),
    "nn.LogSoftmax": lambda z, y: pick(torch.nn.LogSoftmax(-1)(z), y),
    "take_along_dim": lambda z, y: torch.take_along_dim(z.log_softmax(-1), y[..., None], dim=2)[
        ..., 0
    ],
    "by keyword": lambda z, y: z.log_softmax(-1).take_along_dim(indices=y[..., None], dim=-1)[
        ..., 0
    ],
    "minus": lambda z, y: -pick(-z.log_softmax(-1), y),
    "logits less logsumexp": lambda z, y: (
        z.gather(-1, y[..., None]) - z.logsumexp(-1, keepdim=True)
    ).squeeze(-1),
    "logits alone": pick,
    "several ids": lambda z, y: several(z.log_softmax(-1), y),
    "several ids of logits": several,
    "several ids of softmax": lambda z, y: several(z.softmax(-1), y),
    "several ids, then the rest": lambda z, y: (
        several(z.log_softmax(-1), y) + entropy(z) * z.logsumexp(-1)
    ),
    "probability": lambda z, y: pick(z.softmax(-1), y),
    "logsumexp": lambda z, y: z.logsumexp(dim=(-1,)),
    "shifted": lambda z, y: F.pad(log_p(z[:, :-1], y[:, 1:]), (1, 0)),
    "flat": lambda z, y: log_p(z.view(-1, z.shape[-1]), y.flatten()).view(y.shape),
    "squeezed": lambda z, y: log_p(z.unsqueeze(0).squeeze(0), y),
    "flattened late": lambda z, y: pick(z.log_softmax(-1).flatten(0, 1), y.flatten(), 1).view(
        y.shape
    ),
    "sliced late": lambda z, y: F.pad(pick(z.log_softmax(-1)[:, :-1], y[:, 1:]), (1, 0)),
    "nll_loss": lambda z, y: F.nll_loss(
        z.log_softmax(-1).flatten(0, 1), y.flatten(), reduction="none"
    ).view(y.shape),
    "nll_loss, classes second": lambda z, y: F.nll_loss(
        z.log_softmax(-1).transpose(1, 2), y, reduction="none"
    ),
    "selective_log_softmax": selective,
    "rows one by one": rows_of_one_pass,
    "entropy": entropy,
    "entropy of softmax": lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "entropy, minus inside": lambda z, y: torch.sum(
        -z.log_softmax(-1) * z.softmax(-1), dim=-1, keepdim=True
    )[..., 0],
    "entropy of chunks": entropy_of_chunks,
    "entropy by means": entropy_of_means,
    "mean logits": lambda z, y: z.mean(-1),
    "sum of log p": sum_of_log_p,
}


def weighted(form, z, y):
    values = form(z, y.clamp(max=z.shape[-1] - 1))
    return (values * torch.arange(1.0, ROWS + 1, dtype=values.dtype).sin().view(y.shape)).sum()


def model_of(form, use=same, **settings):
    return Model(use, lambda z, y: weighted(form, z, Y), **settings)


def fused_run(model, **options):
    """(run of the fused model without its logits, the handle)"""
    with flce.fuse(model, strict=True, **options) as handle:
        return run(model), handle


def policy_loss(z, y, old=-3.0, cut=lambda z: z):
    """PPO's, with the entropy and an estimate of the KL divergence to a reference."""
    logp = log_p(cut(z), y)
    ratio = (logp - old).exp()
    advantage = torch.arange(1.0, y.numel() + 1, dtype=logp.dtype).cos().view(y.shape)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    kl = (old - logp).exp() - (old - logp) - 1
    return loss + 0.1 * kl.mean() - 0.01 * entropy(cut(z)).mean() + 1e-3 * z.logsumexp(-1).mean()
