"""flce.integrations.nemo against eager losses, through NeMo AutoModel's own calls."""

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness import cases
from harness.operands import H, N, V, agree, indices, leaf
from harness.processes import on_ranks

pytest.importorskip("nemo_automodel.components.loss.linear_ce_base")

from flce.integrations.nemo import FlceLinearCrossEntropy  # noqa: E402  imports nemo_automodel

B = 2


def operands(dtype=torch.float64):
    x, w = (leaf(*size, device="cpu", dtype=dtype) for size in ((B, N, H), (V, H)))
    y = indices(N, device="cpu")
    return x, w, torch.stack([y, y.roll(3)])


def truth(x, w, y, softcap, reduction):
    logits = F.linear(x, w)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    rows = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)
    return rows.view(y.shape) if reduction == "none" else rows


@cases.pairwise(reduction=["sum", "mean", "none"], softcap=[0, 3.0])
def test_loss(reduction, softcap):
    x, w, y = operands()
    loss_fn = FlceLinearCrossEntropy(logit_softcapping=softcap, reduction=reduction)
    agree(loss_fn(x, y, w), truth(x, w, y, softcap, reduction), (x, w))


@pytest.mark.parametrize("tokens", [None, 0, 17, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_sum_with_its_denominator_and_weights(tokens, weighted):
    x, w, y = operands()
    weights = torch.rand(B, N) if weighted else None
    made = FlceLinearCrossEntropy()(x, y, w, num_label_tokens=tokens, loss_weights=weights)
    rows = truth(x, w, y, 0, "none")
    expected = (rows if weights is None else rows * weights).sum()
    if tokens is not None:
        expected = expected / tokens if tokens else expected * 0
    agree(made, expected, (x, w))


def test_recipes_find_and_call_it():
    """By the names that a recipe's YAML gives, and as a recipe calls it with a model."""
    loss = importlib.import_module("nemo_automodel.components.loss.loss")
    utils = importlib.import_module("nemo_automodel.components.loss.utils")
    loss_fn = loss.build_loss_module(FlceLinearCrossEntropy, z_loss=0.5, reduction="sum")
    assert type(loss_fn) is FlceLinearCrossEntropy
    x, w, y = operands()
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(H, V, bias=False, dtype=torch.float64)
    w = model.lm_head.weight
    made = utils.calculate_loss(loss_fn, labels=y, model=model, hidden_states=x, num_label_tokens=5)
    z = (F.linear(x, w).logsumexp(-1).square() * (y != -100)).sum()
    agree(made, (truth(x, w, y, 0, "sum") + 0.5 * z) / 5, (x, w))


def test_a_float32_weight_serves_in_the_dtype_of_hidden_states():
    x, w, y = operands(torch.float32)
    x = x.detach().bfloat16().requires_grad_()
    FlceLinearCrossEntropy()(x, y, w).backward()
    made = x.grad, w.grad
    assert [v.dtype for v in made] == [torch.bfloat16, torch.float32]
    rounded = w.detach().bfloat16().double().requires_grad_()
    exact = torch.autograd.grad(truth(x.double(), rounded, y, 0, "sum"), (x, rounded))
    for a, b in zip(made, exact, strict=True):
        assert (a.double() - b.double()).norm() <= 2**-7 * b.double().norm()


def test_autocast():
    x, w, y = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = FlceLinearCrossEntropy()(x, y, w)
    expected = truth(x, w, y, 0, "sum")
    assert (made - expected).abs() <= 2**-7 * expected
    assert torch.autograd.grad(made, w)[0].dtype == torch.float32


@pytest.mark.parametrize("given", [{"num_label_tokens": 3}, {"loss_weights": torch.ones(B, N)}])
def test_refusals(given):
    x, w, y = operands()
    name = next(iter(given))
    with pytest.raises(ValueError, match=f'{name}: expected None, or reduction="sum", got .*mean'):
        FlceLinearCrossEntropy(reduction="mean")(x, y, w, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'impl'"):
        FlceLinearCrossEntropy(impl="cce")
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        FlceLinearCrossEntropy(shift=1)


@on_ranks(2)
def test_a_weight_split_by_fsdp2():
    """Outside of the head's forward; times the ranks, which FSDP2's mean divides out."""
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    head = torch.nn.Linear(H, V, bias=False, dtype=torch.float64)
    batches = [operands() for _ in range(2)]
    whole = head.weight.detach().clone().requires_grad_()
    expected = sum(truth(x, whole, y, 0, "sum") for x, _, y in batches) / 99
    expected = torch.autograd.grad(expected, (whole, batches[rank][0]))
    fully_shard(head, mesh=mesh)
    x, _, y = batches[rank]
    loss = FlceLinearCrossEntropy()(
        x, y, head.weight, num_label_tokens=99, grad_reduce_group=dist.group.WORLD
    )
    (2 * loss).backward()
    torch.testing.assert_close(head.weight.grad.full_tensor(), expected[0])
    torch.testing.assert_close(x.grad, 2 * expected[1])
