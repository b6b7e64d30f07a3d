"""A rough time of a step: GEMMs, attention and passes over memory, each at a share of the GPU's
nominal rate. docs/estimate.md compares it with measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import flce

from .gpus import Gpu
from .memory import WIDE, Training, layer_bytes, liger_chunks, mask_layers
from .model import Model

# Of an H200's nominal rates: what its GEMMs and row passes reach (benchmarks/predict.py: 347.2e12
# multiply-adds, 3.7e12 bytes a second).
GEMM_SHARE, MEMORY_SHARE = 0.70, 0.77
# SDPA's flash kernels, and its kernels that take a mask. Fitted, as LAYER_PASSES.
ATTENTION_SHARE, MASKED_SHARE = 0.45, 0.235
FLOAT32_GEMM = 0.5  # of TF32, over 16 bits
# Passes over what a layer keeps, by elementwise kernels in forward and backward. Fitted to the
# measured steps of docs/fuse.md.
LAYER_PASSES = 13
FLCE_GEMMS = 1.05  # time of flce over its bare GEMMs on Hopper (README.md)


@dataclass(frozen=True)
class Times:
    """Seconds; 0 where the GPU's rates are not known."""

    layers: float
    eager_head: float
    flce_head: float
    liger_head: float = 0.0

    @property
    def eager(self) -> float:
        return self.layers + self.eager_head

    @property
    def flce(self) -> float:
        return self.layers + self.flce_head

    @property
    def liger(self) -> float:
        return self.layers + self.liger_head

    def share(self, head: float) -> float:
        """The head's share of a step."""
        return head / (self.layers + head) if head else 0.0


def times(model: Model, tokens: int, training: Training, gpu: Gpu, plan: flce.Plan) -> Times:
    if not (gpu.multiply_adds and gpu.bandwidth):
        return Times(0.0, 0.0, 0.0)
    slower = FLOAT32_GEMM if training.element == WIDE else 1.0
    rate = GEMM_SHARE * gpu.multiply_adds * slower
    moved = MEMORY_SHARE * gpu.bandwidth
    product = tokens * model.hidden * model.vocab / rate
    chunks = max(plan.chunks, 1), max(plan.backward_chunks, 1)
    products = plan.forward_gemms / chunks[0] + plan.backward_gemms / chunks[1]
    gemms = 2 if training.lora else 3  # a frozen weight has no gradient
    return Times(
        layers=_layers(model, tokens, training, rate, moved, gpu.multiply_adds * slower),
        eager_head=gemms * product + _eager_passes(model, tokens, training) / moved,
        flce_head=FLCE_GEMMS * products * product,
        liger_head=gemms * product + _liger_passes(model, tokens, training) / moved,
    )


def _liger_passes(model: Model, tokens: int, training: Training) -> int:
    """Bytes that Liger's fused loss moves: of each chunk the logits, written, read twice, written
    and read twice, and the weight's gradient, read and written."""
    chunks, _ = liger_chunks(model, tokens)
    weight = 0 if training.lora else 2 * chunks * model.head_parameters
    return training.element * (6 * tokens * model.vocab + weight)


def _eager_passes(model: Model, tokens: int, training: Training) -> int:
    """Bytes that the eager loss moves: logits, their float32 copy, log_softmax (two reads), zeros
    for nll_loss's gradient, log_softmax's gradient (two reads of two operands), its cast."""
    e = training.element
    cast = e + WIDE if e != WIDE else 0
    return tokens * model.vocab * (e + 2 * cast + 3 * WIDE + WIDE + 5 * WIDE)


def _layers(
    model: Model, tokens: int, training: Training, rate: float, moved: float, nominal: float
) -> float:
    """Of all layers: forward, backward, and with checkpointing a second forward."""
    forwards = 4 if training.checkpointing else 3
    # Of frozen matrices there is no gradient; those of adapters are small.
    gemms = forwards - 1 if training.lora else forwards
    products = gemms * tokens * model.layers * model.active_parameters / rate
    # Two products, the backward has 2.5 times as many multiply-adds. Causal: half of the pairs; a
    # mask leaves no pair out.
    masked = mask_layers(model, tokens, training)
    pairs = tokens * (tokens // training.sequences) * model.heads * model.head_dim
    effort = 0.5 * (model.layers - masked) / ATTENTION_SHARE + masked / MASKED_SHARE
    attention = effort * 2 * pairs * (forwards + 0.5) / nominal
    activations, _ = layer_bytes(model, tokens, training)
    return products + attention + LAYER_PASSES * forwards / 3 * activations / moved
