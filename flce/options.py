"""The table of the loss's options, its outputs, and the option lists of the inner operators.

Their values are checked in validate.py; decisions from options and sizes are in strategy.py.
"""

import collections
import functools
import inspect
import math
import typing

import torch

# In the order of the enums in csrc/flce.h.
REDUCTIONS = ("none", "mean", "sum")
SAVES = ("nothing", "logits", "grads", "stats", "samples")
GRADIENT_KINDS = ("exact", "sampled")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

INTEGER, NUMBER = "integer", "number"  # which list of the inner operators holds an option


class Option(typing.NamedTuple):
    """An option of `flce.linear_cross_entropy`.

    default: in the public functions, the operators and the Modules.
    schema: its type in the schema of torch.ops.flce.linear_cross_entropy; None: not passed to it.
    slot: INTEGER or NUMBER; None: a tensor, or used up before an inner operator is called.
    of_logits: whether flce.cross_entropy has it too.
    of_module: whether the Modules hold it, as an attribute.
    check: for a NUMBER, returns whether it is in range; `expected`: that range in words.
    """

    default: object
    schema: str | None = None
    slot: str | None = None
    of_logits: bool = False
    of_module: bool = False
    check: typing.Callable[[float], bool] | None = None
    expected: str = ""


def _number(default, check, expected, schema="float"):
    return Option(default, schema, NUMBER, True, True, check, expected)


# Tests compare it with the public signatures, their docstring and the README's call.
OPTIONS = {
    "linear_bias": Option(None, "Tensor?"),
    "adapter_input": Option(None, "Tensor?"),
    "adapter_weight": Option(None, "Tensor?"),
    "weight": Option(None, "Tensor?", of_logits=True),
    "reduction": Option("mean", "str", INTEGER, of_logits=True, of_module=True),
    "ignore_index": Option(-100, "int?", INTEGER, of_logits=True, of_module=True),
    "label_smoothing": _number(0.0, lambda value: 0.0 <= value <= 1.0, "0 <= label_smoothing <= 1"),
    "options": Option(None),
    "softcap": _number(
        None, lambda value: 0.0 < value < math.inf, "a positive finite number or None", "float?"
    ),
    "logit_scale": _number(
        1.0, lambda value: math.isfinite(value) and value != 0.0, "a finite number other than 0"
    ),
    "temperature": _number(1.0, lambda value: 0.0 < value < math.inf, "a positive finite number"),
    "z_loss": _number(0.0, lambda value: 0.0 <= value < math.inf, "a finite number of at least 0"),
    "token_weight": Option(None, "Tensor?", of_logits=True),
    "num_items": Option(None, "Tensor?", of_logits=True),
    "shift": Option(0, "int", of_module=True),
    "cu_seqlens": Option(None, "Tensor?"),
    "valid_vocab": Option(None, "SymInt?", of_module=True),
    "valid_bound": Option(None, "SymInt?"),
    "accum_dtype": Option(None, "ScalarType?", INTEGER, of_module=True),
    "logits_dtype": Option(None, "ScalarType?", INTEGER, of_module=True),
    "save": Option("auto", "str", INTEGER, of_module=True),
    "max_memory": Option(None, "int?", INTEGER, of_module=True),
    "accumulate_into": Option(None, of_module=True),
    "gradient": Option("exact", "str", INTEGER, of_module=True),
    "gradient_eps": _number(
        2**-6, lambda value: 2**-12 <= value <= 1.0, "from 2**-12 to 1"
    )._replace(of_logits=False),
    "vocab_parallel": Option(None, "str?", of_module=True),
    # Not of a Module: a fixed seed would repeat one draw in every step.
    "gradient_seed": Option(None, "Tensor?"),
}


class LinearCrossEntropyOutput(typing.NamedTuple):
    """The loss and the requested outputs; None for the others.

    loss: shape (), or (...) for reduction="none"; differentiable.
    lse: logsumexp of each row's logits, shape (...); differentiable; 0 where ignored.
    entropy: of each row's softmax, in nats, shape (...); 0 where ignored; differentiable, but not
    with gradient="sampled".
    accuracy: the share of valid rows whose largest logit is the target's, shape (); 0 if there are
    none. predictions: the lowest class of the largest logit, int64, shape (...); -1 where ignored.
    z_loss: the part z_loss lse^2 of the loss, with the same reduction; detached.

    All but the predictions have the loss's dtype: float64 for float64 operands, else float32.
    """

    loss: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    accuracy: torch.Tensor | None = None
    predictions: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None


OUTPUTS = LinearCrossEntropyOutput._fields[1:]
RETURNS = tuple(f"return_{name}" for name in OUTPUTS)  # arguments, False by default
# Which outputs a call returns in addition to the loss.
Wanted = collections.namedtuple("Wanted", OUTPUTS, defaults=(False,) * len(OUTPUTS))


def defaults(having=None):
    """Names and defaults of all options, or of those whose field `having` is set."""
    chosen = ((name, o) for name, o in OPTIONS.items() if having is None or getattr(o, having))
    return {name: option.default for name, option in chosen}


def completed(function, known, given):
    """The options `given` to `function`, completed by the defaults `known` of all that it has."""
    for name in given:
        if name not in known:
            expected = f"expected some of {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {expected}")
    return {**known, **given}


def show_options(function, options):
    """Lists `options`, names and defaults, in the signature of `function` for its **options."""
    own = inspect.signature(function).parameters.values()
    own = [parameter for parameter in own if parameter.kind != inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own += [inspect.Parameter(name, keyword, default=value) for name, value in options.items()]
    function.__signature__ = inspect.Signature(own)


# Raise it together with kLayout of csrc/binding/op_options.h.
LAYOUT = 5
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
# Slots after the options, derived from outputs, tensors and torch's global settings.
_FLAGS = ("wants_entropy", "wants_predictions", "wants_statistics", "saves_memory")
_FLAGS += (*GRADIENTS, "allow_tf32")
# Of a sharded vocabulary (flce_problem); ranks 0: it is not sharded.
SHARDS = ("ranks", "rank", "first_class", "classes")
_SHARD_FLAGS = ("input_is_sharded", "partial_grad_input", "wide_terms")
SHARDS += _SHARD_FLAGS
_CODES = {"reduction": REDUCTIONS, "save": SAVES, "gradient": GRADIENT_KINDS}
_CODES |= dict.fromkeys(("accum_dtype", "logits_dtype", "dtype"), DTYPES)
_CODES |= dict.fromkeys((*_FLAGS, *_SHARD_FLAGS), (False, True))
NUMBERS = tuple(name for name, option in OPTIONS.items() if option.slot == NUMBER)
CAPS = tuple(name for name in NUMBERS if OPTIONS[name].default is None)
INTEGERS = tuple(name for name, option in OPTIONS.items() if option.slot == INTEGER)
INTEGERS += ("dtype", "frozen_hidden", *_FLAGS, *SHARDS)
_SIZES = ("valid_vocab", "rows")


class Settings(collections.namedtuple("Settings", (*_SIZES, *INTEGERS, *NUMBERS, "group"))):
    """The arguments of the inner operators after their tensors: two sizes, which may be
    symbolic, two lists, and the name of a process group or None. A value of _CODES becomes its
    index there; softcap 0.0 means None."""

    __slots__ = ()

    @property
    def gradients(self):
        """Whether the gradients of input, linear_weight and linear_bias are wanted."""
        return self.grad_input, self.grad_weight, self.grad_bias

    def arguments(self):
        """The settings in the form that the operators take."""
        return *self[: len(_SIZES)], *_packed(self[len(_SIZES) : -1]), self.group

    @classmethod
    def of_arguments(cls, valid_vocab, rows, integers, numbers, group=None):
        """The inverse of `arguments`; ValueError for a wrong length or index."""
        expected = len(INTEGERS) + 1, len(NUMBERS)
        if (len(integers), len(numbers)) != expected:
            raise ValueError(
                f"integers, numbers: expected {expected[0]} and {expected[1]} values, got "
                f"{len(integers)} and {len(numbers)}"
            )
        named = zip(INTEGERS, integers[:-1], strict=True)
        return cls(valid_vocab, rows, *(_decoded(*value) for value in named), *numbers, group)


@functools.lru_cache(maxsize=1024)
def _packed(values):
    named = zip(INTEGERS, values, strict=False)
    integers = [
        _CODES[name].index(value) if name in _CODES else int(value) for name, value in named
    ]
    return (*integers, LAYOUT), tuple(float(value) for value in values[len(INTEGERS) :])


def _decoded(name, value):
    choices = _CODES.get(name)
    if choices is None:
        return value
    if not 0 <= value < len(choices):
        raise ValueError(f"{name}: expected 0 to {len(choices) - 1}, got {value}")
    return choices[value]
