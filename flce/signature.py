"""What follows from a call's signature alone: the dtypes, devices and shapes of its tensors and its
options, but no value that a tensor holds. That is every check other than those of values, and the
settings of the inner operators.

A training step repeats its signature, and in a small step the device waits for the host before the
first kernel, so what follows from a signature is computed once and cached.
"""

import collections
import functools
import math
import operator
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling

from . import parallel, strategy, validate
from ._C import getenv
from .options import GRADIENTS, OPTIONS, SHARDS, Settings, Wanted, defaults

# The options that are part of a signature: their values are in the cache key.
_LOGITS_NAMES = tuple(name for name, row in OPTIONS.items() if row.slot and row.of_logits)
_LINEAR_NAMES = (
    *(name for name, option in OPTIONS.items() if option.slot),
    *("valid_vocab", "accumulate_into", "vocab_parallel"),
)
logits_values = operator.itemgetter(*_LOGITS_NAMES)
linear_values = operator.itemgetter(*_LINEAR_NAMES)
_REQUIRED = frozenset(("input", "linear_weight", "logits", "target"))
_matmul = torch.backends.cuda.matmul

# The metadata of a tensor that is checked. A call passes plain tuples of these fields: a namedtuple
# takes five times as long to create, and is only created for a new signature.
Meta = collections.namedtuple("Meta", ("dtype", "device", "shape", "requires_grad"))


def describe(name, tensor):
    """The fields of Meta of a tensor that is checked to be dense; None for an optional None."""
    if tensor is None and name not in _REQUIRED:
        return None
    dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    if not dense or tensor.is_nested:
        validate.check_tensor(name, tensor)
    return tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad


def _metas(described):
    return [None if fields is None else Meta(*fields) for fields in described]


def environment(first, max_memory=None):
    """The global state that a call depends on: whether grad mode is on, whether torch.compile
    traces the call, autocast's dtype or None, whether float32 GEMMs may use TF32, and the text
    of FLCE_MAX_MEMORY if the argument `max_memory` is None. `first`: the rows' tensor."""
    return (
        torch.is_grad_enabled(),
        is_compiling(),
        # Only then: formatting the device type takes as long as the rest with cold caches.
        autocast_dtype(first.device.type) if torch._C._is_any_autocast_enabled() else None,
        first.dtype == torch.float32 and first.is_cuda and _matmul.fp32_precision == "tf32",
        getenv("FLCE_MAX_MEMORY") if max_memory is None else None,
    )


def autocast_dtype(device_type):
    """The dtype to which autocast casts the GEMMs' operands; None if it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def _cached_by_signature(function):
    """Caches the results of `function` by its arguments, compared with their types."""
    known = functools.lru_cache(maxsize=1024, typed=True)(function)

    def find(*args):
        try:
            return known(*args)
        except TypeError:
            # Not hashable: a size is symbolic (compile, export), or an argument has a wrong type,
            # which the checks below refuse by name.
            pass
        return function(*args)

    return find


@dataclass(eq=False)
class Signature:
    """The cached result for one signature."""

    settings: Settings  # for all rows; `save` as the caller gave it, so possibly "auto"
    wanted: Wanted
    rows: Meta  # of the tensor with the rows
    has_probabilities: bool
    vocab: int  # number of classes without padding (valid_vocab), of all ranks
    share: int  # of a rank: `vocab` unless it is divided
    accumulates: bool = False
    compiling: bool = False
    for_all: tuple | None = None  # cached result of `resolved` for all rows

    def __post_init__(self):
        self.stat = strategy.stat_dtype(self.settings.dtype)
        self.differentiable = any(self.settings.gradients)
        # Whether a gradient may come from lse or entropy.
        self.differentiates_outputs = bool(self.wanted.lse or self.wanted.entropy)

    @functools.cached_property
    def lists(self):
        """The options as the operators on logits take them."""
        return self.settings.arguments()[2:4]

    def resolved(self, rows):
        """The settings with the strategy for `rows` computed rows (None: all), and the same
        settings as the arguments of the inner operators."""
        if rows is None and self.for_all is not None:
            return self.for_all
        count = math.prod(self.rows.shape[:-1]) if rows is None else rows
        settings = self.settings._replace(rows=rows, save=strategy.resolve_save(self, count))
        found = settings, settings.arguments()
        if rows is None:
            self.for_all = found
        return found


def _settings(given, scalars, wanted, dtype, leaves, **others):
    """`dtype`: of the GEMMs' operands; `leaves`: Meta of what may get a gradient, or None."""
    stat = strategy.stat_dtype(dtype)
    accum_dtype = validate.check_dtype("accum_dtype", given["accum_dtype"], dtype, stat)
    logits_dtype = validate.check_dtype("logits_dtype", given["logits_dtype"], dtype, stat)
    values = {
        **given,
        **scalars,
        **others,
        "rows": None,
        "dtype": dtype,
        "accum_dtype": accum_dtype or dtype,
        "logits_dtype": logits_dtype or stat,
        "wants_entropy": wanted.entropy,
        "wants_predictions": wanted.accuracy or wanted.predictions,
        "wants_statistics": wanted.lse or wanted.entropy or wanted.accuracy or wanted.z_loss,
    }
    for name, leaf in zip(GRADIENTS, leaves, strict=True):
        values[name] = leaf is not None and leaf.requires_grad
    return Settings(*(values[name] for name in Settings._fields))


def _of_shard(shard, start, classes, has_probabilities):
    """The settings SHARDS and `group`."""
    if shard is None:
        return {**dict.fromkeys(SHARDS, 0), "group": None}
    if has_probabilities:
        validate.refuse("target", "class indices with vocab_parallel", "probabilities")
    # int: under torch.compile sizes may be symbols, which the packed list cannot hold.
    classes = int(classes)
    values = shard.ranks, shard.rank, int(min(start, classes)), classes, shard.sequence
    values += not shard.reduce_input_grad, shard.wide
    values = dict(zip(SHARDS, values, strict=True))
    return {**values, "group": shard.group}


@_cached_by_signature
def linear_signature(global_state, wanted, operands, tensors, frozen_hidden, *values):
    """The Signature of a linear cross entropy; refuses wrong arguments.

    `global_state`: the result of `environment`; `operands`: results of `describe` for input,
    linear_weight, linear_bias; `tensors`: the same for target, weight, token_weight and the rows'
    temperatures; `frozen_hidden`: how many of linear_weight's first columns get no gradient;
    `values`: the result of `linear_values`.
    """
    given = dict(zip(_LINEAR_NAMES, values, strict=True))
    grad_mode, compiling, autocast, allow_tf32, environment_memory = global_state
    operands = _metas(operands)
    input, linear_weight, _ = operands
    validate.check_choices(given)
    scalars = validate.check_scalars(given)
    validate.check_rows("input", input)
    shard = parallel.shard_of(given["vocab_parallel"])
    validate.check_head(*operands, 0 if shard else 1)
    start, vocab = (
        shard.class_range(linear_weight.shape[0]) if shard else (0, linear_weight.shape[0])
    )
    named = "input"
    if shard and shard.sequence:
        input = input._replace(shape=(shard.ranks * input.shape[0], *input.shape[1:]))
        named = f"the inputs of {shard.ranks} ranks (sequence=True)"
    has_probabilities = _check_loss_tensors(tensors, wanted, vocab, scalars, (named, input))
    if given["valid_vocab"] is not None:
        vocab = validate.check_integer("valid_vocab", given["valid_vocab"], 1, vocab)
    if shard:
        given["valid_vocab"] = None  # `classes` instead
    dtype = validate.compute_dtype(*operands, autocast)
    if given["gradient"] == "sampled" and (has_probabilities or dtype == torch.float64):
        which = "probabilities as target" if has_probabilities else "float64 operands"
        validate.refuse("gradient", f'"exact" with {which}', '"sampled"')
    settings = _settings(
        given,
        scalars,
        wanted,
        dtype,
        operands if grad_mode else (None,) * 3,
        max_memory=strategy.resolve_max_memory(given["max_memory"], input.device),
        saves_memory=given["max_memory"] is None and not environment_memory,
        allow_tf32=allow_tf32 and dtype == torch.float32,
        frozen_hidden=frozen_hidden,
        **_of_shard(shard, start, vocab, has_probabilities),
    )
    accumulates = given["accumulate_into"] is not None and settings.grad_weight
    share = -(-vocab // shard.ranks) if shard else vocab
    return Signature(
        settings, wanted, input, has_probabilities, vocab, share, accumulates, compiling
    )


@_cached_by_signature
def logits_signature(global_state, wanted, logits, tensors, *values):
    """As linear_signature, for given logits; `values`: the result of `logits_values`."""
    given = defaults() | dict(zip(_LOGITS_NAMES, values, strict=True))
    (logits,) = _metas([logits])
    validate.check_choices(given)
    scalars = validate.check_scalars(given)
    validate.check_rows("logits", logits)
    vocab = logits.shape[-1]
    if vocab < 1:
        validate.refuse("logits", "at least one class", f"shape {tuple(logits.shape)}")
    has_probabilities = _check_loss_tensors(tensors, wanted, vocab, scalars, ("logits", logits))
    leaves = (logits if global_state[0] else None, None, None)
    unused = {"save": "nothing", "max_memory": 0, "saves_memory": False, "allow_tf32": False}
    unused |= {"frozen_hidden": 0, **_of_shard(None, 0, 0, False)}
    settings = _settings(given, scalars, wanted, logits.dtype, leaves, **unused)
    return Signature(settings, wanted, logits, has_probabilities, vocab, vocab)


def _check_loss_tensors(tensors, wanted, vocab, scalars, named):
    """Returns whether the target is probabilities. `named`: the rows' tensor, (name, Meta)."""
    target, weight, *vectors = _metas(tensors)
    first_name, first = named
    validate.check_target(target, vocab, scalars["ignore_index"], *named)
    if weight is not None:
        validate.check_float("weight", weight.dtype)
    each, which = "a factor for each class", "class weights that do"
    validate.check_vector("weight", weight, (vocab,), each, *named, which)
    each = f"a number for each row of {first_name}"
    for name, vector in zip(("token_weight", "temperature"), vectors, strict=True):
        validate.check_vector(name, vector, first.shape[:-1], each, *named)
    has_probabilities = target.dtype.is_floating_point
    if wanted.accuracy and has_probabilities:
        expected = "False with probabilities, which name no class to be right about"
        validate.refuse("return_accuracy", expected, True)
    return has_probabilities
