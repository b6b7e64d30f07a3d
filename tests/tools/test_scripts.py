"""Every script of the repository starts in a test: the smallest run on a CPU, or its help where it
needs a GPU, a compiler or the network. Numbers and times are tested in the files of OTHERS, if at
all."""

import importlib
import json
import re
import subprocess
import sys

import pytest

import messages
from harness import ROOT

FOLDERS = ("benchmarks", "docs", "examples", "tests", "tools")
# The scripts that tests of other files run, or whose functions these call.
OTHERS = {
    "benchmarks/bench.py": "tests/tools/test_benchmarks.py",
    "benchmarks/conformance_peers.py": "tests/tools/test_conformance.py",
    "benchmarks/distill.py": "tests/tools/test_benchmarks.py",
    "benchmarks/distill_plot.py": "tests/tools/test_benchmarks.py",
    "benchmarks/frameworks.py": "tests/frameworks/test_framework_benchmark.py",
    "benchmarks/pictures.py": "tests/project/test_docs.py",
    "benchmarks/plot.py": "tests/tools/test_benchmarks.py",
    "benchmarks/precision.py": "tests/tools/test_benchmarks.py",
    "benchmarks/sampled_training.py": "tests/tools/test_benchmarks.py",
    "benchmarks/soak.py": "tests/tools/test_benchmarks.py",
    "benchmarks/train_loop.py": "tests/tools/test_benchmarks.py",
    "benchmarks/train_parallel.py": "tests/tools/test_train_parallel.py",
    "docs/make_api.py": "tests/project/test_docs.py",
    "examples/finetune_hf.py": "tests/frameworks/test_finetune_hf.py",
    "tests/check_kernels.py": "tests/project/test_check_kernels.py",
    "tests/check_wheel.py": "tests/project/test_wheel.py",
    "tools/cross.py": "tests/project/test_wheel.py",
    "tools/hub.py": "tests/frameworks/test_hub.py",
    "tools/sbom.py": "tests/project/test_wheel.py",
}
HERE = (
    "benchmarks/logprobs.py",
    "benchmarks/models.py",
    "benchmarks/options.py",
    "benchmarks/scale.py",
    "examples/distill.py",
    "examples/train_lm.py",
    "tests/batch_invariance.py",
    "tests/every_kernel.py",
    "tests/fuse_coverage.py",
    "tests/messages.py",
    "tools/wheel_matrix.py",
)
SHAPE = "24x16x200"
SMALL = ("--device", "cpu", "--dtype", "float32", "--rounds", "1")


def test_every_script_is_run_by_a_test():
    paths = (path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
    scripts = {
        str(path.relative_to(ROOT))
        for path in paths
        if '__name__ == "__main__"' in path.read_text()
    }
    assert scripts == {*OTHERS, *HERE}
    for script, test in OTHERS.items():
        assert script.rpartition("/")[2].removesuffix(".py") in (ROOT / test).read_text(), script


def run(monkeypatch, module, *arguments):
    """main() with these arguments on the command line."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return module.main()


@pytest.mark.parametrize("kind", ["policy", "entropy", "classes"])
def test_logprobs(scripts, monkeypatch, tmp_path, kind):
    path, logprobs = tmp_path / "record.json", scripts("logprobs")
    monkeypatch.setattr(logprobs.torch, "compile", lambda function: function)  # half a minute
    run(monkeypatch, logprobs, SHAPE, *SMALL, "--kinds", kind, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    rows = [row for row in rows if "errors" in row and "sampled" not in row["contestant"]]
    assert len(rows) >= 4
    for row in rows:
        assert row["kind"] == kind and max(row["errors"].values()) < 1e-5, row


def test_options(scripts, monkeypatch, tmp_path):
    path = tmp_path / "record.json"
    run(monkeypatch, scripts("options"), SHAPE, *SMALL, "--save", "auto", "stats", "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert {row["save"] for row in rows} == {"auto", "stats"} and len(rows) > 10
    assert all(max(row["errors"].values()) < 1e-5 for row in rows if row["option"] != "reading")


def test_models(scripts, monkeypatch, tmp_path):
    """A model of a few thousand parameters in place of the published ones."""
    pytest.importorskip("transformers")
    models, path = scripts("models"), tmp_path / "record.json"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 200}
    monkeypatch.setitem(models.CONFIGS, "tiny", ("LlamaConfig", sizes))
    few = ("--tokens", "32", "--warmup", "0", "--rounds", "1")
    chosen = ("plain", "flce", "fuse", "256MiB", "sampled")
    run(monkeypatch, models, "tiny", "--contestants", *chosen, *SMALL[:2], *few, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["contestant"] for row in rows] == list(chosen)
    assert all(row["loss"] > 0 for row in rows)


def test_scale(tmp_path):
    """In a process of its own, as it starts two more; in bfloat16."""
    path = tmp_path / "record.json"
    command = [sys.executable, "-W", "ignore", ROOT / "benchmarks/scale.py", SHAPE]
    command += ["--ranks", "2", "--device", "cpu", "--rounds", "1", "--json", path]
    command += ["--contestants", "flce", "sequence", "chunks=2", "eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(max(row["errors"].values()) < 1e-2 for row in rows), rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the examples, which keep their tokens there."""
    return tmp_path_factory.mktemp("demo")


# What each prints.
EXAMPLES = {
    "train_lm": ("training, eager: 100%", "training, flce: 100%", "eager: last loss"),
    "distill": ("student, eager: 100%", "student, flce: 100%", "teacher:", "text alone:"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, folder, monkeypatch, capsys):
    """Two steps of a model of two hundred rows: losses, time and memory, bars, a picture."""
    for needed in ("tokenizers", "tqdm", "matplotlib"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train_lm = importlib.import_module("train_lm")
    small = train_lm.Preset(200_000, 2, 32, 2, 2, 32, 2, 1e-3, "1MiB")
    monkeypatch.setitem(train_lm.PRESETS, "cpu", small)
    assert run(monkeypatch, importlib.import_module(name), "--out", folder) == 0
    assert list(folder.glob("*.png"))
    printed = "".join(capsys.readouterr())
    assert all(text in printed for text in EXAMPLES[name])
    assert len(re.findall(r", loss step [\d.]+ ms, peak memory \d+ MiB\n", printed)) == 2


def test_batch_invariance(monkeypatch, tmp_path, capsys):
    path = tmp_path / "record.json"
    module = importlib.import_module("batch_invariance")
    few = ("--device", "cpu", "--shape", "16x40", "--dtype", "float32", "--tokens", "48")
    run(monkeypatch, module, *few, "--json", path)
    (one,) = json.loads(path.read_text())["runs"]
    assert one["matrix"] and capsys.readouterr().out


def test_messages():
    done = subprocess.run(
        [sys.executable, messages.__file__], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split("\n")[:2] == ["lacking", "left over"], done.stderr


def test_fuse_coverage(monkeypatch, capsys):
    pytest.importorskip("transformers")
    module = importlib.import_module("fuse_coverage")
    assert run(monkeypatch, module, "LlamaForCausalLM") == 0
    assert capsys.readouterr().out.endswith("1 built, 100.0 % fused, 0 wrong\n")


@pytest.mark.parametrize("script", ["tests/every_kernel.py", "tools/wheel_matrix.py"])
def test_the_help_of_what_needs_a_gpu_or_the_network(script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / script, "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_memcheck():
    """The shell reads it, and the files that it names exist."""
    script = ROOT / "tests/memcheck.sh"
    subprocess.run(["sh", "-n", script], check=True)
    named = re.findall(r"tests/[\w/*]+\.py", script.read_text())
    assert len(named) > 10
    for name in named:
        assert list(ROOT.glob(name)), name
