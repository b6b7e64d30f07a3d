"""What follows from a call's signature alone: the dtypes, devices and shapes of its tensors and its
options, without any value that a tensor holds. These are all checks but those of values, and the
settings of the inner operators.

A training step repeats its signature, and the device waits for the host before the first kernel of
a small step, so what follows from a signature is found once and kept.
"""

import collections
import functools
import math
import typing
from dataclasses import dataclass

import torch

from . import accumulate, ops, strategy, validate
from .options import DTYPES, OPTIONS, OUTPUTS, Scalars, Settings

_KEPT = 1024  # signatures; those not asked for longest go first
# The options that decide a signature, in the order of the values that are its key.
LOGITS_VALUES = ("reduction", *Scalars._fields)
LINEAR_VALUES = (
    *(name for name, option in OPTIONS.items() if option.slot),
    "valid_vocab",
    "accumulate_into",
)


class Meta(typing.NamedTuple):
    """What the checks look at in a tensor, under a tensor's names.

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


def _meta(fields):
    return None if fields is None else Meta(*fields)


class Environment(typing.NamedTuple):
    """What a call takes from around it. `autocast`: its dtype where it is on for the device;
    `compiling`: whether the call is traced for torch.compile."""

    grad: bool
    compiling: bool
    autocast: torch.dtype | None
    allow_tf32: bool
    max_memory: str | None


def environment(first, compiling, max_memory=None):
    """The fields of Environment. `first`: the tensor with the rows; `max_memory`: the caller's, of
    which None lets FLCE_MAX_MEMORY speak."""
    return (
        torch.is_grad_enabled(),
        compiling,
        # The text of a device's type takes as long as all the rest, where the caches are cold.
        autocast_dtype(first.device.type) if torch._C._is_any_autocast_enabled() else None,
        first.dtype == torch.float32 and first.is_cuda and _allows_tf32(),
        strategy.given_max_memory() if max_memory is None else None,
    )


def autocast_dtype(device_type):
    """The dtype to which autocast casts the products' operands, None where it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def _allows_tf32():
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


class Wanted(collections.namedtuple("Wanted", OUTPUTS, defaults=(False,) * len(OUTPUTS))):
    """Which outputs a call gives beside the loss."""

    __slots__ = ()

    @property
    def differentiable(self):
        return self.lse or self.entropy


class LossTensors(typing.NamedTuple):
    """Metas of the tensors of the loss beside the operands."""

    target: Meta
    weight: Meta | None
    token_weight: Meta | None
    temperature: Meta | None


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


def product_dtypes(dtype, accum_dtype, logits_dtype):
    """Those of the products' operands, of dW's sum and of the logits, None replaced."""
    stat = strategy.stat_dtype(dtype)
    accum_dtype = validate.check_dtype("accum_dtype", accum_dtype, dtype, stat) or dtype
    logits_dtype = validate.check_dtype("logits_dtype", logits_dtype, dtype, stat) or stat
    return dtype, accum_dtype, logits_dtype


@dataclass(frozen=True, eq=False)
class Signature:
    """What both kinds of call have. `returns`: of the Function that makes them differentiable."""

    reduction: str
    scalars: Scalars
    has_probabilities: bool
    vocab: int
    stat: torch.dtype
    wanted: Wanted
    differentiable: bool

    @property
    def wants_predictions(self):
        return self.wanted.accuracy or self.wanted.predictions

    @property
    def wants_statistics(self):
        return self.wanted.differentiable or self.wanted.accuracy or self.wanted.z_loss

    @functools.cached_property
    def returns(self):
        return ops.Returns.LOSS_AND_STATS if self.wanted.differentiable else ops.Returns.LOSS


@dataclass(frozen=True, eq=False)
class LinearSignature(Signature):
    """Of linear cross entropy: N and H, dtypes as of product_dtypes, which gradients are wanted."""

    tokens: int
    hidden: int
    valid_vocab: int | None
    device_type: str
    types: tuple
    save: str
    max_memory: int
    saves_memory: bool
    grads: tuple
    accumulate_into: str | None
    compiling: bool
    allow_tf32: bool

    @property
    def accumulates(self):
        return self.accumulate_into is not None and self.grads[1]

    @property
    def _makes_late(self):
        """Whether no gradient may be made in the forward: the caller's .grad is the backward's, a
        compiled one gets zeros where none came from lse or entropy, and would make all again, and
        float16 has no room for those of probabilities that are not normalized (plan.c: kept_dtype).
        """
        operand = strategy.gemm_dtype(self.device_type, self.types[0])
        return (
            self.accumulates
            or (self.wanted.differentiable and self.compiling)
            or (self.has_probabilities and operand == torch.float16)
        )

    def resolve_save(self, rows):
        """The strategy where `rows` rows are computed."""
        if not self.differentiable:
            return "nothing"
        dtype, _, logits_dtype = self.types
        operand = strategy.gemm_dtype(self.device_type, dtype)
        dtypes = (operand, logits_dtype if self.device_type != "cpu" else operand)
        wants = self.wanted
        kept = strategy.saved_dtype(dtypes, self.scalars, self.has_probabilities, wants.entropy)
        return strategy.resolve_save(
            self.save,
            self.device_type,
            (rows, self.hidden, self.vocab),
            dtypes,
            kept,
            self.reduction,
            self.max_memory,
            # Gradients of lse or entropy would recompute the logits under save="grads".
            self.saves_memory and not wants.differentiable,
            self._makes_late,
        )

    def settings_for(self, rows):
        """What the inner operators take behind their tensors; `rows` None for all."""
        dtype, accum_dtype, logits_dtype = self.types
        grad_input, grad_weight, grad_bias = self.grads
        return Settings(
            valid_vocab=self.valid_vocab,
            rows=rows,
            reduction=self.reduction,
            accum_dtype=accum_dtype,
            logits_dtype=logits_dtype,
            save=self.resolve_save(self.tokens if rows is None else rows),
            max_memory=self.max_memory,
            dtype=dtype,
            wants_entropy=self.wanted.entropy,
            wants_predictions=self.wants_predictions,
            wants_statistics=self.wants_statistics,
            saves_memory=self.saves_memory,
            grad_input=grad_input,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
            allow_tf32=self.allow_tf32,
            **self.scalars._asdict(),
        )

    @functools.cached_property
    def _for_all(self):
        settings = self.settings_for(None)
        return settings, settings.arguments()

    def settings(self, rows):
        """As settings_for, and its arguments."""
        if rows is None:
            return self._for_all
        settings = self.settings_for(rows)
        return settings, settings.arguments()


@_once_a_signature
def linear_signature(around, wanted, operands, tensors, *values):
    """`around`: as `environment` gives it; `operands`: as `describe` does, of input, linear_weight,
    linear_bias; `tensors`: likewise, as LossTensors has them; `values`: those of LINEAR_VALUES.
    Raises what is wrong with them."""
    given = dict(zip(LINEAR_VALUES, values, strict=True))
    reduction, save, max_memory = given["reduction"], given["save"], given["max_memory"]
    valid_vocab, accumulate_into = given["valid_vocab"], given["accumulate_into"]
    around, tensors = Environment(*around), LossTensors(*map(_meta, tensors))
    operands = tuple(map(_meta, operands))
    input, linear_weight, linear_bias = operands
    validate.check_choices(reduction, save)
    accumulate.check_place(accumulate_into, save)
    scalars = validate.check_scalars(*(given[name] for name in Scalars._fields))
    validate.check_operands(*operands)
    vocab, hidden = linear_weight.shape
    _check_loss_tensors(tensors, wanted, vocab, scalars.ignore_index, ("input", input))
    if valid_vocab is not None:
        vocab = validate.check_integer("valid_vocab", valid_vocab, 1, vocab)
    dtype = validate.compute_dtype(*operands, around.autocast)
    saves_memory = max_memory is None and not around.max_memory
    if max_memory is None:
        max_memory = strategy.default_max_memory(input.device, around.max_memory)
    grads = tuple(around.grad and meta is not None and meta.requires_grad for meta in operands)
    return LinearSignature(
        reduction=reduction,
        scalars=scalars,
        has_probabilities=tensors.target.dtype.is_floating_point,
        vocab=vocab,
        stat=strategy.stat_dtype(dtype),
        wanted=wanted,
        differentiable=any(grads),
        tokens=math.prod(input.shape[:-1]),
        hidden=hidden,
        valid_vocab=valid_vocab,
        device_type=input.device.type,
        types=product_dtypes(dtype, given["accum_dtype"], given["logits_dtype"]),
        save=save,
        max_memory=strategy.parse_bytes(max_memory),
        saves_memory=saves_memory,
        grads=grads,
        accumulate_into=accumulate_into,
        compiling=around.compiling,
        allow_tf32=around.allow_tf32 and dtype == torch.float32,
    )


@dataclass(frozen=True, eq=False)
class LogitsSignature(Signature):
    """Of cross entropy on logits."""

    @functools.cached_property
    def settings(self):
        """The two lists of the inner operators."""
        others = dict.fromkeys(Settings._fields, 0) | {"save": "nothing"}
        others |= dict.fromkeys(("dtype", "accum_dtype", "logits_dtype"), DTYPES[0])
        loss = {
            "reduction": self.reduction,
            "wants_entropy": self.wanted.entropy,
            "wants_predictions": self.wants_predictions,
            **self.scalars._asdict(),
        }
        return Settings(**others | loss).arguments()[2:]


@_once_a_signature
def logits_signature(around, wanted, logits, tensors, reduction, *scalars):
    """As linear_signature; `reduction` and `scalars` are the values of LOGITS_VALUES."""
    around, logits = Environment(*around), _meta(logits)
    tensors = LossTensors(*map(_meta, tensors))
    validate.check_choices(reduction)
    scalars = validate.check_scalars(*scalars)
    validate.check_logits(logits)
    vocab = logits.shape[-1]
    _check_loss_tensors(tensors, wanted, vocab, scalars.ignore_index, ("logits", logits))
    return LogitsSignature(
        reduction=reduction,
        scalars=scalars,
        has_probabilities=tensors.target.dtype.is_floating_point,
        vocab=vocab,
        stat=strategy.stat_dtype(logits.dtype),
        wanted=wanted,
        differentiable=around.grad and logits.requires_grad,
    )


def _check_loss_tensors(tensors, wanted, vocab, ignore_index, named):
    """`named`: name and Meta of the tensor with the rows."""
    validate.check_target(tensors.target, vocab, ignore_index, *named)
    validate.check_class_weight(tensors.weight, vocab, *named)
    validate.check_row_vector("token_weight", tensors.token_weight, *named)
    validate.check_row_vector("temperature", tensors.temperature, *named)
    if wanted.accuracy and tensors.target.dtype.is_floating_point:
        raise ValueError(
            "return_accuracy: expected False with probabilities, which name no class to be right "
            "about, got True"
        )
