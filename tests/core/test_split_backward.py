"""Gradients of inputs and of weights asked for apart, as pipeline schedules do (zero bubble)."""

import pytest
import torch
from packaging.version import Version
from torch import nn

import flce
from harness import cases

TOKENS, HIDDEN, VOCAB = 48, 16, 96


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("save", cases.SAVES)
def test_each_costs_its_own_product(device, save, dtype, bias):
    """The gradients of one backward, and with save="logits" one product for each."""
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device, bias=bias)
    names = cases.GRADIENTS[: 2 + bias]
    whole = cases.outcome(flce.linear_cross_entropy, case, wants=names, save=save)
    hidden = case.input.clone().requires_grad_()
    x = hidden * 1.0  # not a leaf, as the hidden states of a stage
    weight = case.linear_weight.clone().requires_grad_()
    leaves = [weight]
    if bias:
        case.options["linear_bias"] = case.options["linear_bias"].clone().requires_grad_()
        leaves.append(case.options["linear_bias"])
    loss = flce.linear_cross_entropy(x, weight, case.target, save=save, **case.options)
    found = []

    def ask(inputs, keeps):
        found.extend(torch.autograd.grad(loss, inputs, retain_graph=keeps))

    counts = cases.gemms_of(lambda: ask([x], True)), cases.gemms_of(lambda: ask(leaves, False))
    products = {"logits": 1, "stats": 2, "grads": 0}[save]
    if dtype in (torch.float64, torch.float32):  # others may add dW by blocks
        assert counts == (products, products)
    for name, gradient in zip(names, found, strict=True):
        assert cases.relative_error(gradient, whole[name].double()) <= cases.FLOORS[dtype][0], name


class Stage(nn.Module):
    """The last stage of a pipeline: hidden states to the loss."""

    def __init__(self, save, device):
        super().__init__()
        options = {"dtype": torch.float64, "device": device}
        self.body = nn.Linear(HIDDEN, HIDDEN, **options)
        self.head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, save=save, **options)

    def forward(self, x, labels):
        return self.head(torch.tanh(self.body(x)), labels)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="its stages read an attribute that autograd Functions do not have",
)
@pytest.mark.parametrize("save", cases.SAVES)
def test_stages_of_torch(device, save):
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    torch.manual_seed(0)
    stage, whole = Stage(save, device), Stage(save, device)
    whole.load_state_dict(stage.state_dict())
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, device=device)
    labels = torch.arange(TOKENS, device=device) % VOCAB
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = stage(mine, labels)
    made = []

    def input_part():
        made.append(backward.stage_backward_input([loss], None, [mine], stage.parameters()))

    def weight_part():
        backward.stage_backward_weight(stage.parameters(), made[0][1])

    counts = cases.gemms_of(input_part), cases.gemms_of(weight_part)
    assert counts == {"logits": (1, 1), "stats": (2, 2), "grads": (0, 0)}[save]
    whole(other, labels).backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
    for one, two in zip(stage.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)
