"""Training and sampled gradients with a sharded vocabulary, and what Megatron, CCE and FLA test of
theirs. Run by test_vocab_parallel.py."""

import cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from vocab_cases import HIDDEN, TOKENS, UNEVEN, VOCAB, make
from vocab_ranks import Ranks, on

import flce
from flce import composite, reference

# ---- sampled gradients ----

SCALES = ("softcap", "logit_scale")


def sampled(eps, seed):
    return {"gradient": "sampled", "gradient_eps": eps, "gradient_seed": seed}


def sampled_case(**options):
    """No class is rare: each is drawn often enough for a standard error to be known."""
    return make(torch.float32, std=0.5, **options)


@on(2, 4)
def samples_of_all_classes(ranks):
    """No class has a probability below eps: nothing is drawn, and the gradients are exact."""
    for options in (
        {"softcap": 3.0, "ignored": 4},
        {"label_smoothing": 0.1, "weight": True, "reduction": "none"},
        {"reduction": "sum", "logit_scale": -0.5, "z_loss": 1e-2, "bias": False},
    ):
        case = sampled_case(**options)
        upstream = {"loss": torch.tensor(-1.7)}
        if options.get("reduction") == "none":
            upstream = {"loss": torch.linspace(-1.0, 2.0, TOKENS)}
        exact = cases.outcome(flce.linear_cross_entropy, case, upstream=upstream)
        bias = case.options.get("linear_bias", torch.zeros(VOCAB))
        logits = F.linear(case.input.nan_to_num(), case.linear_weight, bias)
        logits = reference.final_logits(
            logits, None, **{name: options[name] for name in SCALES if name in options}
        )
        ranks.note(logits.softmax(-1).min() > 2**-12, "a probability below eps")
        for how in ({}, {"sequence": True}, {"reduce_input_grad": False}):
            sequence = "sequence" in how
            if sequence and TOKENS % ranks.ranks:
                continue
            for ends in (None, UNEVEN) if ranks.ranks == 4 else (None, (0, VOCAB)):
                classes, own = (
                    ranks.classes(VOCAB, ends),
                    ranks.divided(case, ends, sequence),
                )
                vp = ranks.parallel(VOCAB, ends, **how)
                call = {"vocab_parallel": vp, "upstream": upstream, **sampled(2**-12, 5)}
                made = cases.outcome(flce.linear_cross_entropy, own, **call)
                dx = made["input"]
                if "reduce_input_grad" in how:
                    dx = sum(part.double() for part in ranks.gathered(dx))
                true = ranks.rows(exact["input"]) if sequence else exact["input"]
                ranks.agree("loss", made["loss"], exact["loss"], 1e-6)
                ranks.agree("dX", dx, true, 1e-5)
                ranks.agree("dW", made["linear_weight"], exact["linear_weight"][classes], 1e-5)
                if "linear_bias" in made:
                    ranks.agree("db", made["linear_bias"], exact["linear_bias"][classes], 1e-5)


@on(4)
def sampled_loss_and_bits(ranks):
    """The loss is not sampled; equal seeds give equal bits, and all ranks have the same dX."""
    case = sampled_case(label_smoothing=0.1, ignored=4)
    own, vp = ranks.divided(case, UNEVEN), ranks.parallel(VOCAB, UNEVEN)

    def run(**options):
        return cases.outcome(flce.linear_cross_entropy, own, vocab_parallel=vp, **options)

    exact, first, again, other = (
        run(**options) for options in ({}, sampled(2**-3, 5), sampled(2**-3, 5), sampled(2**-3, 6))
    )
    ranks.agree("loss", first["loss"], exact["loss"], 1e-6)
    ranks.note(cases.same_bits(first, again), "two runs with one seed differ")
    ranks.note(not torch.equal(first["input"], other["input"]), "two seeds give the same dX")
    for name in ("loss", "input"):
        ranks.note_same_bytes(name, first[name])
    several = run(max_memory=3 * 64 * 4, **sampled(2**-3, 5))  # chunks of three rows
    for name in ("loss", "input"):
        ranks.agree(f"{name} in chunks", several[name], first[name], 1e-5)


@on(2)
def mean_of_samples(ranks):
    """The mean over seeds within five standard errors of the exact gradients."""
    seeds = 400
    case = sampled_case(tokens=8, ignored=4)
    own, vp = ranks.divided(case), ranks.parallel(VOCAB)
    exact = cases.outcome(flce.linear_cross_entropy, case)
    exact["linear_weight"] = exact["linear_weight"][ranks.classes(VOCAB)]
    draws = {"input": [], "linear_weight": []}
    for seed in range(seeds):
        call = {"vocab_parallel": vp, **sampled(2**-3, seed)}
        made = cases.outcome(flce.linear_cross_entropy, own, **call)
        for name, kept in draws.items():
            kept.append(made[name].double())
    for name, kept in draws.items():
        kept, true = torch.stack(kept), exact[name].double()
        deviation, rounding = kept.std(0) / seeds**0.5, 1e-6 * true.abs().max()
        outside = (kept.mean(0) - true).abs() - 5.0 * deviation - rounding
        ranks.note(
            (outside <= 0.0).all(), f"{name}: {int((outside > 0.0).sum())} of {true.numel()}"
        )
        ranks.note(kept.std(0).max() > 0.1 * true.std(), f"{name}: nothing was drawn")


@on(2)
def keys_of_ranks(ranks):
    """Each rank draws with a key of its own: ranks with equal rows of W draw different classes."""
    for seed in (0, 5, 2**63 - 1, -(2**63)):
        keys = [composite._seed_of_rank(torch.tensor([seed]), rank) for rank in range(1024)]
        ranks.note(int(keys[0]) == seed, f"rank 0 has another key than {seed}")
        ranks.note(len({int(key) for key in keys}) == 1024, f"equal keys of ranks, {seed}")
        ranks.note({key.dtype for key in keys} == {torch.int64}, "the dtype of a key")
    case = cases.make_case(64, 16, 20, dtype=torch.float32, std=1.0)
    case.target[:] = 0
    call = {"vocab_parallel": ranks.parallel(), **sampled(2**-2, 5)}
    own = cases.outcome(flce.linear_cross_entropy, case, **call)["linear_weight"][1:]
    first, other = ranks.gathered(own)
    ranks.note(not torch.equal(first, other), "both ranks draw the same")


# ---- training ----


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens):
        return torch.tanh(self.linear(self.embedding(tokens)))


def train(loss_of, body, head, rows=None, reduce=None, steps=200):
    """The losses of `steps` steps of SGD. rows: this rank's share of the tokens; reduce: sums the
    gradients of the body over the ranks."""
    optimizer = torch.optim.SGD([*body.parameters(), head], lr=0.2)
    random, losses = cases.generator(4), []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (24,), generator=random)
        target = (3 * tokens + 1) % VOCAB
        optimizer.zero_grad()
        loss = loss_of(body(rows(tokens) if rows else tokens), head, target)
        loss.backward()
        for parameter in body.parameters():
            if reduce:
                reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@on(2, 4)
def training(ranks):
    """200 steps follow those of one process, with dX summed by flce and by the caller."""
    torch.manual_seed(1)
    first, weight = Body(), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    states = {name: value.clone() for name, value in first.state_dict().items()}
    expected = train(flce.linear_cross_entropy, first, nn.Parameter(weight.clone()))
    eager = Body()
    eager.load_state_dict(states)
    plain = train(
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y), eager, nn.Parameter(weight.clone())
    )
    ranks.note(plain[-1] < 0.5 * plain[0], f"the loss falls from {plain[0]} to {plain[-1]}")
    ranks.agree("one process", expected, plain, 1e-5)
    ways = [({}, "auto"), ({}, "grads"), ({"sequence": True}, "auto")]
    ways.append(({"reduce_input_grad": False}, "stats"))
    for how, save in ways if ranks.ranks == 2 else ways[:1]:
        body, vp = Body(), ranks.parallel(VOCAB, **how)
        body.load_state_dict(states)
        head = nn.Parameter(weight[ranks.classes(VOCAB)].clone())

        def loss_of(x, w, y, vp=vp, save=save):
            return flce.linear_cross_entropy(x, w, y, vocab_parallel=vp, save=save)

        rows = ranks.rows if "sequence" in how else None
        # Each rank's dX is that of its tokens, or a term of the sum.
        reduce = (lambda grad: dist.all_reduce(grad)) if how else None
        losses = train(loss_of, body, head, rows, reduce)
        error = ((losses - expected).abs() / expected).max().item()
        ranks.note(error <= 1e-5, f"losses {how} {save}: {error:.1e}")
        ranks.note_same_bytes(f"losses {how} {save}", losses)


# ---- what others test ----


@on(2, 4)
def as_megatron(ranks):
    """Logits of a size of 1000 for targets of shape (13, 17), 11 classes a rank; label smoothing
    over the classes of all ranks, whose losses have to be the same."""
    vocab = 11 * ranks.ranks
    random = cases.generator(1234)
    logits = torch.randn(13 * 17, vocab, generator=random).mul(1000.0)
    target = torch.randint(vocab, (13, 17), generator=random)
    x = logits.reshape(13, 17, vocab)
    identity = torch.eye(vocab)[ranks.classes(vocab)]
    for smoothing in (0.0, 0.1):
        for reduction in ("none", "mean"):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            wide = logits.double().requires_grad_()
            expected = F.cross_entropy(wide, target.flatten(), **options)
            grad = torch.autograd.grad(expected.sum(), wide)[0].reshape(x.shape)
            if reduction == "none":
                expected = expected.reshape(target.shape)
            leaf = x.clone().requires_grad_()
            vp = ranks.parallel()
            made = flce.linear_cross_entropy(leaf, identity, target, vocab_parallel=vp, **options)
            ranks.agree(f"loss {options}", made, expected, 1e-6)
            ranks.note_same_bytes(f"loss {options}", made)
            ranks.agree(f"dlogits {options}", torch.autograd.grad(made.sum(), leaf)[0], grad, 1e-6)


@on(4)
def as_cce(ranks):
    """507 classes on 4 ranks, whose shares differ; with a softcap, ignored targets, a shift."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for softcap in (None, 20.0):
            for reduction in ("none", "mean", "sum"):
                for shift in (0, 1):
                    case = cases.make_case(64, 32, 507, dtype=dtype, std=2.0)
                    shape = (4, 16)
                    case.input, case.target = case.input.view(*shape, 32), case.target.view(shape)
                    case.target[:, 10:12] = -100
                    options = {"softcap": softcap, "reduction": reduction, "shift": shift}
                    for how in ({}, {"reduce_input_grad": False}):
                        ranks.compare(case.with_options(**options), vocab_parallel=how)


@on(2, 4)
def as_fla(ranks):
    """67 classes a rank, on one, two and four ranks of which each has some."""
    groups = [ranks]
    if ranks.ranks == 4:  # all ranks have to start all groups
        for members in ([[0, 1], [2, 3]], [[0], [1], [2], [3]]):
            started = [dist.new_group(own) for own in members]
            groups += [
                Ranks(group) for group, own in zip(started, members, strict=True)
                if ranks.rank in own
            ]  # fmt: skip
    for group in groups:
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in ("mean", "sum"):
                case = cases.make_case(2 * 24, 64, 67 * group.ranks, dtype=dtype, std=2.0)
                case.target[::7] = -100
                case = case.with_options(reduction=reduction, logit_scale=0.5)
                group.compare(case, vocab_parallel={"vocab": None})
        if group is not ranks:
            ranks.failures += group.failures


@on(2)
def extreme_logits(ranks):
    """Logits of one rank beyond the range of exp, a loss of 0, and what torch has for inf."""
    for scale in (1e3, 1e30):
        for save in cases.SAVES:
            case = make(torch.float64, bias=False)
            case.linear_weight[VOCAB - 1] *= scale
            ranks.compare(case, save=save)
    x, w, y = cases.leaves("cpu", TOKENS, hidden=HIDDEN, vocab=VOCAB)
    y.fill_(VOCAB - 1)
    bias = torch.zeros(VOCAB).double()
    bias[-1] = 200.0
    classes, vp = ranks.classes(VOCAB), ranks.parallel(VOCAB)
    options = {"reduction": "none", "linear_bias": bias}
    true = reference.linear_cross_entropy(x, w, y, **options)
    options["linear_bias"] = bias[classes]
    made = flce.linear_cross_entropy(x, w[classes], y, vocab_parallel=vp, **options)
    ranks.note((true < 1e-70).all(), "no small losses")
    # The definition subtracts, the loss of one process and of ranks does not.
    one = flce.linear_cross_entropy(x, w, y, reduction="none", linear_bias=bias)
    ranks.agree("losses near 0", made, one, 1e-10)
    ranks.note((made > 0.0).all(), "losses near 0 are lost")


@on(2)
def all_logits_hidden(ranks):
    """All logits of all ranks are -inf: so is lse, as in one process."""
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    hidden, y = torch.full((6,), -torch.inf), torch.arange(4)
    options = {"linear_bias": hidden[:3], "vocab_parallel": ranks.parallel(), "return_lse": True}
    made = flce.linear_cross_entropy(x, w[3 * ranks.rank :][:3], y, **options)
    one = flce.linear_cross_entropy(x, w, y, linear_bias=hidden, return_lse=True)
    ranks.note(torch.equal(made.lse, one.lse), f"lse {made.lse}, of one process {one.lse}")
    ranks.note(made.loss.isnan() == one.loss.isnan(), f"{made.loss}, of one process {one.loss}")
