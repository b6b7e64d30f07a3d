"""Masked classes, strides, budgets. test_properties.py has the options in combination."""

import math

import cases
import pytest
import torch

import flce

TOKENS, HIDDEN, VOCAB = 37, 24, 131


def make(device, dtype=torch.float32, *, std=3.0, **options):
    """A case with a bias; `class_weight=True` adds weights that every dtype holds exactly."""
    case = cases.make_case(
        TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device, std=std, targets="sampled", bias=True
    )
    if options.pop("class_weight", False):
        steps = torch.randint(0, 9, (VOCAB,), generator=cases.generator(1))
        case.options["weight"] = (steps / 4).to(device, dtype)
    return case.with_options(**options)


@pytest.mark.parametrize("save", cases.SAVES)
def test_bias_of_minus_infinity_masks_classes(device, save):
    """The usual way to keep padding out of a vocabulary."""
    case = make(device)
    case.options["linear_bias"][-7:] = -math.inf
    case.target.clamp_(max=VOCAB - 8)
    case = case.with_options(return_lse=True, return_entropy=True)
    call = {"upstream": {"loss": None, "lse": None, "entropy": None}}
    results = cases.outcome(flce.linear_cross_entropy, case, save=save, **call)
    assert not results["linear_weight"][-7:].any() and not results["linear_bias"][-7:].any()
    cases.Yardstick(case, cancels=True, **call).check(results)
    case = case.with_options(return_lse=False, return_entropy=False)
    cases.check(flce.linear_cross_entropy, case, save=save)


def strided(tensor):
    """The same values in a strided view: every second element of a larger tensor of NaN."""
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_give_the_same_bits(device, save, dtype):
    case = make(device, dtype, class_weight=True)
    plain = cases.outcome(flce.linear_cross_entropy, case, save=save)
    for name in ("input", "linear_weight", "linear_bias", "weight", "target"):
        leaves = {
            "input": case.input,
            "linear_weight": case.linear_weight,
            "target": case.target,
            **case.options,
        }
        leaves[name] = strided(leaves[name])
        assert not leaves[name].is_contiguous()
        wanted = [leaves[key].requires_grad_() for key in cases.GRADIENTS]
        loss = flce.linear_cross_entropy(**leaves, save=save)
        grads = torch.autograd.grad(loss, wanted)
        results = {"loss": loss.detach(), **dict(zip(cases.GRADIENTS, grads, strict=True))}
        assert cases.same_bits(plain, results), name
        for tensor in wanted:
            tensor.requires_grad_(False)


def test_transposed_and_sliced_views(device):
    """A (S, B, H) activation viewed as (B, S, H), a weight stored transposed, a sliced head."""
    x = torch.randn(5, 3, HIDDEN, device=device, dtype=torch.float64)
    w = torch.randn(HIDDEN + 3, VOCAB + 2, device=device, dtype=torch.float64)
    y = torch.randint(VOCAB, (5, 3), device=device)
    case = (x.transpose(0, 1), w[2:-1, 1:-1].T, y.T)
    expected = flce.reference.linear_cross_entropy(*case)
    assert abs(flce.linear_cross_entropy(*case) - expected) <= 1e-12 * expected


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 127, 128, 129, 1000])
def test_budgets(device, dtype, rows):
    """Chunks of each size class, for each strategy."""
    case = cases.make_case(150, HIDDEN, 96, dtype=dtype, device=device, std=4.0, bias=True)
    yardstick = cases.Yardstick(case)
    # With one chunk per token 16-bit sums lose the accuracy that accum_dtype provides.
    accum_dtype = torch.float32 if rows == 1 and dtype.itemsize == 2 else None
    for save in cases.SAVES:
        knobs = {"save": save, "max_memory": rows * 96 * 8, "accum_dtype": accum_dtype}
        results = cases.outcome(flce.linear_cross_entropy, case, **knobs)
        yardstick.check(results, f"{rows} rows, save={save}")


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_same_chunks_give_the_same_bits(device, save):
    """16 rows fit both budgets: the result may only depend on the chunk size."""
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


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_dtype(device, save, dtype):
    """If the logits may be rounded as in an eager head, the result has eager's accuracy."""
    case = cases.make_case(64, 64, 1000, dtype=dtype, device=device, std=8.0, targets="sampled")
    cases.check(flce.linear_cross_entropy, case, save=save, logits_dtype=dtype)


def test_inputs_are_left_alone(device):
    """No argument is modified, with any strategy."""
    case = make(device, class_weight=True, label_smoothing=0.1)
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
