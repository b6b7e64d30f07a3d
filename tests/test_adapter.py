"""adapter_input and adapter_weight: the low-rank term of a head, with a frozen and with a trained
weight."""

import cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce import reference

N, H, V = 33, 20, 70  # H is no multiple of 8: the joined operands are padded
KINDS = {
    "plain": {},
    "none": {"reduction": "none"},
    "softcap and smoothing": {"softcap": 3.0, "label_smoothing": 0.1},
    "scale and z-loss": {"logit_scale": 0.5, "z_loss": 1e-2},
    "padding": {"valid_vocab": V - 5},
    "wide sums": {"accum_dtype": torch.float32},
}


def make_operands(rank, dtype, device, seed=0):
    random = cases.generator(seed)
    shapes = {"x": (3, N // 3, H), "u": (3, N // 3, rank), "w": (V, H), "b": (V, rank)}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    made["bias"] = torch.randn(V, generator=random)
    target = torch.randint(V - 5, (3, N // 3), generator=random)
    target[0, ::4] = -100
    made["x"][0, ::4] = made["u"][0, ::4] = float("nan")  # ignored rows
    return {name: value.to(device, dtype) for name, value in made.items()}, target.to(device)


def run(function, operands, target, frozen, dtype=None, **options):
    """The loss and the gradients by name, w's None where it is frozen."""
    leaves = {name: value.detach().to(dtype or value.dtype) for name, value in operands.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in ("w",) or not frozen)
    loss = function(
        leaves["x"],
        leaves["w"],
        target,
        adapter_input=leaves["u"],
        adapter_weight=leaves["b"],
        linear_bias=leaves["bias"],
        **options,
    )
    loss.backward(
        torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).view(loss.shape).to(loss)
    )
    return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def check(got, eager, truth, dtype):
    for name, true in truth.items():
        if true is None:
            assert got[name] is None, name
            continue
        assert got[name].dtype == (eager[name].dtype), name
        error = cases.relative_error(got[name], true)
        limit = cases.FLOORS[dtype][0] + 2 * cases.relative_error(eager[name], true)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


@cases.pairwise(
    kind=list(KINDS),
    save=[*cases.SAVES, "auto"],
    dtype=cases.DTYPES,
    frozen=[True, False],
    rank=[1, 8, 12],
    max_memory=[None, 4096],
)
def test_against_the_definition(device, kind, save, dtype, frozen, rank, max_memory):
    options = dict(KINDS[kind])
    if save == "grads" and options.get("reduction") == "none":
        pytest.skip('save="grads" holds the gradients of one scalar')
    if dtype == torch.float64:
        options.pop("accum_dtype", None)
    operands, target = make_operands(rank, dtype, device)
    how = {"save": save, "max_memory": max_memory}
    definition = reference.linear_cross_entropy
    truth = run(definition, operands, target, frozen, torch.float64, **options)
    eager = run(definition, operands, target, frozen, **options)
    got = run(flce.linear_cross_entropy, operands, target, frozen, **options, **how)
    check(got, eager, truth, dtype)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sampled(device, frozen, smoothing):
    """One draw for both: the reference draws from the same logits."""
    operands, target = make_operands(8, torch.float32, device)
    options = {"gradient": "sampled", "gradient_eps": 2**-4, "gradient_seed": 5}
    options["label_smoothing"] = smoothing
    truth = run(reference.linear_cross_entropy, operands, target, frozen, **options)
    got = run(flce.linear_cross_entropy, operands, target, frozen, **options)
    for name, true in truth.items():
        if true is not None:
            assert cases.relative_error(got[name], true) < 1e-5, name
    assert (got["w"] is None) == frozen


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
    operands, target = make_operands(4, torch.float32, device)
    with _Gradients() as seen:
        run(flce.linear_cross_entropy, operands, target, True, save=save)
    assert [shape for shape in seen.shapes if shape] == [(V, 4)]


@pytest.mark.parametrize("frozen", [True, False])
def test_autocast(device, frozen):
    """A bfloat16 base with float32 adapters."""
    operands, target = make_operands(8, torch.float32, device)
    operands["w"] = operands["w"].bfloat16()
    truth = run(reference.linear_cross_entropy, operands, target, frozen, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        got = run(flce.linear_cross_entropy, operands, target, frozen)
    for name, true in truth.items():
        if true is None:
            continue
        assert got[name].dtype == (torch.float32 if name == "loss" else operands[name].dtype)
        assert cases.relative_error(got[name], true) < 2e-2, name
    assert (got["w"] is None) == frozen


@pytest.mark.parametrize("frozen", [True, False])
def test_compiled(device, frozen):
    torch.compiler.reset()
    operands, target = make_operands(8, torch.float32, device)
    compiled = torch.compile(flce.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected = run(flce.linear_cross_entropy, operands, target, frozen)
    got = run(compiled, operands, target, frozen)
    for name, value in expected.items():
        assert value is None or torch.equal(got[name], value), name


def test_logprobs_and_outputs(device):
    operands, target = make_operands(8, torch.float64, device)
    x, u, w, b = (operands[name] for name in "xuwb")
    adapter = {"adapter_input": u, "adapter_weight": b}
    logprobs, entropy = flce.linear_logprobs(x, w, target, **adapter)
    made = reference.linear_cross_entropy(
        x, w, target, reduction="none", return_entropy=True, **adapter
    )
    torch.testing.assert_close(-logprobs, made.loss)
    torch.testing.assert_close(entropy, made.entropy)


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
