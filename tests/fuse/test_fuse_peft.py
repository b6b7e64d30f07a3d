"""flce.fuse with PEFT's adapters on the head: they act and train."""

import pytest
import torch

import flce

transformers = pytest.importorskip("transformers", minversion="5.0")
peft = pytest.importorskip("peft")

from harness.tiny_models import TEXT_VOCAB as VOCAB  # noqa: E402
from harness.tiny_models import built, check_after_change, check_fused, step, worst_error  # noqa: E402

BATCH, LENGTH = 2, 64
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
TEXT = {"input_ids": IDS, "labels": IDS}


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


def two_adapters():
    model = adapted(llama())
    added(model)
    return moved(model)


def in_body(**settings):
    return adapted(llama(), target_modules=["q_proj"], **settings)


LORA = ("lm_head.lora_A", "lm_head.lora_B")
SETTINGS = [{}, {"use_rslora": True}, {"lora_dropout": 0.4}, {"lora_bias": True}]
SETTINGS += [{"bias": "lora_only"}, {"init_lora_weights": False, "lora_alpha": 32, "r": 7}]
# A function that makes a model, the parts of its head that are trained, what the losses are of.
MODELS = {
    **{str(one): (lambda one=one: adapted(llama(), **one), LORA, "2 products") for one in SETTINGS},
    "tied": (lambda: adapted(llama(tie_word_embeddings=True)), LORA, "2 products"),
    "scaled and capped": (
        lambda: adapted(built("Gemma2ForCausalLM", final_logit_softcapping=2.0)),
        LORA,
        "2 products",
    ),
    "two adapters": (two_adapters, LORA, "3 products"),
    "saved": (lambda: in_body(modules_to_save=["lm_head"]), ("lm_head.modules_to_save",), "none"),
    "in the body": (in_body, (), "none"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:`lora_bias=True`", "ignore:Model with `tie_word_embeddings")
def test_adapters(name):
    """Loss and every gradient as without fuse, no logits made; the logits are the same bits."""
    make, trained, steps = MODELS[name]
    model = make()
    if trained == LORA:
        report = str(flce.explain(model))
        assert "lm_head: Linear of base_layer, lora_A.default, " in report
    found = check_fused(model, TEXT, (1e-6, 1e-5))
    assert found.logits_error == 0 and steps in str(found.losses)
    of_head = [one for one in found.gradients if "lm_head" in one]
    assert all(any(part in one for one in of_head) for part in trained)
    assert not any("lm_head.base_layer" in one for one in of_head) and bool(of_head) == bool(
        trained
    )


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
    """Adapters in float32 or not; against float64, fused has 1.5 times the eager error."""
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
    """What stands in the head's place is fused by its next call."""
    is_adapted, change = LATER[name]

    def changed(model):
        return moved(change(model) or model).requires_grad_(True)

    check_after_change(adapted(llama()) if is_adapted else llama(), TEXT, changed, when)
