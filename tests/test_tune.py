"""flce.tune: refusals, its file, and on a GPU that its choice is used and correct."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import cases
import pytest
import torch

import flce

tune = importlib.import_module("flce.tune")  # flce.tune is the function
TOKENS, HIDDEN, VOCAB = 300, 64, 1000
BUDGET = 130 * 1024 * 4  # chunks of 128 rows and one of 44; a row is a multiple of 128 bytes
HEADER = Path(__file__).parents[1] / "csrc" / "cuda" / "gemm" / "gemm.cuh"


ALGORITHM = " ".join("2" * 10)


def product(gpu="A GPU 1", **changes):
    """The line of a GEMM."""
    numbers = dict.fromkeys(tune.PRODUCT, 1) | changes
    return " ".join(map(str, [*numbers.values(), gpu]))


def content(choices, form=tune._FORMAT):
    return json.dumps({"format": form, "choices": choices})


# ---- refusals ----


@pytest.mark.parametrize("wrong", ["cpu", "meta"])
def test_other_devices_are_refused(wrong):
    with pytest.raises(ValueError, match=f"device: .*CUDA.*{wrong}"):
        flce.tune(4, 4, 4, device=wrong)


@pytest.mark.skipif(cases.HAS_CUDA, reason="there is a CUDA device")
def test_no_device_is_refused():
    with pytest.raises(ValueError, match="device: .*CUDA"):
        flce.tune(4, 4, 4)


# ---- the file ----

CORRUPT = {
    "empty": "",
    "cut": content({product(): ALGORITHM})[:-5],
    "not utf-8": b"\xff\xfe\x00",
    "list": "[]",
    "earlier format": '{"format": "flce products 1", "entries": []}',
    "other format": content({}, "flce products 0"),
    "no choices": json.dumps({"format": tune._FORMAT}),
    "list of choices": content([product()]),
    "number for an algorithm": content({product(): 7}),
    "text for a number": content({product(m="x"): ALGORITHM}),
    "true for a number": content({product(m=True): ALGORITHM}),
    "too large": content({product(m=10**18): ALGORITHM}),
    "one number more": content({product(): f"{ALGORITHM} 2"}),
    "no name": content({product("").rstrip(): ALGORITHM}),
    "two lines of name": content({product("A\n1"): ALGORITHM}),
}


def test_numbers_are_those_of_the_header():
    """PRODUCT lists the fields of the C struct in order; an algorithm has as many numbers as
    its struct."""
    if not HEADER.exists():
        pytest.skip("installed without its sources")
    text = HEADER.read_text(encoding="utf-8")

    def fields(struct):
        body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, re.S)[1]
        return re.findall(r"\w+(?=[,;])", re.sub(r"int64_t|/\*.*?\*/", "", body, flags=re.S))

    assert ["cublaslt", *fields("gemm_key")] == [*tune.PRODUCT, "factors", "device"]
    assert len(fields("gemm_algorithm")) == len(ALGORITHM.split())
    assert tune._ALGORITHM.fullmatch(ALGORITHM)


def test_what_is_written_is_read(tmp_path):
    path = str(tmp_path / "gemm.json")
    assert tune.read(path) == {}
    other = ALGORITHM.replace("2", "3")
    tune.write(path, {product(m=5): ALGORITHM, product(m=6): ALGORITHM})
    tune.write(path, {product(m=6): other, product(m=7): ALGORITHM})
    expected = {product(m=5): ALGORITHM, product(m=6): other, product(m=7): ALGORITHM}
    assert tune.read(path) == expected
    assert os.listdir(tmp_path) == ["gemm.json"]


def test_a_failed_write_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "gemm.json"
    tune.write(str(path), {product(m=5): ALGORITHM})
    before = path.read_text(encoding="utf-8")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        tune.write(str(path), {product(m=6): ALGORITHM})
    assert path.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["gemm.json"]


@pytest.fixture(params=sorted(CORRUPT))
def corrupt(request, tmp_path):
    path = tmp_path / "flce" / "gemm.json"
    path.parent.mkdir()
    text = CORRUPT[request.param]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_corrupt_file_is_named(corrupt, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(str(corrupt))):
        tune.read(corrupt)
    monkeypatch.setenv("FLCE_TUNE_FILE", str(corrupt))
    with pytest.raises(ValueError, match=f"FLCE_TUNE_FILE.*{re.escape(str(corrupt))}"):
        tune.load()


def test_what_may_have_no_end_is_refused(tmp_path):
    """In another process: such a read does not return. The pipe is first, it takes no memory."""
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with open(large, "wb") as file:
        file.truncate((16 << 20) + 1)
    code = (
        "import importlib, os, sys; tune = importlib.import_module('flce.tune')\n"
        "for os.environ['FLCE_TUNE_FILE'] in sys.argv[1:]:\n"
        "    try:\n"
        "        tune.load()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    paths = [str(path) for path in (pipe, tmp_path, "/dev/zero", large)]
    command = [sys.executable, "-c", code, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for path, line in zip(paths, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"FLCE_TUNE_FILE: {path}: ") and "at most 16 MiB" in line


def test_no_file_is_read_that_nobody_named(tmp_path, monkeypatch):
    """Choices change bits: a cache of the user is not read unless FLCE_TUNE_FILE names it."""
    looked = []
    monkeypatch.setattr(tune, "read", looked.append)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unset in (lambda: None, lambda: monkeypatch.delenv("FLCE_TUNE_FILE")):
        unset()
        tune.load()
    assert looked == []


@pytest.mark.parametrize(("text", "fits"), [('{"entries": 1}', False), (None, True)])
def test_import_reads_the_file(tmp_path, text, fits):
    path = tmp_path / "gemm.json"
    if text is None:
        tune.write(str(path), {product(m=5): ALGORITHM})
    else:
        path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "import flce"],
        env={**os.environ, "FLCE_TUNE_FILE": str(path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) == fits
    assert fits or ("ValueError" in done.stderr and str(path) in done.stderr)


NUMBERS = len(tune.PRODUCT) + len(ALGORITHM.split())


@pytest.mark.parametrize("lines", ["abc", "1 2 3 name", "1 " * NUMBERS, "1 " * NUMBERS + "\n1 A"])
def test_other_text_is_refused(lines):
    if torch.ops.flce.cuda_describe().startswith("not loaded"):
        pytest.skip("no CUDA library was built")
    with pytest.raises(ValueError, match="tuned products"):
        flce.autograd.run(torch.ops.flce.gemm_use.default, lines)


# ---- on a GPU ----


def products(device, dtype=torch.bfloat16, bias=False, **knobs):
    knobs = {"max_memory": BUDGET, "save": "grads", **knobs}
    sizes = (TOKENS, HIDDEN, VOCAB)
    return tune.products_of(sizes, (dtype,) * 3, bias, torch.device(device, 0), knobs)


def taken(line):
    """The algorithm in use for a GEMM, and all candidates."""
    (_, index), algorithms = tune.candidates_of(line, torch.device("cuda", 0))
    return algorithms[index], algorithms


def use(line, algorithm):
    tune.use({line: algorithm})


def restore(lines):
    """Selects the default algorithms again, for the tests that follow."""
    for line in lines:
        (shipped, _), algorithms = tune.candidates_of(line, torch.device("cuda", 0))
        use(line, algorithms[shipped])


@pytest.mark.parametrize("save", cases.SAVES)
def test_products_of_a_step(cuda, save, monkeypatch):
    """Full chunks and the last one; the first chunk writes dW and the others add to it."""
    monkeypatch.setenv("FLCE_KERNEL", "gemm")  # the fused kernel's logits GEMM is not cuBLASLt's
    made = [tune.numbers_of(line) for line in products(cuda, save=save)]
    seen = {(p["m"], p["n"], p["k"], p["accumulate"]) for p in made}
    last = TOKENS - 2 * 128
    expected = {(128, VOCAB, HIDDEN, 0), (last, VOCAB, HIDDEN, 0)}
    if save == "logits":
        expected |= {(TOKENS, HIDDEN, VOCAB, 0), (VOCAB, HIDDEN, TOKENS, 0)}
    else:
        expected |= {(128, HIDDEN, VOCAB, 0), (last, HIDDEN, VOCAB, 0)}
        expected |= {(VOCAB, HIDDEN, 128, beta) for beta in (0, 1)} | {(VOCAB, HIDDEN, last, 1)}
    assert seen == expected


def view(memory, rows, cols, pitch, transposed):
    if transposed:
        rows, cols = cols, rows
    whole = memory.as_strided((rows, cols), (pitch, 1))
    return (whole.T if transposed else whole).double()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_every_candidate_is_right(cuda, dtype, bias):
    """Also split-k algorithms: no candidate loses more than one rounding of the result."""
    device = torch.device(cuda, 0)
    for line in products(cuda, dtype, bias):
        p = tune.numbers_of(line)
        a, b, c, b_row, workspace = memory = tune.operands_of(line, device)
        truth = view(a, p["m"], p["k"], p["pitch_a"], p["transpose_a"]) @ view(
            b, p["k"], p["n"], p["pitch_b"], p["transpose_b"]
        )
        start = c.clone()
        if p["accumulate"]:
            truth += view(start, p["m"], p["n"], p["pitch_c"], False)
        if b_row is not None:
            truth += b_row.double()
        for i in range(len(taken(line)[1])):
            c.copy_(start)
            torch.ops.flce.gemm_time(*memory, line, i, 1)
            error = cases.relative_error(view(c, p["m"], p["n"], p["pitch_c"], False), truth)
            bound = {2: 2.0**-8, 4: 1e-5, 8: 1e-12}[c.dtype.itemsize]
            if c.dtype == torch.float16:
                bound = 2.0**-11
            assert error <= bound, (p, i)


def line_of(like, m, n, k, transpose_a, transpose_b, dtype, c_dtype):
    """The line of a GEMM on the GPU of the line `like`."""
    ahead = {"dtype": dtype, "c_dtype": c_dtype, "k": k, "m": m, "n": n, "pitch_c": n}
    ahead |= {"pitch_a": m if transpose_a else -(-k // 8) * 8}
    ahead |= {"pitch_b": -(-k // 8) * 8 if transpose_b else n}
    ahead |= {"transpose_a": int(transpose_a), "transpose_b": int(transpose_b), "accumulate": 0}
    *_, gpu = like.split(" ", len(tune.PRODUCT))
    numbers = tune.numbers_of(like) | {"workspace_bytes": 32 << 20, "tf32": 0, "bias": 0} | ahead
    return " ".join(map(str, [*numbers.values(), gpu]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("k", [1025, 4097, 4098, 6145, 8193, 11528, 12290, 57608])
def test_no_candidate_loses_the_last_products(cuda, dtype, k):
    """cuBLASLt's split-K leaves out the products after the last whole tile for such k."""
    like, device = products(cuda, dtype)[0], torch.device(cuda, 0)
    own = tune.DTYPES.index(dtype)
    results = {own, tune.DTYPES.index(torch.float32)} if dtype != torch.float64 else {own}
    sizes, transposed = ((64, 1000), (1, 8), (16, 512)), ((1, 0), (0, 0), (0, 1))
    for (m, n), (ta, tb), c_dtype in itertools.product(sizes, transposed, sorted(results)):
        if ta and m % 8:
            continue  # the rows of E are padded to 128 bytes
        line = line_of(like, m, n, k, ta, tb, own, c_dtype)
        p = tune.numbers_of(line)
        a, b, c, _, _ = memory = tune.operands_of(line, device)
        whole = a[: (k if ta else m) * p["pitch_a"]].view(-1, p["pitch_a"]).zero_()
        (whole if ta else whole.T)[k - 63 : k] = 1.0
        b.fill_(1.0)
        for i, algorithm in enumerate(taken(line)[1]):
            c.fill_(-1.0)
            torch.ops.flce.gemm_time(*memory, line, i, 1)
            assert (c[: m * n] == 63.0).all(), (p, algorithm, c[: m * n].unique())


@pytest.mark.parametrize("save", cases.SAVES)
def test_another_choice_is_taken_and_right(cuda, save):
    """The last candidate of every GEMM, not the first: it is used, and no other changes."""
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16, device=cuda, std=4.0)
    knobs = {"save": save, "max_memory": BUDGET}
    truth = cases.chunked_truth(case, TOKENS)
    lines = products(cuda, **knobs)
    cases.outcome(flce.linear_cross_entropy, case, **knobs)  # fills the cache of algorithms
    try:
        for line in lines:
            use(line, taken(line)[1][-1])
        assert all(taken(line)[0] == taken(line)[1][-1] for line in lines)
        first, second = (cases.outcome(flce.linear_cross_entropy, case, **knobs) for _ in range(2))
        assert cases.same_bits(first, second)
        for name in ("input", "linear_weight"):
            assert cases.relative_error(first[name], truth[name]) <= 4e-3
    finally:
        restore(lines)


def test_a_choice_that_is_no_candidate_is_passed_over(cuda):
    line = products(cuda)[0]
    before = taken(line)[0]
    try:
        use(line, " ".join(["12345"] * 10))
        assert taken(line)[0] == before
    finally:
        restore([line])


def test_tune_keeps_and_saves(cuda, tmp_path):
    """The choice is used here at once, and in a new process that reads the file."""
    path = tmp_path / "folder" / "gemm.json"
    made = flce.tune(TOKENS, HIDDEN, VOCAB, save="grads", max_memory=BUDGET, path=str(path))
    lines = products(cuda)
    try:
        assert made.path == str(path) and len(made.products) == len(lines)
        assert len(str(made).splitlines()) == 1 + len(lines)
        for line, t in zip(lines, made.products, strict=True):
            assert t.product == line
            assert taken(line)[0] == t.algorithm
            assert 0 < t.best_ms <= t.shipped_ms and t.candidates >= 1
        assert tune.read(str(path)) == {t.product: t.algorithm for t in made.products}
        # Other algorithms than the default ones, so that the new process shows a difference.
        tune.write(str(path), {line: taken(line)[1][-1] for line in lines})
        code = (
            "import flce, torch, sys\n"
            "for line in sys.stdin.read().splitlines():\n"
            "    rows = torch.ops.flce.gemm_candidates(0, line).splitlines()\n"
            "    print(rows[0].split()[1], len(rows) - 2)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "FLCE_TUNE_FILE": str(path)},
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        pairs = [row.split() for row in done.stdout.splitlines()]
        assert len(pairs) == len(lines) and all(index == last for index, last in pairs)
    finally:
        restore(lines)


def test_nothing_is_saved_without_a_file(cuda, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flce.tune(64, HIDDEN, VOCAB, path="").path is None
    assert os.listdir(tmp_path) == []
    monkeypatch.delenv("FLCE_TUNE_FILE")
    assert flce.tune(64, HIDDEN, VOCAB).path is None
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("FLCE_TUNE_FILE", str(tmp_path / "gemm.json"))
    assert flce.tune(64, HIDDEN, VOCAB).path == str(tmp_path / "gemm.json")


def test_capture_refuses(cuda):
    """tune synchronises: it raises before it does anything, and the capture continues."""
    x = torch.ones(8, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capture"):
            flce.tune(TOKENS, HIDDEN, VOCAB, path="")
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0] * 8


def test_threads_do_not_share_descriptors(cuda):
    """Two threads with different biases run the same GEMMs, each on its stream."""
    made = [
        cases.make_case(64, HIDDEN, VOCAB, dtype=torch.bfloat16, device=cuda, bias=True, seed=seed)
        for seed in (1, 2)
    ]
    expected = [cases.outcome(flce.linear_cross_entropy, case) for case in made]
    torch.cuda.synchronize()
    wrong = []

    def work(case, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = cases.outcome(flce.linear_cross_entropy, case)
                torch.cuda.current_stream().synchronize()
                wrong.append(not cases.same_bits(got, truth))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(made, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 100 and not any(wrong)
