"""Numbers of a sharded vocabulary: options, shards and data. On ranks over gloo."""

import functools
import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist

import flce
from harness import cases
from harness.drawn_options import LINEAR, budget_of, linear_case, strategies, upstream_of
from harness.vocab_case import (
    UNEVEN,
    VOCAB,
    make,
)
from harness.vocab_ranks import RETURNS, Ranks, on

# ---- drawn calls, against the definition and one process ----

DRAWN = {
    **LINEAR,
    "vocab": range(8, 60),
    "targets": [torch.int64, torch.int64, torch.int32],
    "adapter": [None],  # test_drawn_logprobs.py
    "how": [{}, {"sequence": True}, {"reduce_input_grad": False}],
    "wide": [False, True],  # sums of dX in float32
    "begins": [False, True],  # whether each rank says where its classes begin
}


def drawn(pick, ranks):
    """(case, options of Ranks.compare)"""
    plan = {name: pick.choice(values) for name, values in DRAWN.items()}
    how, shape = dict(plan["how"]), plan["shape"]
    if "sequence" in how and (not shape or shape[0] == 0 or shape[0] % ranks):
        how = {}
    if plan["wide"] and plan["dtype"].itemsize < 8 and "reduce_input_grad" not in how:
        how["reduce_dtype"] = torch.float32
    case, generator = linear_case(plan)
    if plan["valid_vocab"] is not None:
        case.linear_weight[case.options["valid_vocab"] :] = math.nan  # never read
    # Some ranks have no class, or padding alone.
    ends = [*sorted(pick.randint(0, plan["vocab"]) for _ in range(ranks - 1)), plan["vocab"]]
    given = {"vocab_parallel": how, "ends": ends if plan["begins"] else None, "plan": plan}
    if not plan["begins"] and plan["vocab"] % ranks == 0:
        how["vocab"] = None  # equal shares
    if plan["logits_dtype"] and plan["dtype"].itemsize < 8:
        given["logits_dtype"] = plan["dtype"]
    given |= {"save": pick.choice(strategies(case)), "upstream": upstream_of(plan, generator)}
    return case, {
        **given,
        "wants": plan["wants"],
        "max_memory": pick.choice([None, budget_of(plan)]),
    }


@on(2, 4)
@pytest.mark.parametrize("part", range(4))
def test_drawn(ranks, part):
    for seed in range(20 * part, 20 * part + 20):
        case, given = drawn(random.Random(seed), ranks.ranks)
        before = len(ranks.failures)
        ranks.compare(case, cancels=True, **given)
        ranks.failures[before:] = [f"{seed}: {text}" for text in ranks.failures[before:]]


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
