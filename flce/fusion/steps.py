"""What was done to deferred logits, and what it means as options of linear_cross_entropy.

Nothing here calls a Module or makes logits but `replayed`, which repeats the steps on real ones.
"""

import functools
import math
import numbers
import typing

import torch

SCALE, TANH, BIAS, CLASSES, CAST = "scale", "tanh", "bias", "classes", "cast"


class Step(typing.NamedTuple):
    """One operation on every row alike.

    kind: one of the names above. value: the factor, None, the vector, (start, stop), the dtype.
    replay: the operation itself, from real logits (..., V) to real logits.
    """

    kind: str
    value: object
    replay: typing.Callable[[torch.Tensor], torch.Tensor]


class Source(typing.NamedTuple):
    """One nn.Linear's output, not computed yet: `linear(x)`, then `steps` (scales and casts),
    before the sum of the Record. x: shape (..., H)."""

    linear: torch.nn.Module
    x: torch.Tensor
    steps: tuple = ()


class Record(typing.NamedTuple):
    """The sum of the sources, and the steps after it. shape (..., V) and dtype are the result's."""

    sources: tuple
    steps: tuple
    shape: tuple
    dtype: torch.dtype

    def then(self, *step, dtype=None, classes=None):
        shape = self.shape if classes is None else (*self.shape[:-1], classes)
        return Record(self.sources, (*self.steps, Step(*step)), shape, dtype or self.dtype)

    def of_rows(self, select):
        """The record of selected or reshaped rows: every step acts on rows one by one, so the
        selection can precede them all, the product included."""
        sources = tuple([Source(s.linear, select(s.x), s.steps) for s in self.sources])
        shape = (*sources[0].x.shape[:-1], self.shape[-1])
        return Record(sources, self.steps, shape, self.dtype)


def kinds(steps):
    return {step.kind for step in steps}


def is_number(value):
    # The type first: asking an abstract class takes several times as long.
    is_plain = type(value) is float or type(value) is int
    return is_plain or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def is_scale(factor, steps):
    """Whether logits with these steps may be scaled by the number `factor`: flce has no factor 0,
    and the factor after a tanh is its softcap, which is positive."""
    for kind, value, _ in reversed(steps):
        if kind == TANH:
            return 0 < factor < math.inf
        if kind == SCALE:
            factor *= value
    return 0 < abs(factor) < math.inf


def replayed(record, product):
    """The real logits. `product(linear, x)`: the real output of a source's nn.Linear."""
    total = None
    for source in record.sources:
        value = product(source.linear, source.x)
        for step in source.steps:
            value = step.replay(value)
        total = value if total is None else total + value
    for step in record.steps:
        total = step.replay(total)
    return total


def operands(record, dtype, cuts_weight):
    """(x, weight, bias, options) of linear_cross_entropy for the record's logits.

    x: shape (..., H), weight: (V, H), bias: (V,) or None. dtype: of the logits that the sources
    make, to which several sources are cast. cuts_weight: whether a class weight or probabilities
    belong to the selected classes, so that the weight has to be cut to these.
    """
    scale = _scale_of(record.sources[0])
    x, weight, bias, options = _product(record.sources, scale, dtype)
    scale, added, outer, classes = _folded(record.steps, scale, len(weight))
    if len(classes) < len(weight):
        if classes.start == 0 and added is None and not cuts_weight:
            options["valid_vocab"] = classes.stop
        else:
            cut = slice(classes.start, classes.stop)
            weight, bias = weight[cut], None if bias is None else bias[cut]
            if "adapter_weight" in options:
                options["adapter_weight"] = options["adapter_weight"][cut]
    if added is not None:
        bias = added if bias is None else bias + added
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype if x.dtype == torch.float64 else torch.float32)
    if outer is not None:
        options.update(softcap=outer, logit_scale=scale * outer)
    elif scale != 1:
        options["logit_scale"] = scale
    return x, weight, bias, options


def _folded(steps, scale, classes):
    """(scale, bias, outer, range of classes): the steps make outer tanh(scale (z + bias)), or
    scale (z + bias) where outer is None, of scale z, for the selected ones of `classes` classes."""
    bias, outer, selected = None, None, range(classes)
    for kind, value, _ in steps:
        if kind == SCALE and outer is not None:
            outer *= value
        elif kind == SCALE:
            scale *= value
        elif kind == TANH:
            outer = 1.0
        elif kind == BIAS:
            value = (value if value.dtype == torch.float64 else value.float()) / scale
            bias = value if bias is None else bias + value
        elif kind == CLASSES:
            bias = None if bias is None else bias[value[0] : value[1]]
            selected = selected[value[0] : value[1]]
    return scale, bias, outer, selected


def _scale_of(source):
    return math.prod([value for kind, value, _ in source.steps if kind == SCALE])


def _product(sources, first_scale, dtype):
    """(x, weight, bias, options) of the sum of all sources, divided by the first one's factor
    `first_scale`. The others are the low-rank term of flce's adapter options.

    PEFT adds a float32 adapter to a bfloat16 base in float32 and rounds the sum to bfloat16; here
    adapter and base are both in bfloat16, which `dtype` is then, and the products are summed in
    float32.
    """
    first, *others = sources
    x, weight, bias = first.x, first.linear.weight, first.linear.bias
    if not others:
        return x, weight, bias, {}
    inputs, weights = [], []
    for source in others:
        ratio = _scale_of(source) / first_scale
        inputs.append(source.x.to(dtype) * ratio)
        weights.append(source.linear.weight.to(dtype))
        if source.linear.bias is not None:
            added = source.linear.bias * ratio
            bias = added if bias is None else bias + added
    is_one = len(others) == 1
    adapter = {"adapter_input": inputs[0] if is_one else torch.cat(inputs, dim=-1)}
    adapter["adapter_weight"] = weights[0] if is_one else torch.cat(weights, dim=1)
    return x.to(dtype), weight.to(dtype), bias, adapter


def key_of(record):
    """What `describe` needs, hashable: (number of sources, ((kind, value), ...))."""
    steps = tuple([(kind, None if kind == BIAS else value) for kind, value, _ in record.steps])
    return len(record.sources), steps


_TEXTS = {SCALE: "scale {:g}", CLASSES: "classes {0[0]} to {0[1]}", CAST: "{}"}


@functools.lru_cache(64)
def describe(key):
    """The steps in words, for reports: "scale 0.5, tanh, scale 30"."""
    sources, steps = key
    words = [f"sum of {sources} products"] if sources > 1 else []
    words += [_TEXTS.get(kind, kind).format(value) for kind, value in steps]
    return ", ".join(words).replace("torch.", "") or "none"
