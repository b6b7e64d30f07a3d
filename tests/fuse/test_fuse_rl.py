"""flce.fuse(model, when="always") in loops of reinforcement and preference learning over a model of
transformers, and in TRL's trainers that call the model's head."""

import copy

import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases

transformers = pytest.importorskip("transformers", minversion="5.0")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from trl.trainer.utils import (  # noqa: E402
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)

from harness.tiny_models import (  # noqa: E402
    PROMPTS,
    TRAINING,
    LogitsMade,
    recorded,
    tiny_llama,
    tiny_tokenizer,
    worst_error,
)

VOCAB, BATCH, LENGTH = 211, 4, 24
GENERATOR = torch.Generator().manual_seed(5)
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=GENERATOR)
MASK = (torch.arange(LENGTH - 1) >= 5) & (torch.arange(LENGTH - 1) < 20 + torch.arange(4)[:, None])
ADVANTAGE = torch.tensor([1.0, -0.5, 0.25, -1.0])[:, None]
SMALL = {"save": "stats", "max_memory": "16KiB"}  # a chunk is a part of the rows


def llama(**settings):
    return tiny_llama(vocab_size=VOCAB, **settings)


def mean(values):
    return (values * MASK).sum() / MASK.sum()


def reinforce(model, old):
    logits = model(input_ids=IDS).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / 0.8
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, IDS[:, 1:].unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -mean(chosen * ADVANTAGE) - 0.01 * mean(entropy)


def sequence_log_probs(model, ids):
    log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    chosen = torch.gather(log_probs, dim=2, index=ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (chosen * MASK).sum(-1)


def dpo(model, old):
    """The first half of the batch is preferred. `old`: the frozen reference, which is fused too."""
    policy = sequence_log_probs(model, IDS)
    with torch.no_grad():
        reference = sequence_log_probs(old, IDS)
    chosen, rejected = (policy - reference).chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def grpo(model, old):
    """By TRL's functions: clipped ratios to the old policy, an estimate of the KL divergence."""
    logits = model(input_ids=IDS).logits[:, :-1, :] / 0.9
    log_probs = selective_log_softmax(logits, IDS[:, 1:])
    with torch.no_grad():
        entropy = entropy_from_logits(logits, chunk_size=16)
        before = selective_log_softmax(old(input_ids=IDS).logits[:, :-1, :] / 0.9, IDS[:, 1:])
    assert not entropy.requires_grad and entropy.shape == log_probs.shape
    ratio = (log_probs - before).exp()
    kl = (before - log_probs).exp() - (before - log_probs) - 1
    loss = -torch.minimum(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE) + 0.04 * kl
    return mean(loss * (entropy > 0))


def both_at_once(model, old):
    logits = model(input_ids=IDS).logits[:, :-1]
    log_probs, entropy = selective_log_softmax_and_entropy(
        logits, IDS[:, 1:], temperature=0.9, row_mask=MASK
    )
    return -mean(log_probs * ADVANTAGE) - 0.01 * mean(entropy)


LOOPS = [reinforce, dpo, grpo, both_at_once]


def step(loss_of, model, old):
    model.zero_grad()
    loss = loss_of(model, old)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compare(loss_of, model, compiles=False, **options):
    """(the errors of loss and gradients, whether tensors of all logits were made)"""
    old = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        old.lm_head.weight.mul_(1.1)
    expected, gradients = step(loss_of, model, old)
    with flce.fuse(old, when="always", strict=True, **options):
        with flce.fuse(model, when="always", strict=True, **options) as handle:
            called = torch.compile(model, backend="aot_eager") if compiles else model
            with LogitsMade(BATCH * (LENGTH - 1), VOCAB) as seen:
                loss, fused_gradients = step(loss_of, called, old)
    assert handle.losses and not handle.fallbacks and not handle.reads
    error = float((loss - expected).abs() / expected.abs().clamp(min=0.1))
    return error, worst_error(fused_gradients, gradients), seen.found


@cases.pairwise(loss_of=LOOPS, dtype=[torch.float32, torch.float64], tied=[False, True])
def test_loops(loss_of, dtype, tied):
    bar = {torch.float32: 2e-5, torch.float64: 1e-11}[dtype]
    model = llama(tie_word_embeddings=tied).to(dtype)
    loss_error, gradient_error, made = compare(loss_of, model, **SMALL)
    assert loss_error <= bar and gradient_error <= bar and not made


# ---- TRL's trainers ----

ROWS = [{"prompt": p, "chosen": p[::-1], "rejected": p[:2]} for p in PROMPTS]


def trained(name, directory, fuse, **own):
    """(logs, gradients, whether logits were made, the handle) of two steps."""
    module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    rows = [{**row, "reference": row["prompt"] + "a"} for row in ROWS] if name == "TPO" else ROWS
    torch.manual_seed(0)
    arguments = {**TRAINING, "output_dir": str(directory), "logging_steps": 1, "bf16": False}
    arguments |= {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.5}
    trainer = getattr(module, f"{name}Trainer")(
        llama(),
        args=getattr(module, f"{name}Config")(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    handle = flce.fuse(trainer.model, when="always", strict=True, **SMALL) if fuse else None
    with LogitsMade(32, VOCAB) as seen:
        logs, gradients = recorded(trainer)
    return logs, gradients, seen.found, handle


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["TPO", "CPO", "ORPO"])
def test_trainers_of_preferences(name, tmp_path):
    """Losses of selective_log_softmax and F.cross_entropy; metrics: entropies, means of logits,
    predictions. No logits are made in two steps of training."""
    logs, gradients, made, _ = trained(name, tmp_path, False)
    our_logs, our_gradients, our_made, handle = trained(name, tmp_path, True)
    assert made and not our_made and handle.losses and not handle.reads
    for log, our_log in zip(logs, our_logs, strict=True):
        assert log.keys() == our_log.keys() and "loss" in log
        for key in log.keys() - {"step_time"}:
            assert our_log[key] == pytest.approx(log[key], rel=1e-4, abs=1e-5), key
    for one, other in zip(our_gradients, gradients, strict=True):
        assert worst_error(one, other) <= 1e-4
