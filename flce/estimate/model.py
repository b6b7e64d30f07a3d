"""Sizes of a decoder, from a config.json of transformers or from numbers."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import hub

# What decides which tensors a layer of transformers' implementation keeps (docs/estimate.md);
# tests/frameworks/test_integrations_estimate.py compares it with what autograd keeps.
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}  # of a layer, else two
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"}  # where config.json does not say it
_PLAIN = {"gpt2"}  # an MLP without a gate
_WIDE_NORMS = _TIED - _PLAIN | {"olmo2"}  # scaled in float32
_HEAD_NORMS = {"qwen3", "gemma3", "gemma3_text", "olmo2"}  # of queries and keys
_KNOWN = {"llama", "mistral", "qwen2", "granite", "smollm3"} | _WIDE_NORMS | _HEAD_NORMS


@dataclass(frozen=True)
class Model:
    """A decoder with an MLP, or experts, and a vocabulary head.

    hidden, vocab, layers, heads, kv_heads, head_dim, intermediate: as in config.json.
    tied: the head's weight is the embedding's.
    norms: of a layer; wide_norms: scaled in float32; head_norms: of queries and keys.
    softcap: of the head's logits, or None.
    window, windowed: tokens of a sliding window, and how many layers have it.
    gated: the MLP has a gate (three matrices), else two.
    experts, active, shared: MLPs of a layer that a router chooses from, how many of them a token
        goes through, and how many every token goes through; 0: one MLP. intermediate: of one.
    notes: what was assumed.
    """

    name: str
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool = False
    norms: int = 2
    wide_norms: bool = False
    head_norms: bool = False
    softcap: float | None = None
    window: int = 0
    windowed: int = 0
    gated: bool = True
    experts: int = 0
    active: int = 0
    shared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Of the four matrices of one layer."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    def _layer_parameters(self, mlps: int) -> int:
        norms = self.norms * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return self.attention_parameters + mlps * mlp + self.hidden * self.experts + norms

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all experts included."""
        return self._layer_parameters(self.experts + self.shared if self.experts else 1)

    @property
    def active_parameters(self) -> int:
        """Of one layer, those that a token is multiplied by."""
        return self._layer_parameters(self.active + self.shared if self.experts else 1)

    @property
    def width(self) -> int:
        """The intermediate size of all MLPs that a token goes through."""
        return self.intermediate * (self.active + self.shared if self.experts else 1)

    def adapter_parameters(self, rank: int) -> int:
        """Of low-rank adapters of this rank on every matrix of the layers, but on no expert."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        if not self.experts:
            sides += (3 if self.gated else 2) * (self.hidden + self.intermediate)
        return self.layers * rank * sides

    @property
    def parameters(self) -> int:
        matrices = self.head_parameters * (1 if self.tied else 2)
        return matrices + self.layers * self.layer_parameters + self.hidden


def model_of_sizes(hidden: int, vocab: int, layers: int, **sizes: int | None) -> Model:
    """A Model of numbers, fields of Model; what is not given is that of a Llama of this hidden
    size. ValueError for a size out of its range, by name."""
    known = {name: size for name, size in sizes.items() if size is not None}
    head_dim = known.setdefault("head_dim", max(1, min(128, hidden)))
    heads = known.setdefault("heads", max(1, hidden // max(1, head_dim)))
    known.setdefault("kv_heads", heads)
    known.setdefault("intermediate", -(-8 * hidden // 3 // 256) * 256)
    assumed = [f"{name} {size}" for name, size in known.items() if sizes.get(name) is None]
    notes = (f"assumed: {', '.join(assumed)}",) if assumed and layers else ()
    changes: dict[str, Any] = known
    return _checked(Model("sizes", hidden, vocab, layers, notes=notes, **changes))


def read_model(path: str | pathlib.Path, **changes: int | None) -> Model:
    """The Model of a config.json, of the folder that has one, or of a name on the hub.

    Args:
        path: a file or folder, or one of `hub_names`, in any letter case; nothing is downloaded.
        **changes: fields of Model in place of those of the file, such as layers.

    Raises:
        FileNotFoundError: no such file, and no such name.
        ValueError: the file is no configuration of a decoder, or lacks a size.
    """
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    if file.exists():
        name = file.parent.name if file.name == "config.json" else file.stem
        config = _config_in(file)
    elif named := hub.config_of(str(path)):
        name, config = named
    else:
        expected = "a config.json, its folder or a name that flce.estimate.hub_names() has"
        alike = hub.alike(str(path))
        raise FileNotFoundError(f"model: expected {expected}, got {str(path)!r}{alike}")
    model = _of_config(config, name, file)
    known: dict[str, Any] = {name: size for name, size in changes.items() if size is not None}
    if "layers" in known and model.layers:
        known["windowed"] = model.windowed * known["layers"] // model.layers
    return _checked(replace(model, **known))


def _config_in(file: pathlib.Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model: expected JSON in {file}, got {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model: expected an object in {file}, got {type(config).__name__}")
    return config


def _of_config(config: dict[str, Any], name: str, file: pathlib.Path) -> Model:
    """`file`: for messages."""
    outer, config = config, config.get("text_config") or config
    if not isinstance(config, dict):
        got = type(config).__name__
        raise ValueError(f"model: expected an object text_config in {file}, got {got}")
    kind = str(config.get("model_type", outer.get("model_type", "")))

    def size(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"model: expected an integer {names[0]} in {file}, got {value!r}")
        return value

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    layers, experts = size("num_hidden_layers", "n_layer"), _experts_of(size)
    notes = [] if kind in _KNOWN else [f"model_type {kind!r} is taken for a Llama of its sizes"]
    is_plain = "n_embd" in config or kind in _PLAIN  # GPT-2 and its like
    if is_plain:
        notes = [f"model_type {kind!r}: a plain MLP; learned positions and biases are not counted"]
    if experts["experts"]:
        notes.append("experts: every layer has them; buffers of the routing are not counted")
    if config.get("kv_lora_rank"):
        notes.append("latent attention is taken for attention of its heads")
    window = max(0, size("sliding_window", default=0))
    window = window if config.get("use_sliding_window", True) else 0
    if config.get("attn_logit_softcapping"):  # SDPA has none
        notes.append("attn_logit_softcapping: attention by flash-attn is assumed")
        window = 0
    tied = config.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind in _TIED))
    return Model(
        name=name,
        hidden=hidden,
        vocab=size("vocab_size"),
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // max(heads, 1)),
        intermediate=_intermediate(size, experts["experts"], 4 * hidden if is_plain else None),
        gated=not is_plain,
        **experts,
        tied=bool(tied),
        norms=4 if kind in _FOUR_NORMS else 2,
        wide_norms=kind in _WIDE_NORMS,
        head_norms=kind in _HEAD_NORMS,
        softcap=config.get("final_logit_softcapping"),
        window=window,
        windowed=_windowed(config, kind, layers, size) if window else 0,
        notes=tuple(notes),
    )


def _experts_of(size: Callable[..., int]) -> dict[str, int]:
    """The fields of Model that experts have, by the names of Mixtral, Qwen, DeepSeek, gpt-oss."""
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    names = "num_experts_per_tok", "num_experts_per_token", "experts_per_token"
    active = size(*names, default=0) if experts else 0
    if experts and not 1 <= active <= experts:
        expected = f"num_experts_per_tok from 1 to {experts}, the number of experts"
        raise ValueError(f"model: expected {expected}, got {active}")
    shared = size("n_shared_experts", "num_shared_experts", default=0) if experts else 0
    return {"experts": experts, "active": active, "shared": shared}


def _intermediate(size: Callable[..., int], experts: int, default: int | None) -> int:
    """Of an MLP, or of one expert."""
    names = ("moe_intermediate_size",) if experts else ()
    if experts and size(*names, default=0):
        return size(*names)
    return size("intermediate_size", "n_inner", default=default)


def _windowed(config: dict[str, Any], kind: str, layers: int, size: Callable[..., int]) -> int:
    """How many layers have the window."""
    types = config.get("layer_types")
    if types and isinstance(types, list):
        return types[:layers].count("sliding_attention")
    default = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(kind, 0)
    pattern = size("sliding_window_pattern", default=default)
    return layers - layers // pattern if pattern > 0 else layers


def _checked(model: Model) -> Model:
    sizes = ("hidden", "vocab", "heads", "kv_heads", "head_dim", "intermediate")
    for name, least in (*((name, 1) for name in sizes), ("layers", 0)):
        value = getattr(model, name)
        if not least <= value < 1 << 31:
            expected = f"{least} or more" if value < least else f"less than {1 << 31}"
            raise ValueError(f"{name}: expected {expected}, got {value}")
    return model
