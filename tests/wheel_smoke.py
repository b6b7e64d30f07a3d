"""What a wheel has to do wherever it installs: `python -m pytest wheel_smoke.py` in an environment
with the wheel, pytest and nothing of the clone; tools/wheel_matrix.py runs it. On a GPU where there
is one. No test compiles anything."""

import io
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flce
from flce.conformance import draw, run
from flce.conformance.adapters import ADAPTERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def operands(tokens, hidden, vocab, dtype):
    x = torch.randn(tokens, hidden, dtype=torch.float64, device=DEVICE)
    w = torch.randn(vocab, hidden, dtype=torch.float64, device=DEVICE) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), device=DEVICE)
    return [t.to(dtype).requires_grad_() for t in (x, w)], target


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.75))


def assert_near(found, truth, dtype):
    error = (found.double() - truth).norm() / (truth.norm() + 1e-30)
    assert error <= TOLERANCE[dtype]


def test_it_is_the_wheel():
    folder = Path(flce.__file__).parent
    assert folder.parent.name == "site-packages"
    assert {path.name for path in folder.glob("*.so")} == {"_C.abi3.so", "libflce_cuda.so"}


@pytest.mark.parametrize("name", ADAPTERS)
def test_losses_and_gradients(name):
    """Drawn cases of flce.conformance, which has the truth in float64."""
    cases = [(index, draw(1, index)) for index in range(100)]
    record = run(ADAPTERS[name](name), cases, torch.device(DEVICE), batch=16)
    assert record.counts.keys() <= {"passed", "undecided", "not offered"}, record.failures
    assert record.counts["passed"] > 50


def test_logprobs_and_entropy():
    leaves, target = operands(65, 32, 129, torch.float64)
    logprobs, entropy = flce.linear_logprobs(*leaves, target, entropy="differentiable")
    exact = F.log_softmax(F.linear(*leaves), -1)
    picked = exact.gather(1, target[:, None])[:, 0]
    everywhere = -(exact.exp() * exact).sum(-1)
    assert_near(logprobs, picked.detach(), torch.float64)
    assert_near(entropy, everywhere.detach(), torch.float64)
    ours, theirs = logprobs + 0.5 * entropy, picked + 0.5 * everywhere
    for one, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert_near(one, other, torch.float64)


def test_modules_compile_pickle_and_fuse():
    leaves, target = operands(33, 16, 65, torch.float32)
    head = flce.LinearCrossEntropyHead(16, 65).to(DEVICE)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    hidden = leaves[0].detach()
    truth = F.cross_entropy(F.linear(hidden, head.weight, head.bias), target)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    for loss in (head(hidden, target), again(hidden, target), compiled(hidden, target)):
        assert_near(loss, truth.detach().double(), torch.float32)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(65, 16)
            self.lm_head = torch.nn.Linear(16, 65, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, input_ids):
            return self.lm_head(self.embed(input_ids))

    model = Model().to(DEVICE)
    eager = F.cross_entropy(model(target), target)
    handle = flce.fuse(model, when="always")
    fused = F.cross_entropy(model(target), target)
    assert_near(fused, eager.detach().double(), torch.float32)
    for one, other in zip(
        gradients(fused, [*model.parameters()]),
        gradients(eager, [*model.parameters()]),
        strict=True,
    ):
        assert_near(one, other.double(), torch.float32)
    handle.remove()


@pytest.fixture
def readme():
    if not Path("tests", "harness", "pages.py").is_file() or not Path("README.md").is_file():
        pytest.skip("no README.md here")
    sys.path.insert(0, "tests")
    from harness import pages

    return Path("README.md").resolve(), pages


def test_readme(readme):
    page, pages = readme
    names = {"__name__": "page"}
    pages.run(page, names)
    assert_near(
        names["loss"],
        names["F"]
        .cross_entropy(names["head"](names["hidden"]).flatten(0, 1), names["labels"].flatten())
        .detach()
        .double(),
        torch.float32,
    )


def test_readme_of_trainers(readme, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl")
    page, pages = readme
    (code,) = [block.code for block in pages.blocks_of(page) if " Trainer(model" in block.code]
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (8, 16))]
    given = {"output_dir": str(tmp_path), "max_steps": 2, "report_to": [], "save_strategy": "no"}
    names = {"model": model, "data": data, "Trainer": transformers.Trainer}
    names["arguments"] = transformers.TrainingArguments(**given)
    exec(code, names)
    trained = names["trainer"].train()
    assert abs(trained.training_loss - math.log(256)) < 0.1


def test_refusals_are_pythons_errors():
    leaves, target = operands(9, 8, 5, torch.float32)
    with pytest.raises(ValueError, match="label_smoothing"):
        flce.linear_cross_entropy(*leaves, target, label_smoothing=2.0)
    if DEVICE == "cpu":
        target[3] = 7
        with pytest.raises(IndexError, match="7"):
            flce.linear_cross_entropy(*leaves, target)


def test_the_operators_pass_opcheck():
    leaves, target = operands(9, 8, 5, torch.float32)
    torch.library.opcheck(torch.ops.flce.linear_cross_entropy.default, (*leaves, target))


def test_info():
    command = [sys.executable, "-W", "ignore", "-m", "flce.info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = (line for line in done.stdout.splitlines() if "nvcc" in line)
    assert "driver 5" in built and " sm_" in built
    assert (DEVICE == "cuda") != ("not usable: " in done.stdout)


# Under an emulator /proc/cpuinfo is that of the machine that runs it.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="scalar code alone")
def test_row_passes_use_what_the_cpu_has():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if {"avx2", "fma", "f16c"} <= flags:
        assert torch.ops.flce.cpu_variant() in ("avx2", "avx512")
