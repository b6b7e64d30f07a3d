"""Numbers of a sharded vocabulary: options, shards and data. On ranks over gloo."""

import functools
import itertools
import math

import cases
import pytest
import torch
import torch.distributed as dist
from vocab_ranks import RETURNS, Ranks, on

import flce

TOKENS, HIDDEN, VOCAB = 22, 24, 41  # 22 rows on 4 ranks: blocks of dX with padding
UNEVEN = (3, 3, 29, VOCAB)  # the second rank has no class
ROW = 16 * 8  # bytes of a row of logits of ceil(41 / 4) classes in float64, with its padding
MAPS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "negative": {"logit_scale": -1.5, "temperature": 0.7},
    "rows": {"softcap": 5.0, "logit_scale": 0.5, "temperature": "rows"},
}


def per_row(seed, tokens=TOKENS):
    return 0.5 + torch.rand(tokens, generator=cases.generator(seed))


def class_weights(vocab=VOCAB):
    """Every dtype holds them exactly; one is 0."""
    return torch.randint(1, 9, (vocab,), generator=cases.generator(1)).double().div_(4)


def make(dtype=torch.float64, *, std=2.0, vocab=VOCAB, tokens=TOKENS, maps="plain", **options):
    """A case with a bias. Options that are tensors may be given as True; ignored: every how many
    rows are, with the ignore_index."""
    made = cases.make_case(tokens, HIDDEN, vocab, dtype=dtype, std=std, bias=True, seed=3)
    options = {**MAPS[maps], **options}
    if not options.pop("bias", True):
        del made.options["linear_bias"]
    if options.get("temperature") == "rows":
        options["temperature"] = per_row(6, tokens).to(dtype)
    tensors = {"weight": class_weights(vocab), "token_weight": per_row(5, tokens) - 0.7}
    for name, value in tensors.items():
        if options.pop(name, False):
            options[name] = value.to(dtype)
    if options.get("valid_vocab") is not None:
        made.target.clamp_(max=options["valid_vocab"] - 1)
        made.linear_weight[options["valid_vocab"] :] = math.nan  # never read
    every, index = options.pop("ignored", 0), options.get("ignore_index", -100)
    return (cases.ignore_some(made, index, every) if every else made).with_options(**options)


def reshaped(case, *shape):
    """The same rows in `shape`."""
    rows = {n: case.options[n] for n in ("token_weight", "temperature") if n in case.options}
    rows = {n: v.reshape(shape) for n, v in rows.items() if isinstance(v, torch.Tensor)}
    x, target = case.input.reshape(*shape, HIDDEN), case.target.reshape(shape)
    return cases.Case(x, case.linear_weight, target, {**case.options, **rows})


def upstream_of(case, outputs):
    """Upstream gradients other than 1: of the loss alone, or of lse and entropy too."""
    rows = case.target.shape
    upstream = {"loss": torch.tensor(-0.37)}
    if case.options.get("reduction") == "none":
        upstream = {"loss": torch.linspace(-1.0, 2.0, case.target.numel()).reshape(rows)}
    if outputs:
        upstream["lse"] = torch.randn(rows, generator=cases.generator(8)).double()
        upstream["entropy"] = torch.randn(rows, generator=cases.generator(9)).double()
    return upstream


# ---- all options, against the definition and one process ----

# Where the ranks' classes end. "equal": start and vocab are not given.
ENDS = {
    "chunks": {2: None, 4: None},
    "uneven": {2: (2, VOCAB), 4: UNEVEN},
    "first": {2: (VOCAB, VOCAB), 4: (VOCAB,) * 4},
    "last": {2: (0, VOCAB), 4: (0, 0, 0, VOCAB)},
    "equal": {2: None, 4: None},
}
OPTIONS = {
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "save": [*cases.SAVES, "auto"],
    "reduction": ["none", "mean", "sum"],
    "bias": [False, True],
    "weight": [False, True],
    "label_smoothing": [0.0, 0.1, 1.0],
    "maps": list(MAPS),
    "z_loss": [0.0, 0.05],
    "token_weight": [False, True],
    "num_items": [None, 7.5],
    "ignored": [0, 3, 1],
    "ignore_index": [-100, -1, 12, VOCAB + 7],  # 12: no class then
    "valid_vocab": [
        None,
        30,
        9,
    ],  # of 4 ranks: with 30 the last has padding alone, with 9 all but one
}
CALLS = {
    "how": [{}, {"sequence": True}, {"reduce_input_grad": False}],
    "wide": [False, True],
    "nested": [False, True],
    "budget": [None, 4 * ROW],
    "ends": list(ENDS),
    "outputs": [False, True],
    "wants": [cases.GRADIENTS, *itertools.combinations(cases.GRADIENTS, 2), ("linear_bias",), ()],
    "bound": [None, "count", "rows"],
    "dtype_of": [None, "accum_dtype", "logits_dtype"],
    "target": [torch.int64, torch.int32],
}


ROWS = cases.covering_rows(**OPTIONS, **CALLS)


@on(2, 4)
@pytest.mark.parametrize("values", ROWS, ids=lambda values: "-".join(map(str, values)))
def test_combinations(ranks, values):
    combination(ranks, **dict(zip([*OPTIONS, *CALLS], values, strict=True)))


def combination(
    ranks, how, wide, nested, budget, ends, outputs, wants, bound, dtype_of, target, **options
):
    dtype, save = options.pop("dtype"), options.pop("save")
    reduction = options["reduction"]
    if save == "grads" and reduction == "none":
        save = "auto"
    if reduction != "mean":
        options["num_items"] = None
    if wide and dtype != torch.float64 and "reduce_input_grad" not in how:
        how = {**how, "reduce_dtype": torch.float32}
    equal, tokens = ends == "equal", 24 if "sequence" in how else TOKENS
    case = make(dtype, vocab=44 if equal else VOCAB, tokens=tokens, **options)
    case.target = case.target.to(target)
    if nested:
        case = reshaped(case, 4 if "sequence" in how else 2, -1)
    knobs = dict.fromkeys(RETURNS, True) if outputs else {}
    if dtype_of == "accum_dtype" and dtype.itemsize == 2:
        knobs["accum_dtype"] = torch.float32
    if dtype_of == "logits_dtype" and dtype != torch.float64:
        knobs["logits_dtype"] = dtype
    ranks.compare(
        case, ends=ENDS[ends][ranks.ranks], wants=wants, save=save, max_memory=budget,
        vocab_parallel={**({"vocab": None} if equal else {}), **how}, cancels=outputs,
        valid_bound=tokens if bound == "rows" else bound,
        upstream=upstream_of(case, outputs), **knobs,
    )  # fmt: skip


# ---- shards and data ----


@on(4)
def test_class_weights_that_cancel(ranks):
    """Those of a rank sum to 0, exactly; all of a rank are 0."""
    case = make(torch.float64, label_smoothing=0.3, weight=True, reduction="sum")
    case.options["weight"][:11] = torch.arange(-5, 6) / 4
    case.options["weight"][33:] = 0.0
    for save in cases.SAVES:
        ranks.compare(case, save=save)


@on(4)
def test_groups_of_some_ranks(ranks):
    """In the classes of a group a rank has its place in the group."""
    pairs = [dist.new_group(members) for members in ([0, 2], [1, 3])]  # all ranks start all groups
    pair = Ranks(pairs[ranks.rank % 2])
    for save in cases.SAVES:
        pair.compare(make(label_smoothing=0.1), save=save)
        pair.compare(make(), vocab_parallel={"sequence": True}, save=save)
    ranks.failures += pair.failures


@on(4)
def test_equal_bits_of_two_runs(ranks):
    for dtype, save in itertools.product((torch.float64, torch.bfloat16), cases.SAVES):
        case = make(dtype, ignored=5, label_smoothing=0.1, z_loss=1e-2)
        made, again = (ranks.compare(case, save=save, **RETURNS) for _ in range(2))
        ranks.note(cases.same_bits(made, again), f"two runs differ: {dtype} {save}")


@on(4)
def test_a_bias_in_float32(ranks):
    case = make(torch.bfloat16)
    for ends in (None, UNEVEN):
        bias = case.options["linear_bias"].float()
        vp = ranks.parallel(VOCAB, ends)
        own = ranks.divided(case.with_options(linear_bias=bias), ends)
        made = cases.outcome(flce.linear_cross_entropy, own, vocab_parallel=vp)
        truth = cases.outcome(flce.reference.linear_cross_entropy, case.to(torch.float64))
        classes = ranks.classes(VOCAB, ends)
        ranks.note(made["linear_bias"].dtype == torch.float32, "the dtype of db")
        if made["linear_bias"].numel():
            ranks.agree("db", made["linear_bias"], truth["linear_bias"][classes], 8e-3)


@on(2)
def test_half_precision_with_a_loss_scale(ranks):
    """The gradients of 65536 times the loss, as a GradScaler asks for them."""
    case = cases.make_case(100, 64, 203, dtype=torch.float16)
    scale = torch.tensor(65536.0)
    truth = cases.outcome(flce.reference.linear_cross_entropy, case.to(torch.float64))
    classes = ranks.classes(203)
    for save in (*cases.SAVES, "auto"):
        for budget in (None, 30 * 128 * 4):
            made = cases.outcome(
                flce.linear_cross_entropy, ranks.divided(case), upstream={"loss": scale},
                vocab_parallel=ranks.parallel(203), save=save, max_memory=budget,
            )  # fmt: skip
            ranks.agree(f"loss {save}", made["loss"], truth["loss"], 2e-5)
            truths = truth["input"], truth["linear_weight"][classes]
            for name, true in zip(cases.GRADIENTS, truths, strict=False):
                ranks.note(made[name].dtype == torch.float16, f"the dtype of {name}")
                ranks.agree(f"{name} {save}", made[name].double() / 65536, true, cases.F16_BAR)


@on(4)
def test_nan_reaches_all_ranks(ranks):
    call = functools.partial(flce.linear_cross_entropy, return_lse=True)
    vp = ranks.parallel(VOCAB)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for at in ("linear_weight", "input", "linear_bias"):
            for row in (0, 12, 40):
                case = make(dtype)
                named = {"linear_bias": case.options["linear_bias"]}
                tensor = named.get(at, getattr(case, at, None))
                tensor.view(len(tensor), -1)[row % len(tensor), 0] = math.nan
                for save in cases.SAVES:
                    made = cases.outcome(call, ranks.divided(case), vocab_parallel=vp, save=save)
                    for name in ("loss", "lse", "input"):
                        bad = bool(made[name].isnan().any())
                        ranks.note(bad, f"{name} has no NaN: {dtype} {at} {row} {save}")
