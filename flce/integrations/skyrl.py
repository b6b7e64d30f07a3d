"""SkyRL: log-probabilities and entropies of its Megatron workers, from hidden states."""

import functools
import importlib

import torch

import flce

from ._rebind import Installation, count_call, imports_of, same_parameters

_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"


def install() -> Installation:
    """Makes SkyRL's fused head run flce: `trainer.fused_lm_head_logprob` of its Megatron strategy,
    with either backend, and the entropy that is logged with it.

    The gradient of hidden is this rank's term of the sum over the tensor-parallel group, as
    SkyRL's. Returns and raises as `flce.integrations` says.
    """
    with imports_of("skyrl"):
        module = importlib.import_module(_MODULE)
    served = _fused_lm_head_logprob_apply, _fused_vocab_parallel_entropy_from_hidden
    # By functools.partial, because remove() rebinds the globals of this module too.
    pairs = [(getattr(module, f.__name__), functools.partial(f)) for f in served]
    return Installation("skyrl", pairs, signatures=same_parameters("skyrl", *pairs))


def _fused_lm_head_logprob_apply(
    backend,
    hidden,
    weight,
    target,
    vocab_start_index,
    vocab_end_index,
    chunk_size,
    tp_group,
    inference_only,
):
    """Log-probabilities of target, float32, shape (B, S); hidden (B, S, H), cast to weight's dtype;
    weight (V / ranks, H), this rank's classes. No gradient with inference_only."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        # SkyRL sums the weight's gradient in float32 too.
        accum_dtype = torch.float32 if weight.dtype.itemsize == 2 else None
        outputs = _logprobs(hidden, weight, target, tp_group, entropy=None, accum_dtype=accum_dtype)
        return outputs[0].float()


@torch.no_grad()
def _fused_vocab_parallel_entropy_from_hidden(
    hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0
):
    """Entropies of logits / temperature, float32, shape (B, S), without a gradient; hidden
    (B, S, H), lm_head_weight (V / ranks, H)."""
    any_class = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    options = {"entropy": "detached", "temperature": temperature}
    return _logprobs(hidden, lm_head_weight, any_class, tp_group, **options)[1].float()


def _logprobs(hidden, weight, target, tp_group, **options):
    count_call("skyrl")
    options["vocab_parallel"] = flce.VocabParallel(tp_group, reduce_input_grad=False)
    return flce.linear_logprobs(hidden.to(weight.dtype), weight, target, **options)
