"""flce/plain.py: `import flce` on a platform for which no module is built. It is simulated, in a
process of its own, with the name of the platform and without the module."""

import json
import shutil
import subprocess
import sys

import pytest

import flce
from harness import ROOT

START = """
import json, sys, warnings
import torch
sys.platform = sys.argv[2]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flce
"""
CALLS = """
torch.manual_seed(0)
x, w = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
y = torch.randint(11, (2, 5))
y[0, 1] = -100
logits = torch.randn(6, 11, requires_grad=True)
head = flce.LinearCrossEntropyHead(8, 11, softcap=3.0)
loss = flce.LinearCrossEntropyLoss(8, 11, z_loss=0.1, weight=torch.rand(11))
with torch.no_grad():
    head.weight.copy_(w), head.bias.zero_(), loss.linear.weight.copy_(w)
logprobs, entropy = flce.linear_logprobs(x, w, y, entropy="detached", temperature=2.0)
wanted = {"return_lse": True, "return_entropy": "detached", "topk": 2}
outputs = flce.linear_cross_entropy(x, w, y, shift=1, **wanted)
computed = {"save": "stats", "max_memory": "1MiB"}
results = {
    "loss": flce.linear_cross_entropy(x, w, y, label_smoothing=0.1, **computed),
    "outputs": outputs.loss + outputs.lse.sum() + outputs.class_logits.sum(),
    "entropies": outputs.entropy + entropy,
    "logprobs": logprobs,
    "cross_entropy": flce.cross_entropy(logits, y.flatten()[:6], reduction="sum"),
    "head": head(x, y, num_items=7),
    "logits": head(x),
    "module": loss(x, y),
}
assert not results["entropies"].requires_grad
sum(r.sum() for r in results.values() if r.requires_grad).backward()
results |= {"dx": x.grad, "dw": w.grad, "dlogits": logits.grad, "dhead": head.weight.grad}
results["dbias"] = head.bias.grad
results = {name: value.detach().flatten().tolist() for name, value in results.items()}
json.dump([len(caught), results, sorted(head.state_dict()), sorted(loss.state_dict())], sys.stdout)
"""
DEFINED = ["linear_cross_entropy", "cross_entropy", "linear_logprobs", "reference"]
DEFINED += ["LinearCrossEntropyHead", "LinearCrossEntropyLoss"]
DEFINED += ["LinearCrossEntropyOutput", "TopLogprobs"]
NAMES = """
from flce import *
refused = []
for name in flce.__all__:
    if name in sys.argv[3:]:
        continue
    try:
        getattr(flce, name)(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0]))
    except NotImplementedError as error:
        assert str(error).startswith(f"flce.{name}: needs the compiled module of flce"), error
        refused.append(name)
for call in (lambda: flce.integrations.trl.install(), lambda: flce.VocabParallel.of):
    try:
        call()
    except NotImplementedError:
        refused.append("attribute")
x, w, y = torch.ones(1, 2), torch.ones(3, 2), torch.tensor([0])
for options in ({"accumulate_into": "grad"}, {"vocab_parallel": object()}):
    try:
        flce.linear_cross_entropy(x, w, y, **options)
    except NotImplementedError as error:
        refused.append(str(error).split(":")[0])
try:
    flce.linear_cross_entropy(x, w, y, no_option=1)
except TypeError:
    refused.append("no_option")
json.dump(refused, sys.stdout)
"""


@pytest.fixture
def site(tmp_path):
    ignored = shutil.ignore_patterns("*.so", "libflce_cuda.txt", "__pycache__")
    shutil.copytree(ROOT / "flce", tmp_path / "flce", ignore=ignored)
    return tmp_path


def run(code, folder, platform, *arguments):
    code = f"import sys; sys.path.insert(0, sys.argv[1]); {START}{code}"
    command = [sys.executable, "-c", code, str(folder), platform, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_losses_are_those_of_the_module(site, platform):
    plain, compiled = run(CALLS, site, platform), run(CALLS, ROOT, "linux")
    assert plain.returncode == compiled.returncode == 0, plain.stderr + compiled.stderr
    warned, found, *keys = json.loads(plain.stdout)
    silent, expected, *keys_of_module = json.loads(compiled.stdout)
    assert (warned, silent) == (1, 0) and keys == keys_of_module
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_what_has_no_definition_is_refused_when_it_is_used(site):
    done = run(NAMES, site, "darwin", *DEFINED)
    assert done.returncode == 0, done.stderr
    expected = [name for name in flce.__all__ if name not in DEFINED] + ["attribute"] * 2
    expected += ["accumulate_into", "vocab_parallel", "no_option"]
    assert json.loads(done.stdout) == expected


def test_linux_never_goes_without_the_module(site):
    done = run("", site, "linux")
    assert done.returncode == 1 and "ImportError: flce: no compiled module" in done.stderr


def test_a_broken_module_is_an_error_everywhere(site):
    (site / "flce" / "_C.abi3.so").write_bytes(b"not a library" * 100)
    done = run("", site, "darwin")
    assert done.returncode == 1 and "cannot be loaded" in done.stderr


def test_info_says_so(site):
    code = "import runpy; runpy.run_module('flce.info', run_name='__main__')"
    done = run(code, site, "darwin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("no compiled module for this platform")


def test_a_build_elsewhere_compiles_nothing(tmp_path):
    pytest.importorskip("setuptools", "77")
    code = (
        "import sys, runpy, setuptools.command.build_ext; sys.platform = 'darwin';"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "-q", "build", "-b", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flce: no compiled module for darwin" in done.stdout
    assert (tmp_path / "lib" / "flce" / "plain.py").exists()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".o", ".a")]
