"""The benchmarks run, report what they measured, and continue if a peer fails. Times are not
checked."""

import contextlib
import json
import sys
import time
from xml.etree import ElementTree

import numpy
import pytest
import torch

from harness import ROOT

BENCHMARKS = ROOT / "benchmarks"
SHAPE = "24x16x200+bias"


def bench(scripts, tmp_path, *arguments):
    """(exit status, record) of a run, on the CPU unless the arguments say otherwise."""
    path = tmp_path / "record.json"
    common = ["--device", "cpu", "--dtype", "float32", "--rounds", "3", "--json", str(path)]
    status = scripts("bench").main([*common, *arguments])
    return status, json.loads(path.read_text())


def named(record, contestant):
    return {row["pass"]: row for row in record["rows"] if row["contestant"] == contestant}


def test_bench_figures(scripts, tmp_path):
    """Also of ignored tokens, sampled targets and wide logits, and with a valid_bound."""
    choices = ["--ignored", "0.5", "--targets", "model", "--std", "4", "--save", "logits"]
    status, record = bench(scripts, tmp_path, SHAPE, "--peers", "eager", *choices)
    assert not status and record["left_out"] == []
    labels = ("flce logits", "flce logits bound", "eager")
    assert {row["contestant"] for row in record["rows"]} == {"gemms", *labels}
    assert named(record, "flce logits bound")["step"]["valid_bound"] == 12
    for row in record["rows"]:
        lower, upper = row["ms_quartiles"]
        assert 0 < row["fastest_ms"] <= lower <= row["ms"] <= upper
        assert row["rounds"] == 3 and row["tflops"] > 0
        assert row["clock"] == "wall" and "unhidden_rounds" not in row
    for label in labels:
        rows = named(record, label)
        assert set(rows["forward"]["errors"]) == {"loss"}
        assert set(rows["step"]["errors"]) == {"loss", "dx", "dw", "db"}
        assert all(error < 1e-5 for row in rows.values() for error in row["errors"].values())
        gradients = 4 * (24 * 16 + 200 * 16 + 200)
        assert rows["step"]["peak_bytes"] >= gradients
        floor = named(record, "gemms")["step"]
        assert rows["step"]["ratio"] == pytest.approx(rows["step"]["ms"] / floor["ms"])


def wrong_gradient(problem, options):
    peers = sys.modules["peers"]
    return lambda p: 1.5 * peers.linear_then_cross_entropy(p.x, p.w, p.y, p.b)


def out_of_memory(problem, options):
    def run(p):
        raise torch.OutOfMemoryError("asked for too much\nand more")

    return run


def not_installed(problem, options):
    import a_package_that_nobody_has  # noqa: F401


def never_ready(problem, options):
    def run(p):
        while True:
            with contextlib.suppress(Exception):  # as a tuner does with its candidates' errors
                time.sleep(0.01)

    return run


def test_failing_peers(scripts, tmp_path):
    failing = [out_of_memory, not_installed, never_ready]
    peers = scripts("peers")
    for peer in [*failing, wrong_gradient]:
        peers.PEERS[peer.__name__] = peer
    names = ["--peers", *(peer.__name__ for peer in failing), "wrong_gradient", "eager"]
    status, record = bench(scripts, tmp_path, SHAPE, "--passes", "step", "--patience", "2", *names)
    assert not status
    reasons = {entry["contestant"]: entry["reason"] for entry in record["left_out"]}
    assert set(reasons) == {peer.__name__ for peer in failing}
    assert reasons["out_of_memory"] == "OutOfMemoryError: asked for too much"
    assert "a_package_that_nobody_has" in reasons["not_installed"]
    assert reasons["never_ready"] == "OutOfPatience: not ready after 2 s"
    labels = {row["contestant"] for row in record["rows"]}
    assert labels == {"gemms", "flce auto", "eager", "wrong_gradient"}
    wrong = named(record, "wrong_gradient")["step"]["errors"]
    assert all(error == pytest.approx(0.5, rel=1e-3) for error in wrong.values())


def test_status_without_flce(scripts, tmp_path, monkeypatch, capsys):
    status, record = bench(scripts, tmp_path, SHAPE, "--peers", "eager", "--save", "nonsense")
    assert status and "no figures of flce" in capsys.readouterr().err
    assert named(record, "eager") and record["left_out"][0]["contestant"] == "flce nonsense"


@pytest.mark.parametrize("count", [2, 3, 6, 14])
def test_balanced_order(scripts, count):
    """Each contestant comes first once; of an even count each ordered pair is adjacent once."""
    orders = [scripts("measure").balanced_order(count, turn) for turn in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert sorted(order[0] for order in orders) == list(range(count))
    pairs = [pair for order in orders for pair in zip(order, order[1:], strict=False)]
    assert count % 2 or len(set(pairs)) == len(pairs)


def test_slow_contestants_get_fewer_rounds(scripts):
    measure, problems = scripts("measure"), scripts("problem")
    problem = problems.make_problem(problems.Shape(4, 2, 8), "cpu", torch.float32)
    runs = {"fast": (lambda p: None, 1e-3), "slow": (lambda p: None, 2.0), "slowest": (len, 1e3)}
    taken, failed = measure.interleaved(runs, problem, "cpu", 9, 6.0)
    assert {label: len(some) for label, some in taken.items()} == {"fast": 9, "slow": 3}
    assert list(failed) == ["slowest"]  # "slowest" itself ran: a Problem has no len


def waits_inside(problem, options):
    def run(p):
        loss = sys.modules["peers"].linear_then_cross_entropy(p.x, p.w, p.y, p.b)
        loss.item()
        return loss

    return run


def test_device_clock_on_cuda(scripts, tmp_path, cuda):
    scripts("peers").PEERS["waits_inside"] = waits_inside
    # With other processes on the GPU a sleep may end too early, but not in all of many rounds.
    choices = ["--device", cuda, "--clock", "device", "--rounds", "25"]
    choices += ["--peers", "waits_inside", "eager"]
    status, record = bench(scripts, tmp_path, "256x64x4000", *choices)
    assert not status and record["left_out"] == []
    for row in record["rows"]:
        assert row["clock"] == "device" and row["ms"] > 0
        waits = row["contestant"] == "waits_inside"
        assert waits == (row["unhidden_rounds"] == row["rounds"]), row


def test_reference_is_that_of_autograd(scripts, monkeypatch):
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


def marks(root, colour):
    """The number of points of a colour in a picture."""
    uses = (one for one in root.iter() if one.tag.endswith("}use"))
    return sum(f"fill: {colour}" in one.get("style") for one in uses)


def test_plot(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    choices = ["--peers", "eager", "--budget", "default", "8KiB", "--passes", "step"]
    _, record = bench(scripts, tmp_path, SHAPE, "64x16x400", "--ignored", "0.5", *choices)
    plot, style = scripts("plot"), scripts("style")
    plot.main([str(tmp_path / "record.json"), "--out", str(tmp_path / "pictures")])
    for shape in (SHAPE, "64x16x400"):
        root = ElementTree.parse(tmp_path / "pictures" / f"{shape}-step.svg").getroot()
        kinds = [row["kind"] for row in record["rows"] if row["shape"] == shape]
        assert marks(root, style.ORANGE) == kinds.count("peer")
        assert marks(root, style.BLUE) == kinds.count("flce")
        assert "flce, 8KiB" in [one.text for one in root.iter()]
    pairs = [(3, 1), (1, 9), (2, 9), (2, 5), (4, 2)]
    rows = [{"peak_bytes": size, "ratio": ratio} for size, ratio in pairs]
    best = [(row["peak_bytes"], row["ratio"]) for row in plot.front(rows)]
    assert best == [(1, 9), (2, 5), (3, 1)]


def loop(scripts, tmp_path, *arguments, shape="64x16x400"):
    path = tmp_path / "loop.json"
    common = [shape, "--device", "cpu", "--dtype", "float32", "--steps", "8", "--warmup", "4"]
    status = scripts("train_loop").main([*common, "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_precision(scripts, tmp_path, device):
    """One-sided float32 logits are the worst of the four pairs, and float32 the more exact."""
    path = tmp_path / "record.json"
    sizes = ["--tokens", "128", "--hidden", "256", "--vocab", "500", "--device", device]
    scripts("precision").main([*sizes, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    for logits in ("random", "peaked"):
        made = [row for row in rows if row["logits"] == logits]
        errors = {row["trainer"]: row["mean_error"] for row in made if "mean_error" in row}
        assert errors["float32"] < 1e-5 and 1e-3 < errors["bfloat16"] < 0.1
        for noise, factor in ((0.0, 3), (2.0**-9, 1)):
            pairs = [row for row in made if row.get("noise") == noise]
            alike = [row["mean_gap"] for row in pairs if row["trainer"] == row["rollout"]]
            mixed = [row["mean_gap"] for row in pairs if row["trainer"] != row["rollout"]]
            assert min(mixed) > factor * max(alike)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_train_loop(scripts, tmp_path, optimizer):
    choices = ["--max-spread", "1e9", "--optimizer", optimizer]
    status, record = loop(scripts, tmp_path, *choices, *["--control"] * (optimizer == "sgd"))
    row = record["row"]
    assert not status and record["missed"] == []
    assert 0 < row["p5_ms"] <= row["ms"] <= row["p95_ms"]
    assert row["spread"] == pytest.approx((row["p95_ms"] - row["p5_ms"]) / row["ms"])
    assert row["loss"] == pytest.approx(6.5, abs=1.0)  # log 400 and the logits' spread
    for name in ("control_ms", "control_spread", "ratio", "ratio_spread"):
        assert row[name] > 0 if optimizer == "sgd" else name not in row


def test_control_on_cuda(scripts, tmp_path, cuda):
    """The bars on memory hold; the peak is the step's: the GEMMs' is above N x V elements."""
    choices = ["--device", cuda, "--dtype", "bfloat16", "--control", "--max-spread", "1e9"]
    choices += ["--budget", "32MiB"]
    status, record = loop(scripts, tmp_path, *choices, shape="4096x64x32000")
    row = record["row"]
    assert not status and record["missed"] == []
    assert row["growth_bytes"] == row["new_device_allocs"] == 0
    assert 0 < row["peak_bytes"] < row["memory"]["held"] + 2 * 4096 * 32000


def test_train_loop_misses_bars(scripts, tmp_path, monkeypatch):
    train_loop, held = scripts("train_loop"), iter([1000, 1100])
    monkeypatch.setattr(train_loop, "memory", lambda device: {"held": next(held)})
    status, record = loop(scripts, tmp_path, "--max-spread", "0", "--max-growth", "99")
    assert status and len(record["missed"]) == 2
    assert "grew by 100 bytes, bar 99" in record["missed"][0]
    for name, bad in {"new_device_allocs": 1, "loss": float("nan")}.items():
        options = train_loop.parse_options(["--max-spread", "9"])
        row = {"growth_bytes": 0, "spread": 0.0, "loss": 1.0, name: bad}
        assert len(train_loop.missed_bars(row, options)) == 1


TINY = "--width 16 --layers 1 --heads 2 --vocab 97 --batch 2 --sequence 8 --heldout 64"
TINY += " --device cpu --steps 6 --evaluate 3 --warmup 2"


@pytest.fixture
def sampled_training(scripts, tmp_path):
    """The script, run on a corpus of 4000 tokens; gives (exit status, runs of the record)."""
    script, path = scripts("sampled_training"), tmp_path / "runs.json"
    tokens = numpy.random.default_rng(0).zipf(1.5, 4000) - 1
    numpy.save(tmp_path / "corpus.npy", numpy.minimum(tokens, 95).astype(numpy.uint16))

    def run(*arguments):
        common = ["--corpus", str(tmp_path / "corpus.npy"), "--json", str(path), *TINY.split()]
        return script.main([*common, *arguments]), json.loads(path.read_text())["runs"]

    run.script, run.record = script, path
    return run


def test_sampled_training(sampled_training):
    """Runs of one seed are equal; a record is continued, and not beyond the budget."""
    final = sampled_training.script.final
    status, (first, other, drawn) = sampled_training("--runs", "exact:0,exact:1,2^-2:0")
    assert not status and first["configuration"]["clip"]
    assert [one["step"] for one in first["validation"]] == [3, 6]
    assert first["validation"][0] != other["validation"][0]
    assert drawn["validation"] != first["validation"]
    assert final(drawn) == pytest.approx(final(first), rel=0.01) and drawn["eps"] == 0.25
    assert [one["at_least"] for one in first["classes"]][:2] == [0, 1]
    assert sum(one["classes"] for one in first["classes"]) == 97
    assert all(0 < one["update"] and 0 < one["second_moment"] for one in first["classes"])
    status, runs = sampled_training("--runs", "exact:0,exact:2", "--budget", "1e-9")
    assert status == 3 and runs == [first, other, drawn]
    sampled_training.record.unlink()
    _, again = sampled_training("--runs", "exact:0,2^-2:0")
    for one, before in zip(again, (first, drawn), strict=True):
        assert one["validation"] == before["validation"] and one["train"] == before["train"]


def test_sampled_training_options(sampled_training):
    """Two micro-batches of one sequence are a batch of two; SGD has no second moments."""
    choices = ["--runs", "exact:0", "--optimizer", "sgd", "--tied", "--no-clip"]
    sampled_training(*choices)
    status, (whole, parts) = sampled_training(*choices, "--batch", "1", "--accumulate", "2")
    assert not status and parts["configuration"]["lr"] == 0.3
    assert parts["train"] == pytest.approx(whole["train"], rel=1e-5)
    assert parts["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-4)
    assert all("second_moment" not in one for one in parts["classes"])


def test_sampled_finetuning(sampled_training, capsys):
    """Runs of a seed continue from one model, with a fifth of the rate, on other text; both texts
    are evaluated, and the record gives the table."""
    script, other = sampled_training.script, sampled_training.record.with_name("other.npy")
    tokens = numpy.random.default_rng(1).integers(0, 97, 4000)
    numpy.save(other, tokens.astype(numpy.uint16))
    given = ["--other", str(other), "--finetune", "7", "--lr", "0.02", "--runs"]
    status, runs = sampled_training(*given, "exact:0,2^-3:0,exact:1")
    assert not status and runs[0]["trained"] == runs[1]["trained"] != runs[2]["trained"]
    assert runs[0]["train"] != runs[1]["train"] and runs[0]["configuration"]["finetune"] == 7
    assert runs[0]["validation"][-1]["step"] == 7
    for run in runs:  # it learns the new text, and forgets the old one
        assert (
            script.final(run) < run["trained"]["other"] and run["first"] != run["trained"]["first"]
        )
    status, again = sampled_training(*given, "2^-3:0,2^-3:1")
    assert (
        not status
        and again[:3] == runs
        and again[3]["trained"]["other"] == runs[2]["trained"]["other"]
    )
    capsys.readouterr()
    script.main(["--table", str(sampled_training.record)])
    rows = capsys.readouterr().out.strip().splitlines()[-3:]
    names = [line.split(" | ")[0] for line in rows]
    assert names == ["| before", "| exact", "| 2^-3"]
    assert f"{script.final(runs[0]):.4f}" in rows[1] and f"{runs[2]['first']:.4f}" in rows[1]


def test_sampled_training_evaluates(sampled_training):
    """Loss and expected entries of held-out tokens, against dense float64."""
    script = sampled_training.script
    sampled_training("--runs", "exact:0")
    arguments = ["--corpus", str(sampled_training.record.with_name("corpus.npy")), *TINY.split()]
    options = script.parse_options(arguments)
    training = script.Training(options, script.Corpus(options, options.corpus), None, 0)
    ids, targets = training.corpus.ids, training.corpus.targets
    assert ids.shape == (8, 8) and torch.equal(ids.flatten()[1:], targets.flatten()[:-1])
    with torch.no_grad():
        logits = (training.model(ids).double() @ training.model.head.double().T).flatten(0, 1)
        truth = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        p = logits.softmax(1)
    torch.testing.assert_close(script.evaluate(training).double(), truth, rtol=1e-5, atol=1e-6)
    target = torch.nn.functional.one_hot(targets.flatten(), 97)
    entries = (p * 16).clamp(max=1) * (1 - target)
    kept = script.kept_entries(training)
    assert kept["2^-4"] == pytest.approx(entries.sum(1).mean().item(), rel=1e-5)


@pytest.mark.parametrize("near", [[], ["--near", "1e-2"]])
def test_distill(scripts, tmp_path, near):
    path = tmp_path / "record.json"
    common = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--json", str(path)]
    how = near or ["--teacher", "24"]
    scripts("distill").main(["24x16x200", "--without", "compile", *how, *common])
    rows = json.loads(path.read_text())["rows"]
    assert [row["contestant"] for row in rows] == 3 * ["GEMMs", "eager", "flce", "sampled"]
    for row in rows:
        assert row["ms"] > 0 and row["over_gemms"] > 0
        if row["contestant"] == "sampled":
            continue
        errors = row.get("errors", {"loss": 0.0}).values()
        assert max(errors) < (5e-3 if near and row["contestant"] == "eager" else 1e-4)


def test_distill_sweep(scripts, tmp_path):
    """A length that would not fit is left out; the table and the picture have the others."""
    pytest.importorskip("matplotlib")
    path, page = tmp_path / "record.json", tmp_path / "page.md"
    operands = 4 * 16 * (2 * 48 + 2 * 200)  # of the last length
    common = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--json", str(path)]
    common += ["--without", "compile", "--kinds", "jsd", "--sweep", "12", "24", "48"]
    scripts("distill").main(["24x16x200", *common, "--memory", str(operands + 250_000)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["tokens"] for row in rows] == 4 * [12] + 4 * [24] + 4 * [48]
    (left,) = [row for row in rows if "ms" not in row]
    assert left["contestant"] == "eager" and left["would_take_bytes"] > 250_000
    assert all(row["ms"] > 0 and row["peak_bytes"] < 250_000 for row in rows if row is not left)
    page.write_text("before\n<!-- sweep -->\nold\n<!-- end of sweep -->\nafter\n")
    out = tmp_path / "sweep.svg"
    scripts("distill_plot").main([str(path), "--out", str(out), "--docs", str(page)])
    lines = page.read_text().splitlines()
    assert (
        lines[3] == "| tokens | four GEMMs | eager | flce | flce, sampled |"
        and lines[-1] == "after"
    )
    assert lines[7].startswith("| 48 | ") and "does not fit: 0 GB" in lines[7]
    texts = [one.text for one in ElementTree.parse(out).getroot().iter() if one.text]
    assert {"JSD of a student's head from a teacher's", "eager", "flce", "48"} <= set(texts)
    style, root = scripts("style"), ElementTree.parse(out).getroot()
    points = {"eager": 2 * 2, "flce": 2 * 3, "sampled": 2 * 3}  # of both panels, and of the legend
    for name, count in points.items():
        assert marks(root, style.CONTESTANTS[name]) == count + 1


@pytest.mark.parametrize("arguments", [("shapes",), ("24x16x200", "--dtype", "float32")])
def test_soak(scripts, tmp_path, arguments, monkeypatch):
    """Every checkpoint has its figures; a growth, an error and a drift are named."""
    soak, path = scripts("soak"), tmp_path / "record.json"
    monkeypatch.setattr(soak.gc, "collect", lambda: 0)  # 20 times all objects of the other tests
    soak.main([*arguments, "--device", "cpu", "--steps", "40", "--json", str(path)])
    record = json.loads(path.read_text())
    rows = record["checkpoints"]
    assert [row["step"] for row in rows] == [*range(2, 41, 2)]
    assert not [text for text in record["missed"] if not text.startswith(("resident", "cache"))]
    if arguments[0] == "shapes":
        judge = soak.Shapes("cpu", 0)
        assert rows[-1]["shapes"] > 30 and max(rows[0]["errors"].values()) > 0.0
        rows[7]["errors"]["torch.float64"] = float("nan")
    else:
        judge = soak.Training("24x16x200", "cpu", torch.float32, 0)
        assert 0.0 < rows[-1]["drift"] < 1e-6
        rows[7]["drift"] = float("nan")
    for row in rows:  # where nothing grows but at the end
        row["cache entries"], row["resident"] = 0, 20 * soak.MIB * (row is rows[-1])
    first, second = soak.missed_bars(rows, judge)
    assert first.startswith("resident grew by 20971520, bar 16777216")
    assert second.startswith(("error in torch.float64 until step 16", "drift until step 16: nan"))
