"""Faults and what a caller sees of them: the rows of docs/faults.md."""

import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import flce
from harness import ROOT, cases, hopper
from harness.gpu import captured, cramped
from harness.processes import run_on_ranks
from harness.subprocesses import HARNESS, end_of, start_python

TESTS = ROOT / "tests"
# What a step allocates for itself, by the names in its errors.
BUFFERS = ("loss", "stats", "scalars", "saved", "predictions", "classes", "class_logits")
BUFFERS += ("grad_input", "grad_weight", "grad_bias", "scaled gradient", "grad_logits")
BUFFERS += ("forward workspace", "backward workspace", "workspace")
COPIES = ("input", "linear_weight", "linear_bias", "target", "weight")
COPIES += ("token_weight", "temperature")


# And how many rows they have at least.
TABLES = {"docs/faults.md": 25, "docs/determinism.md": 15, "SECURITY.md": 9}


@pytest.mark.parametrize("name", TABLES)
def test_each_row_of_a_table_names_a_test(name):
    """`FILE: NAME` of tests, where NAME may be the end of a test's, or a case of its file's."""
    text = (ROOT / name).read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= TABLES[name]
    for row in rows:
        file = ""
        for file_, case in re.findall(r"`(?:tests/)?(\S+\.(?:py|c))`|`(\w+)`", row[-1]):
            file = file_ or file
            path = TESTS / file
            assert path.is_file(), row
            assert not case or f"{case}(" in path.read_text(), (row, case)
        assert file or "none: " in row[-1], row


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A function: the lines of a process whose allocations or GEMMs fail one after the other."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("failing") / "failing_torch.so"
    flags = ["-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    source = TESTS / "c" / "failing_torch.c"
    subprocess.run([compiler, *flags, source, "-o", library, "-ldl", "-lpthread"], check=True)

    def lines(what):
        started = start_python(HARNESS / "fault_steps.py", what, LD_PRELOAD=str(library))
        status, said, errors = end_of(started)
        assert status == 0, errors
        return set(said)

    return lines


# ---- the CPU ----


def test_every_allocation_fails_once(failing):
    """The error names the buffer or the argument; .grad is what it was, nothing stays allocated,
    and the next step has the same bits."""
    expected = {f"buffer {name}" for name in BUFFERS}
    assert failing("memory") == expected | {f"a contiguous copy of {name}" for name in COPIES}


def test_every_product_fails_once(failing):
    """As above; where accumulate_into has begun to add, the error says so."""
    lines = failing("gemm")
    assert {line for line in lines if line.endswith("partial")} == {"accumulate: partial"}
    assert {"accumulate: untouched", "grads: untouched", "sampled: untouched"} <= lines


def test_a_second_backward(failing):
    """After one whose allocation or product has failed: right where nothing was overwritten, else
    refused. With save="grads" a backward scales in place, and has nothing that could fail."""
    again = {f"{name}: right" for name in ("stats", "chunks", "half", "twice", "sampled")}
    assert failing("second") == again | {"logits: refused"}


# ---- the CUDA library ----

FOREIGN = {
    "no file": (None, "cannot open shared object file"),
    "no library": ("text", "file too short|invalid ELF header"),
    "another library": ("int other;", "it lacks a function of this version of flce"),
    "another build": ("{functions}", "it was built from other sources than "),
}
EXPORTS = ("backend", "describe", "peers_begin", "peers_wait", "headers")
# A library is loaded once in a process, so each has a child. sys.path has a relative entry, and the
# folder then changes.
DESCRIBE = """
import os, shutil, sys
sys.path.insert(0, ".")
import torch, flce
library = os.path.abspath("flce/libflce_cuda.so")
os.chdir(sys.argv[1])
for given in sys.argv[2:]:
    if given != "none":
        shutil.copy(given, library)
    if os.fork() == 0:
        print(torch.ops.flce.cuda_describe().splitlines()[0], flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def copied_module(tmp_path):
    """A folder with a copy of flce, whose CUDA library may be another."""
    own, folder = ROOT / "flce", tmp_path / "here"
    (folder / "flce").mkdir(parents=True)
    for path in own.iterdir():
        if path.suffix not in (".so", ".txt"):
            (folder / "flce" / path.name).symlink_to(path)
    shutil.copy(next(own.glob("_C*.so")), folder / "flce")
    return folder


def test_a_foreign_cuda_library_is_named(copied_module, tmp_path):
    """Its file, and why it is not loaded. What lies in the working folder is not looked at."""
    files = []
    for kind, (source, _) in FOREIGN.items():
        path = tmp_path / kind
        if source == "text":
            path.write_text(source)
        elif source:
            functions = "".join(f"long flce_cuda_{name}(void) {{ return 0; }}" for name in EXPORTS)
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
            subprocess.run(command, input=source.format(functions=functions), text=True, check=True)
        files.append(path if source else "none")
    planted = tmp_path / "there" / "flce" / "libflce_cuda.so"
    planted.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "another library", planted)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", DESCRIBE, planted.parents[1], *files]
    done = subprocess.run(command, env=env, cwd=copied_module, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = copied_module / "flce" / "libflce_cuda.so"
    said = done.stdout.splitlines()
    for line, (kind, (_, why)) in zip(said, FOREIGN.items(), strict=True):
        assert line.startswith(f"not loaded: {library}: "), kind
        assert re.search(why, line), (kind, line)


# ---- processes ----


def test_interrupts_threads_forks_and_exits():
    status, said, errors = end_of(start_python(HARNESS / "fault_process.py"))
    expected = ["interrupts", "threads", "fork", "exit", "the thread's steps"]
    assert (status, said) == (0, expected), errors


OUT_OF_MEMORY = """
import resource, sys, torch, flce
rows = int(sys.argv[1])
x, w = (torch.randn(size, 256).bfloat16().requires_grad_() for size in (rows, 32768))
y = torch.randint(32768, (rows,))
call = lambda: flce.linear_cross_entropy(x, w, y, save="grads", max_memory=512 * 32768 * 2)
call()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (24 << 20),) * 2)
try:
    call()
except torch.OutOfMemoryError as error:
    print(error)
"""


HALF, NO_BLOCKS = 256 * 32768 * 2, {"FLCE_BLOCKS": "0"}


@pytest.mark.parametrize(
    ("rows", "settings", "advised"), [(2048, {}, HALF), (4096, {}, HALF), (4096, NO_BLOCKS, None)]
)
def test_out_of_memory_advises_what_takes_less(rows, settings, advised):
    """Half of max_memory over 4 chunks, or by blocks. Over 8 chunks of all classes it would make
    16, whose sum of dW is in float32."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", **settings}
    process = start_python("-c", OUT_OF_MEMORY, rows, **settings)
    _, (text,), errors = end_of(process)
    assert "bytes over the inputs" in text, (text, errors)
    found = re.search(r"Try max_memory=(\d+)$", text)
    assert (int(found[1]) if found else None) == advised, text


def leaves_of(vocab):
    torch.manual_seed(0)
    x, w = torch.randn(12, 8), torch.randn(vocab, 8)
    return x.requires_grad_(), w.requires_grad_(), torch.arange(12)


def raise_or_die():
    """Rank 1 makes no call, then it dies in front of its backward."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    x, w, y = leaves_of(10)

    def loss(group, **options):
        shard = flce.VocabParallel(group, vocab=20)
        return flce.linear_cross_entropy(x, w, y, save="stats", vocab_parallel=shard, **options)

    def error_of(act):
        with pytest.raises(RuntimeError, match="^flce: exchange failed: ") as caught:
            act()
        return str(caught.value)

    loss(dist.group.WORLD).backward()  # what is imported and compared in the first call
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    loss(group).backward()
    if rank == 0:
        raises = error_of(lambda: loss(group))
        assert re.search(r"wait \(statistics\) of group .*imed? ?out", raises), raises
        assert "may hold a part" not in raises
        store.set("timed out", "")
    else:
        store.wait(["timed out"])
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    made = loss(group, accumulate_into="grad")
    if rank == 1:
        store.wait(["has a loss"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("has a loss", "")
    x.grad, w.grad = None, torch.zeros_like(w)
    dies = error_of(made.backward)
    assert "input_terms" in dies and "may hold a part of this backward's sum" in dies, dies
    assert x.grad is None
    flce.linear_cross_entropy(*leaves_of(20)).backward()


def test_a_rank_that_raises_or_dies_ends_the_others():
    """In the group's timeout, 5 s of the first call: without it this would take 600 s. The error
    says which exchange failed, and that accumulate_into had begun to add; what is left of the
    process computes."""
    with pytest.raises(pytest.fail.Exception) as caught:
        run_on_ranks(2, raise_or_die, fresh=True)
    assert str(caught.value) == "rank 1: the process ended with exit code -9"


# ---- a GPU ----

MIB = 1 << 20
# Buffers of more than 10 MiB each, which the caching allocator takes from segments of their own.
# grad_input alone always fits in the backward: the forward has freed a larger workspace.
LARGE = {
    "grads": {"grad_input", "grad_weight", "forward workspace"},
    "logits": {"saved", "grad_weight", "backward workspace"},
    "stats": {"forward workspace", "grad_weight", "backward workspace"},
}


@pytest.mark.parametrize("save", LARGE)
def test_each_buffer_is_once_the_one_that_does_not_fit(cuda, save, monkeypatch):
    """More and more device memory: the error names each large buffer, .grad is not touched, and
    with all the memory the step has the bits of before."""
    monkeypatch.setenv("FLCE_KERNEL", "auto")  # other kernels have other large buffers
    case = cases.make_case(8192, 2048, 16384, dtype=torch.bfloat16, device="cuda", std=4.0)
    leaves = case.input.requires_grad_(), case.linear_weight.requires_grad_()
    options = {"save": save, "max_memory": 64 * MIB if save != "logits" else None}

    def step():
        loss = flce.linear_cross_entropy(*leaves, case.target, **options)
        loss.backward()
        return [leaf.grad for leaf in leaves]

    expected = [grad.clone() for grad in step()]
    named, extra = set(), 0
    while True:
        for leaf in leaves:
            leaf.grad = None
        filling = cramped(extra * MIB)
        try:
            step()
            break
        except torch.OutOfMemoryError as error:
            named.add(re.search(r'bytes for buffer "([^"]+)"', str(error))[1])
            assert leaves[0].grad is leaves[1].grad is None
        finally:
            del filling
            torch.cuda.set_per_process_memory_fraction(1.0)
        extra += 16
        assert extra < 4096, "no end"
        for leaf in leaves:
            leaf.grad = None
        assert all(map(torch.equal, step(), expected)), f"after a failure with {extra} MiB"
    assert named >= LARGE[save], named


@pytest.mark.parametrize("kind", ["synchronises", "no memory"])
def test_a_capture_that_fails(cuda, kind, monkeypatch):
    """The capture raises; calls outside of it, and the next capture, are right."""
    case = cases.make_case(512, 128, 30000, dtype=torch.bfloat16, device="cuda", std=4.0)
    leaves = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def step():
        loss = flce.linear_cross_entropy(*leaves, case.target, save="grads")
        return (loss.detach(), *torch.autograd.grad(loss, leaves))

    expected = [one.clone() for one in step()]
    filling = None
    try:
        if kind == "synchronises":
            monkeypatch.setenv("FLCE_CHECK", "1")
        else:
            torch.cuda.synchronize()
            filling = cramped(4 * MIB)
        # FLCE_CHECK reads the targets, which CUDA refuses in a capture.
        with pytest.raises(RuntimeError if filling is None else torch.OutOfMemoryError):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
    finally:
        del filling
        torch.cuda.set_per_process_memory_fraction(1.0)
        monkeypatch.delenv("FLCE_CHECK", raising=False)
    assert all(map(torch.equal, step(), expected))
    graph, static = captured(step)
    graph.replay()
    assert all(map(torch.equal, static, expected))


def test_threads_a_fork_and_an_exit_with_work_queued(cuda):
    status, said, errors = end_of(start_python(HARNESS / "fault_cuda.py"))
    assert status == 0, errors
    assert [line.split(": ")[0] for line in said] == ["threads", "child", "fork", "exit"], said


def test_threads_do_not_share_descriptors(cuda):
    """Of cuBLASLt's products. Threads with different biases, each on its stream."""
    every = [
        cases.make_case(64, 64, 1000, dtype=torch.bfloat16, device=cuda, bias=True, seed=seed)
        for seed in (1, 2)
    ]
    expected = [cases.outcome(flce.linear_cross_entropy, case) for case in every]
    torch.cuda.synchronize()

    def same(case, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = cases.outcome(flce.linear_cross_entropy, case)
                torch.cuda.current_stream().synchronize()
                yield cases.same_bits(got, truth)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda pair: all(same(*pair)), zip(every, expected, strict=True)))


def test_a_cuda_tensor_without_a_library(cuda, copied_module):
    code = "import torch, flce; x = torch.ones(2, 8, device='cuda'); "
    code += "flce.linear_cross_entropy(x, x, torch.zeros(2).long().cuda())"
    env = {**os.environ, "PYTHONPATH": str(copied_module)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, cwd=copied_module, capture_output=True, text=True)
    library = copied_module / "flce" / "libflce_cuda.so"
    assert f"no CUDA library for a CUDA tensor: looked for {library}: " in done.stderr
    assert done.returncode == 1


@hopper.ONLY
def test_every_kernel_is_launched_for_the_sanitizers():
    """By the script that tests/memcheck.sh runs under compute-sanitizer's tools."""
    status, said, errors = end_of(start_python(TESTS / "every_kernel.py", "--check"))
    assert status == 0, (said, errors)
