"""Sizes of models that have a name on the Hugging Face hub, as their config.json has them: nothing
is downloaded."""

from __future__ import annotations

import difflib
from typing import Any

# model_type, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied, others.
_Row = tuple[str, int, int, int, int, int, int, int, bool, dict[str, Any]]
_GEMMA2: dict[str, Any] = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
}
_WINDOW_512, _WINDOW_1024 = {"sliding_window": 512}, {"sliding_window": 1024}


def _experts(count: int, active: int, **others: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": active, **others}


_MODELS: dict[str, _Row] = {
    "meta-llama/Llama-2-7b": ("llama", 4096, 32, 32, 32, 128, 11008, 32000, False, {}),
    "meta-llama/Llama-3-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, {}),
    "meta-llama/Llama-3-70B": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, {}),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, {}),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, {}),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True, {}),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True, {}),
    "meta-llama/Llama-3.3-70B": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False, {}),
    "TinyLlama/TinyLlama-1.1B": ("llama", 2048, 22, 32, 4, 64, 5632, 32000, False, {}),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True, {}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, {}),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True, {}),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, {}),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False, {}),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False, {}),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False, {}),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, {}),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True, {}),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, {}),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False, {}),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False, {}),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False, {}),
    "Qwen/Qwen3-30B-A3B": ("qwen3", 2048, 48, 32, 4, 128, 768, 151936, False, _experts(128, 8)),
    "google/gemma-2-2b": ("gemma2", 2304, 26, 8, 4, 256, 9216, 256000, True, _GEMMA2),
    "google/gemma-2-9b": ("gemma2", 3584, 42, 16, 8, 256, 14336, 256000, True, _GEMMA2),
    "google/gemma-2-27b": ("gemma2", 4608, 46, 32, 16, 128, 36864, 256000, True, _GEMMA2),
    "google/gemma-3-270m": ("gemma3_text", 640, 18, 4, 1, 256, 2048, 262144, True, _WINDOW_512),
    "google/gemma-3-1b": ("gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, True, _WINDOW_512),
    "google/gemma-3-4b": ("gemma3_text", 2560, 34, 8, 4, 256, 10240, 262208, True, _WINDOW_1024),
    "google/gemma-3-12b": ("gemma3_text", 3840, 48, 16, 8, 256, 15360, 262208, True, _WINDOW_1024),
    "google/gemma-3-27b": ("gemma3_text", 5376, 62, 32, 16, 128, 21504, 262208, True, _WINDOW_1024),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False, {}),
    "mistralai/Mistral-Nemo-2407": ("mistral", 5120, 40, 32, 8, 128, 14336, 131072, False, {}),
    "mistralai/Mistral-Small-24B-2501": ("mistral", 5120, 40, 32, 8, 128, 32768, 131072, False, {}),
    "mistralai/Mixtral-8x7B-v0.1": (
        *("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, False),
        _experts(8, 2),
    ),
    "microsoft/Phi-3-mini-4k": (
        *("phi3", 3072, 32, 32, 32, 96, 8192, 32064, False),
        {"sliding_window": 2047},
    ),
    "microsoft/phi-4": ("phi3", 5120, 40, 40, 10, 128, 17920, 100352, False, {}),
    "microsoft/Phi-4-mini": ("phi3", 3072, 32, 24, 8, 128, 8192, 200064, True, {}),
    "openai-community/gpt2": ("gpt2", 768, 12, 12, 12, 64, 3072, 50257, True, {}),
    "openai-community/gpt2-medium": ("gpt2", 1024, 24, 16, 16, 64, 4096, 50257, True, {}),
    "openai-community/gpt2-large": ("gpt2", 1280, 36, 20, 20, 64, 5120, 50257, True, {}),
    "openai-community/gpt2-xl": ("gpt2", 1600, 48, 25, 25, 64, 6400, 50257, True, {}),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True, {}),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 32, 15, 5, 64, 2560, 49152, True, {}),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 24, 32, 32, 64, 8192, 49152, True, {}),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", 2048, 36, 16, 4, 128, 11008, 128256, True, {}),
    "deepseek-ai/deepseek-llm-7b": ("llama", 4096, 30, 32, 32, 128, 11008, 102400, False, {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        *("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
        {},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        *("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
        {},
    ),
}
_FIELDS = "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads"
_FIELDS += " head_dim intermediate_size vocab_size tie_word_embeddings"
# Parts of a name that do not change the sizes.
_VARIANTS = {"instruct", "it", "pt", "base", "hf", "chat", "meta"}


def _key(name: str) -> str:
    """Of a name, with or without its organisation, in any letter case."""
    parts = name.lower().rsplit("/", 1)[-1].split("-")
    return "-".join(part for part in parts if part not in _VARIANTS)


_BY_KEY = {_key(name): name for name in _MODELS}


def hub_names() -> list[str]:
    """The names that `config_of` knows; "-Instruct" and the like may follow."""
    return list(_MODELS)


def config_of(name: str) -> tuple[str, dict[str, Any]] | None:
    """(the name without its organisation, what its config.json says of sizes), or None."""
    known = _BY_KEY.get(_key(name))
    if known is None:
        return None
    *values, others = _MODELS[known]
    return name.rsplit("/", 1)[-1], dict(zip(_FIELDS.split(), values, strict=True)) | others


def alike(name: str) -> str:
    """Words that name the most similar of the known models, or ""."""
    found = difflib.get_close_matches(_key(name), list(_BY_KEY), n=3, cutoff=0.6)
    return f"; similar names: {', '.join(_BY_KEY[key] for key in found)}" if found else ""
