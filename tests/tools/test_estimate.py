"""`flce.estimate`: against the measured steps of docs/fuse.md, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flce
from flce.estimate import (
    Training,
    estimate,
    find_gpu,
    gpu_names,
    hub_names,
    model_of_sizes,
    read_model,
)
from flce.estimate.__main__ import main
from flce.estimate.memory import eager_loss_bytes, liger_loss_bytes, token_bytes

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


# Of Liger's loss in these steps, in the order of MEASURED without those of several sequences.
LIGER = [17715915264, 13213526528, 11204054016, 10024267264, 15827085824, 7128768512]
SINGLE = [row for row in MEASURED if row[3] == 1]


@pytest.mark.parametrize(("row", "measured"), list(zip(SINGLE, LIGER, strict=True)), ids=str)
def test_peak_memory_of_liger_is_the_measured_one(row, measured):
    name, layers, tokens, _, checkpointing, *_ = row
    training = Training(optimizer="sgd", checkpointing=checkpointing)
    found = estimate(model_of(name, layers), tokens, gpu="h200", training=training)
    assert found.liger.peak == pytest.approx(measured, rel=0.05)


# Tokens, hidden, vocab: GB and ms of Liger's loss alone on an H200 (README.md).
LIGER_ALONE = [
    ((8192, 4096, 128256), 1.18, 56.2),
    ((4096, 4096, 128256), 1.12, 46.3),
    ((8192, 2304, 256000), 1.28, 110.9),
    ((16384, 2048, 151936), 0.77, 68.9),
    ((8192, 4096, 32000), 0.39, 10.4),
]


@pytest.mark.parametrize(("sizes", "gigabytes", "milliseconds"), LIGER_ALONE, ids=str)
def test_liger_alone_is_the_measured_one(sizes, gigabytes, milliseconds):
    tokens, hidden, vocab = sizes
    model = model_of_sizes(hidden, vocab, 0)
    assert liger_loss_bytes(model, tokens, Training()) == pytest.approx(1e9 * gigabytes, rel=0.02)
    taken = estimate(model, tokens, gpu="h200").times.liger_head
    assert taken == pytest.approx(1e-3 * milliseconds, rel=0.3)


# Name: parameters in billions, as the model's page says.
NAMED = {
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8.03,
    "llama-3.3-70b-instruct": 70.6,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49,
    "Qwen/Qwen2.5-7B": 7.62,
    "qwen3-8b-base": 8.19,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "google/gemma-2-2b-it": 2.61,
    "google/gemma-2-9b": 9.24,
    "google/gemma-3-1b-pt": 1.00,
    "google/gemma-3-27b-it": 27.0,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/phi-4": 14.7,
    "gpt2": 0.124,
    "openai-community/gpt2-xl": 1.56,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
    "HuggingFaceTB/SmolLM3-3B-Base": 3.08,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03,
    "deepseek-ai/deepseek-llm-7b-base": 6.91,
    "TinyLlama/TinyLlama-1.1B": 1.10,
}


@pytest.mark.parametrize("name", NAMED)
def test_models_by_their_name_on_the_hub(name):
    assert read_model(name).parameters == pytest.approx(1e9 * NAMED[name], rel=0.02)


def test_every_name_of_the_hub_is_a_model():
    for name in hub_names():
        model = read_model(name)
        assert model.name == name.rsplit("/", 1)[-1]
        assert model.hidden % 64 == 0 and model.heads % model.kv_heads == 0
    for name, config in (("Llama-3.2-1B", LLAMA), ("Qwen3-8B", QWEN), ("gemma-3-270m", GEMMA)):
        known = model_of(config)  # Gemma's has transformers' default window, not the published one
        changes = {"name": known.name, "window": known.window}
        assert replace(read_model(name), **changes) == known


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIGS / f"{QWEN}.json", tmp_path / "gpt2")
    assert read_model("gpt2").hidden == 4096 and read_model("GPT2").hidden == 768


def test_configurations_of_gpt2(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": null, '
        '"vocab_size": 50257}'
    )
    model = read_model(path)
    assert (model.hidden, model.layers, model.intermediate, model.gated) == (768, 12, 3072, False)
    assert replace(model, name="gpt2") == read_model("gpt2")


def test_mixtures_of_experts(tmp_path):
    """Of all experts there are parameters; a token is multiplied by some, and keeps theirs."""
    path = tmp_path / "config.json"
    path.write_text(LLAMA_WITH % '"num_local_experts": 8, "num_experts_per_tok": 2')
    model, dense = read_model(path), replace(read_model(path), experts=0, active=0)
    mlp = 3 * 8 * 16
    assert model.layer_parameters == dense.layer_parameters + 7 * mlp + 8 * 8
    assert model.active_parameters == dense.layer_parameters + mlp + 8 * 8
    assert model.width == 2 * dense.width
    path.write_text(
        LLAMA_WITH % '"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4, '
        '"n_shared_experts": 1'
    )
    assert read_model(path).width == 12 and read_model(path).shared == 1


def test_adapters_train_themselves_alone():
    model = model_of(LLAMA)
    assert model.adapter_parameters(16) == 11272192  # as PEFT says of all linear layers, r=16
    whole, lora = (
        estimate(model, 8192, training=Training(lora=rank, checkpointing=True)) for rank in (0, 16)
    )
    size = 2 * (model.parameters + 11272192)
    assert lora.eager.update == size + 2 * 11272192 * 4  # gradients, two moments and AdamW's step
    assert lora.plan.buffers.keys().isdisjoint({"grad_weight"})
    assert lora.flce.loss < whole.flce.loss and lora.times.eager < whole.times.eager


def test_fsdp_divides_what_is_there_for_each_parameter():
    model = model_of(LLAMA)
    peaks = [estimate(model, 1024, training=Training(fsdp=n)).eager for n in (1, 2, 8)]
    assert peaks[1].update == pytest.approx(peaks[0].update / 2, rel=1e-6)
    assert peaks[2].update == pytest.approx(peaks[0].update / 8, rel=1e-6)
    assert peaks[0].loss > peaks[2].loss
    gathered = 2 * (2 * model.layer_parameters + model.head_parameters)
    kept = 3 * 2 * model.parameters  # with two moments
    assert peaks[0].loss - peaks[2].loss == pytest.approx(kept * 7 / 8 - gathered, rel=1e-6)


def test_it_does_not_help_a_step_of_hardly_any_tokens(capsys):
    """A share of next to nothing is nothing, and a longer sequence is not what this step needs."""
    for name in ("gpt2", "Llama-3.2-1B"):
        assert main(["--model", name, "--tokens", "100"]) == 0
        text = capsys.readouterr().out
        assert "It will not help" in text and "It helps" not in text and " 0 ms" not in text
        assert "It would for long sequences: up to" in " ".join(text.split())
    assert not estimate(model_of_sizes(64, 1000, 1), 100).advice.options


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("RTX4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("rtx-a6000", "a6000"),
        ("L40S", "l40s"),
        ("A100-40GB", "a100-40gb"),
        ("GH200", "gh200"),
    ],
)
def test_gpus_by_name_in_any_spelling(text, name):
    assert find_gpu(text).text == name


def test_every_gpu_has_a_plan():
    names = gpu_names()
    assert len(names) == len(set(names))
    assert {"a10", "l4", "rtx5090", "h20", "b300", "h200"} <= set(names)
    for name in names:
        found = find_gpu(name)
        assert found.multiply_adds > 1e13 and found.bandwidth > 1e11
        assert estimate(model_of_sizes(1024, 32000, 2), 4096, gpu=name).plan.peak_bytes > 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("8k", 8192), ("8K", 8192), ("1.5k", 1536), ("1m", 1 << 20), ("8_192", 8192), ("8,192", 8192)],
)
def test_numbers_of_tokens(text, count, capsys):
    assert main(["--hidden", "64", "--vocab", "1000", "--tokens", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == count


@pytest.mark.parametrize("text", ["k", "8x", "0.3k", "-8", ""])
def test_what_is_no_number_of_tokens(text, capsys):
    with pytest.raises(SystemExit):
        main(["--hidden", "64", "--vocab", "1000", f"--tokens={text}"])
    assert f"expected a number such as 8192 or 8k, got {text!r}" in capsys.readouterr().err


def test_lines_end_at_the_width_of_the_terminal(monkeypatch, capsys):
    for width in (76, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["--model", "gpt2", "--tokens", "64k", "--fsdp", "2", "--lora"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= max(width, 76)
        assert any(line.startswith("  - ") for line in lines)


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
        ("--model /none --tokens 8", "model: expected a config.json, its folder or a name .*none'"),
        (
            "--model Qwen/Qwen3-9B --tokens 8",
            "model: expected .*, got 'Qwen/Qwen3-9B'; similar names: Qwen/Qwen3-",
        ),
        ("--hidden 8 --vocab 9 --tokens 8 --fsdp 0", "fsdp: expected 1 or more, got 0"),
        ("--hidden 8 --vocab 9 --tokens 8 --lora -1", "lora: expected 0 or more, got -1"),
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
        (LLAMA_WITH % '"num_experts": 4', "model: expected num_experts_per_tok from 1 to 4"),
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
    environment = {**os.environ, "COLUMNS": "88"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    page = (Path(flce.__file__).parents[1] / "docs" / "estimate.md").read_text()
    assert done.stdout in page  # the example of the page is what the command prints
