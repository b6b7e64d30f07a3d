"""benchmarks/tune.py and the operators that it calls: on a GPU that a choice is used and right."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cases
import pytest
import torch

import flce

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("tune", ROOT / "benchmarks" / "tune.py")
tune = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tune)
TOKENS, HIDDEN, VOCAB = 300, 64, 1000
BUDGET = 130 * 1024 * 4  # chunks of 128 rows and one of 44; a row is a multiple of 128 bytes
HEADER = ROOT / "csrc" / "cuda" / "gemm" / "gemm.cuh"
ALGORITHM = " ".join("2" * 10)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device: expected a CUDA device.*cpu"):
        tune.main(["4", "4", "4", "--device", "cpu"])


def test_numbers_are_those_of_the_header():
    """PRODUCT and an algorithm's numbers are the fields of the C structs in order."""
    if not HEADER.exists():
        pytest.skip("installed without its sources")
    text = HEADER.read_text(encoding="utf-8")

    def fields(struct):
        body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, re.S)[1]
        return re.findall(r"\w+(?=[,;])", re.sub(r"int64_t|/\*.*?\*/", "", body, flags=re.S))

    assert ["cublaslt", *fields("gemm_key")] == [*tune.PRODUCT, "factors", "device"]
    assert len(fields("gemm_algorithm")) == len(ALGORITHM.split())


def test_a_choice_is_the_line_with_its_algorithm():
    numbers = " ".join("1" * len(tune.PRODUCT))
    one = tune.TunedGemm(f"{numbers} A GPU 1", ALGORITHM, 3, 2.0, 1.0)
    assert one.choice() == f"{numbers} {ALGORITHM} A GPU 1"
    assert "2.000x of 3" in str(one)


NUMBERS = len(tune.PRODUCT) + len(ALGORITHM.split())


@pytest.mark.parametrize("lines", ["abc", "1 2 3 name", "1 " * NUMBERS, "1 " * NUMBERS + "\n1 A"])
def test_other_text_is_refused(lines):
    if torch.ops.flce.cuda_describe().startswith("not loaded"):
        pytest.skip("no CUDA library was built")
    with pytest.raises(ValueError, match="tuned products"):
        flce.operators.run(torch.ops.flce.gemm_use.default, lines)


# ---- on a GPU ----


def products(device, dtype=torch.bfloat16, bias=False, **knobs):
    knobs = {"max_memory": BUDGET, "save": "grads", **knobs}
    sizes = (TOKENS, HIDDEN, VOCAB)
    return tune.gemms_of(sizes, (dtype,) * 3, bias, torch.device(device, 0), knobs)


def taken(line):
    (_, index), algorithms = tune.candidates_of(line, torch.device("cuda", 0))
    return algorithms[index], algorithms


@pytest.fixture
def use():
    """Selects an algorithm for a GEMM; the default ones are selected again for later tests."""
    lines = []

    def choose(line, algorithm):
        lines.append(line)
        torch.ops.flce.gemm_use(tune.TunedGemm(line, algorithm, 0, 0.0, 0.0).choice())

    yield choose
    for line in dict.fromkeys(lines):
        (shipped, _), algorithms = tune.candidates_of(line, torch.device("cuda", 0))
        choose(line, algorithms[shipped])


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
    whole = memory.as_strided((cols, rows) if transposed else (rows, cols), (pitch, 1))
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
    sizes = {"dtype": dtype, "c_dtype": c_dtype, "k": k, "m": m, "n": n, "pitch_c": n}
    sizes |= {"pitch_a": m if transpose_a else -(-k // 8) * 8}
    sizes |= {"pitch_b": -(-k // 8) * 8 if transpose_b else n}
    sizes |= {"transpose_a": int(transpose_a), "transpose_b": int(transpose_b), "accumulate": 0}
    *_, gpu = like.split(" ", len(tune.PRODUCT))
    numbers = tune.numbers_of(like) | {"workspace_bytes": 32 << 20, "tf32": 0, "bias": 0} | sizes
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
def test_another_choice_is_taken_and_right(cuda, save, use):
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16, device=cuda, std=4.0)
    knobs = {"save": save, "max_memory": BUDGET}
    truth = cases.chunked_truth(case, TOKENS)
    lines = products(cuda, **knobs)
    cases.outcome(flce.linear_cross_entropy, case, **knobs)  # fills the cache of algorithms
    for line in lines:
        use(line, taken(line)[1][-1])
    assert all(taken(line)[0] == taken(line)[1][-1] for line in lines)
    first, second = (cases.outcome(flce.linear_cross_entropy, case, **knobs) for _ in range(2))
    assert cases.same_bits(first, second)
    for name in ("input", "linear_weight"):
        assert cases.relative_error(first[name], truth[name]) <= 4e-3


def test_a_choice_that_is_no_candidate_is_passed_over(cuda, use):
    line = products(cuda)[0]
    before = taken(line)[0]
    use(line, " ".join(["12345"] * 10))
    assert taken(line)[0] == before


def test_a_file_serves_another_process(cuda, tmp_path):
    """Its lines are those of the step's GEMMs; a process that passes them on uses them."""
    path = tmp_path / "gemms.txt"
    options = ["--options", json.dumps({"save": "grads", "max_memory": BUDGET})]
    tune.main([*map(str, (TOKENS, HIDDEN, VOCAB)), *options, "--out", str(path)])
    lines = products(cuda)
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(lines)
    # Other algorithms than the default ones, so that the new process shows a difference.
    last = (tune.TunedGemm(line, taken(line)[1][-1], 0, 0.0, 0.0).choice() for line in lines)
    path.write_text("\n".join(last), encoding="utf-8")
    code = (
        "import flce, torch, sys\n"
        "torch.ops.flce.gemm_use(open(sys.argv[1]).read())\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    rows = torch.ops.flce.gemm_candidates(0, line).splitlines()\n"
        "    assert int(rows[0].split()[1]) == len(rows) - 2, line\n"
    )
    command, text = [sys.executable, "-c", code, str(path)], "\n".join(lines)
    subprocess.run(command, input=text, text=True, timeout=300, check=True)


def test_threads_do_not_share_descriptors(cuda):
    """Two threads with different biases run the same GEMMs, each on its stream."""
    made = [
        cases.make_case(64, HIDDEN, VOCAB, dtype=torch.bfloat16, device=cuda, bias=True, seed=seed)
        for seed in (1, 2)
    ]
    expected = [cases.outcome(flce.linear_cross_entropy, case) for case in made]
    torch.cuda.synchronize()

    def same(case, truth):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = cases.outcome(flce.linear_cross_entropy, case)
                torch.cuda.current_stream().synchronize()
                yield cases.same_bits(got, truth)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda pair: all(same(*pair)), zip(made, expected, strict=True)))
