"""Bits of a row's results that do not depend on the rest of its batch (docs/rl-precision.md).

Only a GEMM whose kernel follows from the shape may bring such a dependence, so it is taken away by
operands whose sums of products are exact, or by Hopper's fused logits GEMM.
"""

import json

import pytest
import torch

import batch_invariance
import flce
from batch_invariance import Change, Finding, draw, findings, findings_of_logits
from harness import cases, hopper

ROWS = ("logprobs", "loss", "lse", "entropy", "predictions")
EVERY = (*ROWS, "class logits", "dx", "dx of all")
LEAST_ROWS = 193  # with FLCE_KERNEL=auto the fused kernel needs as many (csrc/architectures.h)
# What every GEMM keeps: a batch of the same shape with the same row passes, and dot products.
ANY_GEMM = dict.fromkeys(("N", "position", "position and N", "ignored rows"), ("class logits",))
ANY_GEMM |= dict.fromkeys(("valid_bound", "max_memory", "save"), ("class logits",))
ANY_GEMM |= {"other rows": EVERY, "no_grad": (*ROWS, "class logits")}
ANY_BATCH = {
    **dict.fromkeys(("N", "position", "position and N", "no row overflows"), ROWS),
    **dict.fromkeys(("other rows", "ignored rows", "valid_bound", "max_memory", "no_grad"), ROWS),
    "linear_loss": ("logprobs",),
}


def broken(found, claims):
    """The claimed results that differ, as text. Every claim has to have been examined."""
    assert {(o.change, o.result) for o in found} >= {(c, r) for c in claims for r in claims[c]}
    return "\n".join(str(o) for o in found if o.differing and o.result in claims[o.change])


def assert_kept(found, claims):
    text = broken(list(found), claims)
    assert not text, text


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("gemm", marks=pytest.mark.skipif(not cases.HAS_CUDA, reason="no CUDA device")),
        pytest.param("fused", marks=hopper.ONLY),
    ]
)
def place(request, monkeypatch):
    """(device, N of the largest batch), with each kernel."""
    if request.param == "cpu":
        return "cpu", 1100
    monkeypatch.setenv("FLCE_KERNEL", request.param)
    return "cuda", 5000


@cases.pairwise(shape=[(64, 193), (1000, 1003)], dtype=[torch.bfloat16, torch.float32])
def test_only_gemms_depend_on_the_batch(place, shape, dtype):
    """Exact logits, whatever the order of their sums: all else of flce adds no dependence."""
    device, tokens = place
    batch = draw(tokens, *shape, dtype, device, exact=True)
    largest = (batch.x.double().abs() @ batch.w.double().abs().T).max()
    assert largest < 2**20, "24 bits hold multiples of 2^-4 up to 2^20"
    assert_kept(findings(batch, lambda change: change.name in ANY_BATCH), ANY_BATCH)


@pytest.mark.parametrize("shape", [(64, 193), (1024, 32064)], ids=str)
def test_the_budgets_make_chunks(place, shape):
    device, tokens = place
    batch = draw(tokens, *shape, torch.bfloat16, device)
    forward, backward = batch_invariance.budgets_of(batch)
    call = {"dtype": batch.x.dtype, "device": device}
    flags = {"grad_input": False, "grad_weight": False, "max_memory": forward}
    assert flce.plan(tokens, *shape, **call, **flags).chunks > 2
    plan = flce.plan(tokens, *shape, **call, save="stats", max_memory=backward)
    assert plan.backward_chunks > 2 or plan.block_classes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_every_gemm_keeps(place, dtype):
    device, tokens = place
    batch = draw(tokens, 200, 1003, dtype, device)
    assert_kept(findings(batch, lambda change: change.name in ANY_GEMM), ANY_GEMM)


@hopper.ONLY
@pytest.mark.parametrize("kernel", ["fused", "auto"])
@pytest.mark.parametrize("shape", [(64, 193), (1000, 1003), (1024, 32064)], ids=str)
def test_rows_of_the_fused_kernel(monkeypatch, shape, kernel):
    """At the largest shape rows are gathered from N = 4187 on."""
    monkeypatch.setenv("FLCE_KERNEL", kernel)
    batch = draw(5000, *shape, hopper.BF16, "cuda")

    def wanted(change):
        enough = kernel == "fused" or len(change.rows) >= LEAST_ROWS
        return change.name in ANY_BATCH and enough

    assert_kept(findings(batch, wanted), ANY_BATCH)


@hopper.ONLY
def test_the_fused_kernel_rounds_no_logits(monkeypatch):
    """logits_dtype lets logits be rounded; this kernel has none in memory."""
    batch = draw(300, 64, 999, hopper.BF16, "cuda")

    def logprobs(kernel, dtype):
        monkeypatch.setenv("FLCE_KERNEL", kernel)
        operands = batch.x.requires_grad_(), batch.w, batch.y
        return flce.linear_logprobs(*operands, entropy=None, logits_dtype=dtype)[0].detach()

    exact, rounded = logprobs("fused", None), logprobs("gemm", hopper.BF16)
    assert torch.equal(logprobs("fused", hopper.BF16), exact)
    assert (rounded - exact).abs().max() > 1e-3 > (logprobs("gemm", None) - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_given_logits(device, dtype):
    """On CUDA of rows that begin at multiples of 16 bytes; else a row's sums follow its address."""
    names = ("other rows", "N", "position", "position and N", "no row overflows")
    claims = dict.fromkeys(names, ("loss", "lse", "entropy", "predictions", "dz"))
    for vocab in (1000, 1003) if device == "cpu" else (1000, 32064):
        assert_kept(findings_of_logits(600, vocab, dtype, device), claims)


def test_a_dependence_is_found(monkeypatch):
    """Of one bit, in the rows of one case alone."""
    own = batch_invariance.results

    def dependent(batch, change, options):
        found = own(batch, change, options)
        if change.case == "N=65":
            found["lse"].view(torch.int32)[7] ^= 1
        return found

    monkeypatch.setattr(batch_invariance, "results", dependent)
    batch = draw(100, 8, 11, torch.bfloat16, "cpu", exact=True)
    found = list(findings(batch, lambda change: change.name in ANY_BATCH))
    (line,) = broken(found, ANY_BATCH).splitlines()
    assert line.startswith("lse, N (N=65): 1 of 65 rows differ, by ")
    with pytest.raises(AssertionError):  # a claim that nothing examined
        broken(found, {**ANY_BATCH, "no such change": ROWS})


def test_the_compared_rows():
    """A batch is those rows of the pool in that order, with the others ignored where it says so."""
    batch = draw(40, 8, 11, torch.float32, "cpu", exact=True)
    rows = torch.tensor([3, 41, 0, 7])
    change = Change("", "", rows, slice(0, None, 2), ignores_others=True)
    made = batch_invariance.results(batch, change, {"save": "logits"})
    truth = (batch.x[rows].double() @ batch.w.double().T).log_softmax(-1)
    expected = truth.gather(-1, batch.y[rows, None])[:, 0]
    expected[1::2] = 0.0
    torch.testing.assert_close(made["logprobs"].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FLCE_KERNEL", "auto")  # main sets it
    path = tmp_path / "matrix.json"
    arguments = ["--device", "cpu", "--shape", "16x40", "--dtype", "bfloat16", "--tokens", "70"]
    batch_invariance.main([*arguments, "--json", str(path)])
    record = json.loads(path.read_text())
    (run,) = record["runs"]
    assert record["tokens"] == 70 and run["kernel"] == "cpu"
    assert set(run["matrix"]) == {*ANY_BATCH, "save", "entropy"}
    assert set(run["matrix"]["N"]) == set(EVERY)
    assert run["matrix"]["other rows"]["dx"] == "same bits"
    assert "other rows         same bits: logprobs, " in capsys.readouterr().out


def test_a_matrix_names_what_differs():
    cases = ("N=1", 1, 0, 0.0), ("N=2", 2, 1, 0.5), ("N=9", 9, 3, 0.25)
    found = [Finding("N", case, "dx", *numbers) for case, *numbers in cases]
    matrix = batch_invariance.matrix_of([*found, Finding("N", "N=1", "lse", 1, 0, 0.0)])
    differing = {"largest": 0.5, "rows": 12, "differing": {"N=2": 1, "N=9": 3}}
    assert matrix == {"N": {"dx": differing, "lse": "same bits"}}
    (line,) = batch_invariance.lines_of(matrix)
    text = "dx: 4 of 12 rows differ, by 5.0e-01 at most (N=2, N=9)"
    assert line.split(maxsplit=1) == ["N", f"same bits: lse; {text}"]
