"""flce.linear_divergence with all logits, by F.kl_div, and cases drawn for it."""

import math
import random

import torch
import torch.nn.functional as F

from flce.packing import DIVERGENCES as KINDS
from flce.reference import final_logits


def kl(log_p, log_q):
    """KL(q || p) of each row."""
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(dim=-1)


def jsd(log_p, log_q, beta):
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * kl(log_m, log_q) + (1 - beta) * kl(log_m, log_p)


# Of each row, p the student's, as the literature has it.
DEFINITIONS = {
    "forward_kl": lambda log_p, log_q, _: kl(log_p, log_q),
    "reverse_kl": lambda log_p, log_q, _: kl(log_q, log_p),
    "jsd": jsd,
}


def divergence_of(log_p, log_q, kind, beta=0.5):
    return DEFINITIONS[kind](log_p, log_q, beta)


def definition(input, linear_weight, teacher_input=None, teacher_weight=None, **options):
    """flce.linear_divergence with all logits; the options that have no effect on it are ignored."""
    get = options.get
    target, vocab = get("target"), get("valid_vocab") or len(linear_weight)
    cut = torch.zeros(input.shape[:-1], dtype=torch.bool, device=input.device)
    cut = cut if target is None else target == -100
    input = input.masked_fill(cut.unsqueeze(-1), 0.0)
    z = F.linear(input, linear_weight, get("linear_bias"))[..., :vocab]
    maps = ("softcap", "logit_scale", "temperature")
    own = {name: options[name] for name in maps if name in options}
    if (other := get("teacher_logits")) is None:
        teacher_input = teacher_input.masked_fill(cut.unsqueeze(-1), 0.0)
        other = F.linear(teacher_input, teacher_weight, get("teacher_bias"))
    other = other.masked_fill(cut.unsqueeze(-1), 0.0)[..., :vocab]
    theirs = {n: options[f"teacher_{n}"] for n in maps if get(f"teacher_{n}") is not None}
    if "temperature" in own:
        theirs.setdefault("temperature", own["temperature"])
    log_p = F.log_softmax(final_logits(z, cut, **own), dim=-1)
    log_q = F.log_softmax(final_logits(other, cut, **theirs), dim=-1)
    rows = divergence_of(log_p, log_q, get("divergence", "forward_kl"), get("beta", 0.5))
    if hard := get("hard_weight", 0.0):
        nll = -log_p.gather(-1, target.masked_fill(cut, 0).unsqueeze(-1)).squeeze(-1)
        rows = (1 - hard) * rows + hard * nll
    rows = rows.masked_fill(cut, 0.0)
    rows = rows if get("token_weight") is None else rows * get("token_weight")
    reduction = get("reduction", "mean")
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    items = (~cut).sum() if get("num_items") is None else torch.as_tensor(get("num_items"))
    return rows.sum() / items if items > 0 else 0.0 * rows.sum()


def draw(seed, device, dtype=torch.float64):
    """(operands by name, options) of a case."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=generator, dtype=dtype) * std).to(device)

    batch = pick.choice([(13,), (3, 7), (1,), (40,)])
    hidden, other = pick.choice([4, 7, 32]), pick.choice([3, 8, 40])
    vocab = pick.choice([2, 65, 130])
    spread = pick.choice([0.3, 1.0, 3.0])
    named = {"input": normal(*batch, hidden), "linear_weight": normal(vocab, hidden, std=spread)}
    options = {"divergence": pick.choice(KINDS), "reduction": pick.choice(["mean", "sum", "none"])}
    if options["divergence"] == "jsd":
        options["beta"] = pick.choice([0.1, 0.5, 0.9])
    if pick.random() < 0.3:
        named["linear_bias"] = normal(vocab)
    if pick.random() < 0.7:
        options |= {"teacher_input": normal(*batch, other)}
        options |= {"teacher_weight": normal(vocab, other, std=spread)}
        options |= {"teacher_bias": normal(vocab)} if pick.random() < 0.3 else {}
    else:
        options["teacher_logits"] = normal(*batch, vocab, std=3 * spread)
    if pick.random() < 0.6:
        target = torch.randint(vocab, batch, generator=generator).to(device)
        target.view(-1)[:: pick.choice([2, 5])] = -100
        options["target"] = target
        named["input"].view(-1, hidden)[target.view(-1) == -100] = math.nan
        if pick.random() < 0.5:
            options["hard_weight"] = pick.choice([0.25, 1.0])
    for prefix in ("", "teacher_"):
        if pick.random() < 0.3:
            options[f"{prefix}softcap"] = pick.choice([2.0, 30.0])
        if pick.random() < 0.3:
            options[f"{prefix}logit_scale"] = pick.choice([0.5, -1.5])
        if pick.random() < 0.4 and (prefix or "hard_weight" not in options):
            rows = torch.rand(*batch, generator=generator, dtype=dtype).to(device) + 0.5
            options[f"{prefix}temperature"] = pick.choice([2.5, rows])
    if pick.random() < 0.3:
        options["token_weight"] = normal(*batch)
    if pick.random() < 0.3 and options["reduction"] == "mean":
        options["num_items"] = pick.choice([3.5, 0.5, torch.tensor(7.0)])
    if pick.random() < 0.3 and vocab > 2:
        options["valid_vocab"] = vocab - 1
        if "target" in options:
            options["target"].clamp_(max=vocab - 2)
    options["max_memory"] = pick.choice([8 << 10, 1 << 20])
    options["save"] = pick.choice(["auto", "stats"])
    return named, options


def outcome(function, named, options):
    leaves = {n: tensor.detach().clone().requires_grad_() for n, tensor in named.items()}
    loss = function(**leaves, **options)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=loss.device)
    grads = torch.autograd.grad(loss, list(leaves.values()), upstream.reshape(loss.shape))
    return {"loss": loss.detach(), **dict(zip(leaves, grads, strict=True))}
