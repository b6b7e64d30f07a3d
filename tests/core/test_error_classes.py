"""The class of an error, from C or from Python, and the decimal point of numbers in its text."""

import functools
import locale
import math
import re
import shutil
import subprocess

import pytest
import torch

import flce
from harness import cases
from harness.refused_call import HIDDEN, TOKENS, VOCAB, arguments, leaf, tensors


def test_errors_leave_the_engine_usable(device):
    with pytest.raises(ValueError):
        flce.linear_cross_entropy(**arguments(device), max_memory=1)
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device=device)
    cases.check(flce.linear_cross_entropy, case)


@pytest.mark.parametrize("how", ["eager", "operator", "compiled"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_c_refuses_has_its_class(how, mode):
    """However torch translates an exception of C++, which differs between its versions."""
    call = torch.ops.flce.linear_cross_entropy if how == "operator" else flce.linear_cross_entropy

    def loss(x, w, target):
        return call(x, w, target, save="logits", max_memory=2**60)

    if how == "compiled":
        loss = torch.compile(loss, backend="aot_eager", dynamic=True)
    with mode():
        out_of_range = torch.ones(3, 1), torch.ones(4, 1), torch.tensor([0, 4, 1])
        with pytest.raises(IndexError, match=r"^target\[1\] is 4: expected 0 <= target < 4 or"):
            loss(*(leaf(t) if t.is_floating_point() else t for t in out_of_range))
        if mode is torch.enable_grad:  # it keeps 2^50 bytes of logits
            x, target = torch.ones(2**24, 1), torch.zeros(2**24, dtype=torch.int64)
            with pytest.raises(torch.OutOfMemoryError, match='^[0-9]+ bytes for buffer "saved"; '):
                loss(leaf(x), x, target)


def test_dynamo_shows_what_python_refuses():
    """With fullgraph=True its own error quotes the exception that ends the graph."""
    bounded = functools.partial(flce.linear_cross_entropy, valid_bound="count")
    compiled = torch.compile(lambda *given: bounded(*given), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="valid_bound: expected an int or None under torch.comp"):
        compiled(*arguments("cpu").values())


class Marked(torch.Tensor):
    """Has no rule of its own."""


def test_a_subclass_is_not_blamed_for_another_argument():
    x, w = torch.ones(3, 2).as_subclass(Marked), torch.ones(4, 2).double()
    with pytest.raises(TypeError, match="^linear_weight: expected the dtype of input"):
        flce.linear_cross_entropy(x, w, torch.zeros(3).long())


def test_subclasses_are_taken(device):
    call = {**arguments(device), "linear_bias": torch.ones(VOCAB, device=device)}
    expected = flce.linear_cross_entropy(**call)
    for name, plain in call.items():
        marked = plain.detach().as_subclass(Marked)
        assert flce.linear_cross_entropy(**{**call, name: marked}) == expected


@pytest.mark.parametrize("argument", ["logits", "target", "weight", "token_weight"])
def test_types_are_checked_before_the_call(argument):
    given = {name: tensors("cpu")[name] for name in ("logits", "target", "weight", "token_weight")}
    with pytest.raises(TypeError, match=f"^{argument}: expected a tensor, got list$"):
        flce.cross_entropy(**{**given, argument: [1.0]})


class Failing(torch.Tensor):
    """Dense, but every operation with it fails."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AttributeError("of the class")


def test_an_error_of_an_operation_is_not_taken_for_one_of_the_caller():
    given = {name: tensors("cpu")[name].detach() for name in ("logits", "target")}
    with pytest.raises(AttributeError, match="^of the class$"):
        flce.cross_entropy(given["logits"].as_subclass(Failing), given["target"])
    with pytest.raises(AttributeError, match="^of the class$"):
        flce.cross_entropy(given["logits"], given["target"].as_subclass(Failing))


@pytest.fixture
def decimal_comma(tmp_path, monkeypatch):
    """C code of this process writes 1,5."""
    localedef = shutil.which("localedef") or pytest.skip("no localedef")
    name = tmp_path / "de_DE.UTF-8"
    command = [localedef, "-i", "de_DE", "-f", "UTF-8", str(name)]
    if subprocess.run(command, capture_output=True).returncode or not name.exists():
        pytest.skip("no source of a locale")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, name.name)
    yield
    locale.setlocale(locale.LC_NUMERIC, before)


def test_numbers_have_a_point_in_every_locale(decimal_comma):
    assert locale.localeconv()["decimal_point"] == ","
    valid = tensors("cpu")
    operands = [valid[name] for name in ("input", "linear_weight", "target")]
    for value in (1.5, -0.1, 12345.678, 1.25e20, 1e17, -2.0, -1e-7, math.inf):
        expected = f"label_smoothing: .* got {re.escape(repr(value))}$"
        with pytest.raises(ValueError, match=expected):
            flce.linear_cross_entropy(*operands, label_smoothing=value)
    student = [one.detach() for one in operands[:2]]
    for beta in (1.5, 1.0000000001, -1e-7):
        with pytest.raises(ValueError, match=f"^beta: .* got {re.escape(repr(beta))}$"):
            flce.linear_divergence(*student, *student, divergence="jsd", beta=beta)
