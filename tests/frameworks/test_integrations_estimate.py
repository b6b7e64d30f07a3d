"""`flce.estimate`: what a layer keeps for its backward, against autograd."""

import json

import pytest
import torch

from flce.estimate import Training, read_model
from flce.estimate.memory import layer_bytes

transformers = pytest.importorskip("transformers")

TOKENS = 256
KINDS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "granite": "GraniteConfig",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "gemma": "GemmaConfig",
    "gemma3_text": "Gemma3TextConfig",
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": TOKENS}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def kept_bytes(config, dtype):
    """Bytes of all storages, but the parameters', that the decoder keeps for its backward."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa"
    )
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, so no address repeats
        return tensor

    ids = torch.randint(64, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_what_the_estimate_says(kind, dtype, tmp_path):
    made = [
        getattr(transformers, KINDS[kind])(num_hidden_layers=layers, **SIZES) for layers in (1, 3)
    ]
    one, three = (kept_bytes(config, dtype) for config in made)
    config = {**SIZES, "num_hidden_layers": 3, "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)
    assert not model.notes
    _, layer = layer_bytes(model, TOKENS, Training(dtype=dtype))
    assert layer == pytest.approx((three - one) / 2, rel=0.01)
