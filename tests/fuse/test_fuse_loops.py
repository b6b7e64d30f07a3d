"""flce.fuse in loops that compute the loss themselves: Lightning, litgpt, nanoGPT's form."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.tiny_models import (
    PROMPTS,
    TRAINING,
    LogitsMade,
    tiny_llama,
    tiny_tokenizer,
    worst_error,
)

VOCAB, HIDDEN, BATCH, LENGTH = 96, 16, 4, 32
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


class Gpt(nn.Module):
    """nanoGPT's forward: targets by position, logits of the last token without them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids, targets=None):
        x = torch.tanh(self.body(self.wte(ids)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)


def compare(model, loss_of, **options):
    """Loss and gradients with and without fuse. -> (the handle, shapes of logits made)"""

    def step_of():
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, gradients = step_of()
    with flce.fuse(model, when="always", save="stats", max_memory="8KiB", **options) as handle:
        with LogitsMade(BATCH * (LENGTH - 1), VOCAB) as seen:
            loss, fused_gradients = step_of()
    assert abs(loss - expected) <= 1e-6 * expected
    assert worst_error(fused_gradients, gradients) <= 1e-6
    return handle, seen.found


def test_nanogpt():
    model = Gpt()
    x, y = IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()
    handle, made = compare(model, lambda: model(x, y)[1], strict=True)
    assert handle.losses == {"none": 1} and not made
    logits = model(IDS)[0]
    with flce.fuse(model, when="always", strict=True), torch.no_grad():
        sampled = model(IDS)[0][:, -1, :] / 0.8
        assert torch.equal(torch.topk(sampled, 3).indices, (logits[:, -1] / 0.8).topk(3).indices)


def test_targets_by_another_name_are_not_fused_by_labels():
    model = Gpt()
    with flce.fuse(model, strict=True) as handle:
        model(IDS, IDS)
    assert not handle.losses and not handle.fallbacks


def litgpt_model(**settings):
    litgpt = pytest.importorskip("litgpt", exc_type=ImportError)
    sizes = dict(n_layer=1, n_head=2, n_embd=HIDDEN, padded_vocab_size=VOCAB, block_size=LENGTH)
    torch.manual_seed(0)
    return litgpt.GPT(litgpt.Config(**sizes, **settings))


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({}, "none"),
        ({"lm_head_bias": True}, "none"),
        ({"final_logit_softcapping": 2.0}, "scale 0.5, tanh, scale 2"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_litgpt(settings, steps, chunked):
    """Chunked as its scripts do: a call of the head and a loss for each chunk of rows; or by the
    loss alone."""
    model = litgpt_model(**settings)
    from litgpt.utils import chunked_cross_entropy

    def loss_of():
        logits = model(IDS, lm_head_chunk_size=8) if chunked else [model(IDS)]
        logits[-1] = logits[-1][..., :-1, :]
        if chunked:
            return chunked_cross_entropy(logits, IDS[..., 1:])
        return chunked_cross_entropy(logits[0], IDS[..., 1:], chunk_size=0)

    handle, made = compare(model, loss_of, strict=True)
    assert handle.losses == {steps: 4 if chunked else 1} and not made
    handle, made = compare(
        model, lambda: chunked_cross_entropy(model(IDS), IDS, chunk_size=50), strict=True
    )
    assert handle.losses == {steps: 3} and not made


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", exc_type=ImportError)

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = Gpt(), []

        def training_step(self, ids, index):
            loss = self.loss_of(ids)
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, ids, index):
            self.log("validation", self.loss_of(ids))

        def loss_of(self, ids):
            logits = self.model.lm_head(torch.tanh(self.model.wte(ids)))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(module):
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            max_steps=3,
            accumulate_grad_batches=2,
            accelerator="cpu",
            default_root_dir=tmp_path,
            **dict.fromkeys(quiet, False),
        )
        data = torch.utils.data.DataLoader(IDS.repeat(6, 1), batch_size=BATCH)
        trainer.fit(module, data, data)
        return [*module.losses, float(trainer.callback_metrics["validation"])]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(Training())
        module = Training()
        with flce.fuse(module, when="always", strict=True) as handle:
            got = trained(module)
    assert len(expected) == 7 and expected[5] < expected[0]
    assert all(abs(a - b) <= 1e-6 * b for a, b in zip(got, expected, strict=True))
    assert sum(handle.losses.values()) >= 12 and not handle.fallbacks


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_does_not_call_the_head(tmp_path):
    """flce.integrations.trl serves it; fuse says so instead of doing nothing unseen."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from flce.integrations.transformers import FuseCallback

    trainer = trl.SFTTrainer(
        tiny_llama(),
        args=trl.SFTConfig(str(tmp_path), bf16=False, max_steps=1, **TRAINING),
        train_dataset=datasets.Dataset.from_dict({"text": PROMPTS}),
        processing_class=tiny_tokenizer(),
        callbacks=[callback := FuseCallback()],
    )
    expected = r"labels did not call the head \(lm_head\).*flce.integrations.trl.install\(\)"
    with pytest.warns(UserWarning, match=expected):
        trainer.train()
    assert not callback.handle.losses
