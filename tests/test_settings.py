"""The options of the inner operators travel as one text, which C++ and the fakes read."""

import contextlib
import math

import pytest
import raw
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flce import ops

ONE = torch.ones(1, 1, dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    "number", [5e-324, 1e-320, 2.2250738585072014e-308, 1e-5, 0.1, 1 / 3, 1e16, 1e308]
)
def test_numbers_arrive_to_the_last_bit(number):
    """One logit, 1, so that the loss is z_loss."""
    options = {"dtype": torch.float64, "z_loss": number, "reduction": "sum", "grads": (False,) * 3}
    loss, *_ = torch.ops.flce.forward(*raw.forward(ONE, ONE, ZERO, "nothing", **options))
    assert loss.item() == number
    assert ops.Settings.of_arguments(*raw.settings("nothing", **options)).z_loss == number


@pytest.mark.parametrize("number", [4096, 2**31, 2**63 - 1])
def test_integers_arrive(number):
    arguments = raw.settings("nothing", max_memory=number)
    assert ops.Settings.of_arguments(*arguments).max_memory == number
    torch.ops.flce.forward(ONE.float(), ONE.float(), ZERO, *(None,) * 5, *arguments)


def test_zero_has_one_text():
    first, second = (raw.settings("nothing", z_loss=zero) for zero in (-0.0, 0.0))
    assert first == second
    assert math.copysign(1.0, ops.Settings.of_arguments(*first).z_loss) == 1.0


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("softcap=0.0", "softcap=a", "expected softcap="),
        ("softcap=0.0 ", "", "expected .*softcap="),
        ("softcap=0.0", "softcap", "expected .*softcap="),
        ("grad_bias=0", "grad_bias=2", "expected grad_bias="),
        ("allow_tf32=0", "allow_tf32=0 more", "options: expected .*more"),
        (" dtype=float32", " dtype=int8", "dtype.*int8"),
        ("max_memory=1048576", "max_memory=1e9", "expected max_memory="),
    ],
)
def test_a_wrong_text_is_named(right, wrong, expected, fake):
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    *arguments, text = raw.forward(x, w, torch.arange(3), "grads")
    assert right in text
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode, pytest.raises(ValueError, match=expected):
        torch.ops.flce.forward(*arguments, text.replace(right, wrong))
