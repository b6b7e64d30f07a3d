"""The benchmarks run, say what they measured, go on where a peer fails. Times are not judged."""

import contextlib
import importlib
import json
import pathlib
import sys
import time

import pytest
import torch

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
SHAPE = "24x16x200+bias"


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/ as running it would."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in ("bench", "measure", "options", "peers", "plot", "problem", "train_loop"):
        sys.modules.pop(name, None)


def bench(scripts, tmp_path, *arguments):
    """(exit status, record) of a run on the CPU."""
    path = tmp_path / "record.json"
    common = ["--device", "cpu", "--dtype", "float32", "--rounds", "3", "--json", str(path)]
    status = scripts("bench").main([*common, *arguments])
    return status, json.loads(path.read_text())


def named(record, contestant):
    return {row["pass"]: row for row in record["rows"] if row["contestant"] == contestant}


def test_bench_figures(scripts, tmp_path):
    status, record = bench(scripts, tmp_path, SHAPE, "--peers", "eager", "--save", "logits")
    assert not status and record["left_out"] == []
    assert {row["contestant"] for row in record["rows"]} == {"gemms", "flce logits", "eager"}
    for row in record["rows"]:
        lower, upper = row["ms_quartiles"]
        assert 0 < row["fastest_ms"] <= lower <= row["ms"] <= upper
        assert row["rounds"] == 3 and row["tflops"] > 0
    for label in ("flce logits", "eager"):
        rows = named(record, label)
        assert set(rows["forward"]["errors"]) == {"loss"}
        assert set(rows["step"]["errors"]) == {"loss", "dx", "dw", "db"}
        assert all(error < 1e-5 for row in rows.values() for error in row["errors"].values())
        gradients = 4 * (24 * 16 + 200 * 16 + 200)
        assert rows["step"]["peak_bytes"] >= gradients
        floor = named(record, "gemms")["step"]
        assert rows["step"]["ratio"] == pytest.approx(rows["step"]["ms"] / floor["ms"])


def test_bench_targets(scripts, tmp_path):
    """Ignored tokens, sampled targets, wide logits; a bound for flce besides."""
    choices = ["--ignored", "0.5", "--targets", "model", "--std", "4", "--passes", "step"]
    status, record = bench(scripts, tmp_path, SHAPE, "--peers", "eager", *choices)
    assert not status
    assert named(record, "flce auto bound")["step"]["valid_bound"] == 12
    for label in ("flce auto", "flce auto bound", "eager"):
        errors = named(record, label)["step"]["errors"]
        assert all(error < 1e-5 for error in errors.values()), (label, errors)


def test_bench_budgets(scripts, tmp_path):
    choices = ["--budget", "default", "8KiB", "--save", "auto", "logits", "--passes", "step"]
    _, record = bench(scripts, tmp_path, "64x16x400", "--peers", "--no-errors", *choices)
    peaks = {row["contestant"]: row["peak_bytes"] for row in record["rows"]}
    assert set(peaks) == {"gemms", "flce auto", "flce auto 8KiB", "flce logits"}
    assert peaks["flce auto 8KiB"] < peaks["flce auto"]
    assert all("errors" not in row for row in record["rows"])


def wrong_gradient(problem, options):
    peers = sys.modules["peers"]
    return lambda p: 1.5 * peers.linear_then_cross_entropy(p.x, p.w, p.y, p.b)


def out_of_memory(problem, options):
    def run(p):
        raise torch.OutOfMemoryError("asked for too much\nand more")

    return run


def not_installed(problem, options):
    import a_package_that_nobody_has  # noqa: F401


def late_failure(problem, options):
    calls = []

    def run(p):
        calls.append(1)
        if len(calls) > 4:
            raise ValueError("only four calls")
        return wrong_gradient(problem, options)(p)

    return run


def never_ready(problem, options):
    def run(p):
        while True:
            with contextlib.suppress(Exception):  # as a tuner does with its candidates
                time.sleep(0.01)

    return run


def test_failing_peers(scripts, tmp_path):
    """Each in its own way: the others' figures are there, and so are the reasons."""
    failing = [out_of_memory, not_installed, late_failure, never_ready]
    peers = scripts("peers")
    for peer in [*failing, wrong_gradient]:
        peers.PEERS[peer.__name__] = peer
    names = ["--peers", *(peer.__name__ for peer in failing), "wrong_gradient", "eager"]
    status, record = bench(scripts, tmp_path, SHAPE, "--passes", "step", "--patience", "5", *names)
    assert not status
    reasons = {entry["contestant"]: entry["reason"] for entry in record["left_out"]}
    assert set(reasons) == {peer.__name__ for peer in failing}
    assert reasons["out_of_memory"] == "OutOfMemoryError: asked for too much"
    assert "a_package_that_nobody_has" in reasons["not_installed"]
    assert reasons["never_ready"] == "OutOfPatience: not ready after 5 s"
    assert reasons["late_failure"] == "ValueError: only four calls"
    labels = {row["contestant"] for row in record["rows"]}
    assert labels == {"gemms", "flce auto", "eager", "wrong_gradient"}
    wrong = named(record, "wrong_gradient")["step"]["errors"]
    assert all(error == pytest.approx(0.5, rel=1e-3) for error in wrong.values())


def test_status_without_flce(scripts, tmp_path, monkeypatch, capsys):
    """A refusal of flce's own is not passed over."""
    status, record = bench(scripts, tmp_path, SHAPE, "--peers", "eager", "--save", "nonsense")
    assert status and "no figures of flce" in capsys.readouterr().err
    assert named(record, "eager") and record["left_out"][0]["contestant"] == "flce nonsense"


def test_unknown_names_are_refused(scripts, capsys):
    for arguments in (["nonsense"], ["--peers", "nobody"]):
        with pytest.raises(SystemExit):
            scripts("bench").parse_options(arguments)
        assert "nonsense" in (text := capsys.readouterr().err) or "nobody" in text


@pytest.mark.parametrize("count", [2, 3, 6, 14])
def test_balanced_order(scripts, count):
    """In `count` rounds each comes first once; for an even count each pair is adjacent once."""
    orders = [scripts("measure").balanced_order(count, turn) for turn in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert sorted(order[0] for order in orders) == list(range(count))
    pairs = [pair for order in orders for pair in zip(order, order[1:], strict=False)]
    assert count % 2 or len(set(pairs)) == len(pairs)


def test_slow_contestants_get_fewer_rounds(scripts):
    measure, problems = scripts("measure"), scripts("problem")
    problem = problems.make_problem(problems.Shape(4, 2, 8), "cpu", torch.float32)
    runs = {"fast": (lambda p: None, 1e-3), "slow": (lambda p: None, 2.0), "slowest": (len, 1e3)}
    times, failed = measure.interleaved(runs, problem, "cpu", 9, 6.0)
    assert {label: len(taken) for label, taken in times.items()} == {"fast": 9, "slow": 3}
    assert list(failed) == ["slowest"]  # it ran: a Problem has no len


def test_reference_is_that_of_autograd(scripts, monkeypatch):
    """Also where it takes many chunks and some rows are ignored."""
    problems = scripts("problem")
    monkeypatch.setattr(problems, "CHUNK_BYTES", 3 * 200 * 8 * 5)
    shape, draw = problems.Shape(24, 16, 200, bias=True), {"ignored": 0.3, "targets": "model"}
    problem = problems.make_problem(shape, "cpu", torch.float64, std=3.0, **draw)
    problem.refresh()
    assert int((problem.y != problems.IGNORE_INDEX).sum()) == problem.valid == 17
    loss = scripts("peers").linear_then_cross_entropy(problem.x, problem.w, problem.y, problem.b)
    truth = problems.reference(problem, "cpu")
    results = (loss, *torch.autograd.grad(loss, problem.leaves))
    for name, error in problems.errors(results, truth).items():
        assert error < 1e-12, name


def test_model_targets_follow_the_model(scripts):
    """Half of the draws are a token of probability one half."""
    problems = scripts("problem")
    problem = problems.make_problem(problems.Shape(4000, 1, 3), "cpu", torch.float32)
    problem.x.data.fill_(1.0)
    problem.w.data.copy_(torch.tensor([[0.5], [0.25], [0.25]]).log())
    problem._sample_targets()
    counts = torch.bincount(problem.y, minlength=3) / 4000
    assert (counts - torch.tensor([0.5, 0.25, 0.25])).abs().max() < 0.05


def test_plot(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    choices = ["--peers", "eager", "--budget", "default", "8KiB", "--passes", "step"]
    bench(scripts, tmp_path, SHAPE, "64x16x400", "--ignored", "0.5", *choices)
    plot = scripts("plot")
    plot.main([str(tmp_path / "record.json"), "--out", str(tmp_path / "pictures")])
    for shape in (SHAPE, "64x16x400"):
        picture = (tmp_path / "pictures" / f"{shape}-step.png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(picture[16:20], "big") == 1400
    rows = [{"peak_bytes": size, "ms": ms} for size, ms in [(3, 1), (1, 9), (2, 9), (2, 5), (4, 2)]]
    assert [(row["peak_bytes"], row["ms"]) for row in plot.front(rows)] == [(1, 9), (2, 5), (3, 1)]


def loop(scripts, tmp_path, *arguments):
    path = tmp_path / "loop.json"
    common = ["64x16x400", "--device", "cpu", "--dtype", "float32", "--steps", "8", "--warmup", "4"]
    status = scripts("train_loop").main([*common, "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_train_loop(scripts, tmp_path, optimizer):
    status, record = loop(scripts, tmp_path, "--max-spread", "1e9", "--optimizer", optimizer)
    row = record["row"]
    assert not status and record["missed"] == []
    assert 0 < row["p5_ms"] <= row["ms"] <= row["p95_ms"]
    assert row["spread"] == pytest.approx((row["p95_ms"] - row["p5_ms"]) / row["ms"])
    assert row["loss"] == pytest.approx(6.5, abs=1.0)  # log 400 and the logits' spread


def test_train_loop_misses_bars(scripts, tmp_path, monkeypatch):
    bars = ["--max-spread", "0", "--max-growth", "99"]
    train_loop = scripts("train_loop")
    held = iter([1000, 1100])
    monkeypatch.setattr(train_loop, "memory", lambda device: {"held": next(held)})
    status, record = loop(scripts, tmp_path, *bars)
    assert status and len(record["missed"]) == 2
    assert "grew by 100 bytes, bar 99" in record["missed"][0]
    for name, bad in {"new_device_allocs": 1, "loss": float("nan")}.items():
        options = train_loop.parse_options(["--max-spread", "9"])
        row = {"growth_bytes": 0, "spread": 0.0, "loss": 1.0, name: bad}
        assert len(train_loop.missed_bars(row, options)) == 1
