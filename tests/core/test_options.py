"""Strides, budgets, sums in float32. test_properties.py has the options in combination."""

import pytest
import torch

import flce
from harness import cases
from harness.drawn_options import spread

HIDDEN = 24


def make(device, dtype=torch.float32):
    """A case with a bias and class weights that every dtype holds exactly."""
    case = cases.make_case(37, HIDDEN, 131, dtype=dtype, device=device, std=3.0, bias=True)
    steps = torch.randint(0, 9, (131,), generator=cases.generator(1))
    return case.with_options(weight=(steps / 4).to(device, dtype))


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_give_the_same_bits(device, save, dtype):
    case = make(device, dtype)
    views = case.map(spread)
    assert not views.linear_weight.is_contiguous()
    made = [cases.outcome(flce.linear_cross_entropy, one, save=save) for one in (case, views)]
    assert cases.same_bits(*made)


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_same_chunks_give_the_same_bits(device, save):
    case = cases.make_case(50, HIDDEN, 96, dtype=torch.float32, device=device, bias=True)
    row = 96 * 4
    results = [
        cases.outcome(flce.linear_cross_entropy, case, save=save, max_memory=budget)
        for budget in (16 * row, 16 * row + row // 2)
    ]
    assert cases.same_bits(*results)


BYTES = {"1024": 1024, "64KiB": 64 << 10, "512MiB": 512 << 20, "2GiB": 2 << 30}
BYTES |= {"64KB": 64_000, "1GB": 1_000_000_000, "1.5 MiB": 3 << 19}


@pytest.mark.parametrize("text", BYTES)
def test_budget_texts(text):
    by_text, by_count = (
        flce.plan(100_000, 64, 128, device="cpu", save="stats", max_memory=budget)
        for budget in (text, BYTES[text])
    )
    assert by_text.chunk_rows == by_count.chunk_rows


def test_budget_from_the_environment(device, monkeypatch):
    """FLCE_MAX_MEMORY sets the default; the argument takes precedence."""
    case = cases.make_case(64, 16, 256, dtype=torch.float32, device=device)
    budget = {"max_memory": 16 * 256 * 4, "save": "stats"}

    def count(**knobs):
        return cases.gemms_of(lambda: cases.outcome(flce.linear_cross_entropy, case, **knobs))

    explicit = count(**budget)
    assert count(save="stats") < explicit
    monkeypatch.setenv("FLCE_MAX_MEMORY", str(budget["max_memory"]))
    assert count(save="stats") == explicit
    assert count(save="stats", max_memory="1MiB") < explicit


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_accum_dtype(device, save, dtype):
    """float32 sums over many chunks are as accurate as one GEMM; the gradient keeps W's dtype."""
    case = cases.make_case(160, HIDDEN, 96, dtype=dtype, device=device, std=4.0)
    yardstick = cases.Yardstick(case)
    budget = 8 * 96 * 4
    for accum in (dtype, torch.float32):
        knobs = {"save": save, "max_memory": budget, "accum_dtype": accum}
        results = cases.outcome(flce.linear_cross_entropy, case, **knobs)
        if accum == torch.float32 or dtype == torch.float32:
            yardstick.check(results, f"{knobs}")
        else:
            # Twenty roundings of the running sum to the operands' dtype.
            error = cases.relative_error(results["linear_weight"], yardstick.truth["linear_weight"])
            assert error <= 20 * cases.FLOORS[dtype][0]


def test_inputs_are_left_alone(device):
    case = make(device).with_options(label_smoothing=0.1)
    options = [value for value in case.options.values() if isinstance(value, torch.Tensor)]
    leaves = [case.input, case.linear_weight, case.target, *options]
    versions = [(leaf.clone(), leaf._version) for leaf in leaves]
    for save in cases.SAVES:
        for leaf in (case.input, case.linear_weight):
            leaf.requires_grad_(True)
        loss = flce.linear_cross_entropy(
            case.input, case.linear_weight, case.target, save=save, **case.options
        )
        torch.autograd.grad(loss, [case.input, case.linear_weight])
    for leaf, (values, version) in zip(leaves, versions, strict=True):
        assert torch.equal(leaf, values) and leaf._version == version


CONSTANTS = ("temperature", "weight", "token_weight", "target")


@pytest.mark.parametrize("first", range(len(CONSTANTS)))
def test_the_first_wrong_argument_is_named(first):
    """In the order of CONSTANTS, and before what follows from the values of others."""
    x, w = torch.randn(4, 8), (torch.randn(11, 8).requires_grad_() * 1)
    shapes = {"weight": (11,), "token_weight": (4,), "temperature": (4,), "target": (4, 11)}
    wrong = {name: torch.rand(shapes[name]).requires_grad_() for name in CONSTANTS[first:]}
    target = wrong.pop("target")
    with pytest.raises(ValueError, match=f"^{CONSTANTS[first]}: expected a tensor that does not"):
        flce.linear_cross_entropy(
            x, w, target, accumulate_into="grad", num_items=-1, return_tail_lse=True, **wrong
        )
