"""TRL: the one function from which SFT, DPO, KTO, GRPO and RLOO take log-probabilities."""

import inspect

import torch

import flce
from flce.composite import autocast_dtype

from ._operands import in_dtype_of
from ._rebind import Installation, is_ours

_OLDEST = (1, 16)
_PARAMETERS = ("hidden", "weight", "bias", "targets", "temperature", "chunk_size")
_PARAMETERS += ("final_logit_softcapping", "logit_scale", "outputs")
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # TRL's default
_DEFAULTS = {"final_logit_softcapping": None, "logit_scale": 1.0, "outputs": _OUTPUTS}
_MEAN = "mean_logits"
_SERVED = {"log_probs", "entropy", _MEAN, "is_top1"}


def install():
    """Makes TRL's trainers compute log-probabilities, entropies and accuracies by flce.

    `trl.trainer.utils._ChunkedLogProbFunction` is looked up in each step, so trainers that exist
    already are served too. Its other results, a mean of softcapped logits, weights that DeepSpeed
    ZeRO-3 has split and devices other than CPU and CUDA remain TRL's own.

    Returns a handle: `remove()`, or the end of a `with` block, restores TRL's function.

    Raises ImportError where TRL is missing, is older than 1.16, or has another function in that
    place, RuntimeError where flce is installed already.
    """
    import trl
    import trl.trainer.utils

    original = getattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)
    if not hasattr(original, "flce_original"):
        _check_version(trl.__version__, original)
    return Installation("trl", [(original, LogProbFunction(original))])


def _check_version(version, function):
    from packaging.version import Version

    found = "no such function"
    if function is not None:
        found = tuple(inspect.signature(function.forward).parameters)[1:]  # without ctx
    if Version(version).release < _OLDEST or found != _PARAMETERS:
        raise ImportError(
            "trl: expected 1.16 or a later version whose trl.trainer.utils._ChunkedLogProbFunction "
            f"takes {_PARAMETERS}, got {version} with {found}"
        )


class LogProbFunction:
    """Replaces TRL's autograd Function: its `apply`, computed by flce."""

    def __init__(self, original):
        self.flce_original = original

    def apply(self, *args, **options):
        """The log-probabilities of `targets`, and what `outputs` names; arguments are TRL's, in the
        order of _PARAMETERS.

        Args:
            hidden: shape (N, H); weight: (V, H), cast to hidden's dtype (or autocast's); bias:
                (V,) or None; targets: class indices, shape (N,).
            temperature, logit_scale, final_logit_softcapping: flce's, the last one its softcap.
            chunk_size: the columns of TRL's tiles; flce has `max_memory` instead.
            outputs: some of "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1".

        Returns (logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1), shape (N,) each, None
        for what `outputs` does not name; float32, is_top1 bool. The first two are differentiable.
        Raises as `flce.linear_cross_entropy`.
        """
        given = {**_DEFAULTS, **dict(zip(_PARAMETERS, args, strict=False)), **options}
        values = (given[name] for name in _PARAMETERS)
        hidden, weight, bias, targets, temperature, _, softcap, logit_scale, outputs = values
        serves = softcap is None or _MEAN not in outputs
        if not is_ours("trl", serves and _can_serve(hidden, weight, outputs)):
            return self.flce_original.apply(*args, **options)
        weight, bias = in_dtype_of(hidden, weight), in_dtype_of(hidden, bias)
        operand_dtype = autocast_dtype(hidden.device.type) or hidden.dtype
        made = flce.linear_cross_entropy(
            hidden,
            weight,
            targets,
            linear_bias=bias,
            reduction="none",
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            # TRL sums the weight's gradient in float32 too.
            accum_dtype=torch.float32 if operand_dtype.itemsize == 2 else None,
            return_entropy="entropy" in outputs,
            return_predictions="is_top1" in outputs,
        )
        made = made if isinstance(made, tuple) else flce.LinearCrossEntropyOutput(made)
        mean = None
        if _MEAN in outputs:
            mean = _mean_of_products(hidden, weight, bias) * (logit_scale / temperature)
        return (
            -made.loss.float(),
            None if made.entropy is None else made.entropy.float(),
            None,
            mean,
            None if made.predictions is None else made.predictions == targets,
        )


def _can_serve(hidden, weight, outputs):
    # ZeRO-3 (ds_id) splits the weight again before the backward, which flce would then read.
    is_split = hasattr(weight, "ds_id")
    return set(outputs) <= _SERVED and hidden.device.type in ("cpu", "cuda") and not is_split


@torch.no_grad()
def _mean_of_products(hidden, weight, bias):
    """The mean over the classes of hidden weight^T + bias: one product with the mean row of
    the weight."""
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the operands
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return mean if bias is None else mean + bias.mean(dtype=torch.float32)
