"""Liger: its fused linear cross entropy, wherever its functions, Modules and models call it."""

import flce
from flce.compat import liger as compat
from flce.compat.signatures import takes

from ._rebind import Installation, is_ours, parameters_of

_DEVICES = ("cpu", "cuda")
_CROSS_ENTROPY = "LigerFusedLinearCrossEntropyFunction"
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"
_SCALED_OPTIONS = {"temperature": 1.0, "ignore_index": -100, "m_tiles_per_cluster": 1}
_SCALED_OPTIONS |= {"return_entropy": False, "selected_token_ids": None}


def install():
    """Makes every call of Liger's fused linear cross entropy run flce.

    That is `liger_fused_linear_cross_entropy`, `LigerFusedLinearCrossEntropyLoss` and the forwards
    which `apply_liger_kernel_to_*` puts into models: Liger's own code up to its autograd Function,
    which flce replaces. Liger 0.8.5's `LigerFusedLinearScaledCrossEntropyFunction` is served
    too. Values and gradients are those of `flce.compat.liger`.

    Returns and raises as `flce.integrations` says.
    """
    import liger_kernel.ops as ops
    import liger_kernel.ops.fused_linear_cross_entropy as default

    # They differ where Liger has chosen other kernels than Triton's.
    originals = {getattr(ops, _CROSS_ENTROPY), getattr(default, _CROSS_ENTROPY)}
    pairs = [(original, CrossEntropyFunction(original)) for original in originals]
    if hasattr(ops, _SCALED):  # since 0.8.2
        scaled = getattr(ops, _SCALED)
        pairs.append((scaled, ScaledCrossEntropyFunction(scaled)))
    return Installation("liger", pairs, known=(_parameters(*pair) for pair in pairs))


def _parameters(original, ours):
    """The calls are positional: the parameters of Liger's must be the first ones of ours."""
    found = parameters_of(getattr(original, "forward", original.apply))
    known = parameters_of(ours.call)
    if found == known[: len(found)] and ours.last_required_parameter in found:
        known = found
    else:
        known = f"{known}, at least up to {ours.last_required_parameter}"
    return "liger_kernel", original.__name__, known, found


class CrossEntropyFunction:
    """Replaces LigerFusedLinearCrossEntropyFunction."""

    supports_inner_impl_dispatch = True  # Liger's functions then pass ce_impl and what follows it
    last_required_parameter = "return_predicted_tokens"  # before it, three values were returned
    call = staticmethod(compat.LigerFusedLinearCrossEntropyFunction.apply)

    def __init__(self, original):
        self.flce_original = original

    def apply(self, _input, *args):
        """(loss, z_loss, token_accuracy, predicted_tokens); arguments, by position, shapes and
        errors as `flce.compat.liger.LigerFusedLinearCrossEntropyFunction.apply`.

        Liger's own runs for devices other than CPU and CUDA, and where `ce_impl` or `ce_mode`
        choose one of its kernels.
        """
        names_a_kernel = any(value is not None for value in args[14:16])  # ce_impl, ce_mode
        if not is_ours("liger", not names_a_kernel and _input.device.type in _DEVICES):
            return self.flce_original.apply(_input, *args)
        return self.call(_input, *args)


class ScaledCrossEntropyFunction:
    """Replaces LigerFusedLinearScaledCrossEntropyFunction."""

    last_required_parameter = "return_entropy"

    def __init__(self, original):
        self.flce_original = original

    def apply(self, *args, **options):
        """As `call`; Liger's own runs where `selected_token_ids` asks for more log-probabilities,
        and for devices other than CPU and CUDA."""
        selected = options.get("selected_token_ids", args[7] if len(args) > 7 else None)
        device = (args[0] if args else options["_input"]).device
        if not is_ours("liger", selected is None and device.type in _DEVICES):
            return self.flce_original.apply(*args, **options)
        return self.call(*args, **options)

    @staticmethod
    @takes("_input", "weight", "target", **_SCALED_OPTIONS)
    def call(_input, weight, target, m_tiles_per_cluster, selected_token_ids, **options):
        """Each row's -log p of its target with logits / temperature, float32 (float64 for float64),
        shape (N,), or with return_entropy (nll, entropy), the entropy in _input's dtype; both are
        differentiable. Raises as `flce.linear_cross_entropy`.

        _input: shape (N, H); weight: (V, H); target: class indices, shape (N,); ignore_index: the
        target of rows that give 0; m_tiles_per_cluster: no effect; selected_token_ids: None.
        """
        nll = flce.linear_cross_entropy(_input, weight, target, reduction="none", **options)
        return (nll.loss, nll.entropy.to(_input.dtype)) if options["return_entropy"] else nll
