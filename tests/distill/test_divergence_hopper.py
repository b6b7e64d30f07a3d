"""Hopper's kernels of flce.linear_divergence: the fused logits GEMMs of both heads, and packed
logits (csrc/cuda/rows/packed_rows.cuh, far_rows.cuh)."""

import math

import pytest
import torch

import flce
from harness import cases
from harness.divergences import KINDS, definition, outcome


@pytest.mark.parametrize("kernel", ["gemm", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_hopper(cuda, monkeypatch, kind, kernel):
    """The fused logits GEMM for both heads, several of its tiles, and a vocabulary that is none."""
    monkeypatch.setenv("FLCE_KERNEL", kernel)
    for dtype in (torch.bfloat16, torch.float16):
        case = cases.make_case(600, 256, 5003, dtype=dtype, device=cuda, bias=True)
        case = cases.ignore_some(case, every=5)
        teacher = cases.make_case(600, 512, 5003, dtype=dtype, device=cuda, seed=1, std=2.0)
        rows = cases.per_row(cuda, 600).float()
        for how in ({}, {"softcap": 5.0, "temperature": rows}, {"hard_weight": 0.3}):
            named = {"input": case.input, "linear_weight": case.linear_weight}
            named["linear_bias"] = case.options["linear_bias"]
            rest = {"teacher_input": teacher.input, "teacher_weight": teacher.linear_weight}
            wide = [{n: t.double() for n, t in one.items()} for one in (named, rest)]
            how = {"divergence": kind, "target": case.target, "teacher_softcap": 8.0, **how}
            truth = outcome(definition, wide[0], {**wide[1], **how})
            made = outcome(flce.linear_divergence, named, {**rest, **how, "max_memory": "12MB"})
            for name, value in made.items():
                error = cases.relative_error(value, truth[name])
                # Gradients of 1e-6 are off by 1e-2 as soon as they are float16.
                floor = cases.relative_error(truth[name].to(value.dtype), truth[name])
                bound = max(4.5e-3 if dtype == torch.bfloat16 else 1e-3, 1.5 * floor)
                assert error <= bound, (name, how, error)


def distant(case, device, how):
    """A teacher of the student's x, and options. near: the teacher has 64 more columns, whose
    part of the logits is small; rare: so, and the targets, class 0, are improbable and differ by
    more; spread, flat: logits of standard deviation 5 to 16, and 1e-3; unlikely: the student rules
    the targets out, so that the fused GEMM repeats their rows; hard: with the targets' loss; long:
    rows of several tiles."""
    rows, vocab = len(case.input), len(case.linear_weight)
    draw = cases.generator(5)
    bias, teacher_bias = torch.zeros(2, vocab)
    if how == "unlikely":
        bias[::10] = 100.0
        bias[case.target[case.target >= 0].cpu()] = -80.0
    if how == "rare":
        bias[0], teacher_bias[0] = -30.0, -33.0
    more = torch.randn(rows, 64, generator=draw).to(case.input)
    near = torch.randn(vocab, 64, generator=draw) / 64**0.5
    step = {"near": 2.0**-10, "nearer": 2.0**-14, "rare": 2.0**-7}.get(how, 1.0)
    scale = {"spread": 8.0, "flat": 1e-3}.get(how, 1.0)
    options = {
        "teacher_input": torch.cat((case.input, more), dim=-1),
        "teacher_weight": torch.cat((case.linear_weight, (near * step).to(case.input)), dim=-1),
        "teacher_bias": teacher_bias.to(device),
        "target": None if how == "rare" else case.target,
    }
    if how == "hard":
        return options | {"hard_weight": 0.3}, bias.to(device)
    for name in ("temperature", "teacher_temperature"):
        options[name] = (0.5 + torch.rand(rows, generator=draw)).to(device) / scale
    if step < 1.0:
        options["teacher_temperature"] = options["temperature"]
    return options, bias.to(device)


FAR = ["near", "nearer", "rare", "spread", "flat", "unlikely", "hard", "long"]


@pytest.mark.parametrize("how", FAR)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_logits_near_and_far(cuda, monkeypatch, dtype, kind, how):
    """32 bits for both logits of a class: errors of the gradient relative to the gradient, which
    is small where student and teacher are near, against those of all float32 logits. 1e-3 is that
    of a class's 32 bits, an error of its own."""
    sizes = (200, 256, 50257) if how == "long" else (600, 256, 5003)  # 7 tiles of a row, or 1
    case = cases.make_case(*sizes, dtype=dtype, device=cuda)
    if how != "rare":  # where no target says which rows are ignored
        case = cases.ignore_some(case, every=5)
    options, bias = distant(case, cuda, how)
    named = {"input": case.input, "linear_weight": case.linear_weight, "linear_bias": bias}
    options |= {"divergence": kind, "beta": 0.3, "max_memory": "32MB" if how == "long" else "12MB"}
    tensors = {n: t.double() for n, t in options.items() if n.startswith("teacher_")}
    truth = outcome(definition, {n: t.double() for n, t in named.items()}, {**options, **tensors})
    errors = {}
    for kernel in ("fused", "gemm"):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        made = outcome(flce.linear_divergence, named, options)
        errors[kernel] = {n: cases.relative_error(v, truth[n]) for n, v in made.items()}
    for name, error in errors["fused"].items():
        unpacked = 1.2 * errors["gemm"][name]
        bound = max(5e-5, unpacked) if name == "loss" else math.hypot(1e-3, unpacked)
        assert error <= bound, (name, error, errors)


@pytest.mark.parametrize("own, other", [(-0.5, 1.0), (1.0, -0.5)])
def test_scales_below_zero(cuda, monkeypatch, own, other):
    """The kernels that pack both logits take positive factors alone; others run then."""
    monkeypatch.setenv("FLCE_KERNEL", "fused")
    case = cases.make_case(300, 256, 1003, dtype=torch.bfloat16, device=cuda)
    named = {"input": case.input, "linear_weight": case.linear_weight}
    options = {"teacher_input": case.input, "logit_scale": own, "teacher_logit_scale": other}
    options["teacher_weight"] = case.linear_weight.flip(0).contiguous()
    wide = [{n: t.double() for n, t in one.items()} for one in (named, {
        n: t for n, t in options.items() if isinstance(t, torch.Tensor)})]  # fmt: skip
    truth = outcome(definition, wide[0], {**options, **wide[1]})
    for name, value in outcome(flce.linear_divergence, named, options).items():
        assert cases.relative_error(value, truth[name]) <= 4.5e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_packed_masked_classes(cuda, monkeypatch, kind):
    """Classes that neither side has add nothing. One that the student lacks makes the forward KL
    infinite, one that the teacher lacks the reverse KL and its gradient."""
    monkeypatch.setenv("FLCE_KERNEL", "fused")
    case = cases.make_case(300, 256, 1003, dtype=torch.bfloat16, device=cuda)
    teacher = torch.randn(1003, 256, generator=cases.generator(3)).to(case.linear_weight) / 16
    named = {"input": case.input, "linear_weight": case.linear_weight}
    options = {"teacher_input": case.input, "divergence": kind}
    whole = {**options, "teacher_weight": teacher}
    cut = {**options, "teacher_weight": teacher[:900].contiguous()}
    mask = torch.zeros(1003, device=cuda).index_fill_(
        0, torch.arange(900, 1003).to(cuda), -math.inf
    )
    short = {"input": case.input, "linear_weight": case.linear_weight[:900].contiguous()}
    expected = outcome(flce.linear_divergence, short, cut)
    finite = mask.clamp(min=-1e4)  # of probability 0 all the same
    for own, other in ((mask, mask), (mask, finite), (finite, mask)):
        made = outcome(
            flce.linear_divergence, {**named, "linear_bias": own}, {**whole, "teacher_bias": other}
        )
        for name in expected:
            value = made[name] if name != "linear_weight" else made[name][:900]
            assert cases.relative_error(value, expected[name]) <= 4e-3, name
        if own is other:
            assert not made["linear_weight"][900:].any()
    for own, other in ((mask, None), (None, mask)):
        results = []
        for kernel in ("fused", "gemm"):
            monkeypatch.setenv("FLCE_KERNEL", kernel)
            biases = {} if own is None else {"linear_bias": own}
            results.append(
                outcome(
                    flce.linear_divergence, {**named, **biases}, {**whole, "teacher_bias": other}
                )
            )
        infinite = kind == ("forward_kl" if other is None else "reverse_kl")
        for result in results:
            assert result["loss"].isinf() if infinite else result["loss"].isfinite()
        if kind == "reverse_kl" and infinite:
            continue  # and so is its gradient
        for name in named:
            assert cases.relative_error(results[0][name], results[1][name]) <= 4e-3, name


@pytest.mark.parametrize("beta", [1e-50, 1e-9, 1.0 - 1e-9])
def test_packed_beta_near_its_limits(cuda, monkeypatch, beta):
    """beta or 1 - beta is 0 in float32."""
    monkeypatch.setenv("FLCE_KERNEL", "fused")
    case = cases.make_case(300, 256, 1003, dtype=torch.bfloat16, device=cuda)
    named = {"input": case.input, "linear_weight": case.linear_weight}
    options = {"teacher_input": case.input, "teacher_weight": case.linear_weight.flip(0)}
    made = outcome(flce.linear_divergence, named, {**options, "divergence": "jsd", "beta": beta})
    for name, value in made.items():
        assert value.isfinite().all(), name
