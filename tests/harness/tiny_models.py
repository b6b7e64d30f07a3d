"""Tiny models with random weights, all that the tests have: of plain torch with an eager head
(Model) or flce's (HeadModel), and of transformers, built from its configurations without downloads.
And their comparison with themselves fused: loss, gradients, logits, tensors made.

transformers is imported when a function needs it; a test that calls one has asked for it.
"""

import contextlib
import importlib
import re
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import flce
from flce.fusion.deferred import DeferredLogits
from flce.fusion.gradient import GradientOfLogits

# ---- plain torch ----

HIDDEN, VOCAB, BATCH, LENGTH = 16, 50, 2, 7
ROWS = BATCH * LENGTH
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def same(logits):
    return logits


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), **options)


def shifted_loss(logits, labels):
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].flatten())


class Model(nn.Module):
    """Embedding, body, head, what `use` makes of the logits, and the loss by `loss_of`."""

    def __init__(
        self, use=same, loss_of=None, dtype=torch.float64, bias=True, body=None, scale=3.0
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.body = body or nn.Identity()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
        self.use, self.loss_of = use, loss_of or flat_loss

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        logits = self.use(self.lm_head(self.body(self.embedding(ids))))
        return (None if labels is None else self.loss_of(logits, labels)), logits


class Own(Model):
    """Multiplies by the head's weight itself."""

    def forward(self, ids, labels=None):
        logits = F.linear(self.embedding(ids), self.lm_head.weight, self.lm_head.bias)
        return (None if labels is None else flat_loss(logits, labels)), logits


class HeadModel(nn.Module):
    def __init__(self, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64, **options):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, dtype=dtype)
        self.body = nn.Linear(hidden, hidden, dtype=dtype)
        self.head = flce.LinearCrossEntropyHead(hidden, vocab, dtype=dtype, **options)

    def hidden(self, ids):
        return torch.tanh(self.body(self.embedding(ids)))

    def forward(self, ids, labels=None, **options):
        return self.head(self.hidden(ids), labels, **options)


class Adapted(nn.Module):
    """An adapter as PEFT writes them, around a base layer of any class."""

    def __init__(self, base, dtype=torch.float64):
        super().__init__()
        self.base_layer, self.out_features = base, VOCAB
        self.down = nn.Linear(HIDDEN, 3, bias=False, dtype=dtype)
        self.up = nn.Linear(3, VOCAB, bias=False, dtype=dtype)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.up(self.down(x)) * 2.0


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(model, ids=IDS, called=None):
    """(loss, gradients, logits) of a step; `called`: the model as compiled or wrapped."""
    model.zero_grad(set_to_none=True)
    loss, logits = (model if called is None else called)(ids, labels=ids)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], logits


def trained(model, loss_of):
    """A step of training."""
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


def equal(got, expected, bar=1e-12):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = got.detach(), expected.detach()
    error = float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-300)
    assert error <= bar, error


def equal_runs(got, expected, bar=1e-12):
    equal(got[0], expected[0], bar)
    for one, other in zip(got[1], expected[1], strict=True):
        equal(one, other, bar)


def compare(model, bar=1e-12, **options):
    expected = run(model)
    with flce.fuse(model, **options) as handle:
        got = run(model)
        equal_runs(got, expected, bar)
        equal(got[2], expected[2], bar)
    return handle


# ---- comparisons of models with losses in their outputs, as those of transformers ----


class LogitsMade(TorchDispatchMode):
    """Notes tensors of all logits' size among the results of operators: at least `rows` times
    `classes` elements, in a shape with the classes as a dimension or flat."""

    def __init__(self, rows, classes):
        super().__init__()
        self.rows, self.classes, self.found = rows, classes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            has_memory = not isinstance(value, DeferredLogits | GradientOfLogits)
            if isinstance(value, torch.Tensor) and has_memory and self.is_logits(value):
                self.found.append((str(function), tuple(value.shape)))
        return made

    def is_logits(self, value):
        has_classes = self.classes in value.shape or value.dim() == 1
        return not value.is_meta and has_classes and value.numel() >= self.rows * self.classes


def step(model, inputs, mode=None):
    """(loss, {name: gradient}, output) of a training step, with the same random numbers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with mode or contextlib.nullcontext():
        output = model(**inputs)
        output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def worst_error(got, expected):
    """Of a gradient, relative to its largest element or to 1e-3 of the largest of all."""
    if got.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(got.keys() ^ expected.keys())} in one only")
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.values())
    worst = 0.0
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), floor)
        error = float((got[name] - gradient).abs().max()) / scale
        worst = error if not error <= worst else worst
    return worst


class Comparison:
    """What came out of one model. made: tensors of the logits' size in the fused training step,
    as (operator, shape); rows: the least number of them that the loss is computed from."""

    def __init__(self, model, inputs, rows, classes, **options):
        model.train()
        loss, gradients, output = step(model, inputs)
        mode = LogitsMade(rows, classes)
        with warnings.catch_warnings(record=True), flce.fuse(model, **options) as handle:
            fused_loss, fused_gradients, fused_output = step(model, inputs, mode)
            self.losses, self.fallbacks = dict(handle.losses), dict(handle.fallbacks)
            difference = (fused_output.logits - output.logits).detach().abs().max()
        self.made = mode.found
        self.loss_error = float((fused_loss - loss).abs() / loss.abs())
        self.gradient_error = worst_error(fused_gradients, gradients)
        self.logits_error = float(difference / output.logits.detach().abs().max())
        self.is_fused = bool(self.losses) and not self.fallbacks
        self.gradients = gradients


def check_fused(model, inputs, bars, rows=None, classes=None):
    """The model fuses, makes no logits of `rows`, and equals itself unfused: loss and logits within
    bars[0], gradients within bars[1]. -> the Comparison"""
    ids = inputs.get("input_ids", inputs["labels"])
    rows = rows or ids.shape[0] * (ids.shape[1] - 1)
    made = Comparison(model, inputs, rows, classes or TEXT_VOCAB, save="stats", max_memory="128KiB")
    assert made.is_fused and not made.made, (made.fallbacks, made.made)
    assert made.loss_error <= bars[0] and made.gradient_error <= bars[1]
    assert made.logits_error <= bars[0]
    return made


def check_after_change(model, inputs, change, when):
    """Fused by the next call after `change`, or taken anew where that returns another."""
    handle = flce.fuse(model, when=when, strict=True)
    step(model, inputs)
    model = change(model) or model
    before = sum(handle.losses.values())
    loss, gradients, output = step(model, inputs)
    assert sum(handle.losses.values()) == before + 1 and flce.explain(model).is_fused
    if handle.model is not model:
        again = flce.fuse(model, strict=True)
        assert abs(step(model, inputs)[0] - loss) <= 1e-6 * loss
        assert again.losses and "removed" in repr(handle)
        again.remove()
    handle.remove()
    expected, expected_gradients, expected_output = step(model, inputs)
    assert abs(loss - expected) <= 1e-6 * expected
    assert worst_error(gradients, expected_gradients) <= 1e-5
    assert torch.equal(output.logits, expected_output.logits)


# ---- transformers ----

TEXT_VOCAB, MAX_PARAMETERS = 1000, 20_000_000
# Sizes that configurations have, by name; those that a class does not have are left out.
_NAMES_OF_SIZES = {
    TEXT_VOCAB: "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id n_group topk_group",
    2: (
        "eos_token_id num_hidden_layers n_layer n_layers num_layers decoder_layers "
        "encoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok layers"
    ),
    3: "sep_token_id",
    4: (
        "cls_token_id num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_kv_heads rotary_dim num_experts num_local_experts "
        "n_routed_experts moe_num_experts time_step_rank attention_heads"
    ),
    128: "max_position_embeddings n_positions n_ctx max_seq_len",
    32: (
        "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim "
        "attention_hidden_size lru_width chunk_size embed_dim output_embedding_size "
        "input_embedding_size backbone_hidden_size"
    ),
    8: (
        "hidden_size_per_layer_input d_kv head_dim dim_head kv_channels qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank"
    ),
    48: (
        "intermediate_size shared_intermediate_size dense_intermediate_size "
        "intermediate_size_mlp ffn_hidden_size decoder_ffn_dim encoder_ffn_dim ffn_dim dim_ff "
        "dff d_ff"
    ),
    16: (
        "moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size"
    ),
}
SIZES = {name: size for size, names in _NAMES_OF_SIZES.items() for name in names.split()}

# What single models need instead, by their class.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
_ZAMBA |= {"use_mamba_kernels": False}
SPECIAL = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE}},
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
        "hidden_size": 32,
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
        **_ZAMBA,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "Zamba2ForCausalLM": {**_ZAMBA, "mamba_d_state": 8, "n_mamba_heads": 8},
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
    import transformers
    from transformers.models.auto import modeling_auto

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
    import transformers

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


def built(name, **settings):
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(tiny_config(cls.config_class, **settings))


# ---- for trainers: letters as tokens ----

# A few steps of SGD on the CPU that print nothing and save nothing.
TRAINING = {"optim": "sgd", "lr_scheduler_type": "constant", "use_cpu": True, "disable_tqdm": True}
TRAINING |= {"report_to": [], "save_strategy": "no"}
PROMPTS = ["abcd", "bca", "cabab", "dd", "ab", "bbad", "cdcd", "da"]


def tiny_tokenizer():
    """A letter is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama(**settings):
    """A LlamaForCausalLM of two layers for tiny_tokenizer's tokens."""
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return built("LlamaForCausalLM", **{**sizes, **heads, **special, **settings})


def recorded(trainer):
    """Trains; returns what each step logged, and each step's gradients by name."""
    from transformers import TrainerCallback

    gradients = []

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            gradients.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )

    trainer.add_callback(Record())
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], gradients
