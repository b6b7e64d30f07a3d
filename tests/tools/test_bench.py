"""`flce.bench`: a few short rounds, what it writes, and what it does where something is missing."""

import io
import json
import sys

import pytest
import torch

import flce
from flce.bench import CONTESTANTS, Case, Result, cases, default_case, run
from flce.bench.__main__ import main
from flce.bench.machine import load_warning
from flce.bench.progress import Progress
from flce.bench.report import table

SIZES = ["--tokens", "64", "--hidden", "32", "--vocab", "512", "--seconds", "0"]


def bench(tmp_path, *arguments):
    """The exit status of the command and the JSON that it wrote."""
    paths = ["--json", str(tmp_path / "b.json"), "--picture", str(tmp_path / "b.png")]
    status = main([*SIZES, "--device", "cpu", *paths, *arguments])
    return status, json.loads((tmp_path / "b.json").read_text())


def without_modules(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # its import raises ImportError


def test_what_it_writes(tmp_path, capsys, monkeypatch):
    """The losses are equal, and memory is measured; without matplotlib there is a message."""
    without_modules(monkeypatch, "matplotlib", "matplotlib.figure")
    status, found = bench(tmp_path, "--contestants", "eager", "flce")
    assert status == 0 and not (tmp_path / "b.png").exists()
    eager, fused = found["results"]
    assert (eager["name"], fused["name"]) == ("eager", "flce")
    assert eager["loss"] == pytest.approx(fused["loss"], rel=1e-5)
    gradients = 4 * (64 + 512) * 32
    # Log-probabilities, their gradient, and that of the logits; the first needs the logits.
    assert 2 * 4 * 64 * 512 + gradients <= eager["peak_bytes"] <= 4 * 4 * 64 * 512 + gradients
    planned = flce.plan(64, 32, 512, dtype=torch.float32, device="cpu").peak_bytes
    assert fused["peak_bytes"] == pytest.approx(planned, rel=0.05)
    for row in (eager, fused):
        assert len(row["seconds"]) == 3 and min(row["seconds"]) > 0
        assert row["median_seconds"] == sorted(row["seconds"])[1]
    assert found["case"] == {
        "tokens": 64,
        "hidden": 32,
        "vocab": 512,
        "dtype": "float32",
        "device": "cpu",
    }
    assert found["machine"]["torch"] == torch.__version__
    shown = capsys.readouterr()
    assert "peak memory" in shown.out and "b.json" in shown.out
    assert "no picture: " in shown.err and "pip install matplotlib" in shown.err


def test_ratios_to_eager():
    results = [Result("eager", [2.0, 4.0, 3.0], 1000), Result("flce", [1.0, 1.5, 2.0], 250)]
    rows = table(results).splitlines()
    assert "over eager:" in rows[0] and rows[1].split()[-2:] == ["time", "memory"]
    assert rows[2].split()[-2:] == ["1.00x", "1.00x"]
    assert rows[3].split()[-2:] == ["0.50x", "0.25x"]
    assert "x" not in table(results[1:]).splitlines()[-1].split()[-1]  # no eager, no ratio
    failed = Result("eager", failed="no memory")
    assert "over eager" not in table([failed, results[1]])


@pytest.mark.parametrize(("load", "warns"), [(0.1, False), (1.0, False), (1.1, True)])
def test_a_machine_under_load_is_told(load, warns, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert bool(load_warning()) == warns
    status, _ = bench(tmp_path, "--contestants", "flce")
    assert status == 0
    assert ("warning: the machine is under load (1.1 on 4" in capsys.readouterr().err) == warns


def test_load_is_not_known_everywhere(monkeypatch):
    monkeypatch.delattr("os.getloadavg")
    assert load_warning() == ""


def test_the_case_of_a_cpu_shows_what_the_logits_take(monkeypatch):
    """Less than half of the eager loss's memory, by the plan; more tokens with more cores."""
    tokens = []
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        case = default_case("cpu")
        sizes = case.tokens, case.hidden, case.vocab
        planned = flce.plan(*sizes, dtype=case.dtype, device="cpu").peak_bytes
        gradients = 4 * (case.tokens + case.vocab) * case.hidden
        eager = 3 * 4 * case.tokens * case.vocab
        assert planned < 0.5 * (eager + gradients)
        tokens.append(case.tokens)
    assert tokens[0] < tokens[1]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    status, _ = bench(tmp_path, "--contestants", "eager", "flce")
    assert status == 0 and (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setitem(CONTESTANTS, "torch.compile", lambda: broken)
    status, found = bench(tmp_path)
    rows = {row["name"]: row for row in found["results"]}
    assert status == 0 and rows["torch.compile"]["failed"] == "RuntimeError: no compiler"
    assert rows["eager"]["seconds"] and rows["flce"]["seconds"]
    assert "failed: RuntimeError: no compiler" in capsys.readouterr().out
    status, _ = bench(tmp_path, "--contestants", "torch.compile")
    assert status == 1  # nothing was measured


def test_compile_is_torch_compile(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
    results = run(Case(8, 8, 16, "cpu", torch.float32), 0, ("torch.compile",))
    assert given == [cases.eager] and len(results[0].seconds) == 3


def test_a_picture_of_an_unknown_format(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, _ = bench(tmp_path, "--contestants", "flce", "--picture", str(tmp_path / "b.foo"))
    assert status == 0 and "no picture: Format 'foo'" in capsys.readouterr().err


def test_refusals(capsys):
    for arguments, message in (
        (["--vocab", "0"], "vocab: expected 1 to 2147483647, got 0"),
        (["--tokens", str(10**20)], f"tokens: expected 1 to 2147483647, got {10**20}"),
        (["--seconds", "nan"], "seconds: expected 0 or more, got nan"),
        (["--json", "/none/b.json"], "json: expected a file in a folder that exists, got /none"),
        (["--picture", "/none/b.png"], "picture: expected a file in a folder that exists, got "),
    ):
        assert main([*SIZES, "--device", "cpu", *arguments]) == 2
        assert capsys.readouterr().err.startswith(f"flce.bench: {message}")
    if not torch.cuda.is_available():
        assert main([*SIZES, "--device", "cuda"]) == 2
        assert capsys.readouterr().err.startswith("flce.bench: device: expected a CUDA device")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    """A plain line without tqdm; one line for each text where the output is no terminal."""
    without_modules(monkeypatch, "tqdm")
    terminal, file = Terminal(), io.StringIO()
    with Progress(100.0, terminal) as plain:
        plain.show("eager")
    assert "\reager" in terminal.getvalue() and "0 of 100 s" in terminal.getvalue()
    with Progress(100.0, file) as quiet:
        for text in ("eager", "eager", "flce"):
            quiet.show(text)
    assert file.getvalue() == "eager\nflce\n"


def test_progress_by_tqdm():
    pytest.importorskip("tqdm")
    terminal = Terminal()
    with Progress(100.0, terminal) as bar:
        bar.show("eager: round 1")
    assert "eager: round 1" in terminal.getvalue() and "of 100 s" in terminal.getvalue()
