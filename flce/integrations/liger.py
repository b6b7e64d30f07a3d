"""Liger: its fused linear cross entropy, wherever its functions, Modules and models call it."""

import importlib.metadata
import inspect

import flce
from flce.compat import liger as compat

from ._rebind import Installation, is_ours

_DEVICES = ("cpu", "cuda")
_CROSS_ENTROPY = "LigerFusedLinearCrossEntropyFunction"
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"


def install():
    """Lets all that calls Liger's fused linear cross entropy run flce.

    That is `liger_fused_linear_cross_entropy`, `LigerFusedLinearCrossEntropyLoss` and the forwards
    which `apply_liger_kernel_to_*` puts into models: Liger's own code up to its autograd Function,
    in whose place flce stands. Liger 0.8.5's `LigerFusedLinearScaledCrossEntropyFunction` is served
    too. Values and gradients are those of `flce.compat.liger`.

    Returns:
        A handle: `remove()`, or the end of a `with` block, brings Liger's functions back.

    Raises:
        ImportError: Liger is missing, or its Function takes arguments that flce does not know.
        RuntimeError: it is installed already.
    """
    import liger_kernel.ops as ops
    import liger_kernel.ops.fused_linear_cross_entropy as default

    # ops has another one where Liger has chosen other kernels than Triton's.
    originals = {getattr(ops, _CROSS_ENTROPY), getattr(default, _CROSS_ENTROPY)}
    pairs = [(original, CrossEntropyFunction(original)) for original in originals]
    if hasattr(ops, _SCALED):  # since 0.8.2
        scaled = getattr(ops, _SCALED)
        pairs.append((scaled, ScaledCrossEntropyFunction(scaled)))
    for original, ours in pairs:
        if not hasattr(original, "flce_original"):
            _check_parameters(original, ours)
    return Installation("liger", pairs)


def _check_parameters(original, ours):
    """The calls are positional: the parameters of Liger's must be the first ones of ours."""
    theirs = getattr(original, "forward", original.apply)
    known = tuple(inspect.signature(ours.call).parameters)
    found = tuple(name for name in inspect.signature(theirs).parameters if name != "ctx")
    if found != known[: len(found)] or ours.last_required_parameter not in found:
        version = importlib.metadata.version("liger_kernel")
        raise ImportError(
            f"liger_kernel: expected a version whose {original.__name__} takes {known}, at least "
            f"up to {ours.last_required_parameter}, got {version} with {found}"
        )


class CrossEntropyFunction:
    """Stands where Liger has LigerFusedLinearCrossEntropyFunction."""

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
        ce_impl_and_mode = args[14:16]
        names_a_kernel = any(value is not None for value in ce_impl_and_mode)
        if not is_ours("liger", not names_a_kernel and _input.device.type in _DEVICES):
            return self.flce_original.apply(_input, *args)
        return self.call(_input, *args)


class ScaledCrossEntropyFunction:
    """Stands where Liger has LigerFusedLinearScaledCrossEntropyFunction."""

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
    def call(
        _input,
        weight,
        target,
        temperature=1.0,
        ignore_index=-100,
        m_tiles_per_cluster=1,
        return_entropy=False,
        selected_token_ids=None,
    ):
        """Each token's -log p of its target, with logits / temperature.

        Args:
            _input: shape (N, H); weight: (V, H); target: class indices, shape (N,).
            temperature: a positive number; ignore_index: the target of rows that give 0.
            m_tiles_per_cluster: of Liger's kernel for Hopper; no effect.
            return_entropy: also the entropy of each row.
            selected_token_ids: None.

        Returns:
            nll, float32 (float64 for float64), shape (N,), or (nll, entropy), the entropy in
            _input's dtype. Both are differentiable.

        Raises: as `flce.linear_cross_entropy`.
        """
        nll = flce.linear_cross_entropy(
            _input,
            weight,
            target,
            reduction="none",
            temperature=temperature,
            ignore_index=ignore_index,
            return_entropy=return_entropy,
        )
        return (nll.loss, nll.entropy.to(_input.dtype)) if return_entropy else nll
