"""benchmarks/predict.py against the records of one and two H200, and facts that hold for any
machine. Of the records the rate of the bare products, the passes' bandwidth and the links' were
fitted to two GPUs' products, profile and single exchanges (comments in predict.py); the steps, and
everything of one GPU, were not."""

import dataclasses
import json
import statistics
import sys

import pytest

from harness import ROOT

RESULTS = ROOT / "benchmarks" / "results"
HEAD = 8192, 4096, 128256
RANKS = (2, 4, 8, 16, 64, 1024)


@pytest.fixture
def model(scripts):
    return scripts("predict")


def of_head(model, ranks=2, transport=None, **options):
    plan = model.make_plan(*HEAD, ranks, **options)
    return model.predict(plan, *HEAD[1:], transport=transport)


def measured_ratios(contestant, runs):
    record = json.loads((RESULTS / "2026-11-23-h200x2-vocab-parallel.json").read_text())
    rows = [row for row in record["rows"] if row["contestant"] == contestant]
    return [row["ratio"] for row in rows if row["run"] in runs]


COPIES, NCCL = ("copies1", "copies2"), ("nccl1", "nccl2")


@pytest.mark.parametrize(
    ("contestant", "runs", "options"),
    [
        ("flce", COPIES, {"chunks": 2}),
        ("flce", NCCL, {"chunks": 2}),
        ("sequence", COPIES, {"chunks": 2, "sequence": True}),
        ("sequence", NCCL, {"chunks": 2, "sequence": True}),
        ("logits", COPIES, {"save": "logits"}),
    ],
)
def test_two_gpus(model, contestant, runs, options):
    """Within two points of every run; 2 chunks of 4096 rows are what those runs had."""
    transport = model.NCCL if runs is NCCL else model.COPIES
    predicted = of_head(model, transport=transport, **options)
    measured = measured_ratios(contestant, runs)
    assert len(measured) == 2
    assert all(abs(predicted.ratio - one) < 0.02 for one in measured), (predicted.ratio, measured)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunks"), [(HEAD, 1), ((16384, 8192, 128256), 3), ((8192, 2048, 151936), 1)]
)
def test_four_gpus(model, shape, chunks, sequence):
    """Within three points of the runs' median: single runs differ by as much. Before dW of the last
    chunk was two GEMMs, steps were slower; several copy streams for x have made no difference."""
    names = "vocab-parallel", "copy-streams"
    records = [
        json.loads((RESULTS / f"2026-11-27-h100x4-{name}.json").read_text()) for name in names
    ]
    measured = [
        row["ratio"]
        for record in records
        for row in record["rows"]
        if (row["tokens"], row["hidden"], row["vocab"]) == shape
        and row["contestant"] == ("sequence" if sequence else "flce")
        and not row["run"].startswith("before")
        and "FLCE_PEERS=0" not in row["run"]
    ]
    plan = model.make_plan(*shape, 4, chunks=chunks, sequence=sequence)
    predicted = model.predict(plan, *shape[1:], machine=model.H100)
    assert predicted.ratio == pytest.approx(statistics.median(measured), abs=0.03)


# Milliseconds of the bare products on one H200, medians of runs of benchmarks/results: none of
# these shapes was fitted.
@pytest.mark.parametrize(
    ("shape", "lowest", "highest"),
    [
        ((8192, 4096, 32000), 9.22, 9.60),
        ((8192, 2304, 256000), 40.7, 43.3),
        ((16384, 2048, 151936), 43.2, 46.1),
        ((2048, 1024, 32000), 0.535, 0.643),
        ((8192, 768, 50256), 2.70, 2.75),
        ((64, 4096, 128256), 0.843, 0.843),
        ((65536, 4096, 128256), 302, 314),
    ],
)
def test_bare_products_of_one_gpu(model, shape, lowest, highest):
    predicted = 1e3 * model.bare_products(model.H200, *shape)
    assert 0.95 * lowest < predicted < 1.05 * highest


def test_chunks_of_one_gpu(model):
    """Steps by rows of a chunk: what a chunk costs, without any exchange."""
    record = json.loads((RESULTS / "2026-11-22-h200-chunks.json").read_text())
    compared = 0
    for row in record["results"]:
        tokens, hidden, vocab = row["shape"][:3]
        if hidden < 2048:  # it writes E at the memory's rate, which is not modelled
            continue
        for time in row["times"]:
            if time["chunk_rows"] != "1GiB" and not time["chunk_rows"].isdigit():
                continue
            whole = time["chunk_rows"] == "1GiB"
            rows = row["rows_of_1GiB"] if whole else int(time["chunk_rows"])
            plan = model.make_plan(tokens, hidden, vocab, 1, chunks=-(-tokens // rows))
            predicted = model.predict(plan, hidden, vocab)
            assert 1e3 * predicted.step == pytest.approx(time["ms"], rel=0.03), (row["shape"], rows)
            assert predicted.exposed == predicted.exchange == predicted.jitter == 0
            compared += 1
    assert compared == 18


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("save", ["grads", "logits", "stats"])
def test_bytes_are_the_plans(model, save, sequence):
    """The engine's order that predict follows makes every call of the plan once."""
    for ranks in RANKS:
        for chunks in (1, 3):
            plan = model.make_plan(*HEAD, ranks, save, chunks, sequence)
            received = model.predict(plan, *HEAD[1:]).received
            assert received == {
                name: pytest.approx(planned.bytes) for name, planned in plan.collectives.items()
            }
    others, row = 1023 / 1024, 4096 * model.ELEMENT
    assert received["partial_dx"] == pytest.approx(others * 8192 * row)
    assert ("input" in received) == sequence == ("summed_dx" not in received)


def test_parts_of_a_step(model):
    for ranks in RANKS:
        for transport in (None, model.NCCL, model.HIERARCHICAL):
            one = of_head(model, ranks, transport=transport)
            assert 0 <= one.exposed <= one.exchange
            assert min(one.products, one.passes, one.jitter) > 0
            assert one.step == pytest.approx(one.products + one.passes + one.exposed + one.jitter)
            assert transport is not model.NCCL or one.exposed == one.exchange
    # What a product hides: of two ranks all of the all-to-all but the memory's time.
    copies = of_head(model, chunks=2)
    assert copies.exposed < copies.exchange / 2


@pytest.mark.parametrize(
    "name, factor", [("network", 2), ("nccl_latency", 0.5), ("network_latency", 0.5)]
)
@pytest.mark.parametrize("save", ["grads", "logits"])
def test_a_faster_network_is_never_slower(model, name, factor, save):
    faster = dataclasses.replace(model.H200, **{name: factor * getattr(model.H200, name)})
    for transport in (model.NCCL, model.HIERARCHICAL):
        plan = model.make_plan(*HEAD, 64, save)
        before, after = (
            model.predict(plan, *HEAD[1:], machine, transport).step
            for machine in (model.H200, faster)
        )
        assert after < before


def test_meshes(model):
    import meshes
    from problem import SHAPES

    assert meshes.data_parallel(model.H200, 4096, 128256, 8, 1) == (0, 0.0)
    received, seconds = meshes.data_parallel(model.H200, 4096, 128256, 8, 4)
    share = 128256 // 8 * 4096 * model.ELEMENT
    assert received == 2 * share * 3 / 4
    assert seconds > received / model.H200.network
    # Groups inside a host exchange by NVLink.
    assert meshes.data_parallel(model.H200, 4096, 128256, 2, 4)[1] < 4 * seconds
    fixed = meshes.meshes(SHAPES["head"], ranks=(16, 64))
    assert [row["tokens"] * row["ranks"] // row["tp"] for row in fixed] == [8192, 8192]
    alone = meshes.best(*HEAD, 16, saves=("grads",), sequences=(False,))
    assert fixed[0]["step"] <= alone.step
    grown = meshes.meshes(SHAPES["head"], ranks=(64,), tokens_of=lambda total: 8192 * total // 8)
    assert grown[0]["efficiency"] > fixed[1]["efficiency"]


def test_the_command(model, monkeypatch, tmp_path, capsys):
    """No GPU and no process group; the record has the table's numbers."""
    import meshes
    import scale

    path = tmp_path / "record.json"
    arguments = ["scale.py", "8192x4096x128256", "--predict", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    scale.main()
    shown = capsys.readouterr().out
    (entry,) = json.loads(path.read_text())["shapes"]
    rows = entry["vocabulary"]
    assert [row["ranks"] for row in rows] == [1, *meshes.RANKS]
    assert rows[0]["efficiency"] == 1 and all(0 < row["efficiency"] < 1 for row in rows[1:])
    for row in rows:
        assert f"{1e3 * row['step']:9.3f} {row['efficiency']:6.1%}" in shown
    monkeypatch.setattr(sys, "argv", ["scale.py", "gist", "--predict"])
    with pytest.raises(SystemExit, match="without a bias"):
        scale.main()
