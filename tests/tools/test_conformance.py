"""flce.conformance: truth, tolerance, reports and the command; test_conformance_wrong.py has the
right implementation that passes and the wrong ones that are found."""

import collections
import dataclasses
import functools
import inspect
import json
import sys

import pytest
import torch

import flce
from flce.conformance import (
    FEATURES,
    NAMES,
    Adapter,
    Rounding,
    build,
    draw,
    evaluate,
    explain,
    run,
    suite,
    truth,
)
from flce.conformance import __main__ as command
from flce.conformance.adapters import ADAPTERS
from harness import ROOT
from harness.wrong import Changed, right
from harness.wrong_sizes import wraps_targets_of_8_bits

PEERS = ROOT / "benchmarks/conformance_peers.py"
CPU = torch.device("cpu")
SMALL = [case for case in suite() if case.vocab <= 1000]
ALL = frozenset((*FEATURES, *NAMES))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ADAPTERS)
def test_flce_passes_drawn_cases(name, device):
    cases = [(index, draw(5, index)) for index in range(40)]
    record = run(ADAPTERS[name](name), cases, device, batch=16)
    assert record.counts.keys() <= {"passed", "undecided", "not offered"}, record.failures
    assert record.counts["passed"] > 20


# ---- reports ----


def test_a_wrong_gradient_is_located():
    def last_row_is_0(x, w, y, bias, options):
        last = (torch.arange(len(w)) == len(w) - 1).unsqueeze(-1)
        return right(
            x, Changed.apply(w, lambda grad: grad.masked_fill(last, 0.0)), y, bias, options
        )

    case = next(case for case in SMALL if case.vocab == 257)
    (line,) = explain(Adapter("wrong", last_row_is_0, ALL), case, CPU)
    assert line.startswith("weight[256, ") and " of 32896 elements" in line


@pytest.mark.parametrize("name", ["x", "w", "y", "bias"])
def test_an_operand_that_is_written_to_is_named(name):
    """Also where loss and gradients are right, or those of what was written."""

    def writes(at, x, w, y, bias, options):
        read = (x, w, y, bias) if at else [one.clone() for one in (x, w, y, bias)]
        written = {"x": x, "w": w, "y": y, "bias": bias}[name].data
        written[-1:] = (written[-1:] + 1) % len(w) if name == "y" else 2 * written[-1:]
        return right(*read, options)

    case = dataclasses.replace(SMALL[0], bias="normal", targets="any", seed=3)
    for at in (0, 1):
        found = explain(Adapter("wrong", functools.partial(writes, at), ALL), case, CPU)
        (line,) = [line for line in found if line.startswith(f"{name}, written to[")]
        assert "error inf" in line
        assert (len(found) > 1) == bool(at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_of_16_bits_fails_unless_declared(dtype):
    def narrow(x, w, y, bias, options):
        return right(x, w, y, bias, options).to(x.dtype)

    case = next(case for case in SMALL if case.dtype == dtype)
    (line,) = explain(Adapter("narrow", narrow, ALL), case, CPU)
    assert line == f"loss: expected torch.float32 or torch.float64, got torch.{dtype}"
    assert not explain(Adapter("narrow", narrow, ALL, half_loss=True), case, CPU)
    wide = dataclasses.replace(case, dtype="float32")
    fails = Adapter("narrow", lambda *given: right(*given).half(), ALL, half_loss=True)
    assert explain(fails, wide, CPU)[0].endswith("got torch.float16")


def test_a_float16_loss_has_no_upstream_gradient_of_65536():
    case = next(c for c in SMALL if c.upstream == "scaled" and c.dtype == "float16")
    assert "65504" in Adapter("narrow", right, ALL, half_loss=True).lacks(case)
    assert not Adapter("right", right, ALL).lacks(case)


def test_an_error_that_is_not_of_autograd_is_none_of_a_changed_operand():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("of another cause")

    def raises(*given):
        return Raises.apply(right(*given))

    case = next(case for case in SMALL if case.call == "x changed")
    record = run(Adapter("raises", raises, ALL), [(0, case)], CPU)
    assert record.failures[0]["what"] == ["RuntimeError: of another cause"]


def test_a_strided_upstream_gradient_stays_so_in_another_dtype():
    case = next(case for case in SMALL if case.upstream == "strided")
    given = build(case, CPU)
    double = given.upstream_in(torch.float64)
    assert double.stride() == given.upstream.stride() == (2,)
    assert torch.equal(double, given.upstream.double())


def test_a_run_describes_failures_of_each_group(capsys):
    few = list(enumerate(SMALL))[:150:5]
    record = run(Adapter("bad", lambda *_: 1.0, ALL), few, CPU)
    groups = [failure["group"] for failure in record.failures]
    assert set(groups) == {case.group for _, case in few} and len(set(groups)) > 2
    assert max(map(groups.count, groups)) == 5
    command.show(record)
    text = capsys.readouterr().out
    assert f"by group: shapes: raised {record.wrong['shapes: raised']}" in text
    assert "case 0: shapes, V 7: N 48, H 128, V 7, bfloat16" in text


# ---- the suite ----


def test_the_page_has_the_numbers_of_cases():
    page, cases = (PEERS.parents[1] / "docs/conformance.md").read_text(), suite()
    assert f" on {len(cases):,} cases" in page
    for group, number in collections.Counter(case.group for case in cases).items():
        assert f"\n| {group} | {number} | " in page


def test_every_case_has_a_name_of_its_own():
    names = [(case.group, case.name, case.dtype) for case in suite()]
    assert len(set(names)) == len(names) and all(name for _, name, _ in names)


def test_the_suite_is_affordable():
    """In numbers of the three matrices; a CPU has about 60 s for it (docs/conformance.md)."""
    sizes = [(case.tokens, case.hidden, case.vocab) for case in suite()]
    assert sum(n * h + v * h + n * v for n, h, v in sizes) < 2.5e8
    assert len(sizes) < 3000


def test_every_result_is_judged():
    """No tolerance is infinite, but where a result overflows float16."""
    for case in SMALL[::7]:
        if case.dtype != "float16":
            found = truth(case, build(case, CPU), Rounding())
            for name, tolerance in found.tolerance.items():
                assert tolerance.isfinite().all() and found.exact[name].isfinite().all(), case


# ---- truth and tolerance ----


def test_truth_is_the_reference_in_float64():
    """Values and gradients by autograd, which the closed formulas of the truth do not use."""
    for index in range(120):
        case = dataclasses.replace(draw(9, index), dtype="float64", logits="normal", offset=0.0)
        given = build(case, CPU)
        expected = truth(case, given, Rounding())
        operands = given.x, given.w, given.y
        loss = flce.reference.linear_cross_entropy(
            *operands, linear_bias=given.bias, **given.options
        )
        grads = torch.autograd.grad(
            loss, list(given.leaves.values()), given.upstream.to(loss.dtype)
        )
        made = dict(zip(given.leaves, grads, strict=True))
        for name, value in {"loss": loss, **made}.items():
            exact = expected.exact[name]
            judged = expected.tolerance[name].isfinite()  # not where class weights add to 0
            close = torch.isclose(value, exact, rtol=1e-9, atol=1e-11) | ~judged
            assert close.all(), f"{index} {name} {case}"


def test_a_product_that_may_overflow_is_not_judged():
    """Also where it is multiplied by 0: inf times 0 is no tolerance."""
    case = dataclasses.replace(SMALL[0], dtype="float16", reduction="sum", upstream="scaled")
    given = build(case, CPU)
    with torch.no_grad():
        given.w[:, 0] = 0
        given.x[:, 1] = 0
    tolerance = truth(case, given, Rounding()).tolerance
    for name, zeros in (("input", tolerance["input"][:, 0]), ("weight", tolerance["weight"][:, 1])):
        assert not tolerance[name].isnan().any() and zeros.isinf().any(), name
    assert not explain(Adapter("right", right, ALL), case, CPU)


def test_tolerance_has_the_stated_roundings_alone():
    case = SMALL[0]
    given = build(case, CPU)
    plain = truth(case, given, Rounding()).tolerance
    for more in ("logits", "exponentials", "factors", "results"):
        stated = Rounding()._replace(**{more: getattr(Rounding(), more) + 1})
        wider = truth(case, given, stated).tolerance
        assert (wider["weight"] > plain["weight"]).all()
        assert (wider["loss"] > plain["loss"]) == (more == "logits")
    exact = truth(case, given, Rounding()).exact["weight"]
    assert (plain["weight"] >= 2.0**-8 * exact.abs()).all()


# ---- runs ----


def test_a_case_is_repeatable():
    for device_case in (draw(3, 17), draw(3, 17)):
        assert device_case == draw(3, 17) != draw(3, 18)
    one, other = build(draw(3, 17), CPU), build(draw(3, 17), CPU)
    assert torch.equal(one.w, other.w) and torch.equal(one.y, other.y)


def test_every_kind_is_drawn():
    drawn = [draw(1, index) for index in range(1500)]
    kinds = {"call": {"once", "second backward", "interleaved", "no_grad"}}
    kinds |= {"bias": {None, "normal", "masked"}, "logits": {"normal", "huge", "extreme"}}
    kinds |= {"weight": {None, "positive", "zeros", "signed"}}
    kinds |= {"layout": {"plain", "strided", "padded", "unaligned", "tied", "same"}}
    kinds |= {"upstream": {"one", "zero", "other", "expanded", "strided", "scaled"}}
    for field, values in kinds.items():
        assert values <= {getattr(case, field) for case in drawn}
    assert any(case.tokens >= 300 for case in drawn) and any(c.hidden > 512 for c in drawn)


def test_what_is_not_offered_is_no_failure():
    def refuses(case):
        return "odd" if case.vocab % 2 else ""

    few = Adapter("few", right, frozenset(["bfloat16"]), refuses=refuses)
    record = run(few, list(enumerate(SMALL))[:150:2], CPU)
    assert set(record.counts) == {"passed", "not offered"}
    assert record.missing["float16"] and record.missing["odd"] and not record.wrong


def test_a_name_that_cannot_be_offered_is_refused():
    with pytest.raises(ValueError, match="^offers: expected some of bfloat16, .*, got bf16, fp32$"):
        Adapter("typo", right, ["bf16", "sum", "fp32"])


def test_a_loss_that_is_no_tensor_is_refused_by_name():
    record = run(Adapter("number", lambda *_: 1.0, ALL), [(0, SMALL[0])], CPU)
    assert record.failures[0]["what"] == ["TypeError: loss: expected a tensor, got float"]


def test_what_raises_and_nan_and_no_gradient_are_failures():
    def nan(x, w, y, bias, options):
        return right(x, w, y, bias, options) * torch.nan

    def none(x, w, y, bias, options):
        return right(x.detach(), w, y, bias, options)

    def raises(x, w, y, bias, options):
        raise ValueError("not today")

    no_rows = next(case for case in SMALL if case.tokens == 0)
    assert explain(Adapter("none", none, ALL), no_rows, CPU) == ["input: no gradient"]
    assert evaluate(Adapter("none", none, ALL), no_rows, CPU)[0] == torch.inf
    for loss, how in ((nan, "failed"), (none, "failed"), (raises, "raised")):
        record = run(Adapter("bad", loss, ALL), [(4, SMALL[0])], CPU)
        assert record.counts == {how: 1} and record.failures[0]["index"] == 4


def test_a_small_case_has_one_thread():
    """On cores that others use, threads that wait for each other take most of its time."""
    seen = []

    def loss(*given):
        seen.append(torch.get_num_threads())
        return right(*given)

    torch.set_num_threads(2)  # the fixture resets it
    large = next(case for case in suite() if case.name == "N 4097")
    run(Adapter("right", loss, ALL), [(0, SMALL[0]), (1, large)], CPU)
    assert seen == [1, 2] and torch.get_num_threads() == 2


def test_a_run_that_is_late_says_what_it_left_out():
    record = run(Adapter("right", right, ALL), list(enumerate(SMALL)), CPU, seconds=-1.0)
    assert record.counts == {"not run": len(SMALL)}


def call(monkeypatch, module, *words):
    monkeypatch.setattr(sys, "argv", ["conformance", *map(str, words)])
    return module.main()


def test_the_command_draws_and_repeats_cases(monkeypatch, tmp_path, capsys):
    path = tmp_path / "record.json"
    both = ("--impl", "flce,eager", "--adapters", PEERS, "--cases", 30, "--seed", 2)
    assert call(monkeypatch, command, *both, "--json", path) == 0
    made = json.loads(path.read_text())
    assert [one["impl"] for one in made] == ["flce", "eager"]
    assert sum(sum(one["counts"].values()) for one in made) == 30
    capsys.readouterr()
    call(monkeypatch, command, *both, "--only", 6)
    assert capsys.readouterr().out.startswith("flce ")
    with pytest.raises(SystemExit, match="got nothing"):
        call(monkeypatch, command, "--impl", "nothing")
    with pytest.raises(SystemExit, match="--adapters: expected a Python file, got nothing"):
        call(monkeypatch, command, "--adapters", "nothing")
    with pytest.raises(SystemExit, match="--adapters: expected ADAPTERS"):
        call(monkeypatch, command, "--adapters", inspect.__file__)
    with pytest.raises(SystemExit, match="--json: expected a file in a folder that exists"):
        call(monkeypatch, command, "--cases", 2, "--json", tmp_path / "none" / "record.json")
    with pytest.raises(SystemExit, match="expected to leave a case"):
        call(monkeypatch, command, "--cases", 2, "--only", 7)
    with pytest.raises(SystemExit, match="expected flce to be run on a case, got none"):
        call(monkeypatch, command, "--cases", 2, "--seconds", 0)


def test_the_sum_with_a_bias_is_a_rounding_of_its_own(scripts):
    """Not of a case without one, whose tolerance would be too wide."""
    rounds = scripts("conformance_peers").rounding(scripts("conformance_peers").with_bias)
    assert rounds(SMALL[0], CPU).logits == 1
    for bias in ("normal", "masked"):
        assert rounds(dataclasses.replace(SMALL[0], bias=bias), CPU).logits == 2


def test_the_table_of_records(scripts, monkeypatch, tmp_path):
    peers = scripts("conformance_peers")
    page, path = tmp_path / "page.md", tmp_path / "record.json"
    options = next(case for case in SMALL if case.group == "options")
    cases = [(0, options), (1, SMALL[0])]
    record = run(Adapter("halves", wraps_targets_of_8_bits, ALL), cases, CPU)
    path.write_text(json.dumps([vars(record)]))
    page.write_text(f"before\n{peers.MARK}\nold\n{peers.MARK}\nafter\n")
    call(monkeypatch, peers, "--table", path, "--write", page)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| halves | 0 0 1 1 | 1 | 0 | 1 | 1 | 0 | 0 | options: failed 1 |" in text
