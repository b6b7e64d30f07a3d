"""Random combinations of options: value, outputs and every gradient against float64.

Each case runs with every strategy that supports it, in one chunk and in several. FLCE_EXAMPLES sets
the number of cases; they are the same in each run.
"""

import random

import hypothesis
import pytest
import torch

import flce
from flce import operators
from harness import cases
from harness.drawn_options import (
    LINEAR,
    LOSS,
    PARTS,
    SHAPES,
    budget_of,
    called,
    draw_targets,
    examples,
    linear_case,
    loss_options,
    plans,
    spread,
    strategies,
    upstream_of,
)
from harness.sampled_case import compare

# Sizes that end at any offset within a vector.
RAGGED = {**LINEAR, "dtype": [torch.bfloat16], "vocab": range(1, 140, 2), "hidden": range(1, 71)}
# Not sampled: float64, probabilities.
SAMPLED = {
    **LINEAR,
    "dtype": [torch.float32],
    "targets": [torch.int64, torch.int64, torch.int32],
    "std": [0.5, 3.0, 20.0, 0.0],
    "bias": [None, 0.0],
    "shape": SHAPES,
    "vocab": range(1, 301, 3),
    "accum_dtype": [None],
    "logits_dtype": [None],
    "gradient_eps": [2**-6, 2**-2, 0.3, 2**-12, 1.0],
    "gradient_seed": [7, 0, -1, 2**63 - 1, -(2**63), 2**32],
    "in_chunks": [False, True],
}


pytestmark = pytest.mark.usefixtures("one_thread")


def moved(case, upstream, device):
    """The case and the upstream gradients on a device; views keep their strides."""

    def move(value):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.copy_(value)

    return case.map(move), {name: move(gradient) for name, gradient in upstream.items()}


def with_padding(case):
    """The same call, with NaN in what belongs to classes from valid_vocab on: it is not read."""
    valid, options = case.options["valid_vocab"], dict(case.options)
    is_spread = case.linear_weight.stride(-1) > 1

    def hide(tensor):
        hidden = torch.arange(len(tensor), device=tensor.device) >= valid
        hidden = hidden.reshape(-1, *(1,) * (tensor.dim() - 1))
        tensor = tensor.masked_fill(hidden, float("nan"))
        return spread(tensor) if is_spread else tensor

    if valid is None:
        return case
    for name in ("linear_bias", "weight", "adapter_weight"):
        if name in options:
            options[name] = hide(options[name])
    return cases.Case(case.input, hide(case.linear_weight), case.target, options)


def check(plan, device):
    """Every strategy that supports the call, in one chunk and in several."""
    case, random = linear_case(plan)
    case, upstream = moved(case, upstream_of(plan, random), device)
    adapter = cases.LEAVES[3:] if plan["adapter"] and plan["wants"] else ()
    call = {"wants": (*plan["wants"], *adapter), "upstream": upstream}
    dtype = plan["dtype"] if plan["logits_dtype"] else None
    yardstick = cases.Yardstick(case, cancels=True, logits_dtype=dtype, **call)
    case = with_padding(case)
    for save in strategies(case):
        for budget in (None, budget_of(plan))[: 1 if save == "auto" else 2]:
            knobs = {"save": save, "max_memory": budget, "logits_dtype": dtype}
            yardstick.check(called(case, plan, **call, **knobs), f"{knobs}")


@PARTS
def test_linear_cross_entropy(device, part):
    @examples(device, part)
    @hypothesis.given(plans(LINEAR))
    def run(plan):
        check(plan, device)

    run()


@pytest.mark.parametrize("variant", ["scalar", "avx2", "avx512"])
def test_cpu_variants(variant, monkeypatch):
    """Each variant of the CPU kernels that this machine supports."""
    monkeypatch.setenv("FLCE_CPU_VARIANT", variant)
    supported = operators.run_plain(operators.inner.cpu_variant.default)
    if supported == "none":
        pytest.skip(f"this CPU has no {variant}")
    assert supported == variant
    draw = random.Random(0)
    for _ in range(150):
        check({name: draw.choice(values) for name, values in LINEAR.items()}, "cpu")


@PARTS
def test_bfloat16_of_odd_sizes_in_poisoned_memory(device, part, monkeypatch):
    @examples(device, part, share=0.5)
    @hypothesis.given(plans(RAGGED))
    def run(plan):
        case, random = linear_case(plan)
        case, upstream = moved(case, upstream_of(plan, random), device)
        call = {"wants": plan["wants"], "upstream": upstream, "max_memory": budget_of(plan)}
        for save in strategies(case):
            made = []
            for poison in ("0", "1"):
                monkeypatch.setenv("FLCE_POISON", poison)
                made.append(cases.outcome(flce.linear_cross_entropy, case, save=save, **call))
            assert cases.same_bits(*made)
            assert all(bool(value.isfinite().all()) for value in made[1].values())

    run()


@PARTS
def test_cross_entropy(device, part):
    @examples(device, part)
    @hypothesis.given(plans(LOSS))
    def run(plan):
        random = cases.generator(plan["seed"])
        logits = plan["std"] * torch.randn(*plan["shape"], plan["vocab"], generator=random)
        target = draw_targets(plan, random, plan["vocab"])
        options = loss_options(plan, random, plan["vocab"])
        ignored = flce.reference.ignored_rows(target, options["ignore_index"])
        logits = logits.to(plan["dtype"]).masked_fill(ignored.unsqueeze(-1), float("nan"))
        case, upstream = moved(
            cases.Case(logits, None, target, options), upstream_of(plan, random), device
        )
        call = {"wants": ("input",), "upstream": upstream}
        yardstick = cases.Yardstick(case, cancels=True, **call)
        yardstick.check(cases.outcome(flce.cross_entropy, case, **call))

    run()


@PARTS
def test_sampled_gradients(device, part):
    """A row's draw depends on its position among all rows, not among those that are computed."""

    @examples(device, part, share=0.3)
    @hypothesis.given(plans(SAMPLED))
    def run(plan):
        if plan["softcap"] is not None:  # both are refused
            lse, _, *others = plan["returns"]
            plan = {**plan, "label_smoothing": 0.0, "returns": (lse, False, *others)}
        case, random = linear_case(plan)
        case, upstream = moved(case, upstream_of(plan, random), device)
        compare(
            case,
            eps=plan["gradient_eps"],
            seed=plan["gradient_seed"],
            wants=(*plan["wants"], *(cases.LEAVES[3:] if plan["adapter"] else ())),
            upstream=upstream,
            max_memory=budget_of(plan) if plan["in_chunks"] else None,
        )

    run()
