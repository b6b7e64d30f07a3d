"""examples/finetune_hf.py: four runs of three steps, and its exit status."""

import dataclasses
import importlib
import math
import sys

import pytest

from harness import ROOT

for name in ("transformers", "peft", "accelerate", "tokenizers", "tqdm", "matplotlib"):
    pytest.importorskip(name)


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", "--steps", "3", "--out", str(tmp_path)])
    module = importlib.import_module("finetune_hf")
    small = {"text_bytes": 2 * 10**5, "batch": 2, "sequence": 32, "hidden": 32, "layers": 1}
    preset = dataclasses.replace(module.PRESETS["cpu"], **small, max_memory="1MiB")
    monkeypatch.setitem(module.PRESETS, "cpu", preset)
    return module


def test_three_steps(example, tmp_path, capfd):
    assert example.main() == 0
    assert (tmp_path / "losses-hf.png").stat().st_size > 10_000
    printed = capfd.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("training  "))
    rows = [line.split() for line in printed[start + 1 : start + 5]]
    assert [row[-5] for row in rows] == ["eager", "flce"] * 2
    for row in rows:
        loss, rate, memory = float(row[-4]), float(row[-3]), float(row[-2])
        assert 0 < loss < 1.1 * math.log(example.VOCAB) and rate > 0 and memory > 0
    difference = float(printed[start + 5].split()[-1])
    assert difference <= 1e-6


@pytest.mark.parametrize("loss, status", [(5.001, 0), (5.01, 1), (math.nan, 1)])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_exit_status(example, monkeypatch, capsys, training, loss, status):
    same = example.Result([6.0, 5.0], 1.0, 1)
    results = {(name, kind): same for name in example.TRAININGS for kind in ("eager", "flce")}
    results[training, "flce"] = example.Result([6.0, loss], 1.0, 1)
    monkeypatch.setattr(example, "train_all", lambda *_: results)
    monkeypatch.setattr(example, "load_tokens", lambda *_: None)
    assert example.main() == status
    assert ("the loss curves differ" in capsys.readouterr().err) == bool(status)


def test_one_step_is_refused(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", "--steps", "1"])
    with pytest.raises(SystemExit):
        example.main()
    assert "expected at least 2: the first one is not timed" in capsys.readouterr().err
