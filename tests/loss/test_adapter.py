"""adapter_input and adapter_weight: the low-rank term of a head, with a frozen and with a trained
weight."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from harness import cases

N, H, V = 33, 20, 70  # H is no multiple of 8: the joined operands are padded


def make(rank, dtype, device):
    case = cases.make_case(N, H, V, dtype=dtype, device=device, bias=True)
    case.target %= V - 5
    case = cases.ignore_some(case, every=4)
    for name, rows in (("adapter_input", N), ("adapter_weight", V)):
        adapter = torch.randn(rows, rank, generator=cases.generator(rows))
        case.options[name] = adapter.to(device, dtype)
    case.options["adapter_input"][::4] = float("nan")
    case.input, case.target = case.input.view(3, N // 3, H), case.target.view(3, N // 3)
    case.options["adapter_input"] = case.options["adapter_input"].view(3, N // 3, rank)
    return case


def wants_of(frozen):
    return [name for name in cases.LEAVES if not frozen or name != "linear_weight"]


class _Gradients(TorchDispatchMode):
    """The shapes of the weight's gradients that flce's operators return."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.flce.forward.default:
            self.shapes.append(None if made[6] is None else tuple(made[6].shape))
        if function is torch.ops.flce.backward.default:
            self.shapes.append(tuple(made[1].shape))
        return made


@pytest.mark.parametrize("save", ["grads", "logits", "stats"])
def test_a_frozen_weight_has_no_gradient(device, save):
    case = make(4, torch.float32, device)
    with _Gradients() as seen:
        cases.outcome(flce.linear_cross_entropy, case, wants=wants_of(True), save=save)
    assert [shape for shape in seen.shapes if shape] == [(V, 4)]


@pytest.mark.parametrize("frozen", [True, False])
def test_compiled(device, frozen):
    case = make(8, torch.float32, device)
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected, got = (
        cases.outcome(function, case, wants=wants_of(frozen))
        for function in (flce.linear_cross_entropy, compiled)
    )
    assert cases.same_bits(expected, got)


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize(
    "named, dtypes",  # of input, linear_weight, adapter_input, adapter_weight
    [
        ("adapter_input", (torch.float32, torch.float32, torch.float64, torch.float32)),
        ("adapter_weight", (torch.float16, torch.float64, torch.float16, torch.float16)),
        ("linear_weight", (torch.float16, torch.float64, torch.float16, torch.float64)),
        (None, (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16)),
        (None, (torch.float64,) * 4),
    ],
)
def test_dtypes(named, dtypes, is_cast):
    """named: the argument that is refused, with and without autocast; None: autocast serves."""
    x, w, u, b = (torch.ones(5, 8, dtype=dtype) for dtype in dtypes)
    given = {"target": torch.arange(5), "adapter_input": u, "adapter_weight": b}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        if named:
            with pytest.raises(TypeError, match=f"^{named}: expected the dtype of"):
                flce.linear_cross_entropy(x, w, **given)
        elif is_cast:
            assert flce.linear_cross_entropy(x, w, **given).isfinite()


@pytest.mark.parametrize("attribute", ["grad", "main_grad"])
def test_accumulate_into_of_a_frozen_weight(device, attribute):
    """It has no gradient to add: the adapter's is returned to autograd."""
    w, u = torch.randn(32, 16, device=device), torch.randn(8, 4, device=device)
    low_rank = torch.randn(32, 4, device=device, requires_grad=True)
    x, target = torch.randn(8, 16, device=device), torch.arange(8, device=device)
    call = {"adapter_input": u, "adapter_weight": low_rank}
    loss = flce.linear_cross_entropy(x, w, target, **call, accumulate_into=attribute)
    (expected,) = torch.autograd.grad(flce.linear_cross_entropy(x, w, target, **call), low_rank)
    loss.backward()
    assert torch.equal(low_rank.grad, expected)
