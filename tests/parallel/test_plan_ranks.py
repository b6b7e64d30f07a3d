"""flce.plan of a rank: its collectives by hand, and counted in a step of three processes."""

import torch
import torch.distributed as dist

import flce
from harness import cases
from harness.processes import on_ranks
from harness.vocab_exchanges import EXCHANGED, GATHERED, exchanges

RANKS, TOKENS, HIDDEN, VOCAB = 3, 24, 16, 40
SIZE = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "ranks": 8}
BF16, STATISTIC = 2, 4  # bytes
BLOCK = 8192 // 8 * 4096 * BF16  # of dX


def test_by_hand(device):
    plan = flce.plan(**SIZE, device=device, save="grads", max_memory="64MiB")
    assert plan.ranks == 8 and plan.chunks > 1
    assert plan.collectives == {
        "statistics": ("all-gather", plan.chunks, 0, 7 * 2 * 8192 * STATISTIC),
        "partial_dx": ("all-to-all", 1, 0, 7 * BLOCK),
        "summed_dx": ("all-gather", 1, 0, 7 * BLOCK),
    }
    assert f"summed_dx    all-gather   1 forward   0 backward {7 * BLOCK:15d} bytes" in plan.text
    assert "ranks=8" in plan.text


def test_by_hand_with_other_options(device):
    plan = flce.plan(**SIZE, device=device, save="stats", sequence=True, label_smoothing=0.1)
    assert plan.collectives == {
        "input": ("all-gather", 1, 1, 2 * 7 * BLOCK),
        "statistics": ("all-gather", 1, 0, 7 * 7 * 8192 * STATISTIC),
        "partial_dx": ("all-to-all", 0, 1, 7 * BLOCK),
    }
    plan = flce.plan(**SIZE, device=device, sequence=True, grad_input=False, grad_weight=False)
    assert plan.collectives == {
        "input": ("all-gather", 1, 0, 7 * BLOCK),
        "statistics": ("all-gather", 1, 0, 7 * 2 * 8192 * STATISTIC),
    }
    wide = flce.plan(**SIZE, device=device, save="grads", reduce_dtype=torch.float32)
    assert wide.collectives["partial_dx"] == ("all-to-all", 1, 0, 2 * 7 * BLOCK)
    assert wide.collectives["summed_dx"] == ("all-gather", 1, 0, 7 * BLOCK)
    frozen = flce.plan(**SIZE, device=device, save="logits", grad_input=False)
    assert frozen.collectives.keys() == {"statistics"}


def test_a_rank_has_its_share(device):
    """Its dW and its logits; without ranks there is nothing to tell."""
    size = {"tokens": 100, "hidden": 64, "vocab": 1001, "device": device, "save": "logits"}
    whole, share = flce.plan(**size), flce.plan(**size, ranks=4)
    assert whole.ranks == 1 and whole.collectives == {} and "ranks" not in str(whole)
    assert share.buffers["grad_weight"] == 251 * 64 * BF16
    assert whole.buffers["grad_weight"] == 1001 * 64 * BF16
    assert share.buffers["saved"] < whole.buffers["saved"] / 3
    automatic = {**size, "save": "auto", "reduction": "none"}
    automatic["max_memory"] = 2 * share.buffers["saved"]  # less than all logits
    assert flce.plan(**automatic, ranks=4).save == "logits"
    assert flce.plan(**automatic).save == "stats"
    assert flce.plan(100, 64, 1001, device=device, ranks=1) == flce.plan(
        100, 64, 1001, device=device
    )


def counted(step):
    """[(kind, bytes received from others)] of the collectives that `step` begins."""
    with exchanges() as found:
        step()
    calls = []
    for one in found:
        if one.name == GATHERED:
            calls.append(("all-gather", one.received - one.sent))
        elif one.name == EXCHANGED:
            calls.append(("all-to-all", one.received // RANKS * (RANKS - 1)))
    return calls


def totals(calls, kind):
    sizes = [size for one, size in calls if one == kind]
    return len(sizes), sum(sizes)


def compare(rank, sequence, dtype, wants, options):
    vp = flce.VocabParallel(dist.group.WORLD, vocab=VOCAB, sequence=sequence)
    tokens = TOKENS if sequence else TOKENS + 1
    rows = min(14, VOCAB - 14 * rank)
    torch.manual_seed(rank)
    x = torch.randn(tokens // RANKS if sequence else tokens, HIDDEN).to(dtype)
    w = torch.randn(rows, HIDDEN).to(dtype)
    x.requires_grad_("input" in wants), w.requires_grad_("weight" in wants)
    y = torch.arange(tokens) % VOCAB
    knobs, made = {"vocab_parallel": vp, **options}, []
    hidden = knobs.pop("teacher_hidden", None)
    teacher = [torch.randn(len(one), hidden or 0).to(dtype) for one in (x, w)]

    def forward():
        if hidden:
            made.append(flce.linear_divergence(x, w, *teacher, target=y, **knobs))
        else:
            made.append(flce.linear_cross_entropy(x, w, y, **knobs))

    def backward():
        made[0].sum().backward()

    passes = [counted(forward), counted(backward) if wants else []]
    grads = {"grad_input": "input" in wants, "grad_weight": "weight" in wants}
    plan = flce.plan(
        tokens, HIDDEN, VOCAB, dtype=dtype, device="cpu", ranks=RANKS, sequence=sequence,
        **grads, **options,
    )  # fmt: skip
    for kind in ("all-gather", "all-to-all"):
        planned = [c for c in plan.collectives.values() if c.kind == kind]
        calls = sum(c.forward for c in planned), sum(c.backward for c in planned)
        found = [totals(one, kind) for one in passes]
        assert calls == tuple(count for count, _ in found), (kind, sequence, options)
        assert sum(c.bytes for c in planned) == sum(size for _, size in found), (kind, options)


@on_ranks(RANKS)
def test_as_counted():
    rank = dist.get_rank()
    budget = 8 * 16 * 8  # a few rows of logits
    for case in cases.covering_rows(
        sequence=[False, True],
        dtype=[torch.float64, torch.bfloat16, torch.float16],
        wants=[(), ("input",), ("weight",), ("input", "weight")],
        options=[
            {"save": "grads", "max_memory": budget},
            {"save": "logits"},
            {"save": "stats", "max_memory": budget, "label_smoothing": 0.1},
            {"reduction": "none"},
            {"teacher_hidden": 24, "max_memory": budget},
            {"teacher_hidden": 24, "max_memory": budget, "save": "stats"},
        ],
    ):
        compare(rank, *case)
    compare(rank, False, torch.float32, ("input", "weight"), {"gradient": "sampled"})
