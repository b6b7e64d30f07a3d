"""`flce.bench`: a few short rounds, what it writes, and what it does where something is missing."""

import io
import json
import sys

import pytest
import torch

import flce
from flce.bench import CONTESTANTS, Case, cases, run
from flce.bench.__main__ import main
from flce.bench.progress import Progress

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
