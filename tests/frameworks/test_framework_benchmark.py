"""benchmarks/frameworks.py: every framework trains a tiny model without flce and with it. In
float32 the losses agree; a case that fails has its reason in the record."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness import ROOT

for name in ("transformers", "accelerate", "peft", "trl", "datasets"):
    pytest.importorskip(name)

SCRIPT = ROOT / "benchmarks/frameworks.py"
CASES = ["trainer", "peft", "sft", "dpo", "grpo", "gkd", "accelerate", "fsdp2"]
FEW = ["--device", "cpu", "--dtype", "float32", "--steps", "2", "--length", "16"]
FEW += ["--sequences", "2", "--completion", "4"]


def record_of(tmp_path, *arguments):
    command = [sys.executable, "-W", "ignore", SCRIPT, *FEW, "--out", tmp_path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "frameworks.json").read_text())


def test_every_case(scripts, tmp_path):
    has_torchtitan = importlib.util.find_spec("torchtitan") and importlib.util.find_spec(
        "spmd_types"
    )
    cases = [*CASES, "torchtitan"] if has_torchtitan else CASES
    record = record_of(tmp_path, "--ranks", "2", "--case", *cases)
    rows = {row["case"]: row for row in record["rows"]}
    assert set(rows) == set(cases) and rows["fsdp2"]["ranks"] == 2
    for row in rows.values():
        plain, ours = row["plain"], row["flce"]
        assert "failed" not in plain and "failed" not in ours, row
        assert row["in_use"] and ours["use"]["by_flce"] >= 2, row
        for result in (plain, ours):
            assert len(result["loss"]) == len(result["step_ms"]) == 2 and result["ms"] > 0
        assert row["loss_difference"] < 1e-5 and row["grad_norm_difference"] < 1e-3, row
        assert any(norm > 0 for norm in plain["grad_norm"])
    assert rows["grpo"]["reward_difference"] == 0.0  # the same completions
    printed = scripts("frameworks").table(record).splitlines()
    assert len(printed) == 2 + len(cases) and len({line.count("|") for line in printed}) == 1


def test_a_case_that_takes_too_long(scripts, tmp_path):
    record = record_of(tmp_path, "--ranks", "1", "--case", "sft", "fsdp2", "--limit", "0.01")
    assert [row["flce"] for row in record["rows"]] == [{"failed": "not ready after 0.01 s"}] * 2
    assert "without flce: not ready after" in scripts("frameworks").table(record)


def test_a_case_that_fails(scripts, monkeypatch, tmp_path):
    """The error stands in the record, and the other run's result too."""
    frameworks, cases = scripts("frameworks"), scripts("framework_cases")

    def fails_plainly(run):
        if not run.is_fused:
            raise RuntimeError("no memory\nand more")
        meter = cases.Meter("cpu")
        meter.begin()
        meter.end()
        meter.log({"loss": 2.0, "grad_norm": 1.0})
        return meter, {"by_flce": 1, "left": {"a reason": 1}}

    monkeypatch.setitem(
        cases.CASES, "sft", cases.Case(title="SFT", package="trl", function=fails_plainly)
    )
    options = SimpleNamespace(batches={"tiny": [1, 8, 2]}, ranks=1, steps=1)
    options.device, options.dtype = "cpu", "float32"
    results = frameworks.run_case("tiny", "sft", options, 0, tmp_path)
    assert results["plain"]["failed"] == "RuntimeError: no memory\nand more"
    assert "fails_plainly" in results["plain"]["traceback"] and frameworks.has_failed(results)
    row = {"size": "tiny", "case": "sft", "ranks": 1, **frameworks.merged([results])}
    row = frameworks.compared(row, 1)
    assert row["flce"]["loss"] == [2.0] and row["in_use"] is False
    record = {"versions": {"trl": "1"}, "machine": {"torch": "2"}, "rows": [row]}
    assert "| SFT (trl 1) | tiny | without flce: RuntimeError: no memory |" in frameworks.table(
        record
    )
    assert "no memory" in frameworks.line(row)


def test_slowest_rank_and_largest_peak(scripts):
    frameworks = scripts("frameworks")
    one = {"loss": [3.0, 2.0, 1.0], "step_ms": [9.0, 9.0, 2.0], "peak_bytes": 5}
    other = {**one, "step_ms": [9.0, 9.0, 4.0], "peak_bytes": 7}
    row = frameworks.merged([{"plain": one, "flce": one}, {"plain": other, "flce": other}])
    assert row["plain"]["ms"] == 4.0 and row["flce"]["peak_bytes"] == 7
    ours = {**row["flce"], "loss": [3.0, 2.5, 1.0], "grad_norm": [2.0, 4.0]}
    ours["use"] = {"by_flce": 3, "left": {}}
    plain = {**row["plain"], "grad_norm": [2.0, 5.0]}
    row = frameworks.compared({"plain": plain, "flce": ours}, 3)
    assert row["in_use"] and row["loss_difference"] == 0.5
    assert row["grad_norm_difference"] == pytest.approx(0.2)
