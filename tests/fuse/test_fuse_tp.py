"""flce.fuse on models of transformers with tensor parallelism, in two processes."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import flce
from harness.processes import on_ranks
from harness.tiny_models import tiny_config, whole

# Earlier versions refuse a vocabulary that the ranks do not divide.
transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("transformers.distributed.tensor_parallel")
RANKS, VOCAB = 2, 101
SIZE = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def configurations():
    yield "Llama", tiny_config(transformers.LlamaConfig, **SIZE)
    yield "tied Llama", tiny_config(transformers.LlamaConfig, **SIZE, tie_word_embeddings=True)
    softcap = {"final_logit_softcapping": 3.0}
    yield "Gemma 2", tiny_config(transformers.Gemma2Config, **SIZE, **softcap)


def saved(config, folder):
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return folder


def divided(folder):
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)


def inputs_of(step):
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, : 3 + step] = -100
    return {"input_ids": ids, "labels": labels}


def step(models, called, number, case, **options):
    """A step of both models, compared. `called`: as models, compiled or not."""
    outputs = [one(**inputs_of(number), **options) for one in called]
    for output, model in zip(outputs, models, strict=True):
        model.zero_grad()
        output.loss.backward()
    (got, expected), (fused, plain) = outputs, models
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-6, atol=0.0, msg=case)
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        gradients = whole(one.grad), whole(other.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=2e-7, msg=f"{case}: {name}")
    torch.testing.assert_close(got.logits + 0, expected.logits, rtol=1e-4, atol=1e-6, msg=case)


def train(folder, name):
    """Three steps of the fused and of the unfused model; then evaluation, and unfused again."""
    models = fused, plain = divided(folder), divided(folder)
    fused.train(), plain.train()
    forward = fused.lm_head.forward
    handle = flce.fuse(fused, strict=True, max_memory="4KiB")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in models]
    for number in range(3):
        options = {"num_items_in_batch": 11} if number == 2 else {}
        step(models, models, number, f"{name}, step {number}", **options)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(handle.losses.values()) == 3 and not handle.fallbacks, flce.explain(fused)
    with torch.no_grad():
        losses = [one(**inputs_of(3)).loss for one in models]
        torch.testing.assert_close(*losses, rtol=2e-6, atol=0.0)
        ids = inputs_of(3)["input_ids"]
        logits = [one(input_ids=ids).logits for one in models]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-6)
    handle.remove()
    assert fused.lm_head.forward is forward and type(fused.lm_head) is torch.nn.Linear


def compiled(folder):
    fused, plain = divided(folder), divided(folder)
    handle = flce.fuse(fused, strict=True)
    called = torch.compile(fused), plain
    for number in range(2):
        step((fused, plain), called, number, f"compiled, step {number}")
    assert handle.losses and not handle.fallbacks, flce.explain(fused)


def fall_back(folder):
    """What needs all logits gets them, with a warning, and right results."""
    models = fused, plain = divided(folder), divided(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with flce.fuse(fused, accumulate_into="grad") as handle:
            step(models, models, 0, "accumulate_into")
            assert list(handle.fallbacks) == [
                "accumulate_into with a vocabulary sharded over ranks"
            ]
    assert any("all logits" in str(warning.message) for warning in caught)
    x, target = torch.randn(5, 16), torch.arange(5)
    soft, bias = torch.randn(5, VOCAB).softmax(-1), torch.randn(VOCAB)
    expected = plain.lm_head(x)
    for what, of in (
        ("probabilities", lambda z: F.cross_entropy(z, soft)),
        ("bias", lambda z: F.cross_entropy(z + bias, target)),
        ("slice", lambda z: F.cross_entropy(z[:, :70], target)),
        ("lse", lambda z: torch.logsumexp(z, -1).sum()),
        ("log p", lambda z: z.log_softmax(-1).gather(-1, target[:, None]).sum()),
        ("ids", lambda z: z.softmax(-1).gather(-1, torch.stack((target, 2 * target), -1)).sum()),
        ("entropy", lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum()),
        ("entropies", lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).square().sum()),
    ):
        with warnings.catch_warnings(), flce.fuse(fused, when="always") as handle:
            warnings.simplefilter("ignore")
            torch.testing.assert_close(of(fused.lm_head(x)), of(expected), msg=what)
            assert bool(handle.fallbacks) != (what in ("lse", "log p", "ids", "entropies")), what


@on_ranks(RANKS)
def test_equals_the_unfused_model(tmp_path):
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS)}
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, config in configurations():
        train(saved(config, tmp_path / name), name)
    fall_back(tmp_path / "Llama")
    compiled(tmp_path / "Llama")
