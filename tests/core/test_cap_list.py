"""A cap of the logits is complete: the steps of "Add a cap of the logits" in CONTRIBUTING.md, for
each curve of flce_curve (csrc/loss.h) but the line. A test is named after its step."""

import inspect
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.conformance import cases
from flce.conformance.truth import _logits
from flce.fusion import deferred, gradient, steps
from flce.options import LOGIT_OPTIONS, OPTIONS, TEACHER_OPTIONS
from harness.layout import body_of, text_of

CURVES = re.search(r"typedef enum flce_curve \{(.*?)\}", text_of("csrc/loss.h"))[1]
CURVES = [name for name in re.findall(r"FLCE_(\w+)", CURVES) if name != "LINE"]
# {curve: option}
CAPS = re.findall(
    r"if \(loss->(\w+) > 0\.0\) map\.curve = FLCE_(\w+)",
    body_of("csrc/loss.h", "flce_logit_map_of"),
)
CAPS = {curve: option for option, curve in CAPS}
every_curve = pytest.mark.parametrize("curve", CURVES)
every_cap = pytest.mark.parametrize("option", CAPS.values())


def operands(classes=9):
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 5, generator=generator, dtype=torch.double) for n in (6, classes))
    return x.requires_grad_(), weight.requires_grad_(), torch.arange(6)


def outcome(function, **options):
    x, weight, target = operands()
    loss = function(x, weight, target, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


@every_cap
def test_1_a_number_that_maps_logits(option):
    assert OPTIONS[option].schema == "float?"
    assert option in LOGIT_OPTIONS and f"teacher_{option}" in TEACHER_OPTIONS


@every_cap
def test_1_its_definition(option):
    """Odd, of slope 1 at 0, bounded by the cap."""
    z = torch.tensor([-1e9, -1e-9, 0.0, 1e-9, 1e9], dtype=torch.float64)
    made = flce.reference.final_logits(z, z != z, **{option: 3.0})
    expected = torch.tensor([-3.0, -1e-9, 0.0, 1e-9, 3.0], dtype=torch.float64)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0.0)


@every_curve
def test_2_its_map(curve):
    assert f"case FLCE_{curve}:" in body_of("csrc/loss.h", "flce_capped")
    assert curve in CAPS


@every_cap
def test_2_the_plan_knows_it(option):
    """E has the slope: with label smoothing the gradient is no factor times E."""
    sizes = {"device": "cpu", "dtype": torch.float32, "label_smoothing": 0.1}
    assert flce.plan(64, 8, 32, **sizes).form == "exp"
    assert flce.plan(64, 8, 32, **sizes, **{option: 3.0}).form == "dz"


@pytest.mark.parametrize("pair", [*itertools.combinations(CAPS.values(), 2)])
def test_3_two_caps_at_once(pair):
    with pytest.raises(ValueError, match=pair[1]):
        flce.linear_cross_entropy(*operands(), **dict.fromkeys(pair, 3.0))


@every_curve
def test_4_the_cpu_computes_it(curve):
    assert f"case FLCE_{curve}:" in body_of("csrc/cpu/rows_general.c", "cap_logits")


@every_cap
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_4_loss_and_gradients(option, options):
    """From E and from dz."""
    options = {option: 1.5, **options}
    made, exact = (
        outcome(function, **options)
        for function in (flce.linear_cross_entropy, flce.reference.linear_cross_entropy)
    )
    torch.testing.assert_close(made, exact, rtol=1e-10, atol=1e-12)


@every_curve
def test_5_cuda_computes_it(curve):
    for function in ("capped", "cap_slope"):
        assert f"case FLCE_{curve}:" in body_of("csrc/cuda/rows/row.cuh", function)


class Capped(torch.nn.Module):
    def __init__(self, curve):
        super().__init__()
        self.lm_head, self.curve = torch.nn.Linear(5, 9, bias=False), curve

    def forward(self, x, labels):
        return F.cross_entropy(3.0 * self.curve(self.lm_head(x) / 3.0), labels)


@every_cap
def test_6_fuse_recognises_it(option):
    (name,) = [name for name, own in steps.CAPS.items() if own == option]
    curve = next(getattr(space, name) for space in (torch, F) if hasattr(space, name))
    x, weight, labels = operands()
    model = Capped(curve).double()
    model.lm_head.weight = torch.nn.Parameter(weight.detach())
    (exact,) = torch.autograd.grad(model(x, labels), x)
    with flce.fuse(model, strict=True) as handle:
        (made,) = torch.autograd.grad(model(x, labels=labels), x)
    assert [*handle.losses] == [f"scale 0.333333, {name}, scale 3"]
    torch.testing.assert_close(made, exact, rtol=1e-10, atol=1e-12)
    operator = getattr(torch.ops.aten, name, None)  # None: torch's function is of several
    assert operator is None or operator.default in deferred._SAME_LAYOUT
    backward = getattr(torch.ops.aten, f"{name}_backward", None)
    assert backward is None or backward.default in gradient._OF_FIRST
    assert re.search(rf"^\| `{name}` .*\| `{option}` \|$", text_of("docs/fuse.md"), re.MULTILINE)


@every_cap
def test_7_conformance_has_cases_of_it(option):
    assert option in cases.FEATURES and option in cases.Case.__dataclass_fields__
    assert f'"{option}"' in text_of("flce/conformance/operands.py")
    assert f"case.{option}" in inspect.getsource(_logits)


@every_cap
def test_8_the_tests_define_it(option):
    for name in ("row_case", "engine_case", "test_classes", "test_divergence"):
        assert re.search(rf"(?:->|\.){option}\b", text_of(f"tests/c/{name}.c")), name
    names = ("drawn", "drawn_options", "drawn_checks", "divergences", "elements", "wrong_options")
    for name in names:
        assert f'"{option}"' in text_of(f"tests/harness/{name}.py"), name
    assert f'"{option}": (lambda' in text_of("tests/fuse/test_fuse_plain.py")
