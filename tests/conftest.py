"""Fixtures: the device that a test runs on, and the kernels that it uses there."""

import importlib
import os
import pathlib
import sys

# A graph compiled with another build of flce has that build's workspace sizes and must not come
# from the cache on disk. Set before torch is imported.
os.environ.update(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0")
# torch's threads sleep while they wait for each other: on cores shared with other programs,
# spinning makes the small cases take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The cores are shared by the processes of pytest-xdist.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

import pytest  # noqa: E402
import torch  # noqa: E402

from harness import cases  # noqa: E402

NO_GPU = "no CUDA device"


def pytest_addoption(parser):
    parser.addoption(
        "--kernel",
        choices=["auto", "gemm", "fused"],
        default="auto",
        help="FLCE_KERNEL of tests that do not set it themselves",
    )


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not cases.HAS_CUDA, reason=NO_GPU)),
    ]
)
def device(request):
    """Every device of this machine; on one without a GPU the CUDA half is skipped, visibly."""
    return request.param


@pytest.fixture
def cuda():
    """A test that only a GPU can run."""
    if not cases.HAS_CUDA:
        pytest.skip(NO_GPU)
    return "cuda"


@pytest.fixture
def one_thread():
    """On shared cores, threads that wait for each other take most of the time of a small case."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _unused_gpu_memory():
    """The processes of pytest-xdist share a GPU: each returns what its allocator keeps unused."""
    yield
    few = 1 << 30
    if WORKERS > 1 and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > few:
        torch.cuda.empty_cache()


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script of benchmarks/ as if it were run there."""
    folder = pathlib.Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch, pytestconfig):
    """Of the shell or an earlier test; FLCE_POISON is kept: results must not depend on it."""
    for name in ("FLCE_MAX_MEMORY", "FLCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLCE_KERNEL", pytestconfig.getoption("kernel"))
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    # transformers' TrainingArguments with torch_compile allow TF32 for the whole process.
    torch.backends.cuda.matmul.allow_tf32 = False
