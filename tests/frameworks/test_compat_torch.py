"""flce.integrations.torch, and the calls of flce.integrations under torch.compile."""

import inspect
import types

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.functional import with_torch_options
from flce.integrations import cce, liger
from flce.integrations import torch as of_torch
from harness import cases
from harness.operands import H, N, V, agree, indices, leaf, make

HAS_TORCHS = hasattr(F, "linear_cross_entropy")
needs_torchs = pytest.mark.skipif(not HAS_TORCHS, reason="torch has no linear_cross_entropy")


def eager(x, w, target, *, linear_bias=None, ignore_index=None, options=None, **kwargs):
    ignore_index = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(F.linear(x, w, linear_bias), target, ignore_index=ignore_index, **kwargs)


def torchs(*args, **kwargs):
    return F.linear_cross_entropy(*args, **kwargs) if HAS_TORCHS else eager(*args, **kwargs)


@cases.pairwise(
    kind=["indices", "probabilities"],
    reduction=["mean", "sum", "none"],
    weighted=[False, True],
    smoothing=[0.0, 0.1],
)
def test_torchs_function(device, kind, reduction, weighted, smoothing):
    x, w, b, target = make(kind, device)
    weight = torch.rand(V, dtype=torch.float64, device=device) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    for bias in (None, b):
        leaves = (x, w) if bias is None else (x, w, b)
        ours = of_torch.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
        theirs = torchs(x, w, target, linear_bias=bias, **options)
        agree(ours, theirs, leaves)


def compiled_calls(x, w, y):
    """A call of each of these modules, as functions of x and w."""
    rows = y.flatten()
    weight = torch.rand(V, dtype=x.dtype, device=x.device)
    return {
        "torch": lambda x, w: of_torch.linear_cross_entropy(x.flatten(0, 1), w, rows),
        "cce": lambda x, w: cce.linear_cross_entropy(x, w, y, shift=1, return_lse=True)[0],
        "liger": lambda x, w: liger.LigerFusedLinearCrossEntropyLoss(
            ce_weight=weight, lse_square_scale=0.1, use_token_scaling=True
        )(w, x.flatten(0, 1), rows),
    }


@pytest.mark.parametrize("name", ["torch", "cce", "liger"])
def test_compile_fullgraph(device, name):
    x, w, _, y = make("indices", device, batch=(2, 5))
    function = compiled_calls(x, w, y)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    agree(compiled(x, w), function(x, w), (x, w))


def fields(acc_dtype=None, acc_policy="auto", batch_chunk_size=None):
    return types.SimpleNamespace(
        acc_dtype=acc_dtype, acc_policy=acc_policy, batch_chunk_size=batch_chunk_size
    )


def test_what_torchs_options_become():
    weight = torch.empty(10, 4, dtype=torch.bfloat16)

    def made(options, weight=weight, **given):
        found = with_torch_options(weight, {"options": options, **given})
        return {name: value for name, value in found.items() if value is not None}

    assert made(fields()) == {}
    both = {"accum_dtype": torch.float32, "max_memory": 8 * 64}  # rows are multiples of 64 bytes
    assert made(fields(torch.float32, "accurate", 8)) == both
    assert made(fields(torch.bfloat16, "accurate", 3), **both) == both
    own = {"accum_dtype": torch.bfloat16}  # also over many chunks, where flce's default is wider
    assert made(fields(torch.float32, "compact")) == own
    with torch.autocast("cpu", torch.float16):
        assert made(fields(None, "compact")) == {"accum_dtype": torch.float16}
        assert made(fields(None, "compact"), weight.double()) == {"accum_dtype": torch.float64}
    with pytest.raises(TypeError, match="^linear_weight: "):
        made(fields(None, "compact"), weight.int())
    assert made(fields(batch_chunk_size=3), weight.double()) == {"max_memory": 3 * 128}
    with pytest.raises(TypeError, match="^options: expected"):
        made({"batch_chunk_size": 3})
    for wrong in (0, True, 2.0):
        with pytest.raises((TypeError, ValueError), match="^options.batch_chunk_size: expected an"):
            made(fields(batch_chunk_size=wrong))


@needs_torchs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_options(device, reduction):
    x, w, b, target = make("indices", device)
    for options in (
        torch.nn.LinearCrossEntropyOptions(),
        torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=4),
        torch.nn.LinearCrossEntropyOptions(acc_policy="accurate", acc_dtype=torch.float64),
    ):
        call = {"linear_bias": b, "reduction": reduction, "options": options}
        theirs = torchs(x, w, target, **call)
        ours = of_torch.linear_cross_entropy(x, w, target, **call)
        agree(ours, theirs, (x, w, b))
        theirs = torchs(x, w, target, **call)
        agree(flce.linear_cross_entropy(x, w, target, **call), theirs, (x, w, b))


@needs_torchs
def test_torchs_signatures():
    def shape_of(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    ours, theirs = of_torch.linear_cross_entropy, F.linear_cross_entropy
    assert shape_of(ours) == shape_of(theirs)
    theirs = torch.nn.LinearCrossEntropyLoss
    assert shape_of(of_torch.LinearCrossEntropyLoss) == shape_of(theirs)


@needs_torchs
def test_torchs_module(device):
    weight = torch.rand(V, device=device, dtype=torch.float64)
    call = {"bias": True, "weight": weight, "label_smoothing": 0.1}
    factory = {"device": device, "dtype": torch.float64}
    theirs = torch.nn.LinearCrossEntropyLoss(H, V, **call, **factory)
    ours = of_torch.LinearCrossEntropyLoss(H, V, **call, **factory)
    ours.load_state_dict(theirs.state_dict())
    x, target = leaf(N, H, device=device), indices(N, device=device)
    one, two = ours(x, target), theirs(x, target)
    assert abs(one - two) <= 1e-12 * two
    one.backward()
    two.backward()
    for mine, truth in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, truth.grad, rtol=1e-11)
    assert "out_features" in repr(ours)


def test_torchs_refusals():
    x, w, _, target = make("probabilities", "cpu")
    with pytest.raises(ValueError, match="^ignore_index: expected None"):
        of_torch.linear_cross_entropy(x, w, target, ignore_index=-100)
    with pytest.raises(ValueError, match="^weight: expected"):
        of_torch.LinearCrossEntropyLoss(H, V, weight=torch.ones(V + 1))
    with pytest.raises(ValueError, match="^label_smoothing: expected"):
        of_torch.LinearCrossEntropyLoss(H, V, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"^out_features: expected \(\)"):
        of_torch.LinearCrossEntropyLoss(H, V, out_features=(2,))
    with pytest.raises(ValueError, match=r"^linear_weight: expected shape \(V, "):
        of_torch.linear_cross_entropy(x, w.unsqueeze(1), target.unsqueeze(2))
