"""Small random models of transformers, built from its configurations, without downloads."""

import importlib
import re
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCAB, HIDDEN = 1000, 32
MAX_PARAMETERS = 20_000_000

# Sizes that configurations have, by name; those that a class does not have are left out.
SIZES = {
    "vocab_size": VOCAB,
    "decoder_vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 3,
    "cls_token_id": 4,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "n_embd": HIDDEN,
    "dim": HIDDEN,
    "emb_dim": HIDDEN,
    "embedding_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "attention_hidden_size": HIDDEN,
    "lru_width": HIDDEN,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "dim_ff": 48,
    "dff": 48,
    "d_ff": 48,
    "d_kv": 8,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "dim_head": 8,
    "kv_channels": 8,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "time_step_rank": 4,
    "chunk_size": 32,
    "attention_heads": 4,
    "layers": 2,
    "embed_dim": HIDDEN,
    "output_embedding_size": HIDDEN,
    "input_embedding_size": HIDDEN,
    "backbone_hidden_size": HIDDEN,
}

# What single models need instead, by their class.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 32}
SPECIAL = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2},
    "FalconH1ForCausalLM": {**_MAMBA, "mamba_d_ssm": 64},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "hidden_size": HIDDEN,
        "feed_forward_size": 48,
        "num_attention_heads": 4,
        "attention_head_size": 8,
        "hidden_dropout_prob": 0.0,  # its dropout seeds itself from the clock
        "local_attention_probs_dropout_prob": 0.0,
    },
    "XmodForCausalLM": {"languages": ["en_XX"], "default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"qk_dim_factor": 1.0, "mode": "train"},
    "ZambaForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "use_mamba_kernels": False,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "use_mamba_kernels": False,
    },
}
# Tried in this order where a model cannot be built or run: hybrids need a layer of each kind,
# latent attention as many key heads as query heads.
VARIANTS = (
    {},
    {"num_hidden_layers": 4},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
    {"num_hidden_layers": 6},
)


def causal_classes():
    """{class name: module name} of all causal language models of the installed transformers."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for name in re.findall(r"^class (\w+ForCausalLM)\(", path.read_text(), re.MULTILINE):
            found[name] = module
    found.pop("AutoModelForCausalLM")
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        found.setdefault(name, "transformers")
    return found


def _known(config_class):
    """Names that a configuration has, those of its base included."""
    names = set(getattr(config_class, "__dataclass_fields__", {}))
    return names | set(getattr(config_class, "attribute_map", {}))


def tiny_config(config_class, **others):
    """A configuration with SIZES, of its parts too. `others`: fields of the outermost one."""
    known = _known(config_class)
    chosen = {name: size for name, size in SIZES.items() if name in known}
    aliases = getattr(config_class, "attribute_map", {})
    chosen = {k: v for k, v in chosen.items() if not (k in aliases and aliases[k] in chosen)}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(part, type) and part is not transformers.AutoConfig:
            chosen[name] = tiny_config(part).to_dict()
    return config_class(**{**chosen, **others})


def tiny_model(name, module, variant=0):
    """A model with random weights. ValueError if its configuration does not become small."""
    cls = getattr(importlib.import_module(module), name)
    config = tiny_config(cls.config_class, **{**VARIANTS[variant], **SPECIAL.get(name, {})})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    return cls(config)
