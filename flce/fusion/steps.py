"""What was done to deferred logits, and what it means as options of linear_cross_entropy. Nothing
here calls a Module."""

import functools
import math
import typing

import torch
from torch.compiler import is_compiling

from .. import torch_private

SCALE, BIAS, CLASSES, CAST = "scale", "bias", "classes", "cast"
# Curves that cap the logits: {torch's function: the option whose value is `cap` in
# cap curve(z / cap)}; the name is also the kind of the step.
CAPS = {"tanh": "softcap"}
# What values are, where they are not logits z of shape (..., V), the classes last; p = softmax(z).
FORMS = (
    "log p",  # (..., V)
    "p",  # (..., V)
    "p log p",  # (..., V)
    "p z",  # (..., V)
    "classes second",  # (B, V, T): logits or log p, as F.cross_entropy takes them
    "classes split",  # (..., groups, V / groups): logits, with a loss for each group
    "kl",  # (..., V): the elements of F.kl_div of two heads
)
LOG_P, P, P_LOG_P, P_Z, SECOND, SPLIT, KL = FORMS


class Unknown(Exception):
    """An operation is none that is known: real logits are needed."""


def require(is_known):
    """Raises Unknown unless `is_known`."""
    if not is_known:
        raise Unknown


class Step(typing.NamedTuple):
    """One operation on every row alike. compute: the operation itself, on real values (..., V).

    kind, one of the names above, and its value:
    SCALE: the factor. BIAS: the vector (V,). CLASSES: (start, stop). CAST: the dtype.
    one of CAPS: 1, which is not read.
    one of FORMS: the factor of its values, 1 but for products of scaled ones.
    """

    kind: str
    value: object
    compute: typing.Callable[[torch.Tensor], torch.Tensor]


class Source(typing.NamedTuple):
    """One nn.Linear's output, not computed yet: `linear(x)`, then `steps` (scales and casts),
    before the sum of the Record. x: shape (..., H). weight_and_bias: at the call; None while
    torch.compile traces: those that the nn.Linear has when they are needed."""

    linear: torch.nn.Module
    x: torch.Tensor
    steps: tuple = ()
    weight_and_bias: tuple | None = None

    def parameters(self):
        if self.weight_and_bias is None:
            return self.linear.weight, self.linear.bias
        return self.weight_and_bias

    def with_changes(self, x, steps):
        return Source(self.linear, x, steps, self.weight_and_bias)


class Rows:
    """What was computed of the rows of some logits, shared by all Records of the same rows: of z
    and of z.float(), for example. The rows of z[:, :-1] have Rows of their own, whose
    parent_record is that of z, and whose `select` is x -> x[:, :-1].

    statistics: {key: values} as `loss.statistic` computes them, the key being "lse" or another
    name, or the number of a target; and "targets": [the targets with a number].
    parent_record, select: the Record that the rows were selected from, or None, and how, from
    (..., n) to (..., n). is_piece: `select` gives one of the pieces of a split of all its rows.
    logits_cache: (steps, the real logits, their Memory or None), or None.
    rows_by_factor: {factor: Rows of the logits times that}.
    statistics_by_view: {layout of a view of the hidden states: the statistics of its rows}.
    """

    def __init__(self, parent_record=None, select=None, is_piece=False):
        self.parent_record, self.select, self.is_piece = parent_record, select, is_piece
        self.statistics, self.logits_cache = {}, None
        self.rows_by_factor, self.statistics_by_view = {}, {}

    def lookup(self, key):
        """The statistic by this key, or None; one with a name also as a selection of the parent's.
        A target's key is a number that each Rows gives out itself: another target's there."""
        values = self.statistics.get(key)
        if values is None and self.parent_record is not None and isinstance(key, str):
            values = self.parent_record.rows.lookup(key)
            values = None if values is None else self.select_values(values)
        return values

    def target_number(self, target):
        """The number of a target among those of these rows, which are compared by their values;
        None while torch.compile traces. On CUDA a second target of a shape waits for the device."""
        if is_compiling():
            return None
        targets = self.statistics.setdefault("targets", [])
        for i, known_target in enumerate(targets):
            if known_target.shape == target.shape and _is_same(known_target, target):
                return i
        targets.append(target.clone())
        return len(targets) - 1

    def select_values(self, values):
        """`select` of one value for each row, (...) to (...)."""
        return self.select(values.unsqueeze(-1)).squeeze(-1)

    def cached_logits(self, steps, needs_gradient):
        """The real logits by these steps, if they exist and nobody has written to them.
        needs_gradient: a gradient has to go through them."""
        steps_of_cache, logits, memory = self.logits_cache or (None, None, None)
        if steps_of_cache is not steps:
            return None
        if memory is not None:  # of a value that has no graph of its own
            return None if memory.is_touched else logits
        is_changed = logits.is_inference() or logits._version
        return None if is_changed or logits.requires_grad < needs_gradient else logits


def _is_same(target, other):
    is_captured = target.is_cuda and torch.cuda.is_current_stream_capturing()
    return target.device == other.device and not is_captured and torch.equal(target, other)


class Record(typing.NamedTuple):
    """The sum of the sources, and what was done to it: `steps`, which make logits, then
    `form_steps`, from the first step on whose kind is one of FORMS. shape and dtype are the
    result's."""

    sources: tuple
    steps: tuple
    shape: tuple
    dtype: torch.dtype
    rows: Rows
    form_steps: tuple = ()

    def changed(self, **fields):
        """torch 2.11's compiler loses the class of what _replace returns."""
        return Record(*[fields.get(name, getattr(self, name)) for name in Record._fields])

    def then(self, *step, dtype=None, shape=None):
        step = Step(*step)
        result = {"dtype": dtype or self.dtype, "shape": shape or self.shape}
        if self.form_steps or step.kind in FORMS:
            return self.changed(form_steps=(*self.form_steps, step), **result)
        if step.kind == CAST:
            rows = self.rows
        elif step.kind == SCALE:
            rows = self.rows.rows_by_factor.setdefault(step.value, Rows())
        else:
            rows = Rows()
        return self.changed(steps=(*self.steps, step), rows=rows, **result)

    def of_rows(self, select, is_piece=False):
        """The record of selected or reshaped rows: every step acts on rows one by one, so the
        selection can precede them all, the product included."""
        sources = tuple([s.with_changes(select(s.x), s.steps) for s in self.sources])
        rows, whole, x = Rows(self, select, is_piece), self.sources[0].x, sources[0].x
        if not is_compiling() and torch_private.is_alias(x, whole):
            view = x.storage_offset(), x.shape, x.stride()
            rows.statistics = self.rows.statistics_by_view.setdefault(view, rows.statistics)
        return self.changed(sources=sources, shape=(*x.shape[:-1], self.shape[-1]), rows=rows)

    def form(self):
        """One of FORMS; None for logits."""
        return ([None] + [step.kind for step in self.form_steps if step.kind in FORMS])[-1]

    def factor(self):
        """By what number the values of the form are multiplied."""
        return math.prod([step.value for step in self.form_steps if step.kind != CAST])


def kinds(steps):
    return {step.kind for step in steps}


def is_capped(steps):
    return any(kind in CAPS for kind, _, _ in steps)


def is_scale(factor, steps):
    """Whether logits with these steps may be scaled by `factor`: not by 0 or infinity. The factors
    after a curve make the cap together, so that their product must be positive."""
    for kind, value, _ in reversed(steps):
        if kind in CAPS:
            return 0 < factor < math.inf
        if kind == SCALE:
            factor *= value
    return 0 < abs(factor) < math.inf


def apply_steps(steps, value):
    """The real result of steps on a real value."""
    for step in steps:
        value = step.compute(value)
    return value


def operands(record, dtype, needs_slice):
    """(x (..., H), weight (V, H), bias (V,) or None, options) of linear_cross_entropy for the
    record's logits. dtype: of the logits that the sources make; with several sources their
    operands are cast to it. needs_slice: whether to slice the head's weight even where valid_vocab
    would do, because class weights or probabilities have the selected classes alone, or because the
    teacher of a divergence has no valid_vocab."""
    scale = _scale_of(record.sources[0])
    x, weight, own_bias, options = _operands_of_sum(record.sources, scale, dtype)
    folded = _folded(record.steps, scale, own_bias, len(weight))
    scale, classes, bias = folded.scale, folded.classes, folded.bias
    if len(classes) < len(weight) and not (classes.start or folded.is_added or needs_slice):
        options["valid_vocab"], bias = classes.stop, own_bias
    elif len(classes) < len(weight):
        cut = slice(classes.start, classes.stop)
        weight = weight[cut]
        if "adapter_weight" in options:
            options["adapter_weight"] = options["adapter_weight"][cut]
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype if x.dtype == torch.float64 else torch.float32)
    if folded.curve is not None:
        # outer curve(scale z) = cap curve(logit_scale z / cap) with cap = outer and
        # logit_scale = scale outer.
        options[CAPS[folded.curve]] = folded.outer
        scale *= folded.outer
    return x, weight, bias, options | ({"logit_scale": scale} if scale != 1 else {})


class _Folded(typing.NamedTuple):
    """What steps make of z: outer curve(scale (z + bias)), curve being a name of CAPS, or
    scale (z + bias) where both are None, of a range of the classes. is_added: whether a step has
    added to the bias."""

    scale: float
    outer: float | None
    curve: str | None
    is_added: bool
    classes: range
    bias: torch.Tensor | None


def _folded(steps_of_logits, scale, bias, vocab):
    """The _Folded of steps after a product with this bias and factor."""
    outer, curve, is_added, classes = None, None, False, range(vocab)
    for kind, value, _ in steps_of_logits:
        if kind == SCALE and outer is not None:
            outer *= value
        elif kind == SCALE:
            scale *= value
        elif kind in CAPS:
            outer, curve = 1.0, kind
        elif kind == BIAS:
            value = (value if value.dtype == torch.float64 else value.float()) / scale
            bias, is_added = value if bias is None else bias + value, True
        elif kind == CLASSES:
            bias = None if bias is None else bias[slice(*value)]
            classes = classes[slice(*value)]
    return _Folded(scale, outer, curve, is_added, classes, bias)


def _scale_of(source):
    return math.prod([value for kind, value, _ in source.steps if kind == SCALE])


def _operands_of_sum(sources, first_scale, dtype):
    """(x, weight, bias, options) of the sum of all sources, divided by the first one's factor
    `first_scale`; the sources after the first are flce's adapter. PEFT adds a float32 adapter to a
    bfloat16 base in float32 and rounds the sum to bfloat16; here `dtype` is bfloat16 then, both are
    cast to it, and their products are summed in float32."""
    first, *others = sources
    x, (weight, bias) = first.x, first.parameters()
    if not others:
        return x, weight, bias, {}
    inputs, weights = [], []
    for source in others:
        ratio = _scale_of(source) / first_scale
        inputs.append(source.x.to(dtype) * ratio)
        own_weight, own_bias = source.parameters()
        weights.append(own_weight.to(dtype))
        if own_bias is not None:
            added = own_bias * ratio
            bias = added if bias is None else bias + added
    adapter = {"adapter_input": torch.cat(inputs, -1), "adapter_weight": torch.cat(weights, 1)}
    return x.to(dtype), weight.to(dtype), bias, adapter


def hashable_steps(record):
    """What `describe` needs, hashable: (number of sources, ((kind, value), ...))."""
    steps = tuple([(kind, None if kind == BIAS else value) for kind, value, _ in record.steps])
    return len(record.sources), steps


_TEXTS = {SCALE: "scale {:g}", CLASSES: "classes {0[0]} to {0[1]}", CAST: "{}"}


@functools.lru_cache(64)
def describe(sources_and_steps):
    """The steps in words, for reports: "scale 0.5, tanh, scale 30"."""
    sources, steps = sources_and_steps
    words = [f"sum of {sources} products"] if sources > 1 else []
    words += [_TEXTS.get(kind, kind).format(value) for kind, value in steps]
    return ", ".join(words).replace("torch.", "") or "none"
