"""Peak memory of a training step, from the tensors that autograd keeps for a layer.

Bytes of torch's allocator, as `torch.cuda.max_memory_allocated` counts them, of transformers'
implementation with SDPA. Where the numbers come from: docs/estimate.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flce

from .model import Model

WIDE = 4  # bytes of float32, in which norms and the eager loss compute
# Of the eager loss at its peak, in the backward: float32 log-probabilities, the gradient of these,
# the gradient of the float32 logits.
EAGER_LOGIT_BYTES = 3 * WIDE
# State of an optimizer and what its step allocates, in elements of a parameter's dtype.
OPTIMIZERS = {"sgd": (0, 0), "momentum": (1, 0), "adamw": (2, 1), "adamw-fused": (2, 0)}


@dataclass(frozen=True)
class Training:
    """How a step trains.

    dtype: of the parameters and of the computation.
    optimizer: one of OPTIMIZERS; "adamw" is torch's default, which allocates in its step. Or the
        number of bytes of state for each parameter, master weights included.
    checkpointing: of the activations of each layer.
    sequences: into which the tokens are divided.
    flash: attention by flash-attn, which needs no mask for a sliding window; else SDPA.
    lora: the rank of adapters on the layers' matrices, which alone are trained; 0: all parameters.
    fsdp: the ranks that share parameters, gradients and the optimizer's state; the tokens are
        those of one rank.

    Raises ValueError for a value out of its range, by name.
    """

    dtype: torch.dtype = torch.bfloat16
    optimizer: str | float = "adamw"
    checkpointing: bool = False
    sequences: int = 1
    flash: bool = False
    lora: int = 0
    fsdp: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype: expected a dtype of 16 or 32 bits, got {self.dtype}")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            expected = f"one of {', '.join(OPTIMIZERS)} or bytes of a parameter"
            raise ValueError(f"optimizer: expected {expected}, got {self.optimizer!r}")
        if not isinstance(self.optimizer, str) and not 0 <= self.optimizer <= 64:
            raise ValueError(f"optimizer: expected 0 to 64 bytes, got {self.optimizer}")
        for name, least in (("sequences", 1), ("lora", 0), ("fsdp", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected {least} or more, got {getattr(self, name)}")

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def optimizer_bytes(self, parameters: int) -> tuple[int, int]:
        """Bytes of the optimizer's state, and of what its step allocates."""
        if isinstance(self.optimizer, str):
            state, step = OPTIMIZERS[self.optimizer]
            return state * parameters * self.element, step * parameters * self.element
        return int(self.optimizer * parameters), 0


@dataclass(frozen=True)
class Peaks:
    """Bytes at the moments of a step that can be its peak."""

    loss: int  # the activations of all layers, and the loss
    backward: int  # the last layer's backward begins
    gradients: int  # the backward ends: all gradients are there
    update: int  # the optimizer's step

    @property
    def peak(self) -> int:
        return max(self.loss, self.backward, self.gradients, self.update)

    @property
    def moment(self) -> str:
        """The name of the moment of the peak."""
        names = ("loss", "backward", "gradients", "update")
        return max(names, key=lambda name: int(getattr(self, name)))


def mask_layers(model: Model, tokens: int, training: Training) -> int:
    """Layers whose SDPA takes a mask: a window that is shorter than a sequence."""
    masked = not training.flash and tokens // training.sequences > model.window > 0
    return model.windowed if masked else 0


def token_bytes(model: Model, training: Training, masked: bool) -> int:
    """Bytes that a layer keeps of a token for its backward."""
    e = training.element
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # The input in float32, and the normalised values before the scale. The products read the
    # results of two norms; those of the other two are only added to the residual.
    norm = WIDE + (WIDE if model.wide_norms else e)
    total = model.norms * norm * model.hidden + 2 * e * model.hidden
    total += norm * (queries + keys) if model.head_norms else 0
    # Queries, keys, values and the result; with a mask SDPA's keys and values are repeated for
    # each query head (a single one is only viewed so). The logsumexp of each head.
    key_width = queries if masked and model.kv_heads > 1 else keys
    total += 2 * e * (queries + key_width) + WIDE * model.heads
    # A token's copies for its experts, and their results.
    total += 2 * e * model.hidden * model.active
    # Gate, its activation, up, and their product; without a gate a value and its activation.
    return total + (4 if model.gated else 2) * e * model.width


def layer_bytes(model: Model, tokens: int, training: Training) -> tuple[int, int]:
    """Bytes that all layers keep without checkpointing, and the most that one keeps."""
    masked = mask_layers(model, tokens, training)
    plain = tokens * token_bytes(model, training, False)
    # A bias of the mask in the computation's dtype, of each layer.
    mask = tokens * (tokens // training.sequences) * training.element
    wide = tokens * token_bytes(model, training, True) + mask
    return (model.layers - masked) * plain + masked * wide, wide if masked else plain


def peaks(model: Model, tokens: int, training: Training, loss: int) -> Peaks:
    """The Peaks of a step whose loss takes `loss` bytes with its gradients."""
    e, hidden, ranks = training.element, tokens * model.hidden, training.fsdp
    adapters = model.adapter_parameters(training.lora)
    trained = adapters if training.lora else model.parameters
    state, allocated = (size // ranks for size in training.optimizer_bytes(trained))
    gradients = trained * e // ranks
    # FSDP gathers two layers at a time, and keeps what is outside of them: embedding and head.
    gathered = 2 * model.layer_parameters * e + model.head_parameters * e * (2 - model.tied)
    persistent = (model.parameters + adapters) * e // ranks + state
    persistent += gathered if ranks > 1 else 0
    every, largest = layer_bytes(model, tokens, training)
    activations = model.layers * hidden * e if training.checkpointing else every
    # A boolean mask of all layers with a window.
    mask = tokens * (tokens // training.sequences) if mask_layers(model, tokens, training) else 0
    final_norm = (WIDE + (WIDE if model.wide_norms else e) + e) * hidden
    # Gradients of gate and up, of the MLP's result and of the residual.
    passing = 2 * e * tokens * model.width + 3 * e * hidden if model.layers else 0
    recomputed = largest if training.checkpointing and model.layers else 0
    one_layer = largest if model.layers else 0
    head = 0 if training.lora else model.head_parameters * e
    layer = 0 if training.lora else model.layer_parameters * e
    # The embedding's gradient is made last. That of a tied weight is a tensor of its own until it
    # is added to the head's.
    embedding = head if model.tied else 0
    before = gradients - ((0 if model.tied else head) + layer) // ranks
    before += layer if ranks > 1 else 0
    return Peaks(
        loss=persistent + activations + mask + final_norm + loss,
        backward=persistent + activations + mask + head + recomputed + passing,
        gradients=persistent + max(before + mask + one_layer + passing, gradients + embedding),
        update=persistent - (gathered if ranks > 1 else 0) + gradients + allocated,
    )


def eager_loss_bytes(model: Model, tokens: int, training: Training) -> int:
    """Of transformers' loss: the logits are made in float32 (ForCausalLMLoss)."""
    capped = training.element if model.softcap else 0  # tanh keeps its result
    return tokens * model.vocab * (EAGER_LOGIT_BYTES + capped)


def liger_chunks(model: Model, tokens: int) -> tuple[int, int]:
    """(number, rows) of the chunks of Liger's fused loss (0.8.5), whose logits take about as much
    memory as its input."""
    rows = -(-tokens // -(-model.vocab // model.hidden))
    rows = 1 << max(0, rows - 1).bit_length()
    return -(-tokens // rows), rows


def liger_loss_bytes(model: Model, tokens: int, training: Training) -> int:
    """The gradients, and a chunk's logits, which become their gradient."""
    _, rows = liger_chunks(model, tokens)
    weight = 0 if training.lora else model.head_parameters
    return training.element * (tokens * model.hidden + weight + min(rows, tokens) * model.vocab)


def flce_loss_bytes(plan: flce.Plan) -> int:
    return int(plan.peak_bytes)
