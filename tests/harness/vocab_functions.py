"""Every function with a sharded vocabulary, one of whose ranks has no class, against one
process."""

import itertools
import math
import typing

import torch

import flce
from harness import cases
from harness.divergences import KINDS
from harness.vocab_case import TOKENS, VOCAB, make, teacher_of
from harness.vocab_ranks import chunk_ends

SAMPLED = {"gradient": "sampled", "gradient_eps": 2**-12, "gradient_seed": 3}
TEACHER = ("teacher_weight", "teacher_bias", "teacher_logits")


def ends_with(rank, ranks, own, vocab=VOCAB):
    """Where the ranks' classes end if one has `own` of them, and the others the rest, unequally
    where it does not divide."""
    others = chunk_ends(vocab - own, ranks - 1)
    sizes = [end - begin for begin, end in zip([0, *others], others, strict=False)]
    sizes.insert(rank, own)
    return list(itertools.accumulate(sizes))


def cross_entropy(x, w, b, y, **options):
    made = flce.linear_cross_entropy(x, w, y, linear_bias=b, **options)
    return [made] if isinstance(made, torch.Tensor) else [one for one in made if one is not None]


def logprobs(x, w, b, y, **options):
    options = {"linear_bias": b, "return_topk": 3, "tail": True, **options}
    made, entropy, *top = flce.linear_logprobs(x, w, y, **options)
    return [made, entropy, *itertools.chain(*top)]


def ids_of(w, y, options):
    """Classes of three ranks; none in the ignored rows, whose x is NaN."""
    vocab_parallel = options.get("vocab_parallel")
    vocab = len(w) if vocab_parallel is None else vocab_parallel.vocab
    steps = vocab // 3 * torch.arange(3, device=y.device)
    ids = (y.clamp(min=0).unsqueeze(-1) + steps) % vocab
    return ids.masked_fill((y == -100).unsqueeze(-1), -100)


def logprobs_at(x, w, b, y, **options):
    return [
        flce.linear_logprobs_at(x, w, ids_of(w, y, options), tail=True, linear_bias=b, **options)
    ]


def loss_of_chunks(x, w, b, y, **options):
    def loss(logprobs, entropy, rows):
        return (logprobs.exp() + 0.1 * entropy).sum()

    named = {"linear_bias": b, "max_memory": 5 * 400, **options}
    return [flce.linear_loss(x, w, y, loss, entropy="differentiable", **named)]


def sparse_target(x, w, b, y, **options):
    chances = torch.tensor([0.5, 0.3, 0.1], dtype=x.dtype, device=x.device).expand(len(y), 3)
    target = ids_of(w, y, options), chances
    return [flce.linear_cross_entropy(x, w, target, linear_bias=b, **options)]


def divergence(x, w, b, y, **options):
    return [flce.linear_divergence(x, w, linear_bias=b, target=y, **options)]


def sparse_divergence(x, w, b, y, **options):
    ids = ids_of(w, y, options)
    known = ids, torch.full(ids.shape, -2.0, dtype=x.dtype, device=x.device)
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


def outcome(function, leaves, y, options, scale=1.0):
    """The outputs, and the gradients of x, W and b of a sum of all outputs that have one, times
    `scale`, as a GradScaler has it."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    made = function(*leaves, y, **options)
    total = sum(one.double().sum() for one in made if one.requires_grad)
    return [one.detach() for one in made], torch.autograd.grad(scale * total, leaves)


def teachers(dtype):
    """A head, and logits: of all classes, or of a rank's own."""
    head = teacher_of(dtype)
    logits = torch.randn(TOKENS, VOCAB, generator=cases.generator(5), dtype=dtype)
    return {"a head": (head, False), "a head's shard": (head, True),
            "logits": ({"teacher_logits": logits}, False),
            "logits' shard": ({"teacher_logits": logits}, True)}  # fmt: skip


def divided(given, spread, classes):
    """A teacher's operands on a rank. `spread`: it has those of its own classes."""
    if not spread:
        return given
    at = {n: (..., classes) if n == "teacher_logits" else classes for n in TEACHER}
    return {n: t[at[n]].contiguous() if n in TEACHER else t for n, t in given.items()}


class Operands(typing.NamedTuple):
    """Of all classes; of a rank: its own."""

    leaves: tuple  # x, W, b
    target: torch.Tensor
    teacher: dict
    spread: bool  # the teacher is divided too


class Bars(typing.NamedTuple):
    outputs: float
    gradients: float
    ids: float = 1.0  # how many have to be equal


def compare(ranks, name, ends, operands, bars, **more):
    """Notes where a call on ranks differs from that of one process."""
    function, options = CALLS[name]
    options, (x, *of_classes) = {**options, **more}, operands.leaves
    classes = ranks.classes(len(of_classes[0]), ends)
    # Gradients of a mean over divergences of K classes are near float16's smallest numbers.
    scale = 2.0**10 if x.dtype == torch.float16 and "K classes" in name else 1.0
    one, expected = outcome(
        function, operands.leaves, operands.target, {**options, **operands.teacher}, scale
    )
    options |= divided(operands.teacher, operands.spread, classes)
    options["vocab_parallel"] = ranks.parallel(len(of_classes[0]), ends)
    own = x, *(t[classes] for t in of_classes)
    made, grads = outcome(function, own, operands.target, options, scale)
    text = f"{x.dtype} {name} {ends}"
    for k, (got, true) in enumerate(zip(made, one, strict=True)):
        if got.is_floating_point():
            ranks.agree(f"{text}: output {k}", got, true, bars.outputs)
        else:
            equal = (got == true).double().mean().item()
            ranks.note(equal >= bars.ids, f"{text}: output {k}: {equal} equal")
    for k, (got, true) in enumerate(zip(grads, expected, strict=True)):
        true = true if k == 0 else true[classes]
        ranks.agree(f"{text}: gradient {k}", got, true, bars.gradients)


def compare_all(ranks, ends, device="cpu"):
    """In float64; sampled gradients in float32."""
    for name, (function, options) in CALLS.items():
        sampled = "gradient" in options
        # No probability is below eps: all classes are drawn.
        dtype, std = (torch.float32, 0.3) if sampled else (torch.float64, 2.0)
        case = make(dtype, std=std, ignored=5)
        bars = Bars(1e-5, 0.02) if sampled else Bars(1e-10, 1e-9)
        leaves = case.input, case.linear_weight, case.options["linear_bias"]
        *leaves, target = (t.to(device) for t in (*leaves, case.target))
        whole = teachers(torch.float64).values() if function is divergence else [({}, False)]
        for given, spread in whole:
            given = {n: t.to(device, dtype) for n, t in given.items()}
            compare(ranks, name, ends, Operands(tuple(leaves), target, given, spread), bars)


def operands_of(dtype, device, tokens, hidden, vocab, std=1.0):
    """Of a call and its teacher, a head of another hidden size."""
    made = []
    for size, seed in ((hidden, 3), (hidden // 2, 9)):
        case = cases.make_case(tokens, size, vocab, dtype=dtype, std=std, bias=True, seed=seed)
        case = cases.ignore_some(case, -100, 5)
        leaves = case.input, case.linear_weight, std * case.options["linear_bias"]
        made.append(tuple(t.to(device) for t in leaves))
    teacher = dict(zip(("teacher_input", "teacher_weight", "teacher_bias"), made[1], strict=True))
    return Operands(made[0], case.target.to(device), teacher, spread=True)


# Which of nearly equal classes are a row's largest is open in 16 bits, and so are their gradients.
BARS = {torch.bfloat16: Bars(2e-3, 2e-2, 0.9), torch.float16: Bars(2e-3, 1e-2, 0.9)}
WITHOUT_TOP = {"all outputs": {"topk": 0}, "log-probabilities": {"return_topk": 0, "tail": False}}


def compare_in_16_bits(ranks, dtype, device, tokens, hidden, vocab):
    """Every function, each rank in turn without a class and with one, by the kernels of 16 bits
    where the sizes are large enough for these."""
    usual = operands_of(dtype, device, tokens, hidden, vocab)
    drawn = operands_of(dtype, device, tokens, hidden, 301, std=0.3)  # few are not drawn
    for rank, own in itertools.product(range(ranks.ranks), (0, 1)):
        for name, (function, options) in CALLS.items():
            operands, bars = usual, BARS[dtype]
            if "gradient" in options:
                operands, bars = drawn, bars._replace(gradients=0.05)
            call = ranks, name, ends_with(rank, ranks.ranks, own, len(operands.leaves[1]))
            chosen = operands if function is divergence else operands._replace(teacher={})
            more = {"max_memory": "64KiB"} if name == "linear_loss" else {}
            if name in WITHOUT_TOP:
                compare(*call, chosen, bars._replace(gradients=math.inf))
                more = WITHOUT_TOP[name]
            compare(*call, chosen, bars, **more)
