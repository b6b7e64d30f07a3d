"""A plan as a user reads it, and as a program does; the names that a user sees."""

import json

import pytest
import torch

import flce
from flce.plan_words import mib

SIZES = (8192, 4096, 128256)
PLANS = {
    "grads": dict(device="h100"),
    "logits": dict(device="cpu", ranks=8),
    "stats": dict(device="h100", save="stats", max_memory="256MiB"),
    "samples": dict(device="h200", gradient="sampled"),
    "nothing": dict(device="h100", grad_input=False, grad_weight=False),
}


@pytest.mark.parametrize("save", PLANS)
def test_the_summary_names_loop_memory_and_peak_without_names_of_fields(save):
    plan = flce.plan(*SIZES, **PLANS[save])
    assert plan.save == save
    text = str(plan)
    assert text.startswith(f'save="{save}": ') and "8,192 rows" in text
    assert f"{plan.forward_gemms} in the forward" in text
    assert f"{mib(plan.peak_bytes)} at the peak" in text
    assert not {"=", "_bytes"} & {*text.replace('save="', "").split()}
    assert "grad_weight" not in text and "bytes" not in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_parts_of_the_peak_are_those_of_the_plan(monkeypatch):
    monkeypatch.delenv("FLCE_KERNEL", raising=False)
    plan = flce.plan(*SIZES, device="h100", max_memory="256MiB")
    buffers = plan.buffers
    first, rows, _, memory, *parts = str(plan).splitlines()
    assert first == 'save="grads": the forward makes the gradients, the backward scales them'
    assert rows == f"8,192 rows in {plan.chunks} chunks of up to {plan.chunk_rows:,}"
    assert memory == (
        f"memory over the inputs: {mib(plan.peak_bytes)} at the peak, in the forward (forward "
        f"{mib(plan.forward_peak_bytes)}, backward 1,066 MiB)"
    )
    named = ("gradient of linear_weight", "logits of a chunk", "gradient of input")
    sizes = [buffers[name] for name in ("grad_weight", "logits", "grad_input")]
    others = sum(buffers.values()) - sum(sizes)
    expected = zip((*named, "workspace and small tensors"), (*sizes, others), strict=True)
    assert parts == [f"  {name:42}{mib(size):>12}" for name, size in expected]


def test_blocks_and_ranks_are_told():
    blocks = flce.plan(*SIZES, device="h100", max_memory="8MiB")
    assert f"by blocks of {blocks.block_rows:,} rows x {blocks.block_classes:,}" in str(blocks)
    assert blocks.blocks == "dx_first"
    whole = f"gradient by blocks over all rows for the first {blocks.whole_classes:,} classes, by"
    assert whole in str(blocks)
    ranks = flce.plan(*SIZES, device="cpu", ranks=8)
    received = sum(one.bytes for one in ranks.collectives.values())
    assert str(ranks).endswith(f"one of 8 ranks: receives {mib(received)} in 3 exchanges")


def test_every_buffer_that_has_words_exists():
    from flce import plan_words

    plans = [flce.plan(*SIZES, **options) for options in PLANS.values()]
    plans.append(flce.plan(*SIZES, device="h100", bias=True, return_predictions=True))
    plans.append(flce.plan(*SIZES, device="h100", teacher_hidden=64))
    plans.append(flce.plan(*SIZES, device="h100", teacher_logits=4))
    plans.append(flce.plan(*SIZES, device="h100", max_memory="16MiB", accum_dtype=torch.float32))
    known = set().union(*(plan.buffers for plan in plans))
    assert plan_words._BUFFERS.keys() <= known


def test_the_fields_as_a_dict():
    plan = flce.plan(*SIZES, device="cpu", ranks=8)
    fields = json.loads(json.dumps(plan.as_dict()))
    assert fields["save"] == plan.save and fields["buffers"] == plan.buffers
    assert fields["collectives"]["statistics"]["bytes"] == plan.collectives["statistics"].bytes
    assert "text" not in fields and f"chunk_rows={fields['chunk_rows']}" in plan.text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 KiB"), (2570, "2.51 KiB"), (1 << 20, "1 MiB"), (1 << 30, "1,024 MiB")],
)
def test_sizes(size, text):
    assert mib(size) == text


@pytest.mark.parametrize("module", [flce, flce.integrations])
def test_dir_shows_public_names_alone(module):
    shown = set(dir(module))
    assert shown - {"__version__"} == set(module.__all__)
