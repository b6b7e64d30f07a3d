"""The fused linear cross entropy of liger-kernel 0.8: Module, function and autograd Function.

Arguments, their order and return values are Liger's, checked against 0.8.2 and 0.8.5. Differences:

- The gradient of a frozen input does not switch off those of weight and bias.
- The returned z-loss is float32 (Liger: the input's dtype for "none" and a sum of it otherwise).
- Accuracy over no valid token is 0 (Liger: NaN); so is the loss over no rows (Liger: an error).
- A target out of range is an error or NaN (flce.linear_cross_entropy); Liger's Triton kernels for
  this loss do not check it, its CuTe and cuTile ones do (docs/semantics.md).
- accum_dtype: the weight's gradient is summed in the operands' dtype if that represents every
  number of accum_dtype, else in float32 for 16-bit operands. float64 for float32 operands is
  refused.
- Every output but the loss is detached (Liger's are in the graph but give no gradient).
- A backward may be repeated and the graph kept: nothing that autograd saved is overwritten.

A bias of another dtype is promoted with input's, as in Liger; its gradient has the bias's dtype.
"""

import abc
import dataclasses
import sys

import torch
from torch import nn

import flce
from flce.options import DTYPES
from flce.composite import autocast_dtype

_REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass
class CrossEntropyOutput(abc.ABC):
    """The result of a call that asks for more than the loss; None for what was not asked for.

    loss and z_loss: shape (), or (N,) for reduction="none". token_accuracy: shape (), or 1 or 0 for
    each token, shape (N,), for "none". predicted_tokens: int64, shape (N,), -1 where ignored.

    If liger_kernel.transformers is imported, a call returns Liger's own class instead, which has
    these fields and counts as a subclass of this one (__subclasshook__).
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None

    @classmethod
    def __subclasshook__(cls, other):
        return (cls is CrossEntropyOutput and other is _output_class()) or NotImplemented


def liger_fused_linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
    chunk_mem_const=1,
):
    """liger_kernel.transformers.functional.liger_fused_linear_cross_entropy.

    Args:
        input: shape (N, H).
        weight: the head's weight, shape (V, H).
        target: class indices, shape (N,).
        bias: shape (V,), of input's dtype or a narrower one, or float32; or None.
        ce_weight: a factor for each class, shape (V,), or None.
        ignore_index, label_smoothing, reduction: as F.cross_entropy.
        lse_square_scale: adds this times lse^2 to a token's loss; under "mean" divided by the
            number of valid tokens, never by class weights.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        return_z_loss: also return that part of the loss, detached.
        accum_dtype: dtype in which the weight's gradient is summed; if flce does not support it, a
            dtype that is at least as exact is used (see the module). None: the operands' own.
        use_token_scaling: each token's loss, z-loss included, times the detached probability that
            the model gives its target; denominators do not change. It takes memory as
            reduction="none" does; with class weights, smoothing or z-loss it takes one more forward
            instead.
        return_token_accuracy, return_predicted_tokens: also return these.
        chunk_mem_const: Liger's chunk size (0.8.5). No effect: flce has `max_memory` instead.

    Returns:
        The loss, float32 (float64 for float64); or a CrossEntropyOutput where a return_* is set.

    Raises:
        As `flce.linear_cross_entropy`.
    """
    _check_chunk_mem_const(chunk_mem_const)
    output = _outputs(
        input,
        weight,
        target,
        bias=bias,
        ce_weight=ce_weight,
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        return_z_loss=return_z_loss,
        accum_dtype=accum_dtype,
        use_token_scaling=use_token_scaling,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    asked = return_z_loss or return_token_accuracy or return_predicted_tokens
    if not asked:
        return output.loss
    return _output_class()(
        loss=output.loss,
        z_loss=output.z_loss,
        token_accuracy=output.token_accuracy,
        predicted_tokens=output.predicted_tokens,
    )


class LigerFusedLinearCrossEntropyFunction:
    """The `apply` of liger_kernel.ops.LigerFusedLinearCrossEntropyFunction, with positional
    arguments.

    It is not an autograd.Function: it calls flce's operators.
    """

    supports_inner_impl_dispatch = True

    @staticmethod
    def apply(
        _input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        ce_impl=None,
        ce_mode=None,
        chunk_mem_const=1,
    ):
        """Arguments as `liger_fused_linear_cross_entropy`; always returns (loss, z_loss,
        token_accuracy, predicted_tokens), None for what was not asked. `ce_impl` and `ce_mode`,
        which choose among Liger's kernels, must be None."""
        for name, value in (("ce_impl", ce_impl), ("ce_mode", ce_mode)):
            if value is not None:
                raise ValueError(f"{name}: expected None, flce has its own kernels, got {value!r}")
        _check_chunk_mem_const(chunk_mem_const)
        output = _outputs(
            _input,
            weight,
            target,
            bias=bias,
            ce_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        return output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss.

    Args:
        As `liger_fused_linear_cross_entropy`. `ce_weight` is an attribute and not a buffer, as in
        Liger: it must be on the device of the call, and the state_dict is empty.

    Raises:
        ValueError: reduction, label_smoothing or softcap is none of the allowed values.
    """

    def __init__(
        self,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(
                f"label_smoothing: expected 0 <= label_smoothing <= 1, got {label_smoothing}"
            )
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap: expected a positive number or None, got {softcap}")
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, lin_weight, _input, target, bias=None):
        """The loss, or a CrossEntropyOutput. Argument order: weight (V, H), input (N, H),
        target (N,)."""
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias=bias,
            ce_weight=self.ce_weight,
            ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            accum_dtype=self.accum_dtype,
            use_token_scaling=self.use_token_scaling,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )


def _output_class():
    """Liger's CrossEntropyOutput if Liger is imported, else ours.

    Liger's models check isinstance against their own class; they may call this module in place of
    `liger_kernel.transformers.functional.liger_fused_linear_cross_entropy`. Nothing is imported
    here.
    """
    functional = sys.modules.get("liger_kernel.transformers.functional")
    theirs = getattr(functional, "CrossEntropyOutput", None)
    return CrossEntropyOutput if theirs is None else theirs


def _check_chunk_mem_const(value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"chunk_mem_const: expected a positive int, got {value!r}")


def _outputs(
    input,
    weight,
    target,
    *,
    bias,
    ce_weight,
    lse_square_scale,
    reduction,
    return_z_loss,
    accum_dtype,
    use_token_scaling,
    return_token_accuracy,
    return_predicted_tokens,
    **same,
):
    """The CrossEntropyOutput of a call; `same`: the options that have the same name in flce and
    Liger."""
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        raise TypeError(f"target: expected class indices, as Liger has them, got {target.dtype}")
    if same["ignore_index"] is None:
        raise TypeError("ignore_index: expected an int, as Liger has it, got None")
    per_token = reduction == "none"
    asked = {
        "return_z_loss": return_z_loss,
        "return_accuracy": return_token_accuracy and not per_token,
        # The accuracy of a single token is whether its prediction is right.
        "return_predictions": return_predicted_tokens or (return_token_accuracy and per_token),
    }
    options = {
        **same,
        **asked,
        "linear_bias": _promoted(bias, input),
        "weight": ce_weight,
        "reduction": reduction,
        "accum_dtype": _sum_dtype(accum_dtype, input),
    }
    if lse_square_scale:
        options["z_loss"] = lse_square_scale
    call = _scaled if use_token_scaling else flce.linear_cross_entropy
    output = call(input, weight, target, **options)
    if not any(asked.values()):
        return CrossEntropyOutput(output)
    accuracy = output.accuracy
    if return_token_accuracy and per_token:
        accuracy = (output.predictions == target).to(output.loss.dtype)
        accuracy = accuracy.masked_fill(target == same["ignore_index"], 0.0)
    return CrossEntropyOutput(
        output.loss,
        output.z_loss,
        accuracy,
        output.predictions if return_predicted_tokens else None,
    )


def _is_float(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES


def _promoted(bias, input):
    """A bias of a narrower dtype, converted exactly to the dtype of its sum with the logits;
    autograd casts its gradient back.

    Anything but a floating tensor is returned unchanged, for flce to refuse by name.
    """
    if not (_is_float(bias) and _is_float(input)):
        return bias
    return bias.to(torch.promote_types(bias.dtype, input.dtype))


def _sum_dtype(accum_dtype, input):
    """flce's accum_dtype for Liger's: at least as exact, or unchanged for flce to refuse."""
    if accum_dtype not in DTYPES or not _is_float(input):
        return accum_dtype
    operand = input.dtype
    if operand != torch.float64:
        operand = autocast_dtype(input.device.type) or operand
    if torch.promote_types(operand, accum_dtype) == operand:
        return None
    # Also for float64: Liger rounds each chunk's dW of 16-bit operands to 16 bits before it adds it
    # in float64, which is a larger error than that of a float32 sum.
    return torch.float32 if operand.itemsize == 2 else accum_dtype


def _scaled(input, head, target, **options):
    """The loss with each token's loss multiplied by the detached probability of its target."""
    if options["weight"] is None and not options["label_smoothing"] and not options.get("z_loss"):
        return _scaled_plain(input, head, target, **options)
    # With class weights, smoothing or z-loss the probability cannot be recovered from a row's loss,
    # so it takes a forward of its own.
    plain = ("linear_bias", "softcap", "ignore_index")
    with torch.no_grad():
        nll = flce.linear_cross_entropy(
            input, head, target, reduction="none", **{name: options[name] for name in plain}
        )
    return flce.linear_cross_entropy(input, head, target, token_weight=nll.neg().exp(), **options)


def _scaled_plain(input, head, target, *, reduction, **options):
    """As _scaled if a row's loss is -log of the probability: one call with reduction="none"
    suffices."""
    output = flce.linear_cross_entropy(input, head, target, reduction="none", **options)
    is_tuple = isinstance(output, tuple)
    rows = output.loss if is_tuple else output
    loss = rows * rows.detach().neg().exp()
    z_loss = output.z_loss if is_tuple else None
    if reduction != "none":
        loss = loss.sum()
        z_loss = None if z_loss is None else z_loss.sum()  # the z-loss of rows that are all zeros
    if reduction == "mean":
        loss = loss / (target != options["ignore_index"]).sum().clamp(min=1)
    return output._replace(loss=loss, z_loss=z_loss) if is_tuple else loss
