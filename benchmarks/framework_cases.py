"""What frameworks.py runs: a training of a few steps by each framework, without flce and with it as
docs/frameworks says. Models, tokens and tokenizers are made here; nothing is downloaded."""

import contextlib
import gc
import sys
import time
import types
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

import llama
import torch
import torch.distributed as dist

import flce

SEED = 11
SIZES = {"tiny": llama.Sizes(256, 4, 4, 2, 512, 4096, tied=True), "1b": llama.SIZES["1b"]}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
LEARNING_RATE = 1e-4
# Of what trainers log. GRPO: equal rewards mean that both runs drew the same tokens.
LOGGED = ("loss", "grad_norm", "entropy", "reward")
CLIP = 1.0  # the norm to which gradients are clipped, as by transformers' Trainer


@dataclass(frozen=True)
class Run:
    case: str
    size: str
    is_fused: bool
    steps: int
    sequences: int  # of a step, on each rank
    length: int
    completion: int  # tokens that GRPO generates
    device: str
    dtype: torch.dtype
    folder: Path
    rank: int = 0
    ranks: int = 1

    @property
    def sizes(self):
        return SIZES[self.size]


class Meter:
    """Time of each step, between synchronisations, and what the steps logged."""

    def __init__(self, device):
        self.device, self.times, self.logs = device, [], {}

    def _now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self):
        self.started = self._now()

    def end(self):
        self.times.append(1e3 * (self._now() - self.started))

    def log(self, values):
        for name in LOGGED:
            if name in values:
                self.logs.setdefault(name, []).append(float(values[name]))


# ---- models and data ----


def build_model(run, seed=SEED, dtype=None):
    import transformers

    sizes = run.sizes
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=2 * run.length,
        tie_word_embeddings=sizes.tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    with torch.device(run.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or run.dtype)


def build_tokenizer(run):
    """A word is a token, and its name that of its index."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), run.sizes.vocab))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return tokenizer


def draw_ids(run, rows, length, seed=1):
    """(rows, length) tokens, distributed like 1 / (k + 1), as words are; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(rows, length, generator=generator, dtype=torch.float64)
    words = run.sizes.vocab - len(SPECIAL)
    return len(SPECIAL) + (words**uniform - 1).long().clamp_(0, words - 1)


def draw_texts(run, rows, length, seed=1):
    return [" ".join(f"t{i}" for i in row) for row in draw_ids(run, rows, length, seed).tolist()]


def rows_of(run):
    """Rows of all steps, labels included, for transformers' Trainer."""
    ids = draw_ids(run, run.steps * run.sequences, run.length)
    return [{"input_ids": row, "labels": row} for row in ids]


# ---- what flce did ----


def of_fusion(handle):
    left = {**handle.fallbacks, **{f"read: {name}": n for name, n in handle.reads.items()}}
    return {"by_flce": sum(handle.losses.values()), "left": left}


def of_installation(handle):
    calls = dict(handle.calls)
    return {"by_flce": calls.pop("flce", 0), "left": calls}


# ---- loops ----


def train_in_loop(run, parameters, backward):
    """`backward(ids)` computes gradients and returns the loss."""
    meter = Meter(run.device)
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, fused=run.device == "cuda")
    drawn = draw_ids(run, run.steps * run.sequences, run.length, seed=1 + run.rank)
    for ids in drawn.to(run.device).split(run.sequences):
        meter.begin()
        loss = backward(ids)
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.end()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        meter.log({"loss": loss, "grad_norm": norm})
    return meter


def run_accelerate(run):
    """A loop of one's own under accelerate's autocast, of float32 weights."""
    import accelerate

    narrow = run.dtype == torch.bfloat16
    accelerator = accelerate.Accelerator(
        mixed_precision="bf16" if narrow else "no", cpu=run.device == "cpu"
    )
    model = build_model(run, dtype=torch.float32)
    handle = flce.fuse(model) if run.is_fused else None
    model = accelerator.prepare(model)

    def backward(ids):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        return loss.detach()

    return train_in_loop(run, list(model.parameters()), backward), handle and of_fusion(handle)


def run_torchtitan(run):
    """torchtitan's loss, called as its trainer does, on hidden states of transformers' Llama."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from flce.integrations.torchtitan import FlceLoss

    model = build_model(run)
    loss_fn = (FlceLoss if run.is_fused else ChunkedLossWrapper).Config().build()
    loss_fn.set_lm_head(model.lm_head)

    def backward(ids):
        hidden = model.model(input_ids=ids).last_hidden_state
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        valid = torch.tensor(labels[:, 1:].numel(), device=ids.device)
        loss, _ = loss_fn(hidden, labels, valid)
        loss.backward()
        return loss.detach()

    ours = flce.linear_cross_entropy  # FlceLoss has no count of its own
    with unittest.mock.patch.object(flce, "linear_cross_entropy", wraps=ours) as called:
        meter = train_in_loop(run, list(model.parameters()), backward)
    return meter, {"by_flce": called.call_count, "left": {}} if run.is_fused else None


def run_fsdp2(run):
    """Each layer a unit; embedding and head, which are tied, are the root's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(run, dtype=torch.float32)
    mesh = dist.init_device_mesh(run.device, (run.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    handle = flce.fuse(model) if run.is_fused else None

    def backward(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / run.ranks

    return train_in_loop(run, list(model.parameters()), backward), handle and of_fusion(handle)


# ---- trainers ----


def arguments_of(run, **own):
    """Of a transformers.TrainingArguments or one of TRL's; what else they have is its default."""
    common = {
        "output_dir": str(run.folder),
        "max_steps": run.steps,
        "per_device_train_batch_size": run.sequences,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "bf16": run.dtype == torch.bfloat16,
        "use_cpu": run.device == "cpu",
        "dataloader_pin_memory": run.device == "cuda",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
        "seed": SEED,
    }
    return {**common, **own}


def train_by(trainer, run):
    import transformers

    meter = Meter(run.device)

    class Record(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            meter.begin()

        def on_step_end(self, *_, **__):
            meter.end()

        def on_log(self, args, state, control, logs=None, **_):
            meter.log(logs)

    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Record())
    trainer.train()
    return meter


def run_trainer(run):
    """transformers' Trainer with FuseCallback."""
    return _run_trainer(run, build_model(run))


def run_peft(run):
    """LoRA on the attention and the head, by transformers' Trainer."""
    import peft

    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], r=8)
    model = build_model(run)
    torch.manual_seed(SEED)
    return _run_trainer(run, peft.get_peft_model(model, lora))


def _run_trainer(run, model):
    import transformers

    from flce.integrations.transformers import FuseCallback

    callbacks = [FuseCallback()] if run.is_fused else []
    arguments = transformers.TrainingArguments(**arguments_of(run))
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows_of(run), callbacks=callbacks
    )
    meter = train_by(trainer, run)
    return meter, of_fusion(callbacks[0].handle) if run.is_fused else None


def run_trl(run, name, columns, own, extra=None):
    """SFT, DPO or GRPO under flce.integrations.trl.install()."""
    import trl
    from datasets import Dataset

    trainer = getattr(trl, f"{name}Trainer")(
        build_model(run),
        args=getattr(trl, f"{name}Config")(**arguments_of(run, **own)),
        train_dataset=Dataset.from_dict(columns),
        processing_class=build_tokenizer(run),
        **(extra or {}),
    )
    if not run.is_fused:
        return train_by(trainer, run), None
    with flce.integrations.trl.install() as handle:
        return train_by(trainer, run), of_installation(handle)


def run_sft(run):
    texts = draw_texts(run, run.steps * run.sequences, run.length)
    return run_trl(run, "SFT", {"text": texts}, {"max_length": run.length})


def run_dpo(run):
    """Half as many pairs as sequences, the first eighth of each a prompt."""
    pairs, prompt = max(1, run.sequences // 2), run.length // 8
    rows = run.steps * pairs
    columns = {"prompt": draw_texts(run, rows, prompt)}
    for seed, name in ((2, "chosen"), (3, "rejected")):
        texts = draw_texts(run, rows, run.length - prompt, seed)
        columns[name] = [
            f" {text}" for text in texts
        ]  # else its first word joins the prompt's last
    own = {"per_device_train_batch_size": pairs, "max_length": run.length}
    return run_trl(run, "DPO", columns, own, {"ref_model": build_model(run)})


def odd_tokens(completion_ids, **_):
    """A reward that differs between completions of a model that knows nothing."""
    return [sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def run_grpo(run):
    """Four completions of each prompt, four times as many as sequences. The learning rate is TRL's:
    the weights hardly move, so that both runs draw the same tokens."""
    count = 4 * run.sequences
    prompts = draw_texts(run, run.steps * run.sequences, min(32, run.length))
    own = {
        "per_device_train_batch_size": count,
        "num_generations": 4,
        "max_completion_length": run.completion,
        "learning_rate": 1e-6,
    }
    return run_trl(run, "GRPO", {"prompt": prompts}, own, {"reward_funcs": odd_tokens})


def run_gkd(run):
    """Distillation of a model of the same shape, on given completions."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows, prompt = run.steps * max(1, run.sequences // 2), run.length // 8
    asked = draw_texts(run, rows, prompt)
    answered = draw_texts(run, rows, run.length - prompt, 2)
    messages = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": two}]
        for one, two in zip(asked, answered, strict=True)
    ]
    own = {"lmbda": 0.0, "beta": 0.5, "max_length": run.length}
    own["per_device_train_batch_size"] = max(1, run.sequences // 2)
    student, teacher = build_model(run), build_model(run, SEED + 1)
    with contextlib.ExitStack() as stack:
        handle = None
        if run.is_fused:
            stack.enter_context(flce.fuse(student, when="always"))
            stack.enter_context(flce.fuse(teacher, when="always"))
            handle = stack.enter_context(flce.integrations.trl_distillation.install(GKDTrainer))
        trainer = GKDTrainer(
            student,
            teacher,
            args=GKDConfig(**arguments_of(run, **own)),
            train_dataset=Dataset.from_dict({"messages": messages}),
            processing_class=build_tokenizer(run),
        )
        meter = train_by(trainer, run)
    return meter, handle and of_installation(handle)


class Case(types.SimpleNamespace):
    """title, package: for the table; function: of a Run -> (Meter, what flce did)."""


CASES = {
    "trainer": Case(title="Trainer", package="transformers", function=run_trainer),
    "peft": Case(title="LoRA, on the head too", package="peft", function=run_peft),
    "sft": Case(title="SFTTrainer", package="trl", function=run_sft),
    "dpo": Case(title="DPOTrainer", package="trl", function=run_dpo),
    "grpo": Case(title="GRPOTrainer", package="trl", function=run_grpo),
    "gkd": Case(title="GKDTrainer", package="trl", function=run_gkd),
    "accelerate": Case(title="own loop", package="accelerate", function=run_accelerate),
    "torchtitan": Case(title="loss", package="torchtitan", function=run_torchtitan),
    "fsdp2": Case(title="FSDP2", package="torch", function=run_fsdp2),
}


def measured(run):
    """The result of a Run: losses, gradient norms, ms of each step, peak of memory over what was
    there before, what flce did."""
    if accelerate := sys.modules.get("accelerate.state"):  # of the run before
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    before = None
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    meter, use = CASES[run.case].function(run)
    result = {**meter.logs, "step_ms": meter.times}
    if before is not None:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return result | ({"use": use} if run.is_fused else {})
