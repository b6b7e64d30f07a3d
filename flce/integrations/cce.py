"""Apple's cut_cross_entropy (CCE, 25.6): its linear_cross_entropy and LinearCrossEntropy, and
`install()`, which makes the package's own run flce wherever they are called.

Arguments, their order and return values are CCE's. Differences:

- The mean over no valid token is 0 (CCE: NaN, and an error in the backward); so it is over no rows
  (CCE: an error).
- Gradients are exact: nothing is filtered, so `filter_eps`, `filter_e_grad` and `filter_c_grad`
  have no effect; the gradient of `e` is one sum over the vocabulary, so `accum_e_fp32` has none.
- Two runs are bitwise equal, on CPU and CUDA.
- A target out of range is an error or NaN (flce.linear_cross_entropy); CCE does not check it.
- float64, float32, bfloat16 and float16 on CPU and CUDA.
"""

import functools
import typing
from typing import Generic, Literal, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack, overload

import flce
from flce.options import Reduction
from flce.validate import check_tensor, refuse

from ._rebind import Installation, count_call, imports_of, parameters_of
from ._signatures import takes_by_name

_LossAndLse = tuple[Tensor, Tensor]
_Result = TypeVar("_Result", default=Tensor | _LossAndLse)
_FilterEps = float | Literal["auto"] | None

IMPLS: tuple[str, ...] = ("cce", "torch_compile", "cce_exact", "cce_kahan_full", "cce_kahan_full_c")
IMPLS += ("cce_kahan_full_e", "cce_kahan_full_c_full_e")
# Of distributed weights, which flce does not have; zero3_params is of Axolotl's fork.
_ONLY_THEIRS = ("vocab_parallel_options", "zero3_params")


class _ModuleOptions(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: int
    filter_eps: _FilterEps
    accum_e_fp32: bool
    accum_c_fp32: bool
    filter_e_grad: bool
    filter_c_grad: bool
    impl: object


class _Options(_ModuleOptions, total=False):
    vocab_parallel_options: None


@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> _LossAndLse: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: int = 0,
    return_lse: bool = False,
    filter_eps: _FilterEps = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: object = "cce",
    vocab_parallel_options: None = None,
) -> Tensor | _LossAndLse: ...
@takes_by_name
def linear_cross_entropy(
    e, c, targets, *, bias, softcap, reduction, ignore_index, return_lse, **options
):
    """The cross entropy of `e @ c.T + bias`.

    Args:
        e: hidden states, shape (..., D); with a shift (..., T, D). c: the head's weight, (V, D).
        targets: class indices, shape (...); with a shift (..., T). bias: shape (V,), or None.
        ignore_index, reduction: as F.cross_entropy.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        shift: k >= 0, or a bool: position t has the target of t + k, and the last k none.
        return_lse: also return the logsumexp of each token's logits; it is differentiable.
        filter_eps, filter_e_grad, filter_c_grad, accum_e_fp32: no effect.
        accum_c_fp32: sum the gradient of c in float32 for 16-bit operands.
        impl: one of `IMPLS`, or an enum member with such a name. All run the same code; all except
            "cce" and "torch_compile" set accum_c_fp32, as in CCE.
        vocab_parallel_options: must be None.

    Returns:
        The loss, or (loss, lse). Shape () or, for "none", (...); lse always has (...). With a shift
        of k the last dimension of both is T - k, element t that of position t. 0 where ignored.

    Raises: ValueError for a shift outside of [0, T), an unknown impl or filter_eps and for
    vocab_parallel_options; else as `flce.linear_cross_entropy`.
    """
    check_tensor("targets", targets)
    sums_in_float32 = _checked(options) or options["accum_c_fp32"]
    shift = _check_shift(options["shift"], targets)
    position_count = targets.shape[-1] - shift if shift else None  # of those that have a target
    if shift and targets.dim() == 1:  # flce shifts the rows of inputs with three dimensions or more
        e, targets, shift = e[:position_count], targets[shift:], 0
    result = flce.linear_cross_entropy(
        e,
        c,
        targets,
        linear_bias=bias,
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=softcap,
        shift=shift,
        accum_dtype=torch.float32 if sums_in_float32 and c.dtype != torch.float64 else None,
        return_lse=return_lse,
    )
    outputs = (result.loss, result.lse) if return_lse else (result,)
    outputs = tuple(tensor[..., :position_count] if tensor.dim() else tensor for tensor in outputs)
    return outputs if return_lse else outputs[0]


def _checked(options):
    """Whether the impl sums the gradient of c in float32, after the checks of what flce ignores."""
    filter_eps, group, impl = (options[k] for k in ("filter_eps", "vocab_parallel_options", "impl"))
    if filter_eps not in (None, "auto") and not isinstance(filter_eps, float):
        refuse("filter_eps", 'a float, "auto" or None', repr(filter_eps))
    if group is not None:
        expected = "None, a weight split over processes is not supported"
        got = f"a {type(group).__name__}; gather c, or use cut_cross_entropy for it"
        refuse("vocab_parallel_options", expected, got)
    name = impl if isinstance(impl, str) else str(getattr(impl, "name", impl)).lower()
    if name not in IMPLS:
        refuse("impl", f"one of {IMPLS}", repr(impl))
    return name not in ("cce", "torch_compile")


def _check_shift(shift, targets):
    if not isinstance(shift, int):
        refuse("shift", "an int or a bool", type(shift).__name__, TypeError)
    length = targets.shape[-1] if targets.dim() else 1
    if shift and not 0 <= shift < length:
        refuse("shift", f"0 <= shift < {length}", shift)
    return int(shift)


class LinearCrossEntropy(nn.Module, Generic[_Result]):
    """cut_cross_entropy.LinearCrossEntropy: a Module with the options of `linear_cross_entropy`
    and no parameters."""

    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: int
    filter_eps: _FilterEps
    accum_e_fp32: bool
    accum_c_fp32: bool
    filter_e_grad: bool
    filter_c_grad: bool
    impl: object
    return_lse: bool

    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor]",
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[_LossAndLse]",
        *,
        return_lse: Literal[True],
        **options: Unpack[_ModuleOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor | _LossAndLse]",
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: int = 0,
        filter_eps: _FilterEps = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: object = "cce",
        return_lse: bool = False,
    ) -> None: ...
    @takes_by_name
    def __init__(self, **options):
        super().__init__()
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> _Result:
        """The loss, or (loss, lse)."""
        options = {name: getattr(self, name) for name in _MODULE_OPTIONS}
        return linear_cross_entropy(e, c, targets, bias, **options)

    if typing.TYPE_CHECKING:

        def __call__(
            self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
        ) -> _Result: ...


_MODULE_OPTIONS = parameters_of(LinearCrossEntropy.__init__)[1:]


# ---- in the place of CCE's own ----


def install() -> Installation:
    """Makes every call of `cut_cross_entropy.linear_cross_entropy` run flce: those by
    `LinearCrossEntropy` and by the forwards which `cce_patch` puts into models, too.

    Values and gradients are those of this module's own call: exact, without CCE's gradient filter.
    With `vocab_parallel_options`, or the `zero3_params` of Axolotl's fork, CCE's own runs. Returns
    and raises as `flce.integrations` says.
    """
    with imports_of("cut_cross_entropy"):
        import cut_cross_entropy

    original = cut_cross_entropy.linear_cross_entropy
    names = parameters_of(original)
    ours = functools.partial(_call_in_place, original, names)
    ours_and_theirs = (*parameters_of(linear_cross_entropy), "zero3_params")
    served = names if set(names) <= set(ours_and_theirs) else f"some of {ours_and_theirs}"
    signature = "cut_cross_entropy", original.__name__, served, names
    pairs = [(original, functools.update_wrapper(ours, original))]
    return Installation("cce", pairs, signatures=[signature])


def _call_in_place(original, names, *args, **options):
    arguments = {**dict(zip(names, args, strict=False)), **options}
    # An argument given twice, too many or an unknown one: the original raises the TypeError.
    is_valid_call = len(arguments) == len(args) + len(options) and arguments.keys() <= set(names)
    is_distributed = any(arguments.pop(name, None) is not None for name in _ONLY_THEIRS)
    serves = is_valid_call and not is_distributed
    count_call("cce", serves)
    if not serves:
        return original(*args, **options)
    if arguments.get("filter_eps") == "high":  # 25.1.1's name for 25.6's "auto"
        arguments["filter_eps"] = "auto"
    return linear_cross_entropy(**arguments)
