"""flce.conformance: a right implementation passes, and each of many wrong ones is found."""

import dataclasses
import functools
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

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

PEERS = Path(__file__).parents[1] / "benchmarks/conformance_peers.py"
CPU = torch.device("cpu")
SMALL = [case for case in suite() if case.vocab <= 1000]
ALL = frozenset((*FEATURES, *NAMES))


pytestmark = pytest.mark.usefixtures("one_thread")


def right(x, w, y, bias, options, final=lambda z: z):
    """flce.reference on operands in float64: gradients are rounded once, to the operands' dtype."""
    x, w, bias = (None if one is None else final(one.double()) for one in (x, w, bias))
    return flce.reference.linear_cross_entropy(x, w, y, linear_bias=bias, **options)


def groups_that_fail(loss, group, **fields):
    """The first case of the group that is found wrong, or None."""
    wrong = Adapter("wrong", loss, ALL)
    for case in SMALL:
        if case.group != group or any(getattr(case, k) != v for k, v in fields.items()):
            continue
        ratio, _ = evaluate(wrong, case, CPU)
        if not ratio <= 1.0:
            return case
    return None


def test_a_right_implementation_passes_every_case():
    record = run(Adapter("right", right, ALL), list(enumerate(SMALL)), CPU)
    assert record.counts == {"passed": len(SMALL)}, record.failures


@pytest.mark.parametrize("name", ADAPTERS)
def test_flce_passes_drawn_cases(name, device):
    cases = [(index, draw(5, index)) for index in range(40)]
    record = run(ADAPTERS[name](name), cases, device, batch=16)
    assert record.counts.keys() <= {"passed", "undecided", "not offered"}, record.failures
    assert record.counts["passed"] > 20


# ---- wrong implementations ----


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, change):
        ctx.change = change
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def changing_input(change, x, w, y, bias, options):
    return right(Changed.apply(x, change), w, y, bias, options)


def changing_logits(change, x, w, y, bias, options):
    """`change` maps the gradient of the logits, in float32."""
    logits = Changed.apply(
        F.linear(x.float(), w.float(), None if bias is None else bias.float()), change
    )
    return flce.cross_entropy(logits, y, **options)


def ignores_upstream(x, w, y, bias, options):
    return Changed.apply(right(x, w, y, bias, options), torch.ones_like)


def first_upstream_for_all(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return Changed.apply(loss, lambda grad: grad[:1].expand_as(grad)) if loss.dim() else loss


def drops_tail_of_vocabulary(x, w, y, bias, options):
    kept = max(1, len(w) // 64 * 64)
    bias = None if bias is None else bias[:kept]
    options = {k: v[:kept] if k == "weight" else v for k, v in options.items()}
    return right(x, w[:kept], torch.where(y < kept, y, 0), bias, options)


def reads_beyond_vocabulary(x, w, y, bias, options):
    more = -len(w) % 64  # zeros, as logits
    w = F.pad(w, (0, 0, 0, more))
    bias = None if bias is None else F.pad(bias, (0, more))
    options = {k: F.pad(v, (0, more)) if k == "weight" else v for k, v in options.items()}
    return right(x, w, y, bias, options)


def drops_last_rows(x, w, y, bias, options):
    last = torch.arange(len(y)) >= max(1, len(y) // 64 * 64)
    return right(x, w, y.masked_fill(last, options["ignore_index"]), bias, options)


def drops_last_of_hidden(x, w, y, bias, options):
    kept = max(1, x.shape[1] // 8 * 8)
    return right(x[:, :kept], w[:, :kept], y, bias, options)


def counts_ignored_rows(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    valid = (y != options["ignore_index"]).sum()
    return loss * valid / max(len(y), 1) if options["reduction"] == "mean" else loss


def ignores_minus_100_alone(x, w, y, bias, options):
    return right(x, w, y.clamp(min=0), bias, options | {"ignore_index": -100})


def ignored_rows_have_gradients(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    extra = right(x, w, y.masked_fill(y < 0, 0), bias, options | {"reduction": "sum"})
    return loss + 1e-2 * (extra - extra.detach())


def leaks_nan_of_ignored_rows(x, w, y, bias, options):
    logits = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    return flce.cross_entropy(logits, y, **options)


def subtracts_no_maximum(x, w, y, bias, options):
    logits = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    cut = y == options["ignore_index"]
    picked = logits.gather(-1, y.masked_fill(cut, 0).long().unsqueeze(-1)).squeeze(-1)
    rows = (logits.exp().sum(-1).log() - picked).masked_fill(cut, 0.0)
    if options["reduction"] == "none":
        return rows
    return rows.sum() / ((~cut).sum() if options["reduction"] == "mean" else 1)


def rounds_logits_unsaid(x, w, y, bias, options):
    logits = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    return flce.cross_entropy(logits + (logits.bfloat16().float() - logits).detach(), y, **options)


def filters_small_gradients(x, w, y, bias, options):
    small = lambda grad: grad.masked_fill(grad.abs() < 2e-4 * grad.abs().max(), 0.0)  # noqa: E731
    return changing_logits(small, x, w, y, bias, options)


def wraps_targets(x, w, y, bias, options):
    wrapped = torch.where(y > 127, y - 128, y)
    return right(x, w, wrapped, bias, options)


def reads_rows_as_contiguous(x, w, y, bias, options):
    plain = x.as_strided(x.shape, (x.shape[1], 1))
    return right(plain, w, y, bias, options)


def no_weight_gradient_if_input_is_frozen(x, w, y, bias, options):
    return right(x, w if x.requires_grad else w.detach() + 0.0 * w, y, bias, options)


def without(name, x, w, y, bias, options):
    options = {key: value for key, value in options.items() if key != name}
    return right(x, w, y, None if name == "bias" else bias, options)


def forgets_slope_of_softcap(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    other = without("softcap", x, w, y, bias, options)
    return loss.detach() + other - other.detach()


def divides_by_rows_not_weights(x, w, y, bias, options):
    if options["reduction"] != "mean":
        return right(x, w, y, bias, options)
    total = right(x, w, y, bias, options | {"reduction": "sum"})
    return total / (y != options["ignore_index"]).sum()


def smooths_over_other_classes(x, w, y, bias, options):
    if "label_smoothing" in options:
        vocab = len(w)
        options = options | {"label_smoothing": options["label_smoothing"] * vocab / (vocab - 1)}
    return right(x, w, y, bias, options)


ROUND = lambda grad: (grad.float() * (1 + 2.0**-7)).to(grad.dtype)  # noqa: E731
WRONG = {  # the group that has to find it, and fields of the case that does
    drops_tail_of_vocabulary: ("shapes", {}),
    reads_beyond_vocabulary: ("shapes", {}),
    drops_last_rows: ("shapes", {}),
    drops_last_of_hidden: ("shapes", {}),
    wraps_targets: ("shapes", {}),
    filters_small_gradients: ("shapes", {"dtype": "float32"}),
    rounds_logits_unsaid: ("shapes", {"dtype": "bfloat16"}),
    functools.partial(changing_input, ROUND): ("shapes", {"dtype": "float16"}),
    functools.partial(changing_input, lambda grad: grad.bfloat16().to(grad.dtype)): (
        "shapes",
        {"dtype": "float32"},
    ),
    subtracts_no_maximum: ("logits", {}),
    counts_ignored_rows: ("ignored", {}),
    ignores_minus_100_alone: ("ignored", {"ignore_index": 3}),
    ignored_rows_have_gradients: ("ignored", {}),
    leaks_nan_of_ignored_rows: ("ignored", {"poisoned": True}),
    ignores_upstream: ("upstream", {"reduction": "mean"}),
    first_upstream_for_all: ("upstream", {"reduction": "none"}),
    reads_rows_as_contiguous: ("layout", {"layout": "strided"}),
    no_weight_gradient_if_input_is_frozen: ("layout", {"wants": "weight"}),
    functools.partial(changing_input, lambda grad: 16 * grad): ("layout", {"layout": "tied"}),
    forgets_slope_of_softcap: ("options", {"bias": False}),
    divides_by_rows_not_weights: ("options", {"z_loss": 0.0}),
    smooths_over_other_classes: ("options", {"z_loss": 0.0}),
}
for _name in ("bias", "weight", "softcap", "label_smoothing", "z_loss"):
    WRONG[functools.partial(without, _name)] = ("options", {})


def _name(loss):
    """Without addresses, which differ between pytest's processes."""
    parts = (loss.func, *loss.args) if isinstance(loss, functools.partial) else (loss,)
    return "-".join(getattr(part, "__name__", str(part)) for part in parts)


@pytest.mark.parametrize("loss", WRONG, ids=_name)
def test_a_wrong_implementation_fails(loss):
    group, fields = WRONG[loss]
    assert groups_that_fail(loss, group, **fields) is not None


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

    case = dataclasses.replace(SMALL[0], bias=True, targets="any", seed=3)
    for at in (0, 1):
        found = explain(Adapter("wrong", functools.partial(writes, at), ALL), case, CPU)
        (line,) = [line for line in found if line.startswith(f"{name}, written to[")]
        assert "error inf" in line
        assert (len(found) > 1) == bool(at)


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
            assert torch.allclose(value, exact, rtol=1e-9, atol=1e-11), f"{index} {name} {case}"


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

    for loss, how in ((nan, "failed"), (none, "failed"), (raises, "raised")):
        record = run(Adapter("bad", loss, ALL), [(4, SMALL[0])], CPU)
        assert record.counts == {how: 1} and record.failures[0]["index"] == 4


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


def test_the_table_of_records(scripts, monkeypatch, tmp_path):
    peers = scripts("conformance_peers")
    page, path = tmp_path / "page.md", tmp_path / "record.json"
    record = run(Adapter("halves", wraps_targets, ALL), [(0, SMALL[-1]), (1, SMALL[0])], CPU)
    path.write_text(json.dumps([vars(record)]))
    page.write_text(f"before\n{peers.MARK}\nold\n{peers.MARK}\nafter\n")
    call(monkeypatch, peers, "--table", path, "--write", page)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| halves | 0 0 1 1 | 1 | 0 | 1 | 1 | 0 | 0 | layout: failed 1 |" in text
