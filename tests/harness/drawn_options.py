"""Random combinations of options of a call: test_properties.py and its like.

FLCE_EXAMPLES sets the number of cases; they are the same in each run.
"""

import math
import os
from itertools import combinations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import flce
from harness import cases

ALL_OUTPUTS = ("loss", "lse", "entropy")
EXAMPLES = {"cpu": 1600, "cuda": 480}
RARELY = [None] * 3  # prepended to the values of an option that most calls omit
# Around every vector and tile width.
TAILS = (3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1025, 2049)
SHAPES = [
    (),
    *((n,) for n in range(41)),
    *((b, n) for b in range(5) for n in range(1, 11)),
    *((a, b, n) for a in (1, 2) for b in (1, 2, 3) for n in range(7)),
]
# The values that each part of a call is drawn from, simplest first: failing cases shrink to these.
LOSS = {
    "seed": range(256),
    "shape": [*SHAPES, *((n,) for n in (63, 127, 128, 129, 257))],
    "vocab": [*range(1, 71), *range(1, 71), *TAILS],
    "dtype": [torch.float64] * 5 + [torch.float32, torch.bfloat16, torch.float16],
    "std": [0.5, 0.5, 3.0, 3.0, 8.0, 300.0],
    "targets": [torch.int64, torch.int64, torch.int32, "probabilities"],
    "ignore": [0.0, 0.0, 0.6, 1.0],  # the fraction of ignored rows
    "ignore_index": [-100, -100, None, 0, -1, 99],  # 99: beyond the classes
    "reduction": ["mean", "mean", "sum", "none"],
    "label_smoothing": [0.0, 0.0, 0.1, 1.0],
    "class_weight": [None, None, "own", "float32"],
    "softcap": [*RARELY, 1.5, 30.0],
    "logit_scale": [1.0, 1.0, 0.25, -1.5],
    "temperature": [1.0, 1.0, 0.7, "rows", "scalar"],
    "z_loss": [0.0, 0.0, 0.01, 0.5],
    "token_weight": [*RARELY, torch.float32, torch.bfloat16, torch.bool, torch.int32],
    "num_items": [*RARELY, 7, 2.5, torch.float32, torch.int64, 0.5],
    "returns": [tuple(bool(bits >> i & 1) for i in range(5)) for bits in range(32)],
    "upstream": [(), ("loss", "lse"), ("loss", "entropy"), ("lse",), ("entropy",), ALL_OUTPUTS],
}
LINEAR = {
    **LOSS,
    "hidden": [*range(1, 25), 33, 129],
    "bias": [None, 0.0, 0.0, -200.0, 200.0],  # its mean
    "adapter": [*RARELY, 1, 8],  # its rank
    "wants": [subset for size in (3, 2, 1, 0) for subset in combinations(cases.GRADIENTS, size)],
    "shift": [0, 0, 0, 1, 2, 5],
    "documents": [False, False, True],
    "valid_vocab": [*RARELY, 0.01, 0.5, 1.0],  # fraction of the vocabulary
    "valid_bound": [None, "count", 0, 3],  # margin above the number of valid rows
    "accum_dtype": [None, torch.float32],
    "logits_dtype": [*RARELY, "own"],
    "chunk_rows": range(1, 10),
    "spread": [False, False, True],  # tensors with other elements in between
    "autocast": [
        False,
        True,
    ],  # of 16 bits: float32 tensors, all but the weight in every other call
}


def plans(table):
    """A plan is drawn as one bytes object, in which each byte selects one part.

    If each part were drawn separately, most examples would be mutations of others: hypothesis
    copies the values of one draw to another, and with so many independent parts that repeats
    combinations.
    """

    def plan(drawn):
        parts = zip(table.items(), drawn, strict=True)
        return {name: values[byte % len(values)] for (name, values), byte in parts}

    return st.binary(min_size=len(table), max_size=len(table)).map(plan)


PARTS = pytest.mark.parametrize("part", range(4))  # of the examples: processes share them


def examples(device, part, share=1.0):
    """Another seed for each part, and a quarter of the examples of the environment or device."""
    count = math.ceil(share * int(os.environ.get("FLCE_EXAMPLES", EXAMPLES[device])) / 4)
    settings = hypothesis.settings(max_examples=count, database=None, deadline=None)
    return lambda test: hypothesis.seed(part)(settings(test))


RETURNS = ("return_lse", "return_entropy", "return_accuracy", "return_predictions", "return_z_loss")


def steps(shape, random, dtype, least=0):
    """Multiples of 1/4 up to 2, exact in every dtype; integers for integer dtypes."""
    return (torch.randint(least, 9, shape, generator=random) / 4).to(dtype)


def draw_targets(plan, random, vocab):
    """Class targets with the given fraction ignored, or probabilities."""
    shape = plan["shape"]
    if plan["targets"] == "probabilities":
        logits = 2.0 * torch.randn(*shape, plan["vocab"], generator=random)
        return logits.softmax(-1).to(plan["dtype"])
    target = torch.randint(vocab, shape, generator=random)
    index = -100 if plan["ignore_index"] is None else plan["ignore_index"]
    ignored = torch.rand(shape, generator=random) < plan["ignore"]
    return target.masked_fill(ignored, index).to(plan["targets"])


def loss_options(plan, random, vocab):
    """The options that linear_cross_entropy and cross_entropy share, as far as they apply."""
    shape, dtype = plan["shape"], plan["dtype"]
    probabilities = plan["targets"] == "probabilities"
    names = ("reduction", "label_smoothing", "softcap", "logit_scale", "z_loss", "temperature")
    options = {name: plan[name] for name in names}
    options["ignore_index"] = -100 if probabilities else plan["ignore_index"]
    if plan["class_weight"]:
        kind = torch.float32 if plan["class_weight"] == "float32" else dtype
        # Not 0: a mean over rows of weight 0 is NaN, as in F.cross_entropy.
        options["weight"] = steps((plan["vocab"],), random, kind, least=1)
    if plan["temperature"] == "rows":
        options["temperature"] = 0.5 + steps(shape, random, torch.float32)
    elif plan["temperature"] == "scalar":
        options["temperature"] = torch.tensor(1.25)
    if plan["token_weight"] is not None:
        options["token_weight"] = steps(shape, random, plan["token_weight"])
    if plan["num_items"] is not None and plan["reduction"] == "mean":
        given = plan["num_items"]
        is_tensor = isinstance(given, torch.dtype)
        options["num_items"] = torch.tensor(9, dtype=given) if is_tensor else given
    options.update(zip(RETURNS, plan["returns"], strict=True))
    if probabilities:
        options["return_accuracy"] = False
    return options


def upstream_of(plan, random):
    """Upstream gradients of the outputs that are differentiated together, of the loss if there is
    no other.

    Their signs differ, and none is a power of two.
    """
    rows = plan["shape"]
    can = {"loss": True, "lse": plan["returns"][0], "entropy": plan["returns"][1]}
    names = [name for name in plan["upstream"] if can[name]] or ["loss"]
    scalar = plan["reduction"] != "none"
    return {
        name: torch.randn(() if name == "loss" and scalar else rows, generator=random)
        for name in names
    }


def linear_case(plan):
    """A call of linear_cross_entropy according to the plan, with NaN in each ignored row."""
    random = cases.generator(plan["seed"])
    shape, vocab, dtype = plan["shape"], plan["vocab"], plan["dtype"]
    # Rounded logits of 300 choose other classes, and float16's loss scale is for |lse| <= 64.
    if plan["logits_dtype"] or (dtype == torch.float16 and plan["z_loss"]):
        plan = {**plan, "std": min(plan["std"], 8.0)}
    x = torch.randn(*shape, plan["hidden"], generator=random) * plan["std"] ** 0.5
    w = torch.randn(vocab, plan["hidden"], generator=random)
    w = w * (plan["std"] / plan["hidden"]) ** 0.5
    valid_vocab = None
    if plan["valid_vocab"] is not None:
        valid_vocab = max(1, int(plan["valid_vocab"] * vocab))
    target = draw_targets(plan, random, valid_vocab or vocab)
    options = loss_options(plan, random, vocab)
    options.update(valid_vocab=valid_vocab, accum_dtype=plan["accum_dtype"])
    if dtype == torch.float64:
        options["accum_dtype"] = None
    if plan["bias"] is not None:
        bias = torch.randn(vocab, generator=random) + plan["bias"]
        options["linear_bias"] = bias.to(dtype)
    if rank := plan["adapter"]:
        options["adapter_input"] = torch.randn(*shape, rank, generator=random).to(dtype)
        low_rank = torch.randn(vocab, rank, generator=random)
        options["adapter_weight"] = (low_rank * (plan["std"] / rank) ** 0.5).to(dtype)
    if not target.is_floating_point():
        options.update(shift_of(plan, random))
    options["valid_bound"] = None
    ignore_index, cu_seqlens = options["ignore_index"], options.get("cu_seqlens")
    later = flce.reference.shifted(target, options.get("shift", 0), cu_seqlens, ignore_index)
    ignored = flce.reference.ignored_rows(later, ignore_index)
    if not target.is_floating_point() and plan["valid_bound"] is not None:
        more, valid = plan["valid_bound"], int((~ignored).sum())
        options["valid_bound"] = more if more == "count" else valid + more
    x = x.to(dtype).masked_fill(ignored.unsqueeze(-1), float("nan"))
    if plan["adapter"]:
        options["adapter_input"].masked_fill_(ignored.unsqueeze(-1), float("nan"))
    case = cases.Case(x, w.to(dtype), target, options)
    return case.map(spread) if plan["spread"] else case, random


def spread(tensor):
    """The same values, as every second element of a larger tensor."""
    return torch.stack([tensor, tensor.flip(0) if tensor.dim() else tensor], -1)[..., 0]


def shift_of(plan, random):
    tokens = torch.Size(plan["shape"]).numel()
    if plan["documents"] and plan["shape"]:
        ends = torch.randint(tokens + 1, (4,), generator=random).sort().values
        kind = torch.int32 if plan["seed"] % 2 else torch.int64
        return {"shift": max(1, plan["shift"]), "cu_seqlens": ends.to(kind)}
    return {"shift": plan["shift"] if len(plan["shape"]) > 1 else 0}


def strategies(case):
    scalar = case.options["reduction"] != "none"
    return ["auto", *(save for save in cases.SAVES if scalar or save != "grads")]


def called(case, plan, **call):
    """flce's results; under autocast the gradients as the operands' dtype has them."""
    if not plan["autocast"] or case.dtype.itemsize > 2:
        return cases.outcome(flce.linear_cross_entropy, case, **call)
    wide = case.to(torch.float32)
    if plan["seed"] % 2:
        wide.linear_weight = case.linear_weight
    with torch.autocast(case.input.device.type, case.dtype):
        made = cases.outcome(flce.linear_cross_entropy, wide, **call)
    for name in made.keys() & set(cases.LEAVES):
        assert made[name].dtype == getattr(wide, name, wide.options.get(name)).dtype
        made[name] = made[name].to(case.dtype)
    return made


def budget_of(plan):
    """The size in bytes of a few rows of logits in the widest dtype, with their alignment."""
    return plan["chunk_rows"] * (plan["vocab"] + 15) * 8
