"""torch's own sample inputs of nn.functional.linear_cross_entropy, run through flce.

Each sample runs with both, with the same arguments, including options= and ignore_index=None. Two
documented differences occur: a mean over no valid target is 0 here and NaN in torch, and weights of
more than two dimensions are refused. (The third, a float32 loss for 16-bit operands, does not occur
in the dtypes compared.)
"""

import warnings

import pytest
import torch
import torch.nn.functional as F

import flce

NAME = "nn.functional.linear_cross_entropy"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("this torch has no linear_cross_entropy", allow_module_level=True)
op_db = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="torch's sample inputs need expecttest (of the dependency group tests)",
).op_db
VARIANTS = {op.variant_test_name or "plain": op for op in op_db if op.name == NAME}


def value_and_gradients(function, sample):
    weight, target = sample.args
    options = dict(sample.kwargs)
    leaves = {"input": sample.input, "linear_weight": weight}
    if "linear_bias" in options:
        leaves["linear_bias"] = options.pop("linear_bias")
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    given = dict(leaves)
    options = {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    operands = (given.pop("input"), given.pop("linear_weight"), target.detach())
    loss = function(*operands, **given, **options)
    upstream = torch.linspace(-0.7, 1.3, loss.numel(), dtype=loss.dtype, device=loss.device)
    grads = torch.autograd.grad(loss, list(leaves.values()), upstream.reshape(loss.shape))
    return {"loss": loss.detach(), **dict(zip(leaves, grads, strict=True))}


def described(sample):
    sizes = [tuple(tensor.shape) for tensor in (sample.input, *sample.args)]
    return f"{sizes} {sample.kwargs}"


def assert_close(ours, theirs, tolerance, what):
    for name, expected in theirs.items():
        value = ours[name]
        assert value.shape == expected.shape and value.dtype == expected.dtype, f"{name} of {what}"
        # Sums of a few dozen terms of size 1 that may cancel.
        error, size = (value - expected).abs().max(), expected.abs().max().clamp(min=1.0)
        assert error <= tolerance * size, f"{name} of {what}: {error:.3e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_samples(device, dtype, variant):
    checked = 0
    for sample in VARIANTS[variant].sample_inputs(device, dtype, requires_grad=True):
        with warnings.catch_warnings():
            # torch warns that it leaves the chunked path; the values are the same.
            warnings.filterwarnings("ignore", message="linear_cross_entropy: ``options`` ignored")
            theirs = value_and_gradients(F.linear_cross_entropy, sample)
        if sample.args[0].dim() > 2:  # K-dimensional, which is refused
            with pytest.raises(ValueError, match="^linear_weight: expected shape"):
                value_and_gradients(flce.integrations.torch.linear_cross_entropy, sample)
            continue
        ours = value_and_gradients(flce.integrations.torch.linear_cross_entropy, sample)
        if sample.kwargs.get("reduction", "mean") == "mean" and theirs["loss"].isnan():
            assert not any(tensor.any() for tensor in ours.values()), described(sample)
        else:
            assert_close(ours, theirs, TOLERANCE[dtype], described(sample))
        checked += 1
    assert checked >= 10


def test_every_variant_is_there():
    """If torch renames its table, this test fails instead of the file testing nothing."""
    assert {"plain", "chunked", "chunked_none"} <= VARIANTS.keys()
