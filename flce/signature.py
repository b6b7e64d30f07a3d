"""What follows from a call's signature alone: the dtypes, devices and shapes of its tensors and its
options, without any value that a tensor holds. These are all checks but those of values, and the
settings of the inner operators.

A training step repeats its signature, and the device waits for the host before the first kernel of
a small step, so what follows from a signature is found once and kept.
"""

import functools
import math
import operator
import typing
from dataclasses import dataclass

import torch

from . import strategy, validate
from ._C import getenv
from .options import GRADIENTS, NUMBERS, OPTIONS, Settings, Wanted

_KEPT = 1024  # signatures; those not asked for longest go first
# The options that decide a signature, whose values are part of its key.
_LOGITS_NAMES = ("reduction", "ignore_index", *NUMBERS)
_LINEAR_NAMES = (
    *(name for name, option in OPTIONS.items() if option.slot),
    *("valid_vocab", "accumulate_into"),
)
logits_values = operator.itemgetter(*_LOGITS_NAMES)
linear_values = operator.itemgetter(*_LINEAR_NAMES)


class Meta(typing.NamedTuple):
    """The metadata that is checked, under a tensor's names.

    A call hands over plain tuples of these: a tuple with names takes five times as long to make,
    and is only made for a signature that is new.
    """

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    requires_grad: bool

    def dim(self):
        return len(self.shape)


def describe(name, tensor):
    """The fields of Meta of what is checked to be a dense tensor; None stays None."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        validate.check_tensor(name, tensor)
    return tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad


def _metas(described):
    return [None if fields is None else Meta(*fields) for fields in described]


def environment(first, max_memory=None):
    """What a call takes from its surroundings: whether grad mode is on, whether it is traced for
    torch.compile, autocast's dtype or None, whether float32 products may be TF32, and the text of
    FLCE_MAX_MEMORY where `max_memory`, the caller's, is None. `first`: the tensor with the rows."""
    return (
        torch.is_grad_enabled(),
        torch.compiler.is_compiling(),
        # The text of a device's type takes as long as all the rest, where the caches are cold.
        autocast_dtype(first.device.type) if torch._C._is_any_autocast_enabled() else None,
        first.dtype == torch.float32 and first.is_cuda and _allows_tf32(),
        getenv("FLCE_MAX_MEMORY") if max_memory is None else None,
    )


def autocast_dtype(device_type):
    """The dtype to which autocast casts the products' operands, None where it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def _allows_tf32():
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def _once_a_signature(function):
    """Keeps what `function` gave for its last arguments, which are compared with their types."""
    known = functools.lru_cache(maxsize=_KEPT, typed=True)(function)

    @functools.wraps(function)
    def find(*args):
        try:
            return known(*args)
        except TypeError:
            # No hash: a size that is symbolic under compile or export, or an argument of a wrong
            # type, which is refused by its name below.
            pass
        return function(*args)

    return find


@dataclass(frozen=True, eq=False)
class Signature:
    """What both kinds of call have."""

    settings: Settings  # for all rows; `save` as it is given
    wanted: Wanted
    has_probabilities: bool
    vocab: int  # the number of classes that exist
    stat: torch.dtype
    differentiable: bool

    @functools.cached_property
    def differentiates_outputs(self):
        """Whether a gradient may come from lse or entropy."""
        return bool(self.wanted.lse or self.wanted.entropy)

    @functools.cached_property
    def lists(self):
        """The options as the operators on logits take them."""
        return self.settings.arguments()[2:]


@dataclass(frozen=True, eq=False)
class LinearSignature(Signature):
    """Of linear cross entropy. `makes_late`: whether no gradient may be made in the forward."""

    tokens: int
    hidden: int
    device_type: str
    accumulates: bool
    makes_late: bool

    def settings_for(self, rows):
        """Settings with the strategy where `rows` rows are computed, None for all."""
        save = strategy.resolve_save(self, self.tokens if rows is None else rows)
        return self.settings._replace(rows=rows, save=save)

    @functools.cached_property
    def _for_all(self):
        settings = self.settings_for(None)
        return settings, settings.arguments()

    def resolved(self, rows):
        """Those settings and their arguments."""
        if rows is None:
            return self._for_all
        settings = self.settings_for(rows)
        return settings, settings.arguments()


def _settings(given, scalars, wanted, types, **others):
    """`types`: the dtypes of the products' operands, of dW's sum and of the logits."""
    dtype, accum_dtype, logits_dtype = types
    values = {
        "valid_vocab": None,
        "rows": None,
        "reduction": given["reduction"],
        "dtype": dtype,
        "accum_dtype": accum_dtype,
        "logits_dtype": logits_dtype,
        "save": "nothing",
        "max_memory": 0,
        "wants_entropy": wanted.entropy,
        "wants_predictions": wanted.accuracy or wanted.predictions,
        "wants_statistics": wanted.lse or wanted.entropy or wanted.accuracy or wanted.z_loss,
        **dict.fromkeys((*GRADIENTS, "saves_memory", "allow_tf32"), False),
    }
    return Settings(**values | scalars | others)


def _product_types(dtype, given):
    stat = strategy.stat_dtype(dtype)
    accum_dtype = validate.check_dtype("accum_dtype", given["accum_dtype"], dtype, stat)
    logits_dtype = validate.check_dtype("logits_dtype", given["logits_dtype"], dtype, stat)
    return dtype, accum_dtype or dtype, logits_dtype or stat


@_once_a_signature
def linear_signature(around, wanted, operands, tensors, *values):
    """`around`: as `environment` gives it; `operands`: as `describe` does, of input, linear_weight,
    linear_bias; `tensors`: likewise, of target, weight, token_weight and the rows' temperatures;
    `values`: as `linear_values` gives them. Raises what is wrong with them."""
    given = dict(zip(_LINEAR_NAMES, values, strict=True))
    grad_mode, compiling, autocast, allow_tf32, environment_memory = around
    operands, tensors = _metas(operands), _metas(tensors)
    input, linear_weight, _ = operands
    validate.check_choices(given["reduction"], given["save"], given["accumulate_into"])
    scalars = validate.check_scalars(given)
    validate.check_rows("input", input)
    validate.check_head(*operands)
    vocab, hidden = linear_weight.shape
    has_probabilities = _check_loss_tensors(tensors, wanted, vocab, scalars, ("input", input))
    valid_vocab, max_memory = given["valid_vocab"], given["max_memory"]
    if valid_vocab is not None:
        vocab = validate.check_integer("valid_vocab", valid_vocab, 1, vocab)
    dtype = validate.compute_dtype(*operands, autocast)
    grads = [grad_mode and meta is not None and meta.requires_grad for meta in operands]
    accumulates = given["accumulate_into"] is not None and grads[1]
    settings = _settings(
        given,
        scalars,
        wanted,
        _product_types(dtype, given),
        valid_vocab=valid_vocab,
        save=given["save"],
        max_memory=strategy.resolve_max_memory(max_memory, input.device),
        saves_memory=max_memory is None and not environment_memory,
        allow_tf32=allow_tf32 and dtype == torch.float32,
        **dict(zip(GRADIENTS, grads, strict=True)),
    )
    device_type = input.device.type
    # The caller's .grad is the backward's; a compiled backward gets zeros where no gradient came
    # from lse or entropy, and would make all again; and float16 has no room for the gradients of
    # probabilities that are not normalized (plan.c: kept_dtype).
    makes_late = (
        accumulates
        or (compiling and (wanted.lse or wanted.entropy))
        or (has_probabilities and strategy.gemm_dtype(device_type, dtype) == torch.float16)
    )
    return LinearSignature(
        settings=settings,
        wanted=wanted,
        has_probabilities=has_probabilities,
        vocab=vocab,
        stat=strategy.stat_dtype(dtype),
        differentiable=any(grads),
        tokens=math.prod(input.shape[:-1]),
        hidden=hidden,
        device_type=device_type,
        accumulates=accumulates,
        makes_late=makes_late,
    )


@_once_a_signature
def logits_signature(around, wanted, logits, tensors, *values):
    """As linear_signature; `values`: as `logits_values` gives them."""
    given = dict(zip(_LOGITS_NAMES, values, strict=True))
    (logits,), tensors = _metas([logits]), _metas(tensors)
    validate.check_choices(given["reduction"])
    scalars = validate.check_scalars(given)
    validate.check_rows("logits", logits)
    vocab = logits.shape[-1]
    if vocab < 1:
        validate.refuse("logits", "at least one class", f"shape {tuple(logits.shape)}")
    has_probabilities = _check_loss_tensors(tensors, wanted, vocab, scalars, ("logits", logits))
    return Signature(
        settings=_settings(given, scalars, wanted, (logits.dtype,) * 3),
        wanted=wanted,
        has_probabilities=has_probabilities,
        vocab=vocab,
        stat=strategy.stat_dtype(logits.dtype),
        differentiable=around[0] and logits.requires_grad,
    )


def _check_loss_tensors(tensors, wanted, vocab, scalars, named):
    """Gives whether the target is of probabilities. `named`: name and Meta of the rows' tensor."""
    target, weight, token_weight, temperature = tensors
    validate.check_target(target, vocab, scalars["ignore_index"], *named)
    validate.check_class_weight(weight, vocab, *named)
    validate.check_row_vector("token_weight", token_weight, *named)
    validate.check_row_vector("temperature", temperature, *named)
    if wanted.accuracy and target.dtype.is_floating_point:
        expected = "False with probabilities, which name no class to be right about"
        validate.refuse("return_accuracy", expected, True)
    return target.dtype.is_floating_point
