"""Trains a small Llama by transformers' Trainer, then LoRA on it, each with and without flce.

The text is that of train_lm.py: the Python standard library's own source and a BPE of 32000 entries
made from it. A Llama with random weights is trained on the first three quarters; PEFT's adapters on
its attention and its head are trained on the last quarter. Nothing is downloaded. Each run is a
process of its own, with the same seed and the same batches: in float32 the loss curves with and
without flce have to agree within 1e-3, else the exit status is 1.

    python examples/finetune_hf.py                   # two CPU cores, one to three minutes
    python examples/finetune_hf.py --device cuda     # a larger model, bfloat16 autocast
"""

import argparse
import gc
import itertools
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from train_lm import (
    MIB,
    SEED,
    TOLERANCE,
    VOCAB,
    largest_difference,
    load_tokens,
    process_memory,
    pyplot,
)

from flce.integrations.transformers import FuseCallback

TRAININGS = {"full": "all weights", "lora": "LoRA on attention and head"}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
# Loaded once, by the server that the processes of all runs are forked from.
PRELOADED = ["peft", "transformers.trainer", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Preset:
    text_bytes: int  # of source text to read
    layers: int
    hidden: int
    heads: int
    batch: int  # sequences of one forward
    accumulation: int  # forwards of a step
    sequence: int
    steps: int
    learning_rate: float
    max_memory: str  # flce's bound for logits


PRESETS = {
    "cpu": Preset(4 * 10**6, 2, 256, 4, 8, 2, 128, 12, 1e-3, "32MiB"),
    "cuda": Preset(24 * 10**6, 8, 1024, 16, 16, 2, 512, 200, 3e-4, "256MiB"),
}


@dataclass(frozen=True)
class Run:
    """One training, in a process of its own."""

    training: str  # a name in TRAININGS
    is_fused: bool
    preset: Preset
    steps: int
    device: str
    folder: Path

    @property
    def loss(self):
        return "flce" if self.is_fused else "eager"


@dataclass(frozen=True)
class Result:
    curve: list  # the loss of each step
    rate: float  # tokens a second, of the median step after the first one
    memory: int  # bytes


class Text(torch.utils.data.Dataset):
    """Sequences of the corpus, one after the other; the model shifts the labels itself."""

    def __init__(self, tokens, length):
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def text_of(run):
    tokens = load_tokens(run.preset.text_bytes, run.folder)
    border = len(tokens) * 3 // 4
    part = tokens[:border] if run.training == "full" else tokens[border:]
    return Text(part, run.preset.sequence)


# ---- one run ----


def build_model(run):
    """A Llama with random weights, or the trained one with adapters on it."""
    preset = run.preset
    if run.training == "lora":
        trained = transformers.LlamaForCausalLM.from_pretrained(run.folder / "model")
        return get_peft_model(trained, LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTED))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=preset.hidden,
            intermediate_size=4 * preset.hidden,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            num_key_value_heads=preset.heads,
            max_position_embeddings=preset.sequence,
        )
    )


class Progress(transformers.trainer_callback.ProgressCallback):
    """The Trainer's own bar, with the loss behind it; keeps the loss and the time of each step."""

    def __init__(self):
        super().__init__()
        self.losses, self.ends = [], []

    def on_step_end(self, args, state, control, **others):
        super().on_step_end(args, state, control, **others)
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4f}")


def build_trainer(run, model, data):
    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=run.preset.batch,
        gradient_accumulation_steps=run.preset.accumulation,
        learning_rate=run.preset.learning_rate,
        lr_scheduler_type="constant",
        bf16=run.device == "cuda",
        use_cpu=run.device == "cpu",
        dataloader_pin_memory=run.device == "cuda",
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    callbacks = []
    if run.is_fused:
        callbacks.append(FuseCallback(strict=True, max_memory=run.preset.max_memory))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.trainer_callback.ProgressCallback)
    trainer.add_callback(progress := Progress())
    return trainer, progress


def train(run):
    """Called in the run's process. Saves the model that the adapters are put on.

    Its memory is the most that model, gradients, optimizer and activations took together. CPU: by
    how much this process grew. CUDA: torch.cuda.max_memory_allocated.
    """
    # Notes of transformers and PEFT would break the progress bars.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    data = text_of(run)
    gc.collect()
    before = process_memory("VmRSS")
    transformers.set_seed(SEED)
    trainer, progress = build_trainer(run, build_model(run), data)
    trainer.train()
    if run.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = process_memory("VmHWM") - before
    if run.training == "full" and not run.is_fused:
        trainer.model.save_pretrained(run.folder / "model")
    tokens = run.preset.batch * run.preset.accumulation * run.preset.sequence
    seconds = statistics.median(end - start for start, end in itertools.pairwise(progress.ends))
    return Result(progress.losses, tokens / seconds, memory)


def train_all(preset, arguments):
    """{(training, loss): Result}; a new process has none of the memory of the runs before it."""
    steps = preset.steps if arguments.steps is None else arguments.steps
    # With several GPUs and one process the Trainer takes nn.DataParallel, which fuse refuses.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = first
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = {}
    for training, title in TRAININGS.items():
        for is_fused in (False, True):
            run = Run(training, is_fused, preset, steps, arguments.device, arguments.out)
            print(f"training {title}, {run.loss}", flush=True)
            with ProcessPoolExecutor(1, context) as executor:
                results[training, run.loss] = executor.submit(train, run).result()
    return results


# ---- report ----


def plot(results, path):
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, (training, title) in zip(axes, TRAININGS.items(), strict=True):
        for loss, style in (("eager", "-"), ("flce", "--")):
            curve = results[training, loss].curve
            axis.plot(range(1, len(curve) + 1), curve, style, label=loss, linewidth=2)
        axis.set(xlabel="step", ylabel="loss", title=title)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def report(results, preset, device):
    """Prints the table; the largest relative difference of two curves."""
    rows = preset.batch * preset.sequence
    print(f"\nhead: {rows} tokens x {preset.hidden} hidden x {VOCAB} entries, {device}")
    print(f"{'training':28}{'loss':8}{'last loss':>10}{'tokens/s':>10}{'peak memory':>14}")
    for (training, loss), result in results.items():
        print(
            f"{TRAININGS[training]:28}{loss:8}{result.curve[-1]:10.5f}{result.rate:10.0f}"
            f"{result.memory / MIB:10.0f} MiB"
        )
    eager, ours = (
        sum((results[training, loss].curve for training in TRAININGS), [])
        for loss in ("eager", "flce")
    )
    difference = largest_difference(eager, ours)
    print(f"largest relative difference of the loss curves: {difference:.2e}")
    return difference


def step_count(text):
    if int(text) < 2:
        raise argparse.ArgumentTypeError("expected at least 2: the first one is not timed")
    return int(text)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=PRESETS, default="cpu")
    parser.add_argument("--steps", type=step_count, help="of each run (default: 12, 200)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all results")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    preset = PRESETS[arguments.device]
    arguments.out.mkdir(parents=True, exist_ok=True)
    load_tokens(preset.text_bytes, arguments.out)
    results = train_all(preset, arguments)
    picture = arguments.out / "losses-hf.png"
    plot(results, picture)
    difference = report(results, preset, arguments.device)
    print(f"picture: {picture}")
    # Sixteen-bit rounding alone parts two runs further than this; NaN fails.
    if arguments.device == "cpu" and not difference <= TOLERANCE:
        print(f"the loss curves differ by more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
