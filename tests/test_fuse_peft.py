"""flce.fuse with PEFT's adapters on the head: they act and train."""

import pytest
import torch

import flce

transformers = pytest.importorskip("transformers", minversion="5.0")
peft = pytest.importorskip("peft")

from tiny_models import TEXT_VOCAB as VOCAB  # noqa: E402
from tiny_models import LogitsMade, built, step, worst_error  # noqa: E402

BATCH, LENGTH = 2, 64
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
TEXT = {"input_ids": IDS, "labels": IDS}
OPTIONS = {"save": "stats", "max_memory": "128KiB"}


def llama(dtype=torch.float32, **settings):
    return built("LlamaForCausalLM", num_hidden_layers=1, **settings).to(dtype)


def adapted(base, **settings):
    """A model with LoRA, whose up projections are not the zeros that they begin with."""
    settings = {"target_modules": ["lm_head", "q_proj"], "r": 4, **settings}
    return moved(peft.get_peft_model(base, peft.LoraConfig(**settings)))


def moved(model):
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.1 * noise.to(parameter.dtype))
    return model.train()


def check(model, bar=1e-5, loss_bar=1e-6):
    """Loss and every gradient as without fuse, no logits made; the logits too, when asked for."""
    loss, gradients, output = step(model, TEXT)
    seen = LogitsMade(BATCH * (LENGTH - 1), VOCAB)
    with flce.fuse(model, strict=True, **OPTIONS) as handle:
        fused_loss, fused_gradients, fused_output = step(model, TEXT, seen)
        assert not seen.found and handle.losses
        assert torch.equal(fused_output.logits, output.logits)
    assert abs(fused_loss - loss) <= loss_bar * loss
    assert worst_error(fused_gradients, gradients) <= bar
    return gradients, handle


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"lora_dropout": 0.4},
        {"lora_bias": True},
        {"init_lora_weights": False, "lora_alpha": 32, "r": 7},
        {"bias": "lora_only"},
    ],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
def test_lora(settings):
    gradients, handle = check(adapted(llama(), **settings))
    assert any("lm_head.lora_A" in name for name in gradients)
    assert any("lm_head.lora_B" in name for name in gradients)
    assert not any("lm_head.base_layer" in name for name in gradients)
    assert "sum of 2 products" in str(dict(handle.losses))


def test_the_adapter_acts():
    """Others read lm_head.weight, which is the base layer's, and drop the adapter."""
    model = adapted(llama())
    with flce.fuse(model, strict=True):
        with_adapter = model(**TEXT).loss.detach()
        with model.disable_adapter():
            without = model(**TEXT).loss.detach()
    assert abs(with_adapter - without) > 1e-3
    with model.disable_adapter():
        assert abs(model(**TEXT).loss.detach() - without) <= 1e-6 * without


def test_two_adapters():
    model = adapted(llama())
    model.add_adapter("other", peft.LoraConfig(r=8, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])
    _, handle = check(moved(model))
    assert "sum of 3 products" in str(dict(handle.losses))


def test_merged():
    model = adapted(llama())
    model.merge_adapter()
    expected = model(**TEXT).loss
    with flce.fuse(model, strict=True) as handle:
        assert abs(model(**TEXT).loss - expected) <= 1e-6 * expected
    assert list(handle.losses) == ["none"]


def test_modules_to_save():
    gradients, _ = check(adapted(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert any("lm_head.modules_to_save" in name for name in gradients)


def test_adapters_elsewhere():
    gradients, _ = check(adapted(llama(), target_modules=["q_proj"]))
    assert not any("lm_head" in name for name in gradients)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_tied_weights():
    check(adapted(llama(tie_word_embeddings=True)))


def test_a_scaled_and_capped_head():
    check(adapted(built("Gemma2ForCausalLM", final_logit_softcapping=2.0)))


def test_dora_makes_logits():
    """Its norm needs the product of both projections."""
    model = adapted(llama(), use_dora=True)
    loss, gradients, _ = step(model, TEXT)
    with flce.fuse(model) as handle, pytest.warns(UserWarning, match="is not deferred"):
        fused_loss, fused_gradients, _ = step(model, TEXT)
    assert torch.equal(fused_loss, loss) and worst_error(fused_gradients, gradients) == 0
    assert handle.fallbacks


@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_a_bfloat16_base(adapter_dtype):
    """PEFT keeps the adapters in float32 unless told otherwise; the fused product is in bfloat16.
    Both are compared with float64: fused may have the eager error and half as much again."""
    model = adapted(llama(torch.bfloat16))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    loss, gradients, output = step(model, TEXT)
    with flce.fuse(model, strict=True):
        fused_loss, fused_gradients, fused_output = step(model, TEXT)
        assert torch.equal(fused_output.logits, output.logits)
    exact = adapted(llama(torch.bfloat16)).double()
    exact_loss, exact_gradients, _ = step(exact, TEXT)
    assert abs(fused_loss - exact_loss) <= 1e-3 * exact_loss
    head = [name for name in gradients if "lm_head" in name]
    assert len(head) == 2 and fused_gradients.keys() == gradients.keys()
    for name in head:
        errors = [
            float((g[name].double() - exact_gradients[name]).norm() / exact_gradients[name].norm())
            for g in (fused_gradients, gradients)
        ]
        assert fused_gradients[name].dtype == adapter_dtype
        assert errors[0] <= 1.5 * errors[1] + 2e-3, (name, errors)


def added(model):
    model.add_adapter("other", peft.LoraConfig(r=8, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])


def deleted(model):
    added(model)
    model.set_adapter("other")
    model.delete_adapter("default")


def to_save(model):
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, settings)


LATER = {
    "get_peft_model": (False, adapted),
    "modules_to_save": (False, to_save),
    "add_adapter": (True, added),
    "delete_adapter": (True, deleted),
    "merge_adapter": (True, lambda model: model.merge_adapter()),
    "merge_and_unload": (True, lambda model: model.merge_and_unload()),
    "unload": (True, lambda model: model.unload()),
    "unload of get_peft_model": (False, lambda model: adapted(model).merge_and_unload()),
}


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("name", LATER)
def test_adapters_that_change_after_fuse(name, when):
    """What stands in the head's place is fused by its next call, and flce.fuse takes it anew."""
    is_adapted, change = LATER[name]
    model = adapted(llama()) if is_adapted else llama()
    handle = flce.fuse(model, when=when, strict=True)
    step(model, TEXT)
    model = moved(change(model) or model)
    model.requires_grad_(True)
    before = sum(handle.losses.values())
    loss, gradients, output = step(model, TEXT)
    assert sum(handle.losses.values()) == before + 1 and flce.explain(model).is_fused
    if handle.model is not model:
        again = flce.fuse(model, strict=True)
        assert abs(step(model, TEXT)[0] - loss) <= 1e-6 * loss
        assert again.losses and "removed" in repr(handle)
        again.remove()
    handle.remove()
    expected, expected_gradients, expected_output = step(model, TEXT)
    assert abs(loss - expected) <= 1e-6 * expected
    assert worst_error(gradients, expected_gradients) <= 1e-5
    assert torch.equal(output.logits, expected_output.logits)


def test_explain_names_the_adapter():
    model = adapted(llama())
    report = str(flce.explain(model))
    assert "lm_head: Linear of base_layer, lora_A.default, lora_B.default" in report
