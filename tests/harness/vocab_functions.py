"""Every function with a sharded vocabulary, one of whose ranks has no class, against one
process."""

import torch

import flce
from harness import cases
from harness.divergences import KINDS
from harness.vocab_case import TOKENS, VOCAB, make, teacher_of
from harness.vocab_ranks import chunk_ends

SAMPLED = {"gradient": "sampled", "gradient_eps": 2**-12, "gradient_seed": 3}
TEACHER = ("teacher_weight", "teacher_bias", "teacher_logits")


def ends_without(rank, ranks):
    """Where the ranks' classes end if one has none."""
    ends = chunk_ends(VOCAB, ranks - 1)
    return [*ends[:rank], ends[rank - 1] if rank else 0, *ends[rank:]]


def cross_entropy(x, w, b, y, **options):
    made = flce.linear_cross_entropy(x, w, y, linear_bias=b, **options)
    return [made] if isinstance(made, torch.Tensor) else [one for one in made if one is not None]


def logprobs(x, w, b, y, **options):
    options = {"linear_bias": b, "return_topk": 3, "tail": True, **options}
    made, entropy, top = flce.linear_logprobs(x, w, y, **options)
    return [made, entropy, *top]


def ids_of(y):
    """Classes of three ranks; none in the ignored rows, whose x is NaN."""
    ids = (y.clamp(min=0).unsqueeze(-1) + 13 * torch.arange(3, device=y.device)) % VOCAB
    return ids.masked_fill((y == -100).unsqueeze(-1), -100)


def logprobs_at(x, w, b, y, **options):
    return [flce.linear_logprobs_at(x, w, ids_of(y), tail=True, linear_bias=b, **options)]


def loss_of_chunks(x, w, b, y, **options):
    def loss(logprobs, entropy, rows):
        return (logprobs.exp() + 0.1 * entropy).sum()

    named = {"linear_bias": b, "max_memory": 5 * 400, **options}
    return [flce.linear_loss(x, w, y, loss, entropy="differentiable", **named)]


def sparse_target(x, w, b, y, **options):
    chances = torch.tensor([0.5, 0.3, 0.1], dtype=x.dtype, device=x.device).expand(TOKENS, 3)
    return [flce.linear_cross_entropy(x, w, (ids_of(y), chances), linear_bias=b, **options)]


def divergence(x, w, b, y, **options):
    return [flce.linear_divergence(x, w, linear_bias=b, target=y, **options)]


def sparse_divergence(x, w, b, y, **options):
    known = ids_of(y), torch.full((TOKENS, 3), -2.0, dtype=x.dtype, device=x.device)
    return [flce.linear_divergence(x, w, linear_bias=b, teacher_logits=known, **options)]


RETURNS = {"return_lse": True, "return_entropy": True, "return_predictions": True, "topk": 3}
CALLS = {
    "all outputs": (cross_entropy, {**RETURNS, "label_smoothing": 0.1}),
    "log-probabilities": (logprobs, {}),
    "log-probabilities at": (logprobs_at, {}),
    "linear_loss": (loss_of_chunks, {}),
    "target (ids, probabilities)": (sparse_target, {}),
}
CALLS |= {f"save {save}": (cross_entropy, {"save": save}) for save in cases.SAVES}
CALLS |= {f"sampled {reduction}": (cross_entropy, {**SAMPLED, "reduction": reduction})
          for reduction in ("mean", "none")}  # fmt: skip
for _kind in KINDS:
    _named = {"divergence": _kind}
    CALLS[f"{_kind}"] = divergence, {**_named, "hard_weight": 0.2}
    CALLS[f"{_kind}, rows"] = divergence, {**_named, "reduction": "none"}
    CALLS[f"{_kind}, later"] = divergence, {**_named, "save": "stats"}
    CALLS[f"{_kind}, sampled"] = divergence, {**_named, **SAMPLED}
    CALLS[f"{_kind}, K classes"] = sparse_divergence, _named


def outcome(function, leaves, y, options):
    """The outputs, and the gradients of x, W and b of a sum of all outputs that have one."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    made = function(*leaves, y, **options)
    total = sum(one.double().sum() for one in made if one.requires_grad)
    return [one.detach() for one in made], torch.autograd.grad(total, leaves)


def teachers(dtype):
    """A head, and logits: of all classes, or of a rank's own."""
    head = teacher_of(dtype)
    logits = torch.randn(TOKENS, VOCAB, generator=cases.generator(5), dtype=dtype)
    return {"a head": (head, False), "a head's shard": (head, True),
            "logits": ({"teacher_logits": logits}, False),
            "logits' shard": ({"teacher_logits": logits}, True)}  # fmt: skip


def compare(ranks, name, ends, given, spread, device):
    """Notes where a call on ranks differs from that of one process. `given`: the teacher;
    `spread`: of which each rank has its own classes."""
    function, options = CALLS[name]
    sampled = "gradient" in options
    # No probability is below eps: all classes are drawn.
    case = make(torch.float32 if sampled else torch.float64, std=0.3 if sampled else 2.0, ignored=5)
    dtype, classes = case.dtype, ranks.classes(VOCAB, ends)
    operands = case.input, case.linear_weight, case.options["linear_bias"]
    *operands, target = (t.to(device) for t in (*operands, case.target))
    given = {n: t.to(device, dtype) for n, t in given.items()}
    one, expected = outcome(function, operands, target, {**options, **given})
    if spread:
        at = {n: (..., classes) if n == "teacher_logits" else classes for n in TEACHER}
        given = {n: t[at[n]].contiguous() if n in TEACHER else t for n, t in given.items()}
    own = operands[0], *(t[classes] for t in operands[1:])
    options = {**options, **given, "vocab_parallel": ranks.parallel(VOCAB, ends)}
    made, grads = outcome(function, own, target, options)
    bars = (1e-5, 0.02) if sampled else (1e-10, 1e-9)
    for k, (got, true) in enumerate(zip(made, one, strict=True)):
        ranks.agree(f"{name} {ends}: output {k}", got, true, bars[0])
    for k, (got, true) in enumerate(zip(grads, expected, strict=True)):
        true = true if k == 0 else true[classes]
        ranks.agree(f"{name} {ends}: gradient {k}", got, true, bars[1])


def compare_all(ranks, ends, device="cpu"):
    for name, (function, _) in CALLS.items():
        whole = teachers(torch.float64).values() if function is divergence else [({}, False)]
        for given, spread in whole:
            compare(ranks, name, ends, given, spread, device)
