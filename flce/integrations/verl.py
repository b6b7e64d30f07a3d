"""verl: its two fused losses of PPO, from hidden states to log-probabilities and entropies."""

import functools

import flce

from ._operands import in_dtype_of
from ._rebind import Installation, count_call, imports_of, same_parameters


def install() -> Installation:
    """Makes verl's fused kernels run flce: `FusedLinearForPPO` (backends "torch" and "liger") and
    `verl.utils.kernel.linear_cross_entropy` ("triton").

    The latter remains verl's own for other reductions than "none". With a tensor-parallel group the
    gradient of hidden is this rank's term of the sum, as verl's. Returns and raises as
    `flce.integrations` says.
    """
    with imports_of("verl"):
        from verl.utils.experimental import torch_functional
        from verl.utils.kernel import linear_cross_entropy as kernel

    class FusedLinearForPPO(torch_functional.FusedLinearForPPO):
        forward = _forward

    ours = functools.partial(_linear_cross_entropy, kernel.linear_cross_entropy)
    module = torch_functional.FusedLinearForPPO, FusedLinearForPPO
    # The function is the `apply` of this class, and does not tell its parameters.
    signatures = same_parameters("verl", module, (kernel.LinearCrossEntropy, ours))
    return Installation(
        "verl", [module, (kernel.linear_cross_entropy, ours)], signatures=signatures
    )


def _forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
    """(log-probabilities, entropy) of input_ids, shape (...); hidden_states (..., H), vocab_weights
    (V, H). Log-probabilities in float32, entropy in hidden_states' dtype."""
    count_call("verl")
    log_probs, entropy = _logprobs(hidden_states, vocab_weights, input_ids, temperature)
    return log_probs, entropy.to(hidden_states.dtype)


def _linear_cross_entropy(
    original, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None
):
    """(log-probabilities, entropy) of labels, float32, shape (N,) for hidden (..., H) of N rows;
    weight (V, H), or this rank's equal share of the classes of dist_process_group."""
    serves = reduction.lower() == "none"
    count_call("verl", serves)
    if not serves:
        return original(hidden, weight, labels, temperature, reduction, dist_process_group)
    # Megatron's hidden states are (S, 1, H) where labels are (1, S).
    rows, group = hidden.reshape(-1, hidden.shape[-1]), dist_process_group
    shards = None if group is None else flce.VocabParallel(group, reduce_input_grad=False)
    return _logprobs(rows, weight, labels.reshape(-1), temperature, shards)


def _logprobs(hidden, weight, target, temperature, shards=None):
    options = {"temperature": temperature, "vocab_parallel": shards}
    outputs = flce.linear_logprobs(hidden, in_dtype_of(hidden, weight), target, **options)
    return tuple(value.float() for value in outputs)
