"""Sampled gradients of a sharded vocabulary, linear_loss, and extreme logits. On ranks over
gloo."""

import torch

import flce
from flce import composite, reference
from harness import cases
from harness.vocab_case import HIDDEN, TOKENS, UNEVEN, VOCAB, make
from harness.vocab_ranks import on

# ---- sampled gradients ----


def sampled(eps, seed):
    return {"gradient": "sampled", "gradient_eps": eps, "gradient_seed": seed}


def sampled_case(**options):
    """No class is rare: each is drawn often enough for a standard error to be known."""
    return make(torch.float32, std=0.5, **options)


@on(4)
def test_sampled_loss_and_bits(ranks):
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
def test_mean_of_samples(ranks):
    """The mean over seeds within five standard errors of the exact gradients."""
    seeds, upstream = 400, {"entropy": torch.linspace(2.0, -1.0, 8)}
    for given in ({}, {"upstream": upstream, "return_entropy": True}):
        case = sampled_case(tokens=8, ignored=4)
        own, vp = ranks.divided(case), ranks.parallel(VOCAB)
        exact = cases.outcome(flce.linear_cross_entropy, case, **given)
        exact["linear_weight"] = exact["linear_weight"][ranks.classes(VOCAB)]
        draws = {"input": [], "linear_weight": []}
        for seed in range(seeds):
            call = {"vocab_parallel": vp, **sampled(2**-3, seed), **given}
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
def test_keys_of_ranks(ranks):
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


# ---- linear_loss ----


def chunked(ranks, case, vp, rows, **options):
    """{name: value} of the loss and the gradients of linear_loss in chunks of `rows` rows."""
    x, w = (leaf.detach().clone().requires_grad_() for leaf in (case.input, case.linear_weight))
    options = {"rows": rows, "vocab_parallel": vp, **case.options, **options}
    loss = flce.linear_loss(x, w, case.target, lambda p, *_: -p.sum(), **options)
    names = "loss", "input", "linear_weight"
    return dict(zip(names, (loss, *torch.autograd.grad(loss, (x, w))), strict=True))


@on(2)
def test_draws_of_chunks(ranks):
    case, ends = sampled_case(ignored=4), (3, VOCAB)
    own, vp = ranks.divided(case, ends), ranks.parallel(VOCAB, ends)
    whole = cases.outcome(
        flce.linear_cross_entropy, own, vocab_parallel=vp, reduction="sum", **sampled(2**-3, 5)
    )
    for rows in (TOKENS, 3):
        made = chunked(ranks, own, vp, rows, **sampled(2**-3, 5))
        for name, value in made.items():
            ranks.agree(f"{name} in chunks of {rows}", value, whole[name], 1e-5)


@on(2)
def test_sums_of_chunks(ranks):
    """The sum over many chunks is that of one process: in float32 by default."""
    case = cases.make_case(256, 16, 40, dtype=torch.bfloat16, std=0.5)
    case.input += 1.0
    classes, errors = ranks.classes(40), []
    wide = cases.outcome(flce.linear_cross_entropy, case.to(torch.float64), reduction="sum")
    exact = wide["linear_weight"][classes]
    for accum_dtype in (None, torch.bfloat16):
        made = chunked(ranks, ranks.divided(case), ranks.parallel(), 1, accum_dtype=accum_dtype)[
            "linear_weight"
        ]
        errors.append(cases.relative_error(made.double(), exact))
    ranks.note(errors[0] < 5e-3, f"error {errors[0]:.1e}")
    ranks.note(errors[1] > 2 * errors[0], f"in bfloat16 {errors[1]:.1e}")


# ---- extremes ----


@on(2)
def test_losses_near_0(ranks):
    for save in cases.SAVES:
        case = make(torch.float64, bias=False)
        case.linear_weight[VOCAB - 1] *= 1e30
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
def test_all_logits_hidden(ranks):
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    hidden, y = torch.full((6,), -torch.inf), torch.arange(4)
    options = {"linear_bias": hidden[:3], "vocab_parallel": ranks.parallel(), "return_lse": True}
    made = flce.linear_cross_entropy(x, w[3 * ranks.rank :][:3], y, **options)
    one = flce.linear_cross_entropy(x, w, y, linear_bias=hidden, return_lse=True)
    ranks.note(torch.equal(made.lse, one.lse), f"lse {made.lse}, of one process {one.lse}")
    ranks.note(made.loss.isnan() == one.loss.isnan(), f"{made.loss}, of one process {one.loss}")
