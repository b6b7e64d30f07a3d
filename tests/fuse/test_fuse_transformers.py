"""flce.fuse on models of transformers, small, with random weights. All causal language models are
in fuse_coverage.py."""

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

import flce

transformers = pytest.importorskip("transformers", minversion="5.0")

from harness.tiny_models import TEXT_VOCAB as VOCAB  # noqa: E402
from harness.tiny_models import built, causal_classes, check_after_change, tiny_config, tiny_model  # noqa: E402
from harness.tiny_models import check_fused as check  # noqa: E402

BATCH, LENGTH = 2, 64
ROWS = BATCH * (LENGTH - 1)  # that have a label
IDS = torch.randint(20, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
TEXT = {"input_ids": IDS, "labels": IDS}
FLOAT32 = 2e-6, 2e-5
CLASSES = causal_classes()


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def float64_loss(logits, labels, vocab_size, **others):
    """ForCausalLMLoss without its cast to float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "name, steps",
    [
        ("LlamaForCausalLM", "none"),
        ("Qwen3ForCausalLM", "none"),
        ("PhiForCausalLM", "none"),
        ("Gemma2ForCausalLM", "scale 0.0333333, tanh, scale 30"),
        ("Gemma3ForCausalLM", "none"),
        ("Gemma4ForCausalLM", "none"),
        ("Cohere2ForCausalLM", "scale 0.0625"),
        ("GraniteForCausalLM", "scale 1"),
        ("OPTForCausalLM", "none"),
        ("FalconH1ForCausalLM", "scale 1"),
        ("BambaForCausalLM", "none"),
        ("RecurrentGemmaForCausalLM", "scale 0.0333333, tanh, scale 30"),
    ],
)
def test_float64(name, steps):
    variant = 1 if name.startswith("RecurrentGemma") else 0
    model = tiny_model(name, CLASSES[name], variant).double()
    model.loss_function = float64_loss
    found = check(model, TEXT, (1e-14, 1e-12))
    assert list(found.losses) == [steps]


@pytest.mark.parametrize(
    "name, settings, steps",
    [
        ("Mamba2ForCausalLM", {}, "none"),
        ("InklingForCausalLM", {"unpadded_vocab_size": 900}, "classes 0 to 900"),  # a padded head
        ("NanoChatForCausalLM", {}, "scale 0.0666667, tanh, scale 15"),
        ("BambaForCausalLM", {"z_loss_coefficient": 0.1}, "none"),
        # Auxiliary losses are added in place to the loss that flce returned.
        ("GptOssForCausalLM", {"output_router_logits": True}, "none"),
        ("MixtralForCausalLM", {"output_router_logits": True}, "none"),
        ("Qwen3MoeForCausalLM", {"output_router_logits": True}, "none"),
    ],
)
def test_float32(name, settings, steps):
    model = tiny_model(name, CLASSES[name])
    for setting, value in settings.items():
        for owner in (model, model.config) if hasattr(model, setting) else (model.config,):
            setattr(owner, setting, value)
    inputs = {"input_ids": IDS, "labels": IDS % 900}
    assert steps in check(model, inputs, FLOAT32).losses
    if "output_router_logits" in settings:
        assert model(**inputs).aux_loss > 0


def t5():
    return built("T5ForConditionalGeneration", decoder_start_token_id=0), TEXT


def bart():
    model = built("BartForConditionalGeneration")
    model.final_logits_bias.normal_()
    return model, TEXT


def whisper():
    settings = dict(num_mel_bins=8, max_source_positions=16, max_target_positions=LENGTH)
    model = built("WhisperForConditionalGeneration", **settings)
    return model, {"input_features": torch.randn(BATCH, 8, 32), "labels": IDS}


def bert():
    labels = IDS.clone()
    labels[:, ::3] = -100
    return built("BertForMaskedLM"), {"input_ids": IDS, "labels": labels}


def gemma3_with_an_image():
    vision = dict(image_size=28, patch_size=7, num_hidden_layers=1)
    settings = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    config = transformers.Gemma3Config(
        text_config=tiny_config(transformers.Gemma3TextConfig).to_dict(),
        vision_config={**settings, **vision},
        mm_tokens_per_image=4,
        image_token_index=7,
        boi_token_index=5,
        eoi_token_index=6,
    )
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[:, 3:7] = 7
    mask[0, 60:] = 0  # rows chosen by a boolean mask
    pixels = torch.randn(BATCH, 3, 28, 28)
    kinds = (ids == 7).long()
    inputs = dict(input_ids=ids, labels=IDS, attention_mask=mask, token_type_ids=kinds)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, {**inputs, "pixel_values": pixels}


def gemma4():
    zeros = torch.zeros_like(IDS)
    model = built("Gemma4ForConditionalGeneration")
    return model, {**TEXT, "token_type_ids": zeros, "mm_token_type_ids": zeros}


def higgs_audio_text():
    config = tiny_config(transformers.HiggsAudioV2Config, audio_token_id=7)
    torch.manual_seed(0)
    model = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    return model, TEXT


@pytest.mark.parametrize(
    "case", [t5, bart, whisper, bert, gemma3_with_an_image, gemma4, higgs_audio_text]
)
def test_other_models(case):
    torch.manual_seed(4)
    model, inputs = case()
    check(model, inputs, FLOAT32, rows=BATCH * 40)


@pytest.mark.parametrize(
    "name", ["BertForSequenceClassification", "LlamaForSequenceClassification"]
)
def test_classifiers_of_sequences_are_refused(name):
    with pytest.raises(ValueError, match=f"expected one with a vocabulary head.*{name}"):
        flce.fuse(built(name))


def llama(**settings):
    return built("LlamaForCausalLM", **settings)


MASK = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.8


@pytest.mark.parametrize(
    "extra, rows",
    [
        ({"num_items_in_batch": torch.tensor(77)}, ROWS),
        ({"num_items_in_batch": 50}, ROWS),
        ({"shift_labels": IDS.roll(-1, 1)}, ROWS),
        ({"logits_to_keep": 40, "labels": IDS[:, -40:]}, BATCH * 39),
        ({"logits_to_keep": torch.arange(5, 50), "labels": IDS[:, 5:50]}, BATCH * 44),
        ({"ignore_index": int(IDS[0, 5])}, ROWS),
        pytest.param(
            {"logits_to_keep": MASK, "labels": IDS[MASK]},
            int(MASK.sum()) - 1,
            marks=pytest.mark.skipif(
                Version(transformers.__version__) < Version("5.23"),
                reason="earlier versions take no mask",
            ),
        ),
    ],
)
def test_arguments_of_the_forward(extra, rows):
    check(llama(), {**TEXT, **extra}, FLOAT32, rows)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_tied_weights(reentrant):
    model = llama(tie_word_embeddings=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check(model, TEXT, FLOAT32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fused_before_accelerate_dispatches():
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    expected = model(**TEXT).loss
    for early in (True, False):
        handle = flce.fuse(model, strict=True) if early else None
        accelerate.cpu_offload(model, execution_device="cpu")
        handle = handle or flce.fuse(model, strict=True)
        with torch.no_grad():
            output = model(**TEXT)
            assert abs(output.loss - expected) <= 1e-5
            assert output.logits.shape == (BATCH, LENGTH, VOCAB)
            assert torch.isfinite(output.logits).all()
        assert handle.losses
        handle.remove()
        accelerate.hooks.remove_hook_from_submodules(model)
        assert abs(model(**TEXT).loss - expected) == 0


def test_the_coverage_script():
    import fuse_coverage

    assert len(CLASSES) >= 150  # 186 in transformers 5.23
    state, steps, _ = fuse_coverage.row("GraniteForCausalLM", CLASSES["GraniteForCausalLM"])
    assert (state, steps) == ("fused", "scale 1")
    state, reason, _ = fuse_coverage.row("ProphetNetForCausalLM", CLASSES["ProphetNetForCausalLM"])
    assert (state, reason) == ("falls back", "torch.Tensor.transpose is not deferred")
    if Version(transformers.__version__) >= Version("5.23"):  # 5.17 builds it
        assert fuse_coverage.row("FuyuForCausalLM", CLASSES["FuyuForCausalLM"])[0] == "not built"
    states = ("fused", "falls back", "not built", "refused")
    text, *counts = fuse_coverage.table([("A", state, "exp", "") for state in states])
    assert counts == [2, 50, 0] and "| A | falls back | exp |  |" in text


def resized(model):
    model.resize_token_embeddings(VOCAB + 24)


def other_head(model):
    model.set_output_embeddings(torch.nn.Linear(32, VOCAB, bias=False))


@pytest.mark.parametrize("change", [resized, other_head])
@pytest.mark.parametrize("when", ["labels", "always"])
def test_a_replaced_head_is_fused(change, when):
    """By the next call, in its place; one that cannot be is told of by name."""
    model = llama()
    check_after_change(model, TEXT, change, when)
    handle = flce.fuse(model)
    model.set_output_embeddings(type("Odd", (torch.nn.Linear,), {"forward": lambda s, x: x})(2, 2))
    with pytest.warns(UserWarning, match="lm_head was replaced after flce.fuse: Odd is no plain"):
        model(IDS)
    assert not handle.is_attached()
