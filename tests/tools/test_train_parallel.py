"""benchmarks/train_parallel.py: every case with every loss, of a tiny shape, over gloo. In float32
the curves of all losses and all cases are one."""

import json
import subprocess
import sys
import unittest.mock
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from harness import ROOT
from harness.processes import run_on_ranks

SCRIPT = ROOT / "benchmarks/train_parallel.py"
FEW = ["--device", "cpu", "--dtype", "float32", "--length", "8", "--lr", "1e-2"]
FEW += ["--reference-steps", "2"]


def trained(arguments):
    sys.path.insert(0, str(SCRIPT.parent))
    import train_parallel

    with unittest.mock.patch.object(sys, "argv", [str(SCRIPT), *map(str, arguments)]):
        options = train_parallel.parse_options()
    train_parallel.run_all(options, dist.get_rank())


def record_of(tmp_path, ranks, *arguments):
    arguments = [*FEW, "--ranks", ranks, "--out", tmp_path, *arguments]
    run_on_ranks(ranks, trained, fresh=True, arguments=arguments)
    return json.loads((tmp_path / "train-parallel.json").read_text())


def check_curves(record):
    """One curve in all rows: a step of tokens that are divided in another way is the same step."""
    curve, rows = record["rows"][0]["losses"], record["rows"]
    assert len(set(curve)) == len(curve)
    for row in rows:
        steps = row["steps"]
        assert row["losses"] == pytest.approx(curve[:steps], rel=2e-6), row
        assert row["ms"] > 0 and row["tokens_per_s"] > 0
    for row in record["agreement"]:
        assert row["largest"] < 2e-5 and len(row["each"]) == row["steps"]


@pytest.mark.parametrize(
    ("model", "cases"), [("tiny", ["fsdp", "tp"]), ("tiny-untied", ["tp", "context", "pipeline"])]
)
def test_two_ranks(tmp_path, model, cases):
    pytest.importorskip("matplotlib")
    record = record_of(tmp_path, 2, "--models", model, "--steps", "4", "--case", *cases)
    check_curves(record)
    runs = {(row["case"], row["loss"]) for row in record["rows"]}
    for case in cases:
        expected = {"plain", "flce", "float32", *(["loss_parallel"] if case == "tp" else [])}
        assert {loss for of, loss in runs if of == case} == expected
    picture = ElementTree.parse(tmp_path / "train-parallel.svg").getroot()
    texts = [one.text for one in picture.iter() if one.text]
    assert sum(text.endswith("2 ranks") for text in texts) == len(cases)


def test_four_ranks(tmp_path):
    choices = ["--models", "tiny", "--steps", "3", "--case", "fsdp-tp", "--reference-steps", "0"]
    check_curves(record_of(tmp_path, 4, *choices))


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_starts(tmp_path, launcher):
    """By itself and by torchrun, in bfloat16; the picture again from the record."""
    command = [sys.executable, "-W", "ignore", *launcher, SCRIPT, *FEW, "--dtype", "bfloat16"]
    command += ["--out", tmp_path, "--models", "tiny", "--steps", "2", "--case", "fsdp"]
    command += ["--reference-steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [
        one
        for one in json.loads((tmp_path / "train-parallel.json").read_text())["agreement"]
        if (one["loss"], one["to"]) == ("flce", "plain")
    ]
    assert row["largest"] < 1e-2


def test_what_a_case_needs(scripts, monkeypatch, capsys):
    script = scripts("train_parallel")
    for arguments, text in (
        ("--ranks 3 --case fsdp-tp", "an even number of ranks"),
        ("--ranks 16 --case tp", "a divisor of 8"),
        ("--ranks 1 --case pipeline", "2 to 16 ranks"),
        ("--ranks 2 --sequences 3", "a multiple of 2 ranks"),
        ("--steps 1 2", "one number, or one for each model"),
        ("--plot x", "expected --out"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_parallel.py", *arguments.split()])
        with pytest.raises(SystemExit):
            script.parse_options()
        assert text in capsys.readouterr().err


def test_a_run_without_memory(scripts, tmp_path, monkeypatch, capsys):
    """Has no figures, and the picture has its reason. Without matplotlib there is no picture."""
    pytest.importorskip("matplotlib")
    script = scripts("train_parallel")
    names = {"model": "tiny", "case": "tp", "steps": 2}
    rows = [
        {**names, "loss": "plain", "failed": "out of memory"},
        {**names, "loss": "flce", "losses": [2.0, 1.0], "ms": 1.0, "tokens_per_s": 9.0,
         "peak_bytes": 10**9},
    ]  # fmt: skip
    assert script.agreement(rows, 2) == []
    assert "out of memory" in script.line(rows[0]) and "1.00 GB" in script.line(rows[1])
    record = {"machine": {"device": "cpu", "torch": "2", "date": "2026-01-01"}, "ranks": 2}
    record |= {"dtype": "bfloat16", "sequences": 2, "length": 8, "rows": rows, "agreement": []}
    script.save(record, tmp_path)
    picture = (tmp_path / "train-parallel.svg").read_text()
    assert "plain: out of memory" in picture and "1.0 GB" in picture
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    script.save(record, tmp_path / "none")
    assert "no picture: " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["train-parallel.json"]
