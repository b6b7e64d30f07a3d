"""tools/hub.py: flce in the layout of Hugging Face's kernel hub."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import hub  # noqa: E402

SOURCES = sorted((ROOT / "flce").rglob("*.py"))


def test_sources_become_relative():
    assert len(SOURCES) > 30
    for path in SOURCES:
        depth = len(path.relative_to(ROOT).parts) - 2
        text = hub.relative(path.read_text(), depth, "_flce_abc")
        named = re.findall(r'ops\.flce|[^_]flce::|Library\("flce"', text)
        levels = [node.level for node in ast.walk(ast.parse(text)) if hasattr(node, "level")]
        assert not named and max(levels, default=0) <= depth + 1, path


def test_an_absolute_import_that_is_left_is_refused():
    with pytest.raises(ValueError, match="line 2 imports flce: import flce.plan as plan"):
        hub.relative("import torch\nimport flce.plan as plan\n", 0, "_flce_abc")


# With flce itself loaded: neither may register its operators in the other's namespace.
LOADED = """
import sys
from pathlib import Path
import torch, flce
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert kernel is not flce and kernel.__name__.startswith("_flce_cpu_"), kernel
torch.manual_seed(0)
x, w, target = torch.randn(30, 16), torch.randn(50, 16), torch.randint(0, 50, (30,))

def run(package):
    leaves = [t.double().requires_grad_() for t in (x, w)]
    loss = package.linear_cross_entropy(*leaves, target, label_smoothing=0.1)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)

def define():
    leaves = [t.double().requires_grad_() for t in (x, w)]
    logits = torch.nn.functional.linear(*leaves)
    loss = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)

for package in (flce, kernel):
    for one, truth in zip(run(package), define()):
        assert (one - truth).norm() <= 1e-12 * truth.norm(), package
head = kernel.LinearCrossEntropyHead(16, 50)
assert type(head).__module__ == kernel.__name__
torch.compile(head, fullgraph=True, backend="aot_eager")(x, target).backward()
assert head.weight.grad.isfinite().all()
from importlib import import_module
for name in ("integrations.liger", "integrations.cce", "integrations.torch", "fusion"):
    import_module(f"{kernel.__name__}.{name}")
assert kernel.integrations.torch is not flce.integrations.torch
names = {name for name in dir(torch.ops) if name.startswith("_flce")}
print("loaded", kernel.__name__, *names)
"""


def test_the_kernel_loads_from_a_folder(tmp_path):
    """The CPU variant, linked by the system's linker: minutes less than `make hub`."""
    if not find_spec("kernels"):
        pytest.skip("no kernels")
    environment = {**os.environ, "FLCE_CUDA": "0", "FLCE_GLIBC": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    for command in (
        [sys.executable, ROOT / "tools" / "hub.py", tmp_path],
        [sys.executable, "-W", "ignore", "-c", LOADED, tmp_path],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("loaded _flce_cpu_")
