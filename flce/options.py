"""The table of the loss's options, and how the operators take them: as two lists of numbers.

Only what C cannot see is checked here, the type of a value; csrc/core/check.c has the rest.
"""

import collections
import functools
import inspect
import math
import numbers
import os
import re
import typing
from typing import Literal

import torch

from . import operators, validate
from ._C import getenv
from .validate import check_flag, check_integer, refuse

# In the order of the enums in csrc/problem.h.
Reduction = Literal["none", "mean", "sum"]
Gradient = Literal["exact", "sampled"]
Save = Literal["auto", "logits", "grads", "stats"]  # those that a caller may choose
CHOICES = {
    "reduction": typing.get_args(Reduction),
    "save": ("nothing", "logits", "grads", "stats", "samples", "auto"),
    "gradient": typing.get_args(Gradient),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ATTRIBUTES = ("grad", "main_grad")  # of a parameter, that accumulate_into may name


class Option(typing.NamedTuple):
    """An option of `flce.linear_cross_entropy`.

    default: in the public functions, the operators and the Modules.
    schema: its type in the schema of torch.ops.flce.linear_cross_entropy; None: not passed to it,
    or, as vocab_parallel, under other names.
    of_logits: whether flce.cross_entropy has it too.
    of_module: whether the Modules hold it, as an attribute.
    """

    default: object
    schema: str | None = None
    of_logits: bool = False
    of_module: bool = False


# Their types: options.pyi.
OPTIONS = {
    "linear_bias": Option(None, "Tensor?"),
    "adapter_input": Option(None, "Tensor?"),
    "adapter_weight": Option(None, "Tensor?"),
    "weight": Option(None, "Tensor?", of_logits=True),
    "reduction": Option("mean", "str", of_logits=True, of_module=True),
    "ignore_index": Option(-100, "int?", of_logits=True, of_module=True),
    "label_smoothing": Option(0.0, "float", of_logits=True, of_module=True),
    "options": Option(None),
    "softcap": Option(None, "float?", of_logits=True, of_module=True),
    "logit_scale": Option(1.0, "float", of_logits=True, of_module=True),
    "temperature": Option(1.0, "float", of_logits=True, of_module=True),
    "z_loss": Option(0.0, "float", of_logits=True, of_module=True),
    "token_weight": Option(None, "Tensor?", of_logits=True),
    "num_items": Option(None, "Tensor?", of_logits=True),
    "shift": Option(0, "int", of_module=True),
    "cu_seqlens": Option(None, "Tensor?"),
    "valid_vocab": Option(None, "SymInt?", of_module=True),
    "valid_bound": Option(None, "SymInt?"),
    "accum_dtype": Option(None, "ScalarType?", of_module=True),
    "logits_dtype": Option(None, "ScalarType?", of_module=True),
    "save": Option("auto", "str", of_module=True),
    "max_memory": Option(None, "int?", of_module=True),
    "accumulate_into": Option(None, of_module=True),
    "gradient": Option("exact", "str", of_module=True),
    "gradient_eps": Option(2**-6, "float", of_module=True),
    "vocab_parallel": Option(None, of_module=True),
    # Not of a Module: a fixed seed would repeat one draw in every step.
    "gradient_seed": Option(None, "Tensor?"),
    "classes": Option(None, "Tensor?"),
    "topk": Option(0, "int"),
}


class LinearCrossEntropyOutput(typing.NamedTuple):
    """The loss and the requested outputs; None for the others.

    loss: shape (), or (...) for reduction="none"; differentiable.
    lse: logsumexp of each row's logits, shape (...); differentiable; 0 where ignored.
    entropy: of each row's softmax, in nats, shape (...); differentiable; 0 where ignored.
    accuracy: the share of valid rows whose largest logit is the target's, shape (); 0 if there are
    none. predictions: the lowest class of the largest logit, int64, shape (...); -1 where ignored.
    z_loss: the part z_loss lse^2 of the loss, with the same reduction; detached.
    tail_lse: logsumexp of each row's logits of all classes that are not in class_logits, shape
    (...); differentiable; 0 where ignored, -inf where there is no such class. Exact however small
    the probability exp(tail_lse - lse) of these classes is.
    class_logits: final logits of `classes`, or of the `topk` largest in descending order, shape
    (..., K); differentiable, but not with gradient="sampled"; 0 where ignored.
    classes: with `topk`, the classes of class_logits, int64, shape (..., K); -1 where ignored.

    All but predictions and classes have the loss's dtype: float64 for float64 operands, else
    float32.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> out = flce.linear_cross_entropy(x, W, y, return_lse=True, topk=3)
    >>> out.lse.shape, out.class_logits.shape, out.entropy
    (torch.Size([5]), torch.Size([5, 3]), None)
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    accuracy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    tail_lse: torch.Tensor | None = None
    class_logits: torch.Tensor | None = None
    classes: torch.Tensor | None = None


class TopLogprobs(typing.NamedTuple):
    """The K largest log-probabilities of each row.

    logprobs: (..., K), in nats, descending; differentiable. ids: their classes, (..., K), int64; -1
    where the target is ignored. lse: logsumexp of all logits of the row, (...); differentiable.
    tail: with tail=True, log of the probability of all other classes together, (...), in nats;
    differentiable; 0 where the target is ignored, -inf without another class. It is computed from
    their logits: ``log1p(-logprobs.exp().sum(-1))`` is rounding noise where it is small.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> *_, top = flce.linear_logprobs(x, W, y, return_topk=4, tail=True)
    >>> torch.testing.assert_close(top.logprobs.exp().sum(-1) + top.tail.exp(), torch.ones(5))
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    lse: torch.Tensor
    tail: torch.Tensor | None = None


OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_FLAGGED = OUTPUTS[:-2]  # outputs that a flag asks for
RETURNS = tuple(f"return_{name}" for name in _FLAGGED)  # arguments, False by default
# For users' annotations at run time; type checkers read the types in options.pyi.
Options = typing.TypedDict("Options", dict.fromkeys((*OPTIONS, *RETURNS), object), total=False)
# Which of these outputs a call returns in addition to the loss.
Wanted = collections.namedtuple("Wanted", _FLAGGED, defaults=(False,) * len(_FLAGGED))


def defaults(having=None):
    """Names and defaults of all options, or of those whose field `having` is set."""
    chosen = ((name, o) for name, o in OPTIONS.items() if having is None or getattr(o, having))
    return {name: option.default for name, option in chosen}


def completed(function, defaults, options):
    """The `options` to `function`, completed by `defaults`, those of all that it has."""
    check_names(function, defaults, options)
    return {**defaults, **options}


def check_names(function, known, options):
    for name in options:
        if name not in known:
            expected = f"expected some of {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {expected}")


def show_options(function, options):
    """Lists `options`, names and defaults, in the signature of `function` for its **options."""
    parameters = inspect.signature(function).parameters.values()
    parameters = [
        parameter for parameter in parameters if parameter.kind != inspect.Parameter.VAR_KEYWORD
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(name, keyword, default=value) for name, value in options.items()
    ]
    function.__signature__ = inspect.Signature(parameters)


# ---- bytes ----

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}


def parse_bytes(value, name="max_memory"):
    """Bytes from a number or text such as "512MiB", "1.5 GB" (units of 1000 or 1024 bytes).

    Raises TypeError for other types and ValueError for less than one byte, NaN or infinity.
    """
    expected = 'a positive number of bytes or text such as "512MiB"'
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        refuse(name, expected, type(value).__name__, TypeError)
    size = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        size = float(match[1]) * unit if unit else math.nan
    if not 1 <= size < 2**62:  # also refuses NaN
        refuse(name, expected, repr(value))
    return int(size)


@functools.cache
def share_of_memory(device):
    """1/8 of the device's memory, in bytes; text is a GPU that need not be there."""
    if isinstance(device, str):
        _, _, memory, _, _ = operators.run_plain(torch.ops.flce.find_gpu.default, device)
        memory = int(memory)
    elif device.type == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device.index).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory // 8


def default_memory(device):
    """The Memory of a call without max_memory: 1 GiB, or 1/8 of the device's memory if smaller."""
    share = share_of_memory(device)
    return Memory(min(1 << 30, share), share, True)


# ---- packing ----

LAYOUT = 10  # raise it together with kLayout of csrc/binding/options.h
# The names of both lists' slots, in order: FLCE_INTEGERS of csrc/binding/options.h, without the
# layout at its end, and FLCE_LOSS_NUMBERS of csrc/problem.h. And FLCE_DIVERGENCES of that file: in
# the operator's list `teacher` a divergence is its index here, from 1 on.
(*INTEGERS, _), NUMBERS, DIVERGENCES = (
    tuple(names.split()) for names in torch.ops.flce.option_names().split("/")
)
# From so many chunks on the weight's gradient is summed in float32 by default (csrc/flce.h).
WIDE_SUM_CHUNKS = torch.ops.flce.wide_sum_chunks()


class Memory(typing.NamedTuple):
    """max_memory and kept_memory of csrc/problem.h, in bytes; saves_memory: whether they are the
    defaults."""

    max_memory: int = 1 << 30
    kept_memory: int = 1 << 30
    saves_memory: bool = False


class Gradients(typing.NamedTuple):
    """Which gradients are wanted."""

    grad_input: bool = False
    grad_weight: bool = False
    grad_bias: bool = False


GRADIENTS = Gradients._fields


class OfCall(typing.NamedTuple):
    """What a call adds to the options in the list of integers.

    gradients: those that the operator makes. autocast: the index in DTYPES of the dtype to which it
    casts, or -1. frozen_hidden: columns of the weight without a gradient, with an adapter.
    accumulates: whether the weight's gradient is added to an attribute of it. class_gradient:
    whether logits of classes are outputs.
    """

    memory: Memory = Memory()
    gradients: Gradients = Gradients()
    autocast: int = -1
    frozen_hidden: int = 0
    accumulates: bool = False
    traced: bool = False
    class_gradient: bool = False
    allow_tf32: bool = False

    def values(self):
        """By the names of the list of integers."""
        values = self._asdict()
        return {**values.pop("memory")._asdict(), **values.pop("gradients")._asdict(), **values}


class Shard(typing.NamedTuple):
    """A flce.VocabParallel as the operators take it: the name of its group, None without one, and
    integers."""

    group: str | None = None
    ranks: int = 0
    rank: int = 0
    start: int = -1
    vocab: int = -1
    input_is_sharded: int = 0
    partial_grad_input: int = 0
    wide_terms: int = 0

    def integers(self):
        """Its integers by name."""
        values = self._asdict()
        del values["group"]
        return values

    @classmethod
    def of_operator(cls, group, integers):
        """From the arguments vocab_group and vocab_shard of an operator."""
        names = NO_SHARD.integers()
        if len(integers) != len(names):
            refuse("vocab_shard", f"{len(names)} integers with vocab_group", len(integers))
        return cls(group, *map(int, integers))


NO_SHARD = Shard()
_INDEX = {name: i for i, name in enumerate(INTEGERS)}
# The options that an operator takes in its lists, or that say what else the call does.
_PACKED = {name: o.default for name, o in OPTIONS.items() if o.schema != "Tensor?"}
_PACKED |= dict.fromkeys(RETURNS, False)
del _PACKED["options"]
TENSORS = frozenset(name for name, o in OPTIONS.items() if o.schema == "Tensor?")


# Those that map the logits of the linear layer to the final ones: parameters of
# reference.final_logits.
LOGIT_OPTIONS = ("softcap", "logit_scale", "temperature")


# Of flce.linear_divergence.
OF_DIVERGENCE = ("linear_bias", "reduction", "ignore_index", "softcap", "logit_scale")
OF_DIVERGENCE += ("temperature", "token_weight", "num_items", "shift", "cu_seqlens", "valid_vocab")
OF_DIVERGENCE += ("valid_bound", "accum_dtype", "save", "max_memory", "gradient", "gradient_eps")
OF_DIVERGENCE += ("gradient_seed", "accumulate_into", "vocab_parallel")


# Of its operator's list `teacher`.
TEACHER_NUMBERS = ("divergence", "beta", "hard_weight", "teacher_softcap", "teacher_logit_scale")
TEACHER_NUMBERS += ("teacher_temperature",)


def _choice(name, value):
    choices = typing.get_args(Save) if name == "save" else CHOICES[name]
    if value not in choices:
        refuse(name, f"one of {choices}", repr(value))
    return CHOICES[name].index(value)


def _number(name, value):
    """A float. Where None is the default it becomes 0.0, and 0.0 itself is refused."""
    optional = OPTIONS[name].default is None
    if value is None and optional:
        return 0.0
    value = validate.check_number(name, value)
    if value == 0.0 and optional:
        refuse(name, "a positive finite number or None", value)
    return value


def ignore_index_of(value):
    """ignore_index, -100 for None as in torch's linear_cross_entropy."""
    return -100 if value is None else int(check_integer("ignore_index", value))


def code_of(name, dtype, error=TypeError):
    """The index of a dtype in DTYPES; refuses others by `error`, and what is no dtype."""
    is_dtype = isinstance(dtype, torch.dtype)
    if not is_dtype or dtype not in DTYPES:
        refuse(name, f"one of {DTYPES}", repr(dtype), error if is_dtype else TypeError)
    return DTYPES.index(dtype)


def gemm_dtype(autocast, *dtypes):
    """The dtype of the GEMMs of operands of these dtypes. `autocast`: the index in DTYPES of the
    dtype to which it casts, or -1; it casts none where one is float64."""
    return dtypes[0] if autocast < 0 or torch.float64 in dtypes else DTYPES[autocast]


def shard_of(vocab_parallel):
    """The Shard of the option: a VocabParallel, a Shard or None."""
    shard = NO_SHARD if vocab_parallel is None else getattr(vocab_parallel, "shard", vocab_parallel)
    if not isinstance(shard, Shard):
        refuse("vocab_parallel", "a flce.VocabParallel or None", repr(shard), TypeError)
    return shard


def all_classes(vocab_parallel, rows):
    """(number of all classes, of ranks) where this rank's linear_weight has `rows` rows."""
    shard = shard_of(vocab_parallel)
    ranks, vocab = max(shard.ranks, 1), shard.vocab
    return (vocab if vocab >= 0 else ranks * rows), ranks


class Packed:
    """The options of a call that are no tensors, checked and packed; cached by their values."""

    def __init__(self, options):
        self.detaches_entropy = options["return_entropy"] == "detached"
        options = {**options, "return_entropy": self.detaches_entropy or options["return_entropy"]}
        wanted = self.wanted = Wanted(*(check_flag(name, options[name]) for name in RETURNS))
        self.outputs = any(wanted)
        entropy_gradient = wanted.entropy and not self.detaches_entropy
        self.differentiable = wanted.lse or entropy_gradient or wanted.tail_lse
        self.reduction, self.gradient = options["reduction"], options["gradient"]
        self.z_loss = options["z_loss"]
        self.ignore_index = ignore_index_of(options["ignore_index"])
        self.shift = check_integer("shift", options["shift"], 0)
        self.topk = check_integer("topk", options["topk"])
        self.accumulate_into = options["accumulate_into"]
        if self.accumulate_into not in (None, *_ATTRIBUTES):
            refuse("accumulate_into", f"one of {_ATTRIBUTES} or None", repr(self.accumulate_into))
        self.valid_vocab, self.valid_bound = options["valid_vocab"], options["valid_bound"]
        if self.valid_vocab is not None:
            check_integer("valid_vocab", self.valid_vocab)
        if isinstance(self.valid_bound, str):
            if self.valid_bound != "count":
                refuse("valid_bound", 'an int, "count" or None', repr(self.valid_bound))
        elif self.valid_bound is not None:
            check_integer("valid_bound", self.valid_bound, 0)
        memory = options["max_memory"]
        self.max_memory = None if memory is None else parse_bytes(memory)
        shard = self.shard = shard_of(options["vocab_parallel"])
        self.group, self.ranks, self.rank = shard.group, shard.ranks, shard.rank
        self.logit_options = {name: options[name] for name in LOGIT_OPTIONS}
        self.numbers = tuple(_number(name, options[name]) for name in NUMBERS)
        values = {name: _choice(name, options[name]) for name in CHOICES}
        for name in ("accum_dtype", "logits_dtype"):
            dtype = options[name]
            values[name] = -1 if dtype is None else code_of(name, dtype, ValueError)
        values |= shard.integers()
        values |= {"wants_lse": wanted.lse, "wants_entropy": wanted.entropy}
        values["wants_tail"] = wanted.tail_lse
        values |= {"entropy_gradient": entropy_gradient, "consumes_saved": 0}
        values["wants_predictions"] = wanted.predictions or wanted.accuracy
        values["wants_statistics"] = any(wanted._replace(predictions=False))
        values["ignore_index"], values["topk"] = self.ignore_index, self.topk
        values["first_token"] = 0
        self._values, self._lists = values, {}

    def memory(self, device):
        """The Memory of a call on this device."""
        max_memory = self.max_memory
        if max_memory is None and (text := getenv("FLCE_MAX_MEMORY")):
            max_memory = parse_bytes(text, "FLCE_MAX_MEMORY")
        if max_memory is not None:
            return Memory(max_memory, max_memory, False)
        return default_memory(device)

    def integers(self, of_call):
        """The list of integers, with the values of an OfCall."""
        integers = self._lists.get(of_call)
        if integers is None:
            values = self._values | of_call.values()
            integers = (*(int(values[name]) for name in INTEGERS), LAYOUT)
            if len(self._lists) < 64:
                self._lists[of_call] = integers
        return integers


_DEFAULT = Packed(_PACKED)


@functools.lru_cache(maxsize=1024, typed=True)
def _packed(names, *values):
    return Packed({**_PACKED, **dict(zip(names, values, strict=True))})


def split(options):
    """The Packed of the options `options` by name, and a dict of the tensors among them."""
    if not options:
        return _DEFAULT, {}
    tensors, items = {}, {}
    for name, value in options.items():
        if name in TENSORS:
            if value is not None:
                tensors[name] = value
        elif isinstance(value, torch.Tensor):
            _split_scalar(name, value, tensors, items)
        else:
            items[name] = value
    try:
        return _packed(tuple(items), *items.values()), tensors
    except TypeError:  # not hashable: a symbolic size, or a wrong type, which is refused by name
        return Packed({**_PACKED, **items}), tensors


def _split_scalar(name, value, tensors, items):
    """Adds a tensor given for a number to `items`, by its value if it is 0-d. A temperature stays a
    tensor, in `tensors`, unless it is a 0-d CPU tensor: reading others would synchronise."""
    validate.check_constant(name, value)
    validate.refuse_transforms(value)
    is_known = value.dim() == 0 and value.is_cpu and not torch.compiler.is_compiling()
    if name == "temperature" and not is_known:
        tensors[name] = value
        return
    is_number = value.dim() == 0 and name in (*NUMBERS, "ignore_index")
    items[name] = value.item() if is_number else value


def replaced(integers, **values):
    """`integers` with other values by name; one of CHOICES as text or as its index."""
    changed = list(integers)
    for name, value in values.items():
        code = CHOICES[name].index(value) if type(value) is str else int(value)
        changed[_INDEX[name]] = code
    return tuple(changed)


def value_of(integers, name):
    return integers[_INDEX[name]]
