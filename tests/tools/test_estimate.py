"""`flce.estimate`: against the measured steps of docs/fuse.md, and what it refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flce
from flce.estimate import Training, estimate, find_gpu, model_of_sizes, read_model
from flce.estimate.__main__ import main
from flce.estimate.memory import eager_loss_bytes, token_bytes

CONFIGS = Path(__file__).with_name("configs")
LLAMA, QWEN, GEMMA = "llama-3.2-1b", "qwen3-8b", "gemma-3-270m"
# Model, layers, tokens, sequences, checkpointing; peak bytes of the eager loss and of flce.fuse:
# benchmarks/results/2026-11-23-h200-models.json, -models-batch.json. SGD, bfloat16.
MEASURED = [
    (LLAMA, 16, 8192, 1, False, 29529201152, 18628270592),
    (QWEN, 4, 8192, 1, False, 26366888448, 13457351168),
    (GEMMA, 18, 8192, 1, False, 36541841408, 12247373824),
    (LLAMA, 16, 8192, 4, False, 29527628288, 18626763264),
    (QWEN, 4, 8192, 4, False, 26363742720, 13454270976),
    (GEMMA, 18, 8192, 4, False, 34515992576, 10219493376),
    (LLAMA, 16, 32768, 1, True, 55665498624, 10024267264),
    (QWEN, 4, 32768, 1, True, 66010692096, 15827085824),
    (GEMMA, 18, 32768, 1, True, 105789790208, 7128768512),
]
# The longest sequences that were run (those of flce were extrapolated), within 80e9 bytes.
RUN = [(LLAMA, 16, 47104), (GEMMA, 18, 24576), (QWEN, 4, 38912)]


def model_of(name, layers=None):
    return read_model(CONFIGS / f"{name}.json", layers=layers)


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_peak_memory_is_the_measured_one(row):
    name, layers, tokens, sequences, checkpointing, eager, fused = row
    training = Training(optimizer="sgd", checkpointing=checkpointing, sequences=sequences)
    found = estimate(model_of(name, layers), tokens, gpu="h200", training=training)
    assert found.eager.peak == pytest.approx(eager, rel=0.05)
    assert found.flce.peak == pytest.approx(fused, rel=0.05)
    assert found.helps and found.advice.verdict.startswith("It helps: ")


@pytest.mark.parametrize(("name", "layers", "tokens"), RUN)
def test_the_longest_sequence_is_the_measured_one(name, layers, tokens):
    gpu = find_gpu("h200")._replace(memory=80 * 10**9 + (1 << 30))  # 1 GiB is reserved
    training = Training(optimizer="sgd", checkpointing=True)
    found = estimate(model_of(name, layers), 8192, gpu=gpu, training=training)
    assert found.longest.eager == pytest.approx(tokens, rel=0.05)
    assert found.longest.flce > 3 * found.longest.eager


def test_parameters():
    counted = [model_of(name).parameters for name in (LLAMA, QWEN, GEMMA)]
    assert counted == [1235814400, 8190735360, 268098176]


def test_it_says_where_it_will_not_help():
    small = model_of_sizes(4096, 512, 32)
    found = estimate(small, 8192, gpu="h200", training=Training(checkpointing=True))
    assert not found.helps and found.advice.verdict.startswith("It will not help: ")
    assert not found.advice.options
    assert found.eager.moment == "update" and "optimizer's step" in found.advice.verdict


def test_what_the_plan_changes():
    model = model_of(LLAMA)
    large = estimate(model, 8192, gpu="h100")
    less = estimate(model, 8192, gpu="h100", max_memory="256MiB")
    assert less.flce.peak < large.flce.peak and less.eager == large.eager
    planned = flce.plan(8192, 2048, 128256, device="h100")
    assert large.plan == planned
    assert large.flce.loss - large.eager.loss == planned.peak_bytes - eager_loss_bytes(
        model, 8192, Training()
    )
    offered = [option for option in large.advice.options if option.startswith("max_memory")]
    saved = (large.flce.peak - less.flce.peak) / 2**30
    assert offered == [f'max_memory="256MiB": {saved:.2f} GiB less, a little slower']


def test_accumulation_is_offered_where_it_saves_memory():
    """The default keeps logits for it, which take more than the weight's gradient."""
    training, offered = Training(optimizer="sgd", checkpointing=True), []
    for memory in (None, "256MiB", "512MiB"):
        found = estimate(model_of(LLAMA), 8192, training=training, max_memory=memory)
        offered.append(any("accumulate_into" in option for option in found.advice.options))
    assert offered == [False, True, True]


def test_optimizers_and_dtypes():
    model = model_of(LLAMA)

    def update_of(**training):
        return estimate(model, 1024, training=Training(**training)).eager.update

    size = 2 * model.parameters
    assert update_of(optimizer="sgd") == 2 * size  # parameters and gradients
    assert update_of(optimizer="adamw-fused") == 4 * size
    assert update_of(optimizer="adamw") == 5 * size
    assert update_of(optimizer=12.0) == 8 * size
    assert update_of(optimizer="sgd", dtype=torch.float32) == 4 * size


def test_masks_of_a_window():
    """A mask where a sequence is longer than the window, unless attention needs none."""
    short = replace(model_of(QWEN), window=1024, windowed=4, kv_heads=8)
    masked = token_bytes(short, Training(), True) - token_bytes(short, Training(), False)
    assert masked == 2 * 2 * (32 - 8) * 128
    losses = [
        estimate(short, 4096, training=Training(sequences=n, flash=flash)).eager.loss
        for n, flash in ((1, False), (4, False), (1, True))
    ]
    assert losses[0] > losses[1] == losses[2]


def test_a_gpu_of_numbers(capsys):
    """Times with the rates alone; shares of them."""
    sizes = ["--hidden", "2048", "--vocab", "32000", "--layers", "2", "--tokens", "4096", "--json"]
    assert main([*sizes, "--gpu", "90,132,85899345920"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert main([*sizes, "--gpu", "90,132,85899345920,989,3.35"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "seconds" not in without["eager"] and found["eager"]["seconds"] > 0
    assert 0 < found["flce"]["head_share"] < found["eager"]["head_share"] < 1
    assert found["plan"] == without["plan"] and found["gpu"]["multiply_adds"] == 989e12 / 2
    assert found["eager"]["peak_bytes"] == max(found["eager"]["moments"].values())


def test_a_folder_and_its_text_config(tmp_path, capsys):
    config = json.loads((CONFIGS / f"{GEMMA}.json").read_text())
    whole = {"model_type": "gemma3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert replace(read_model(tmp_path), name=GEMMA) == model_of(GEMMA)
    assert main(["--model", str(tmp_path), "--tokens", "1024"]) == 0
    text = capsys.readouterr().out
    assert "0.27 B parameters" in text and "GiB" in text and "It helps: " in text
    config["attn_logit_softcapping"] = 50.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).windowed == 0 and "flash-attn" in read_model(tmp_path).notes[0]
    del config["attn_logit_softcapping"]
    config["model_type"] = "unheard"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).notes == ("model_type 'unheard' is taken for a Llama of its sizes",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 8", "hidden: expected --model, or --hidden and --vocab"),
        ("--model /none --tokens 8", "model: expected a config.json or its folder, got '/none'"),
        (
            "--hidden 8 --vocab 9 --tokens 8 --gpu h101",
            r"gpu: expected a100, .*, or numbers \(compute capability from 80 on, multiprocessors, "
            r"bytes of memory\), got 'h101'",
        ),
        ("--hidden 8 --vocab 9 --tokens 8 --gpu cpu", "gpu: expected a100, .*, got 'cpu'"),
        ("--hidden 8 --vocab 9 --tokens 8 --gpu 90,1,99,-1,1", "gpu: expected positive TFLOP/s"),
        ("--hidden 0 --vocab 9 --tokens 8", "hidden: expected 1 or more, got 0"),
        ("--hidden 8 --vocab 9 --tokens 0", "tokens: expected a positive multiple of 1 seq"),
        (f"--hidden 8 --vocab 9 --tokens {1 << 31}", f"tokens: .*, less than {1 << 31}, got"),
        (f"--hidden {1 << 31} --vocab 9 --tokens 8", f"hidden: expected less than {1 << 31}, got"),
        pytest.param(f"--model {'x' * 300} --tokens 8", ".*File name too long", id="long name"),
        ("--hidden 8 --vocab 9 --tokens 7 --sequences 2", "tokens: expected a positive multiple"),
        ("--hidden 8 --vocab 9 --tokens 8 --sequences 0", "sequences: expected 1 or more, got 0"),
        ("--hidden 8 --vocab 9 --tokens 8 --optimizer 99", "optimizer: expected 0 to 64 bytes"),
        ("--hidden 8 --vocab 9 --tokens 8 --max-memory x", "max_memory: expected a positive"),
    ],
)
def test_refusals_of_the_command(arguments, message, capsys):
    assert main(arguments.split()) == 2
    errors = capsys.readouterr().err
    assert re.match(f"flce.estimate: {message}", errors), errors


LLAMA_WITH = """{"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 2,
"num_attention_heads": 2, "intermediate_size": 16, "text_config": null, %s}"""


def test_numbers_that_a_configuration_may_have(tmp_path):
    path = tmp_path / "config.json"
    for types, windowed in (([], 2), (["sliding_attention"] * 9, 2), (None, 2)):
        path.write_text(LLAMA_WITH % f'"sliding_window": 8, "layer_types": {json.dumps(types)}')
        assert read_model(path).windowed == windowed
    path.write_text(LLAMA_WITH % '"sliding_window": null')
    assert read_model(path).window == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[", "model: expected JSON"),
        ("[]", "model: expected an object"),
        pytest.param("[" * 100_000, "model: expected JSON", id="too deep"),
        ('{"text_config": "x"}', "model: expected an object text_config"),
        (LLAMA_WITH % '"sliding_window": "x"', "model: expected an integer sliding_window"),
        (
            LLAMA_WITH % '"sliding_window": 8, "sliding_window_pattern": "x"',
            "model: expected an integer sliding_window_pattern",
        ),
        ("{}", "model: expected an integer hidden_size"),
        ('{"hidden_size": 8, "num_experts": 4}', "model: expected a dense decoder"),
    ],
)
def test_refusals_of_a_configuration(config, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(ValueError, match=message):
        read_model(path)


def test_the_command():
    command = [sys.executable, "-W", "ignore", "-m", "flce.estimate", "--tokens", "8192"]
    command += ["--model", str(CONFIGS / f"{LLAMA}.json"), "--gpu", "h100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (Path(flce.__file__).parents[1] / "docs" / "estimate.md").read_text()
    assert done.stdout in page  # the example of the page is what the command prints
