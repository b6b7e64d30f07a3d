"""Liger: its fused linear cross entropy, wherever its functions, Modules and models call it."""

import flce
from flce.compat import liger as compat
from flce.compat.signatures import takes

from ._rebind import Installation, is_ours, parameters_of

_CROSS_ENTROPY = "LigerFusedLinearCrossEntropyFunction"
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"
_SCALED_OPTIONS = {"temperature": 1.0, "ignore_index": -100, "m_tiles_per_cluster": 1}
_SCALED_OPTIONS |= {"return_entropy": False, "selected_token_ids": None}


def install():
    """Makes every call of Liger's fused linear cross entropy run flce: its function, its Module,
    the forwards which `apply_liger_kernel_to_*` puts into models; since 0.8.2 the scaled one too.

    Values and gradients are those of `flce.compat.liger`. Returns and raises as `flce.integrations`
    says.
    """
    import liger_kernel.ops as ops
    import liger_kernel.ops.fused_linear_cross_entropy as default

    # They differ where Liger has chosen other kernels than Triton's.
    originals = {getattr(ops, _CROSS_ENTROPY), getattr(default, _CROSS_ENTROPY)}
    call = compat.LigerFusedLinearCrossEntropyFunction.apply
    # Before there was return_predicted_tokens, three values were returned.
    ours = call, "return_predicted_tokens", ("ce_impl", "ce_mode")
    pairs = [(original, Replacement(original, *ours)) for original in originals]
    if scaled := getattr(ops, _SCALED, None):  # since 0.8.2
        ours = _scaled_cross_entropy, "return_entropy", ("selected_token_ids",)
        pairs.append((scaled, Replacement(scaled, *ours)))
    return Installation("liger", pairs, known=(ours.known() for _, ours in pairs))


class Replacement:
    """Replaces an autograd Function of Liger."""

    supports_inner_impl_dispatch = True  # Liger's functions then pass ce_impl and what follows it

    def __init__(self, original, call, last_required, theirs):
        """`call`: flce's, of the arguments of Liger's `apply`, which has them at least up to
        `last_required`; Liger's own runs where one of those that `theirs` names is given."""
        self.original, self.call, self.names = original, call, parameters_of(call)
        self.last_required, self.theirs = last_required, theirs

    def known(self):
        """As for Installation: the calls are positional, so the parameters of Liger's must be the
        first ones of ours."""
        parameters = parameters_of(getattr(self.original, "forward", self.original.apply))
        known = f"{self.names}, at least up to {self.last_required}"
        if parameters == self.names[: len(parameters)] and self.last_required in parameters:
            known = parameters
        return "liger_kernel", self.original.__name__, known, parameters

    def apply(self, *args, **options):
        """As `call`; Liger's own runs for devices other than CPU and CUDA too."""
        arguments = {**dict(zip(self.names, args, strict=False)), **options}
        serves = all(arguments.get(name) is None for name in self.theirs)
        if not is_ours("liger", serves and arguments["_input"].device.type in ("cpu", "cuda")):
            return self.original.apply(*args, **options)
        return self.call(*args, **options)


@takes("_input", "weight", "target", **_SCALED_OPTIONS)
def _scaled_cross_entropy(
    _input, weight, target, m_tiles_per_cluster, selected_token_ids, **options
):
    """Each row's -log p of its target with logits / temperature, float32 (float64 for float64),
    shape (N,), or with return_entropy (nll, entropy), the entropy in _input's dtype; both are
    differentiable. Raises as `flce.linear_cross_entropy`.

    _input: shape (N, H); weight: (V, H); target: class indices, shape (N,); ignore_index: the
    target of rows that give 0; m_tiles_per_cluster: no effect; selected_token_ids: None.
    """
    nll = flce.linear_cross_entropy(_input, weight, target, reduction="none", **options)
    return (nll.loss, nll.entropy.to(_input.dtype)) if options["return_entropy"] else nll
