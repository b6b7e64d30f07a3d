"""Descriptions of cases: `suite` lists those of a run without a seed, in named groups; `draw` makes
one from a seed and an index alone."""

from __future__ import annotations

import dataclasses
import itertools
import random
import typing

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
# What an implementation may lack: options, and what not every caller needs.
FEATURES = ("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
FEATURES += ("ignore_index", "int32", "poisoned", "strided", "no rows", "repeatable")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `group` and `name` are for the report alone.

    logits: normal (standard deviation 2), flat (0.01), extreme (60), huge (5000), peaked (one class
    about 12 above the others, in every second row the target's), or offset (`offset` added to all
    of a row). targets: any, equal (one class), or edge: near 0, near V - 1, next to multiples of
    128. ignored: none, some, first, last, all. poisoned: the ignored rows of x hold NaN.
    upstream: the gradient of the loss: one, zero, other; scaled: 65536; expanded: one number for
    all rows; strided: a vector that is not contiguous.
    bias: None, normal, or masked: -inf for some classes that are no target.
    weight: of classes: None, positive, zeros (some are 0), or signed (some are negative).
    layout: plain; strided: no operand is contiguous; padded: there is memory between the rows of x
    and of w; unaligned: an operand begins one element after its memory; tied: x is rows of w; same:
    x is w.
    wants: what needs a gradient: both, input, weight (and bias), bias, nothing.
    call: how it is called, a name of calls.CALLS.
    """

    group: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str = "bfloat16"
    logits: str = "normal"
    offset: float = 0.0
    targets: str = "any"
    ignored: str = "none"
    ignore_index: int = -100
    poisoned: bool = False
    int32: bool = False
    reduction: str = "mean"
    upstream: str = "one"
    bias: str | None = None
    weight: str | None = None
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    layout: str = "plain"
    wants: str = "both"
    call: str = "once"
    seed: int = 0
    name: str = ""

    def needs(self) -> set[str]:
        """What of FEATURES and of the dtypes an implementation must offer for this case."""
        differs = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        needs = (differs | {self.reduction}) & set(FEATURES) | {self.dtype}
        needs |= {"strided"} if self.layout in ("strided", "padded") else set()
        needs |= {"repeatable"} if self.call == "repeated" else set()
        return needs | ({"no rows"} if self.tokens == 0 else set())

    def __str__(self) -> str:
        """Its group and name, sizes, and every field that is not the default."""
        title = f"{self.group}, {self.name}" if self.name else self.group
        fields = [f for f in dataclasses.fields(self)[5:] if f.name != "name"]
        differs = [f.name for f in fields if getattr(self, f.name) != f.default]
        sizes = f"N {self.tokens}, H {self.hidden}, V {self.vocab}, {self.dtype}"
        return ", ".join([f"{title}: {sizes}", *(f"{n} {getattr(self, n)}" for n in differs)])


def suite() -> list[Case]:
    """The cases of a run without a seed."""
    groups = (_shapes, _large, _logits, _ignored, _upstream, _options, _layout, _calls, _pairs)
    cases = itertools.chain.from_iterable(group() for group in (*groups, _mixed))
    return [dataclasses.replace(case, seed=n) for n, case in enumerate(cases)]


SINGLE_AND_HALVES = ("bfloat16", "float16", "float32")
EVERY_DTYPE = (*SINGLE_AND_HALVES, "float64")
REDUCTIONS = ("mean", "sum", "none")


def _shapes() -> typing.Iterator[Case]:
    """Sizes around those of tiles, vectors and warps."""
    edges = [size + step for size in (8, 64, 128, 256) for step in (-1, 0, 1)]
    for n, size in enumerate(edges):
        for dtype in ("bfloat16", ("float16", "float32")[n % 2]):
            yield Case("shapes", 48, 128, size, dtype, targets="edge", name=f"V {size}")
            yield Case("shapes", size, 128, 384, dtype, name=f"N {size}")
            yield Case("shapes", 48, size, 384, dtype, name=f"H {size}")
    for sizes in ((1, 128, 384), (1, 1, 1), (0, 128, 384), (48, 128, 2)):
        name = "N {}, H {}, V {}".format(*sizes)
        for dtype in EVERY_DTYPE:
            yield Case("shapes", *sizes, dtype, name=name)


def _large() -> typing.Iterator[Case]:
    """One size beyond a chunk, a thread block or 16 bits, the others small."""
    for dtype in SINGLE_AND_HALVES:
        for rows in (300, 513, 1025, 4097):
            yield Case("large", rows, 32, 72, dtype, name=f"N {rows}")
        yield Case("large", 65537, 8, 16, dtype, name="N 65537")
        for hidden in (513, 520, 1025, 2049, 4097):
            yield Case("large", 24, hidden, 136, dtype, name=f"H {hidden}")
        more = {"reduction": "none", "ignored": "some", "upstream": "other"}
        yield Case("large", 1025, 32, 72, dtype, **more, name="N 1025, some ignored, none")
    for n, vocab in enumerate((8193, 32001, 50257, 65537, 128257, 151936, 262145)):
        for dtype in ("bfloat16", ("float32", "float16")[n % 2]):
            yield Case("large", 8, 8, vocab, dtype, targets="edge", name=f"V {vocab}")
    yield Case("large", 8, 8, 151936, targets="edge", int32=True, name="V 151936, int32")
    yield Case("large", 16, 128, 32001, targets="edge", name="H 128, V 32001")


def _logits() -> typing.Iterator[Case]:
    kinds = [(kind, 0.0) for kind in ("flat", "peaked", "extreme", "huge")]
    kinds += [("offset", offset) for offset in (-20.0, 1e3, -1e3, 2e4, -2e4)]
    for dtype, (kind, offset) in itertools.product(EVERY_DTYPE, kinds):
        name = f"{kind} {offset:g}" if offset else kind
        for reduction in ("mean", "none"):
            more = {"reduction": reduction, "name": f"{name}, {reduction}"}
            yield Case("logits", 40, 128, 1000, dtype, kind, offset, **more)


def _ignored() -> typing.Iterator[Case]:
    cut: list[dict] = [{"ignored": pattern} for pattern in ("some", "first", "last", "all")]
    cut += [{"ignored": "some", "ignore_index": index} for index in (3, 0, -1, 504)]
    cut += [{"ignored": "some", "poisoned": True}]
    yield from _each("ignored", cut, upstream="other")


def _upstream() -> typing.Iterator[Case]:
    kinds: list[dict] = [{"upstream": kind} for kind in ("other", "zero", "scaled")]
    yield from _each("upstream", kinds)
    for dtype, kind in itertools.product(SINGLE_AND_HALVES, ("expanded", "strided")):
        more = {"reduction": "none", "upstream": kind, "name": kind}
        yield Case("upstream", 48, 128, 504, dtype, **more)


def _options() -> typing.Iterator[Case]:
    each: list[dict] = [{"bias": kind} for kind in ("normal", "masked")]
    each += [{"weight": kind, "ignored": "some"} for kind in ("positive", "zeros", "signed")]
    each += [{"softcap": 3.0}, {"label_smoothing": 0.1}, {"z_loss": 0.01}]
    yield from _each("options", each, upstream="other")
    every = {"bias": "normal", "weight": "positive", "softcap": 5.0, "label_smoothing": 0.2}
    every |= {"z_loss": 0.1, "ignored": "some", "name": "all"}
    for dtype in EVERY_DTYPE:
        yield Case("options", 48, 128, 504, dtype, **every)


def _layout() -> typing.Iterator[Case]:
    kinds = [("strided", 48), ("padded", 48), ("unaligned", 48), ("tied", 48), ("same", 128)]
    for dtype, (layout, tokens) in itertools.product(SINGLE_AND_HALVES, kinds):
        more: dict = {"layout": layout, "ignored": "some", "name": layout}
        more |= {} if layout in ("tied", "same") else {"bias": "normal", "weight": "positive"}
        yield Case("layout", tokens, 128, 128, dtype, **more)
        yield Case("layout", tokens, 128, 128, dtype, layout=layout, name=f"{layout} alone")
    for dtype, wants in itertools.product(SINGLE_AND_HALVES, ("input", "weight", "nothing")):
        yield Case("layout", 48, 128, 504, dtype, wants=wants, name=f"gradient of {wants}")
    for dtype in SINGLE_AND_HALVES:
        more = {"bias": "normal", "wants": "bias", "name": "gradient of bias"}
        yield Case("layout", 48, 128, 504, dtype, **more)
        yield Case("layout", 48, 128, 504, dtype, targets="equal", name="equal targets")


def _calls() -> typing.Iterator[Case]:
    calls = ("second backward", "separate backwards", "interleaved", "no_grad", "repeated")
    calls += ("x changed", "w changed", "y changed")
    yield from _each("calls", [{"call": call} for call in calls], upstream="other")


def _each(group, settings, **others) -> typing.Iterator[Case]:
    """A case for each setting, reduction and dtype of SINGLE_AND_HALVES."""
    for dtype, reduction, setting in itertools.product(SINGLE_AND_HALVES, REDUCTIONS, settings):
        fields = others | setting | {"reduction": reduction}
        name = f"{_text(setting)}, {reduction}"
        yield Case(group, 48, 128, 504, dtype, **fields, name=name)


def _text(setting: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


# What `_pairs` combines: every two of these that do not contradict each other.
_SETTINGS: list[dict] = [{"tokens": tokens} for tokens in (0, 1, 300)]
_SETTINGS += [{"hidden": 1}, {"hidden": 513}, {"vocab": 129}, {"vocab": 1000}, {"dtype": "float64"}]
_SETTINGS += [{"logits": kind} for kind in ("flat", "peaked", "extreme", "huge")]
_SETTINGS += [{"logits": "offset", "offset": offset} for offset in (-20.0, 1e3, -2e4)]
_SETTINGS += [{"targets": "edge"}, {"targets": "equal"}, {"int32": True}]
_SETTINGS += [{"ignored": "some"}, {"ignored": "all"}, {"ignored": "some", "ignore_index": 3}]
_SETTINGS += [{"ignored": "some", "poisoned": True}]
_SETTINGS += [{"reduction": "sum"}, {"reduction": "none"}]
_SETTINGS += [{"upstream": kind} for kind in ("other", "zero", "scaled")]
_SETTINGS += [{"reduction": "none", "upstream": "strided"}]
_SETTINGS += [{"bias": kind} for kind in ("normal", "masked")]
_SETTINGS += [{"weight": kind} for kind in ("positive", "zeros", "signed")]
_SETTINGS += [{"softcap": 1.5}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"z_loss": 0.1}]
_SETTINGS += [{"layout": kind} for kind in ("strided", "padded", "unaligned", "tied", "same")]
_SETTINGS += [{"wants": "input"}, {"wants": "weight"}, {"bias": "normal", "wants": "bias"}]
_SETTINGS += [{"call": call} for call in ("second backward", "interleaved", "no_grad", "repeated")]


def _pairs() -> typing.Iterator[Case]:
    """Every two settings together, all else plain; in float32, whose tolerance is the smallest of
    what all implementations offer, and in bfloat16, unless float64 is one of the two."""
    for first, second in itertools.combinations(_SETTINGS, 2):
        if any(first[name] != second[name] for name in first.keys() & second.keys()):
            continue
        both = {"hidden": 32, "vocab": 72, "dtype": "float32", **first, **second}
        rows = both["vocab"] if both.get("layout") == "same" else 20
        both = {"tokens": rows, **both, "name": f"{_text(first)} + {_text(second)}"}
        case = Case("pairs", **both)
        if not _is_defined(case):
            continue
        yield case
        if case.dtype == "float32":
            yield dataclasses.replace(case, dtype="bfloat16")


def _is_defined(case: Case) -> bool:
    """Whether the operands that the case describes exist, and have a finite loss."""
    shared = case.layout in ("tied", "same")
    if case.layout == "same" and case.tokens != case.vocab:
        return False
    if shared and (case.tokens > case.vocab or case.wants != "both"):
        return False
    if shared and (case.logits in ("huge", "offset") or case.poisoned):
        return False  # an offset would be squared; NaN in w reaches all logits
    # A class of probability 0 has a loss of inf.
    return not (case.bias == "masked" and case.label_smoothing and not case.softcap)


def _mixed() -> typing.Iterator[Case]:
    """Many settings at once. With few rows: the roundings in a sum of many nearly equal terms,
    such as the bias's gradient with a label smoothing of 1, are not independent, and a right
    implementation may exceed the tolerance (docs/conformance.md)."""
    for n in range(200):
        case = draw(0, n)
        if case.tokens <= 65:
            yield dataclasses.replace(case, group="mixed", name=f"draw {n}")


# Sizes of drawn cases, for a CPU and for a GPU: tokens, hidden, vocab.
_SMALL = "0 1 2 3 7 8 9 15 16 17 31 32 33 40 63 64 65,1 2 7 8 9 15 16 17 31 32 33 63 64 65,"
_SMALL += "1 2 3 7 8 9 31 32 33 63 64 65 100 127 128 129 255 256 257 300"
_LARGE = "0 1 7 8 63 64 65 127 128 129 191 192 193 256 257 385 513,"
_LARGE += "1 8 9 63 64 65 127 128 129 256 520 1024 1032 1025,"
_LARGE += "1 2 8 127 128 129 191 192 193 256 257 1000 1003 4096 4097 8191"
_CHOICES = {
    "logits": ("normal",) * 4 + ("flat", "peaked", "extreme", "offset"),
    "offset": (1e3, -1e3, 1e4, -1e4),
    "targets": ("any", "edge"),
    "ignored": ("none", "none", "some", "some", "first", "last", "all"),
    "ignore_index": (-100, -100, -1, 0, 3),
    "poisoned": (False, True),
    "int32": (False, True),
    "reduction": ("mean", "mean", "sum", "none"),
    "upstream": ("one", "other", "other", "expanded", "zero"),
    "bias": (None, "normal"),
    "weight": (None, None, "positive"),
    "softcap": (None, None, None, 1.5, 30.0),
    "label_smoothing": (0.0, 0.0, 0.1, 1.0),
    "z_loss": (0.0, 0.0, 1e-4, 0.5),
    "layout": ("plain",) * 4 + ("strided", "tied", "same"),
    "wants": ("both",) * 4 + ("input", "weight"),
}
# Drawn after these: in place of a value there, another one of its kind.
_OTHERS = {
    ("logits", "extreme"): ("extreme", "huge"),
    ("offset", -1e4): (-1e4, -2e4, -20.0),
    ("upstream", "other"): ("other", "strided", "scaled"),
    ("bias", "normal"): ("normal", "masked"),
    ("weight", "positive"): ("positive", "zeros", "signed"),
    ("layout", "strided"): ("strided", "padded", "unaligned"),
}
_CALLS = ("once",) * 5 + ("second backward", "interleaved", "no_grad")


def draw(seed: int, index: int, sizes: str = "small") -> Case:
    """Case `index` of the sequence `seed`, always the same; sizes: small or large."""
    drawn = random.Random(f"{seed} {index}")
    fields = {name: drawn.choice(values) for name, values in _CHOICES.items()}
    listed = (_LARGE if sizes == "large" else _SMALL).split(",")
    for name, numbers in zip(("tokens", "hidden", "vocab"), listed, strict=True):
        fields[name] = int(drawn.choice(numbers.split()))
    fields |= {"dtype": drawn.choice(tuple(NAMES)), "seed": drawn.getrandbits(48)}
    for (name, value), values in _OTHERS.items():
        fields[name] = drawn.choice(values) if fields[name] == value else fields[name]
    fields["call"] = drawn.choice(_CALLS)
    if drawn.random() < 0.05:
        larger_sizes = {"tokens": 300}, {"tokens": 513}, {"hidden": 520}, {"hidden": 1025}
        fields |= drawn.choice(larger_sizes)
    return _settled(fields)


def _settled(fields: dict) -> Case:
    """The case drawn, with what contradicts itself taken out."""
    if fields["layout"] == "same":
        fields["tokens"] = fields["vocab"] = min(fields["vocab"], 600)
    if fields["layout"] == "tied" and fields["tokens"] > fields["vocab"]:
        fields["layout"] = "plain"
    shared = fields["layout"] in ("tied", "same")
    if shared and fields["logits"] in ("huge", "offset"):  # it would be squared
        fields["logits"] = "flat"
    # An offset with a z-loss has gradients that overflow float16.
    fields["z_loss" if fields["logits"] == "offset" else "offset"] = 0.0
    fields["poisoned"] &= not shared and fields["ignored"] != "none"  # NaN in w reaches all logits
    if fields["bias"] == "masked" and fields["label_smoothing"]:  # a loss of inf
        fields["bias"] = "normal"
    # The bias's gradient is a sum of nearly equal terms, whose roundings `_mixed` speaks of.
    if fields["tokens"] > 65 and (fields["label_smoothing"] or fields["logits"] == "flat"):
        fields["bias"] = None
    return Case("drawn", **fields | ({"wants": "both"} if shared else {}))
