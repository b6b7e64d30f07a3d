"""Liger: the fused linear cross entropy of liger-kernel 0.8, as Module, function and autograd
Function, and `install()`, which makes Liger's own run flce wherever its code calls it.

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
import typing
from typing import Generic, Literal, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack, overload

import flce
from flce.modes import autocast_dtype
from flce.options import DTYPES, Reduction
from flce.validate import check_integer, is_equal, refuse

from ._rebind import Installation, count_call, imports_of, parameters_of
from ._signatures import takes_by_name

_REDUCTIONS = ("mean", "sum", "none")
_RETURNS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
_CROSS_ENTROPY = "LigerFusedLinearCrossEntropyFunction"
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction"


@dataclasses.dataclass
class CrossEntropyOutput(abc.ABC):
    """The result of a call that asks for more than the loss; None for what was not asked for.

    loss and z_loss: shape (), or (N,) for reduction="none". token_accuracy: shape (), or 1 or 0 for
    each token, shape (N,), for "none". predicted_tokens: int64, shape (N,), -1 where ignored.

    If liger_kernel.transformers is imported, a call returns Liger's own class instead, for which
    its models check; it has these fields and counts as a subclass of this one.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None

    @classmethod
    def __subclasshook__(cls, other):
        return (cls is CrossEntropyOutput and other is _output_class()) or NotImplemented


def _output_class():
    """Liger's class if its module is imported and has one, else ours. Nothing is imported here."""
    functional = sys.modules.get("liger_kernel.transformers.functional")
    return getattr(functional, "CrossEntropyOutput", None) or CrossEntropyOutput


_Result = TypeVar("_Result", default=Tensor | CrossEntropyOutput)


class _ModuleOptions(TypedDict, total=False):
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: Reduction
    softcap: float | None
    accum_dtype: torch.dtype | None
    use_token_scaling: bool


class _LossModuleOptions(_ModuleOptions, total=False):
    return_z_loss: Literal[False]
    return_token_accuracy: Literal[False]
    return_predicted_tokens: Literal[False]


class _OutputModuleOptions(_ModuleOptions, total=False):
    return_z_loss: Literal[True]
    return_token_accuracy: Literal[True]
    return_predicted_tokens: Literal[True]


class _LossOptions(_LossModuleOptions, total=False):
    chunk_mem_const: int


class _OutputOptions(_OutputModuleOptions, total=False):
    chunk_mem_const: int


@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Unpack[_LossOptions],
) -> Tensor: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Unpack[_OutputOptions],
) -> CrossEntropyOutput: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput: ...
@takes_by_name
def liger_fused_linear_cross_entropy(input, weight, target, **options):
    """liger_kernel.transformers.functional.liger_fused_linear_cross_entropy.

    Args:
        input: shape (N, H); weight: shape (V, H); target: class indices, shape (N,).
        bias: shape (V,), of input's dtype or a narrower one, or float32; or None.
        ce_weight: a factor for each class, shape (V,), or None.
        ignore_index, label_smoothing, reduction: as F.cross_entropy.
        lse_square_scale: adds this times lse^2 to a token's loss; under "mean" divided by the
            number of valid tokens, never by class weights.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        return_z_loss: also return that part of the loss, detached.
        accum_dtype: dtype in which the weight's gradient is summed; if flce does not support it, a
            dtype that is at least as exact is used (see the module). None: the operands' own.
        use_token_scaling: each token's loss, z-loss included, times the detached probability of its
            target; denominators do not change. It takes memory as reduction="none" does; with class
            weights, smoothing or z-loss it takes one more forward instead.
        return_token_accuracy, return_predicted_tokens: also return these.
        chunk_mem_const: Liger's chunk size (0.8.5). No effect: flce has `max_memory` instead.

    Returns the loss, float32 (float64 for float64), or a CrossEntropyOutput where a return_* is
    set. Raises as `flce.linear_cross_entropy`.
    """
    values = _outputs(input, weight, target, **options)
    return _output_class()(*values) if any(options[name] for name in _RETURNS) else values[0]


class LigerFusedLinearCrossEntropyFunction:
    """The `apply` of Liger's autograd Function of that name. It calls flce's operators."""

    supports_inner_impl_dispatch = True

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: None = None,
        ce_mode: None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(loss, z_loss, token_accuracy, predicted_tokens), None for what was not asked. Arguments
        as `liger_fused_linear_cross_entropy`, and `ce_impl` and `ce_mode`, which choose among
        Liger's kernels and must be None."""
        for name, value in (("ce_impl", ce_impl), ("ce_mode", ce_mode)):
            if value is not None:
                refuse(name, "None, flce has its own kernels", repr(value))
        return _outputs(
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
            chunk_mem_const=chunk_mem_const,
        )


class LigerFusedLinearCrossEntropyLoss(nn.Module, Generic[_Result]):
    """liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss.

    Args: as `liger_fused_linear_cross_entropy`. `ce_weight` is an attribute and not a buffer, as in
    Liger: it must be on the device of the call, and the state_dict is empty.

    Raises: ValueError where reduction, label_smoothing or softcap has no allowed value.
    """

    ce_weight: Tensor | None
    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: Reduction
    softcap: float | None
    return_z_loss: bool
    accum_dtype: torch.dtype | None
    use_token_scaling: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool

    @overload
    def __init__(
        self: "LigerFusedLinearCrossEntropyLoss[Tensor]",
        ce_weight: Tensor | None = None,
        **options: Unpack[_LossModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: "LigerFusedLinearCrossEntropyLoss[CrossEntropyOutput]",
        ce_weight: Tensor | None = None,
        **options: Unpack[_OutputModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: "LigerFusedLinearCrossEntropyLoss[Tensor | CrossEntropyOutput]",
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None: ...
    @takes_by_name
    def __init__(self, **options):
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)
        if not 0.0 <= self.label_smoothing <= 1.0:
            refuse("label_smoothing", "0 <= label_smoothing <= 1", self.label_smoothing)
        if self.reduction not in _REDUCTIONS:
            refuse("reduction", f"one of {_REDUCTIONS}", repr(self.reduction))
        if self.softcap is not None and not self.softcap > 0:
            refuse("softcap", "a positive number or None", self.softcap)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> _Result:
        """The loss, or a CrossEntropyOutput, for a weight (V, H), input (N, H), target (N,)."""
        options = {name: getattr(self, name) for name in _MODULE_OPTIONS}
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **options)

    if typing.TYPE_CHECKING:

        def __call__(
            self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
        ) -> _Result: ...


_MODULE_OPTIONS = parameters_of(LigerFusedLinearCrossEntropyLoss.__init__)[1:]


def _outputs(input, weight, target, *, chunk_mem_const, use_token_scaling, **options):
    """The fields of a call's CrossEntropyOutput."""
    check_integer("chunk_mem_const", chunk_mem_const, 1)
    if torch.is_tensor(target) and target.is_floating_point():
        refuse("target", "class indices, as Liger has them", target.dtype, TypeError)
    if options["ignore_index"] is None:
        refuse("ignore_index", "an int, as Liger has it", None, TypeError)
    z_loss, accuracy, predictions = (options.pop(name) for name in _RETURNS)
    # The accuracy of a single token is whether its prediction is right.
    of_tokens = accuracy and options["reduction"] == "none"
    options["return_z_loss"] = z_loss
    options["return_accuracy"] = accuracy and not of_tokens
    options["return_predictions"] = predictions or of_tokens
    options["linear_bias"] = _promoted(options.pop("bias"), input)
    options["weight"] = options.pop("ce_weight")
    options["z_loss"] = options.pop("lse_square_scale") or 0.0
    options["accum_dtype"] = _sum_dtype(options["accum_dtype"], input)
    output = (_scaled if use_token_scaling else _plain)(input, weight, target, **options)
    accuracies = output.accuracy
    if of_tokens:
        accuracies = (output.predictions == target).to(output.loss.dtype)
        accuracies = accuracies.masked_fill(is_equal(target, options["ignore_index"]), 0.0)
    return output.loss, output.z_loss, accuracies, output.predictions if predictions else None


def _is_float(tensor):
    return torch.is_tensor(tensor) and tensor.dtype in DTYPES


def _promoted(bias, input):
    """The bias in the dtype of its sum with the logits; flce refuses what is no such tensor."""
    is_sum = _is_float(bias) and _is_float(input)
    return bias.to(torch.promote_types(bias.dtype, input.dtype)) if is_sum else bias


def _sum_dtype(accum_dtype, input):
    """flce's accum_dtype for Liger's: at least as exact, or unchanged for flce to refuse."""
    if accum_dtype not in DTYPES or not _is_float(input):
        return accum_dtype
    dtype = input.dtype
    operand = dtype if dtype == torch.float64 else autocast_dtype(input.device.type) or dtype
    if torch.promote_types(operand, accum_dtype) == operand:
        return operand
    # Also for float64: Liger rounds each chunk's dW of 16-bit operands to 16 bits before it adds it
    # in float64, which is a larger error than that of a float32 sum.
    return torch.float32 if operand.itemsize == 2 else accum_dtype


def _plain(*operands, **options):
    result = flce.linear_cross_entropy(*operands, **options)
    return result if isinstance(result, tuple) else flce.LinearCrossEntropyOutput(result)


def _scaled(*operands, reduction, **options):
    """The loss with each token's loss multiplied by the detached probability of its target."""
    if options["weight"] is not None or options["label_smoothing"] or options["z_loss"]:
        # The probability cannot be recovered from a row's loss: it takes another forward.
        plain = {name: options[name] for name in ("linear_bias", "softcap", "ignore_index")}
        with torch.no_grad():
            factors = _plain(*operands, reduction="none", **plain).loss.neg().exp()
        return _plain(*operands, reduction=reduction, token_weight=factors, **options)
    output = _plain(*operands, reduction="none", **options)
    loss, z_loss = output.loss * output.loss.detach().neg().exp(), output.z_loss
    if reduction != "none":
        loss = loss.sum()
        z_loss = None if z_loss is None else z_loss.sum()  # of rows that are all zeros
    if reduction == "mean":
        ignored = is_equal(operands[2], options["ignore_index"])
        loss = loss / (~ignored).sum().clamp(min=1)
    return output._replace(loss=loss, z_loss=z_loss)


# ---- in the place of Liger's own ----


def install() -> Installation:
    """Makes every call of Liger's fused linear cross entropy run flce: its function, its Module,
    the forwards which `apply_liger_kernel_to_*` puts into models; since 0.8.2 the scaled one too.

    Values and gradients are those of this module's own calls. Returns and raises as
    `flce.integrations` says.
    """
    with imports_of("liger_kernel"):
        import liger_kernel.ops as ops
        import liger_kernel.ops.fused_linear_cross_entropy as default

    # They differ where Liger has chosen other kernels than Triton's.
    originals = {getattr(ops, _CROSS_ENTROPY), getattr(default, _CROSS_ENTROPY)}
    call = LigerFusedLinearCrossEntropyFunction.apply
    # Before there was return_predicted_tokens, three values were returned.
    ours = call, "return_predicted_tokens", ("ce_impl", "ce_mode")
    pairs = [(original, Replacement(original, *ours)) for original in originals]
    if scaled := getattr(ops, _SCALED, None):  # since 0.8.2
        ours = _scaled_cross_entropy, "return_entropy", ("selected_token_ids",)
        pairs.append((scaled, Replacement(scaled, *ours)))
    return Installation("liger", pairs, signatures=(ours.signature() for _, ours in pairs))


class Replacement:
    """Replaces an autograd Function of Liger."""

    supports_inner_impl_dispatch = True  # Liger's functions then pass ce_impl and what follows it

    def __init__(self, original, call, last_required, unserved):
        """`call`: flce's, of the arguments of Liger's `apply`, which has them at least up to
        `last_required`. `unserved`: names of arguments with which Liger's own runs."""
        self.original, self.call, self.names = original, call, parameters_of(call)
        self.last_required, self.unserved = last_required, unserved

    def signature(self):
        """One of `signatures` of Installation: the calls are positional, so the parameters of
        Liger's must be the first ones of ours."""
        parameters = parameters_of(getattr(self.original, "forward", self.original.apply))
        known = f"{self.names}, at least up to {self.last_required}"
        if parameters == self.names[: len(parameters)] and self.last_required in parameters:
            known = parameters
        return "liger_kernel", self.original.__name__, known, parameters

    def apply(self, *args, **options):
        """As `call`; Liger's own runs for devices other than CPU and CUDA too."""
        arguments = {**dict(zip(self.names, args, strict=False)), **options}
        serves = all(arguments.get(name) is None for name in self.unserved)
        serves = serves and arguments["_input"].device.type in ("cpu", "cuda")
        count_call("liger", serves)
        if not serves:
            return self.original.apply(*args, **options)
        return self.call(*args, **options)


def _scaled_cross_entropy(
    _input,
    weight,
    target,
    temperature=1.0,
    ignore_index=-100,
    m_tiles_per_cluster=1,
    return_entropy=False,
    selected_token_ids=None,
):
    """Each row's -log p of its target with logits / temperature, float32 (float64 for float64),
    shape (N,), or with return_entropy (nll, entropy), the entropy in _input's dtype; both are
    differentiable. Raises as `flce.linear_cross_entropy`.

    _input: shape (N, H); weight: (V, H); target: class indices, shape (N,); ignore_index: the
    target of rows that give 0; m_tiles_per_cluster: no effect; selected_token_ids: None.
    """
    options = {"temperature": temperature, "ignore_index": ignore_index}
    options |= {"reduction": "none", "return_entropy": return_entropy}
    nll = flce.linear_cross_entropy(_input, weight, target, **options)
    return (nll.loss, nll.entropy.to(_input.dtype)) if return_entropy else nll
