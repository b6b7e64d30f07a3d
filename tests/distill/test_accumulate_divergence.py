"""accumulate_into of flce.linear_divergence."""

import pytest
import torch
from torch import nn

import flce
from harness import cases

TOKENS, HIDDEN, VOCAB, CLASSES = 60, 16, 72, 6
HOW = {
    "forward": {},
    "later": {"save": "stats"},
    "rows": {"reduction": "none", "divergence": "jsd"},
    "padding": {"valid_vocab": VOCAB - 8, "divergence": "reverse_kl"},
    "classes": {"teacher_logits": CLASSES},
    "classes, later": {"teacher_logits": CLASSES, "save": "stats"},
}


def make(device, dtype, how):
    """(x, weight, arguments) of a call in several chunks."""
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, VOCAB, generator=generator).to(device, dtype)
    given = {"teacher_logits": logits, **HOW[how], "max_memory": 17 * VOCAB * 8}
    if given["teacher_logits"] is not logits:
        top = logits.log_softmax(-1).topk(CLASSES)
        given["teacher_logits"] = top.indices, top.values
    return case.input.clone().requires_grad_(), nn.Parameter(case.linear_weight), given


def backward(x, weight, given, attribute, times=1):
    x.grad = None
    loss = flce.linear_divergence(x, weight, accumulate_into=attribute, **given)
    for time in range(times):
        loss.backward(torch.full_like(loss, 0.7), retain_graph=time + 1 < times)
    return x.grad


def hold(weight, attribute):
    """Sets the attribute to random values, in float32 or wider for main_grad; a float64 copy."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    dtype = weight.dtype if attribute == "grad" else wide
    setattr(weight, attribute, torch.randn(weight.shape, device=weight.device).to(dtype) / 64)
    return getattr(weight, attribute).double().clone()


@cases.pairwise(attribute=["grad", "main_grad"], how=list(HOW), dtype=cases.DTYPES)
def test_adds_the_plain_gradient(device, attribute, how, dtype):
    x, weight, given = make(device, dtype, how)
    dx = backward(x, weight, given, None)
    dw, weight.grad = weight.grad.double().clone(), None
    # Of one sum of two gradients; the GEMMs that add to the attribute sum in another order.
    roundings = 16 if "classes" in how else 2
    before = hold(weight, attribute)
    added_to = getattr(weight, attribute)
    for times in (1, 2):
        assert torch.equal(backward(x, weight, given, attribute), dx)
        expected = before + times * dw
        size = before.abs() + times * (dw.abs() + dw.abs().max())
        allowed = roundings * cases.LOGIT_ROUNDING[dtype] * size
        assert ((added_to.double() - expected).abs() <= allowed).all()
    assert getattr(weight, attribute) is added_to and (attribute == "grad" or weight.grad is None)


@pytest.mark.parametrize("how", HOW)
def test_each_backward_adds_once(device, how):
    """Also of a graph that is kept; .grad is made where there is none."""
    x, weight, given = make(device, torch.float64, how)
    backward(x, weight, given, None)
    dw, weight.grad = weight.grad, None
    backward(x, weight, given, "grad", times=3)
    assert (weight.grad - 3 * dw).abs().max() <= 1e-12


def test_plan(device):
    """Gradients of a whole teacher are tensors in any case; of K classes the GEMMs add."""
    size = {"device": device, "dtype": torch.float32, "max_memory": "1MiB"}
    plans = [
        flce.plan(256, 64, 4096, **size, teacher_logits=logits, accumulate_into="grad")
        for logits in (torch.float32, 8)
    ]
    assert ["grad_weight" in plan.buffers for plan in plans] == [True, False]
