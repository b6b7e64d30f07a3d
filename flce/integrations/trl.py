"""TRL: the one function from which SFT, DPO, KTO, GRPO and RLOO take log-probabilities."""

import functools
import types

import torch

import flce
from flce.logprobs import ENTROPIES
from flce.modes import autocast_dtype
from flce.options import Entropy
from flce.validate import refuse

from ._operands import in_dtype_of
from ._rebind import Installation, count_call, imports_of, parameters_of

_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size")
_PARAMETERS += ("final_logit_softcapping", "logit_scale", "outputs")
# TRL's, without what flce computes of its default outputs.
_DEFAULTS = {"final_logit_softcapping": None, "logit_scale": 1.0, "outputs": ("log_sum_sq_probs",)}
_SERVED = {"log_probs", "entropy", "mean_logits", "is_top1"}


def install(*, entropy: Entropy | None = None) -> Installation:
    """Makes TRL's trainers compute log-probabilities, entropies and accuracies by flce.

    `trl.trainer.utils._ChunkedLogProbFunction` is looked up in each step, so trainers that exist
    already are served too. Its other results, a mean of softcapped logits, weights that DeepSpeed
    ZeRO-3 has split and devices other than CPU and CUDA remain TRL's own.

    entropy: "differentiable", as TRL's, or "detached": a RuntimeError where a loss contains it;
    with a softcap it keeps 2 bytes a logit on CUDA instead of 4. None: "detached" where a softcap
    and is_top1 are given, as by SFTTrainer, which detaches it. Under torch.compile None is
    "differentiable", and there is no such error. Returns and raises as `flce.integrations` says,
    and ValueError for another `entropy`.
    """
    with imports_of("trl"):
        import trl.trainer.utils

    if entropy not in tuple(ENTROPIES):
        refuse("entropy", f"one of {tuple(ENTROPIES)}", repr(entropy))
    original = getattr(trl.trainer.utils, _NAME, None)
    signature = "trl", _NAME, _PARAMETERS, parameters_of(original)
    ours = types.SimpleNamespace(apply=functools.partial(_log_probs, original, entropy))
    return Installation("trl", [(original, ours)], signatures=[signature])


def _log_probs(original, entropy, *args, **options):
    """The `apply` of TRL's autograd Function, with its arguments, _PARAMETERS: hidden (N, H);
    weight (V, H), cast to hidden's dtype (or autocast's); bias (V,) or None; targets: class
    indices, (N,); chunk_size: no effect.

    Returns (logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1), shape (N,) each, None for
    what `outputs` does not name; float32, is_top1 bool. The first is differentiable, the second as
    `install` says. Raises as `flce.linear_cross_entropy`.
    """
    arguments = {**_DEFAULTS, **dict(zip(_PARAMETERS, args, strict=False)), **options}
    values = (arguments[name] for name in _PARAMETERS)
    hidden, weight, bias, targets, temperature, _, softcap, logit_scale, outputs = values
    serves = set(outputs) <= _SERVED and (softcap is None or "mean_logits" not in outputs)
    # ZeRO-3 (ds_id) splits the weight again before the backward, which flce would then read.
    serves = serves and hidden.device.type in ("cpu", "cuda") and not hasattr(weight, "ds_id")
    count_call("trl", serves)
    if not serves:
        return original.apply(*args, **options)
    weight, bias = in_dtype_of(hidden, weight), in_dtype_of(hidden, bias)
    operand_dtype = autocast_dtype(hidden.device.type) or hidden.dtype
    is_traced = torch.compiler.is_compiling()
    is_logged = softcap is not None and "is_top1" in outputs and not is_traced
    entropy = entropy or ("detached" if is_logged else "differentiable")
    flce_options = {"linear_bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    flce_options |= {"temperature": temperature, "reduction": "none"}
    # TRL sums the weight's gradient in float32 too.
    flce_options["accum_dtype"] = torch.float32 if operand_dtype.itemsize == 2 else None
    flce_options["return_entropy"] = ENTROPIES[entropy if "entropy" in outputs else None]
    flce_options["return_predictions"] = "is_top1" in outputs
    result = flce.linear_cross_entropy(hidden, weight, targets, **flce_options)
    result = result if isinstance(result, tuple) else flce.LinearCrossEntropyOutput(result)
    is_top1 = None if result.predictions is None else result.predictions == targets
    mean, entropies = None, None if result.entropy is None else result.entropy.float()
    if "mean_logits" in outputs:
        mean = _mean_of_products(hidden, weight, bias) * (logit_scale / temperature)
    # torch.compile would trace the backward, which raises.
    if entropies is not None and entropy == "detached" and not is_traced:
        entropies = _EntropyWithoutGradient.apply(entropies, result.loss)
    return -result.loss.float(), entropies, None, mean, is_top1


class _EntropyWithoutGradient(torch.autograd.Function):
    """The entropy, which is logged: its backward raises, so that no loss of it loses its gradient
    unseen. loss: what gives the result a graph."""

    @staticmethod
    def forward(ctx, entropy, loss):
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx, _):
        got = 'a gradient of it; call flce.integrations.trl.install(entropy="differentiable")'
        refuse("entropy", "a loss without it", got, RuntimeError)


@torch.no_grad()
def _mean_of_products(hidden, weight, bias):
    """The mean over the classes of hidden weight^T + bias, by the mean row of the weight."""
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the operands
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)
