"""How the operators take the options of a call: as two lists of numbers.

Only what C cannot see is checked here, the type of a value; csrc/core/check.c has the rest.
"""

import functools
import math
import numbers
import os
import re
import typing

import torch

from . import mistakes, operators, validate
from ._C import getenv
from .options import (
    CHOICES,
    DTYPES,
    LOGIT_OPTIONS,
    OF_TEACHER,
    OPTIONS,
    RETURNS,
    TEACHER_OPTIONS,
    Attribute,
    Save,
    Wanted,
    defaults,
)
from .validate import check_flag, check_integer, refuse

_ATTRIBUTES = typing.get_args(Attribute)

# ---- bytes ----

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SUFFIXES = "B, KB, MB, GB, TB of 1000, KiB, MiB, GiB, TiB of 1024, in any letter case"


def parse_bytes(value, name="max_memory"):
    """Bytes from a number or text such as "512MiB", "1.5 GB" (units of 1000 or 1024 bytes).

    Raises TypeError for other types and ValueError for less than one byte, NaN or infinity.
    """
    expected = f'a positive number of bytes or text such as "512MiB" ({_SUFFIXES})'
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
    """1/8 of the device's memory, in bytes. device: a torch.device, or as text a GPU to plan for
    without its hardware (flce.plan)."""
    if isinstance(device, str):
        _, _, memory, _, _ = operators.run_plain(torch.ops.flce.find_gpu.default, device)
        memory = int(memory)
    elif device.type == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device.index).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory // 8


@functools.cache
def default_memory(device):
    """The Memory of a call without max_memory: 1 GiB, or 1/8 of the device's memory if smaller."""
    share = share_of_memory(device)
    return Memory(min(1 << 30, share), share, True)


# ---- packing ----

LAYOUT = 11  # raise it together with kLayout of csrc/binding/options.h
# The names of both lists' slots, in order: FLCE_INTEGERS of csrc/binding/options.h, without the
# layout at its end, and the numbers of that file. DIVERGENCES: the names of FLCE_DIVERGENCES of
# csrc/problem.h; the number of one is 1 + its index.
(*INTEGERS, _), NUMBERS, DIVERGENCES = (
    tuple(names.split()) for names in torch.ops.flce.option_names().split("/")
)
# From so many chunks on the weight's gradient is summed in float32 by default (csrc/flce.h).
WIDE_SUM_CHUNKS = torch.ops.flce.wide_sum_chunks()


class Memory(typing.NamedTuple):
    """Bounds in bytes: max_memory of the logits, kept_memory of what save="auto" may keep. In
    `memory` of csrc/problem.h they are `bound` and `kept`; bound_is_default has the same name."""

    max_memory: int = 1 << 30
    kept_memory: int = 1 << 30
    bound_is_default: bool = False


class WantedGradients(typing.NamedTuple):
    """Which gradients are wanted."""

    grad_input: bool = False
    grad_weight: bool = False
    grad_bias: bool = False


NO_GRADIENTS = WantedGradients()
GRADIENTS = WantedGradients._fields


class CallContext(typing.NamedTuple):
    """What the list of integers has besides PackedOptions: what depends on a call's tensors, its
    device and torch's modes, and the divergence.

    gradients: those that the operator makes. autocast: the index in DTYPES of the dtype to which it
    casts, or -1. frozen_hidden: columns of the weight without a gradient, with an adapter.
    accumulates: whether the weight's gradient is added to an attribute of it. traced: whether a
    graph is traced. class_gradient: whether logits of classes are outputs, whose gradient may
    follow. divergence: one of flce_divergence of csrc/problem.h.
    """

    memory: Memory = Memory()
    gradients: WantedGradients = NO_GRADIENTS
    autocast: int = -1
    frozen_hidden: int = 0
    accumulates: bool = False
    traced: bool = False
    class_gradient: bool = False
    allow_tf32: bool = False
    divergence: int = 0

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


class DivergenceSettings(typing.NamedTuple):
    """How a divergence compares a student with its teacher. divergence: one of flce_divergence of
    csrc/problem.h, 0 in the call of a loss. The numbers are the arguments of flce.linear_divergence
    of these names, but teacher_softcap is 0.0 for None."""

    divergence: int
    beta: float
    hard_weight: float
    teacher_softcap: float
    teacher_logit_scale: float
    teacher_temperature: float

    def numbers(self):
        """Its numbers by their names in the operators' list."""
        values = self._asdict()
        del values["divergence"]
        return values


NO_SHARD = Shard()
_INDEX = {name: i for i, name in enumerate(INTEGERS)}
_LOSS_NUMBERS = tuple(name for name in NUMBERS if name not in DivergenceSettings._fields)
TENSORS = frozenset(name for name, o in OPTIONS.items() if o.schema == "Tensor?")
_TENSORS_OF_TEACHER = [name for name, o in TEACHER_OPTIONS.items() if o.schema == "Tensor?"]
# The options that an operator takes in its lists, or that say what else the call does.
_PACKED = {k: v for k, v in defaults().items() if k not in TENSORS | {"options"}}


def _choice(name, value):
    choices = typing.get_args(Save) if name == "save" else CHOICES[name]
    if value not in choices:
        refuse(name, f"one of {choices}", f"{value!r}{mistakes.our_value(value, choices)}")
    return CHOICES[name].index(value)


def _number(name, value, default):
    """A float. Where None is the default it becomes 0.0, and 0.0 itself is refused."""
    optional = default is None
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


class PackedOptions:
    """The options of a call that are no tensors, checked and packed; cached by their values.

    wants_outputs: whether a flag of `wanted` asks for more than the loss. differentiates_stats:
    whether such an output is computed from stats and may have a gradient.
    """

    def __init__(self, options):
        self.detaches_entropy = options["return_entropy"] == "detached"
        options = {**options, "return_entropy": self.detaches_entropy or options["return_entropy"]}
        wanted = self.wanted = Wanted(*(check_flag(name, options[name]) for name in RETURNS))
        self.wants_outputs = any(wanted)
        entropy_gradient = wanted.entropy and not self.detaches_entropy
        self.differentiates_stats = wanted.lse or entropy_gradient or wanted.tail_lse
        self.reduction, self.gradient = options["reduction"], options["gradient"]
        self.z_loss = options["z_loss"]
        self.ignore_index = ignore_index_of(options["ignore_index"])
        self.shift = check_integer("shift", options["shift"], 0)
        self.topk = check_integer("topk", options["topk"])
        self.accumulate_into = options["accumulate_into"]
        if self.accumulate_into not in (None, *_ATTRIBUTES):
            got = f"{self.accumulate_into!r}{mistakes.our_value(self.accumulate_into, _ATTRIBUTES)}"
            refuse("accumulate_into", f"one of {_ATTRIBUTES} or None", got)
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
        self._numbers = {
            name: _number(name, options[name], OPTIONS[name].default) for name in _LOSS_NUMBERS
        }
        self.numbers = self.numbers_of(NO_DIVERGENCE)
        self.logit_options = self._logit_options()
        values = {name: _choice(name, options[name]) for name in CHOICES}
        for name in ("accum_dtype", "logits_dtype"):
            dtype = options[name]
            values[name] = -1 if dtype is None else code_of(name, dtype, ValueError)
        values |= shard.integers()
        values |= {
            "wants_lse": wanted.lse,
            "wants_entropy": wanted.entropy,
            "wants_tail": wanted.tail_lse,
            "wants_predictions": wanted.predictions or wanted.accuracy,
            "wants_statistics": any(wanted._replace(predictions=False)),
            "entropy_gradient": entropy_gradient,
            "consumes_saved": 0,
            "ignore_index": self.ignore_index,
            "topk": self.topk,
            "first_token": 0,
        }
        self._values, self._lists = values, {}

    def _logit_options(self):
        """The arguments of reference.final_logits."""
        # 0.0 stands for None.
        is_none = {name: OPTIONS[name].default is None for name in LOGIT_OPTIONS}
        return {
            name: None if is_none[name] and self._numbers[name] == 0.0 else self._numbers[name]
            for name in LOGIT_OPTIONS
        }

    def numbers_of(self, divergence_settings):
        """The list of numbers of a call with these DivergenceSettings."""
        values = self._numbers | divergence_settings.numbers()
        return tuple(values[name] for name in NUMBERS)

    def memory(self, device):
        """The Memory of a call on this device."""
        max_memory = self.max_memory
        if max_memory is None and (text := getenv("FLCE_MAX_MEMORY")):
            max_memory = parse_bytes(text, "FLCE_MAX_MEMORY")
        if max_memory is not None:
            return Memory(max_memory, max_memory, False)
        return default_memory(device)

    def integers(self, context):
        """The list of integers of a call with this CallContext."""
        integers = self._lists.get(context)
        if integers is None:
            values = self._values | context.values()
            integers = (*(int(values[name]) for name in INTEGERS), LAYOUT)
            if len(self._lists) < 64:
                self._lists[context] = integers
        return integers


def _divergence_settings(divergence, options):
    """The DivergenceSettings with the numbers among `options`."""
    names = (name for name in DivergenceSettings._fields if name != "divergence")
    numbers = {name: _number(name, options[name], OF_TEACHER[name]) for name in names}
    return DivergenceSettings(divergence, **numbers)


NO_DIVERGENCE = _divergence_settings(0, OF_TEACHER)
_DEFAULT = PackedOptions(_PACKED)


@functools.lru_cache(maxsize=1024, typed=True)
def _packed(names, *values):
    return PackedOptions({**_PACKED, **dict(zip(names, values, strict=True))})


def split(options):
    """The PackedOptions of the options `options` by name, and a dict of the tensors among them."""
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
        return PackedOptions({**_PACKED, **items}), tensors


def split_divergence(options):
    """The options of a divergence: the DivergenceSettings, a dict of the teacher's tensors, and the
    options of the student."""
    of_teacher = {name: options.get(name, default) for name, default in OF_TEACHER.items()}
    of_student = {name: value for name, value in options.items() if name not in OF_TEACHER}
    tensors = {name: of_teacher.pop(name) for name in _TENSORS_OF_TEACHER}
    temperature = of_teacher["teacher_temperature"]
    if isinstance(temperature, torch.Tensor):  # of each row, in place of the number
        tensors["teacher_temperature"] = temperature
        of_teacher["teacher_temperature"] = OF_TEACHER["teacher_temperature"]
    code = divergence_code(of_teacher["divergence"])
    return _divergence_settings(code, of_teacher), tensors, of_student


def divergence_code(divergence):
    """The flce_divergence of that name."""
    if divergence not in DIVERGENCES:
        got = f"{divergence!r}{mistakes.our_value(divergence, DIVERGENCES)}"
        refuse("divergence", f"one of {DIVERGENCES}", got)
    return 1 + DIVERGENCES.index(divergence)


def _split_scalar(name, value, tensors, items):
    """Adds a tensor where a number is expected to `items`, by its value if it is 0-d. A temperature
    stays a tensor, in `tensors`, unless it is 0-d on the CPU: reading others would synchronise."""
    validate.check_constant(name, value)
    validate.refuse_transforms(value)
    is_known = value.dim() == 0 and value.is_cpu and not torch.compiler.is_compiling()
    if name == "temperature" and not is_known:
        tensors[name] = value
        return
    is_number = value.dim() == 0 and name in (*_LOSS_NUMBERS, "ignore_index")
    items[name] = value.item() if is_number else value


def replaced(integers, **values):
    """`integers` with other values by name; one of CHOICES as text or as its index."""
    return _replaced(tuple(integers), **values)  # torch gives an operator's arguments as lists


@functools.lru_cache(maxsize=1024)
def _replaced(integers, **values):
    changed = list(integers)
    for name, value in values.items():
        code = CHOICES[name].index(value) if type(value) is str else int(value)
        changed[_INDEX[name]] = code
    return tuple(changed)


@functools.lru_cache(maxsize=1024)
def backward_integers(integers, save, consumes_saved, wanted):
    """The integers of a backward from those of its forward. wanted: WantedGradients."""
    values = dict(zip(GRADIENTS, wanted, strict=True))
    return replaced(integers, save=save, consumes_saved=consumes_saved, **values)


def value_of(integers, name):
    return integers[_INDEX[name]]
