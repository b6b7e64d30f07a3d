"""A case is a description: sizes, dtype, and what its logits, targets and options are like.

`suite` lists cases, boundary shapes first; `draw` makes one at random, from a seed and an index alone.
`build` makes the tensors of a case on a device, from the case's own seed.
"""

from __future__ import annotations

import dataclasses
import random

import torch

NAMES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WIDE = ("bfloat16", "float16", "float32")  # the dtypes of the suite
# What an implementation may lack: options, and what not every caller needs.
OPTIONS = ("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
FEATURES = (*OPTIONS, "ignore_index", "int32", "poisoned", "strided", "no rows")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `group` is for the report alone.

    logits: normal (standard deviation 2), flat (0.01), extreme (60), peaked (one class 25 above the
    others, in every second row the target's), or offset (`offset` added to all of a row).
    targets: any, or edge: near 0, near V - 1, beside multiples of 128.
    ignored: none, some, first, last, all. poisoned: the ignored rows of x hold NaN.
    upstream: the gradient of the loss: one, zero, other; expanded: one number for all rows.
    layout: plain; strided: no operand is contiguous; tied: x is rows of w, same: x is w.
    wants: what needs a gradient: both, input, weight.
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
    bias: bool = False
    weight: bool = False
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    layout: str = "plain"
    wants: str = "both"
    seed: int = 0

    def needs(self):
        """What of FEATURES and of the dtypes an implementation must offer for this case."""
        flags = ("bias", "weight", "softcap", "label_smoothing", "z_loss", "int32", "poisoned")
        needs = {self.dtype, *(name for name in flags if getattr(self, name))}
        needs |= {self.reduction} - {"mean"}
        needs |= {"no rows"} if self.tokens == 0 else set()
        needs |= {self.layout} & {"strided"}
        return needs | ({"ignore_index"} if self.ignore_index != -100 else set())

    def __str__(self):
        sizes = f"N {self.tokens}, H {self.hidden}, V {self.vocab}, {self.dtype}"
        given = (f for f in dataclasses.fields(self)[5:] if getattr(self, f.name) != f.default)
        return ", ".join([sizes, *(f"{f.name} {getattr(self, f.name)}" for f in given)])


def suite():
    """The cases of a run without a seed, at most a few hundred."""
    found = [dataclasses.replace(case, seed=n) for n, case in enumerate(_listed())]
    return found


def _listed():
    edges = [size + step for size in (8, 64, 128, 256) for step in (-1, 0, 1)]
    other = ("float16", "float32")
    for n, size in enumerate(edges):
        for dtype in ("bfloat16", other[n % 2]):
            yield Case("shapes", 48, 64, size, dtype, targets="edge")
            yield Case("shapes", size, 64, 320, dtype)
            yield Case("shapes", 48, size, 320, dtype)
    for vocab in (50257, 32001, 128257):
        for dtype in WIDE:
            yield Case("shapes", 24, 64, vocab, dtype, targets="edge")
    for dtype in WIDE:
        yield Case("shapes", 1, 64, 320, dtype)
        yield Case("shapes", 1, 1, 1, dtype)
        yield Case("shapes", 0, 64, 320, dtype)
        yield Case("shapes", 48, 64, 2, dtype)
        for reduction in ("mean", "none"):
            yield Case("logits", 40, 64, 1000, dtype, "flat", reduction=reduction)
            yield Case("logits", 40, 64, 1000, dtype, "peaked", reduction=reduction)
            yield Case("logits", 40, 64, 1000, dtype, "extreme", reduction=reduction)
            for offset in (1e3, -1e3, 1e4, -1e4):
                yield Case("logits", 40, 64, 1000, dtype, "offset", offset, reduction=reduction)
        for reduction in ("mean", "sum", "none"):
            what = {"dtype": dtype, "reduction": reduction}
            for pattern in ("some", "first", "last", "all"):
                yield Case("ignored", 48, 64, 500, ignored=pattern, upstream="other", **what)
            yield Case("ignored", 48, 64, 500, ignored="some", ignore_index=3, **what)
            yield Case("ignored", 48, 64, 500, ignored="some", poisoned=True, **what)
            for upstream in ("zero", "other"):
                yield Case("upstream", 48, 64, 500, upstream=upstream, **what)
            for option in _options():
                yield Case("options", 48, 64, 500, upstream="other", **what, **option)
        yield Case("upstream", 48, 64, 500, dtype, reduction="none", upstream="expanded")
        yield Case("options", 48, 64, 500, dtype, ignored="some", **_all_options())
        for layout in ("strided", "tied", "same"):
            tokens = 128 if layout == "same" else 48
            yield Case("layout", tokens, 64, 128, dtype, layout=layout, ignored="some")
        for wants in ("input", "weight"):
            yield Case("layout", 48, 64, 500, dtype, wants=wants)
        yield Case("layout", 48, 64, 32001, dtype, targets="edge", int32=True)


def _options():
    return [
        {"bias": True},
        {"weight": True, "ignored": "some"},
        {"softcap": 3.0},
        {"label_smoothing": 0.1},
        {"z_loss": 0.01},
    ]


def _all_options():
    return {"bias": True, "weight": True, "softcap": 5.0, "label_smoothing": 0.2, "z_loss": 0.1}


# Drawn cases: small sizes around boundaries, as often small as large.
_SIZES = {
    "small": {
        "tokens": (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65),
        "hidden": (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65),
        "vocab": (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 300),
    },
    "large": {
        "tokens": (0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 385, 513),
        "hidden": (1, 8, 9, 63, 64, 65, 127, 128, 129, 256, 520, 1024, 1032, 1025),
        "vocab": (1, 2, 8, 127, 128, 129, 191, 192, 193, 256, 257, 1000, 1003, 4096, 4097, 8191),
    },
}
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
    "bias": (False, True),
    "weight": (False, False, True),
    "softcap": (None, None, None, 1.5, 30.0),
    "label_smoothing": (0.0, 0.0, 0.1, 1.0),
    "z_loss": (0.0, 0.0, 1e-4, 0.5),
    "layout": ("plain",) * 4 + ("strided", "tied", "same"),
    "wants": ("both",) * 4 + ("input", "weight"),
}


def draw(seed, index, sizes="small", dtypes=tuple(NAMES)):
    """Case `index` of the sequence `seed`; sizes: small, for a CPU, or large, for a GPU."""
    random_ = random.Random(f"{seed} {index}")
    given = {name: random_.choice(values) for name, values in _CHOICES.items()}
    given |= {name: random_.choice(values) for name, values in _SIZES[sizes].items()}
    given |= {"dtype": random_.choice(dtypes), "seed": random_.getrandbits(48)}
    if given["logits"] == "offset":
        given["z_loss"] = 0.0  # its gradient would overflow float16
    else:
        given["offset"] = 0.0
    if given["layout"] == "same":
        given["tokens"] = given["vocab"] = min(given["vocab"], 600)
    if given["layout"] == "tied" and given["tokens"] > given["vocab"]:
        given["layout"] = "plain"
    shared = given["layout"] in ("tied", "same")
    if shared or given["ignored"] == "none":  # NaN in w would reach the other rows' logits
        given["poisoned"] = False
    if shared:
        given["wants"] = "both"
    return Case("drawn", **given)


# ---- tensors ----


@dataclasses.dataclass
class Operands:
    """The tensors of a case. `leaves`: by name, those of which gradients are asked for; of a tied
    case "weight" alone. `rows`: of a tied case, the rows of w that x is, or None."""

    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    bias: torch.Tensor | None
    upstream: torch.Tensor
    options: dict
    leaves: dict
    rows: torch.Tensor | None


def build(case, device):
    make = torch.Generator(device).manual_seed(case.seed)
    dtype = NAMES[case.dtype]

    def normal(*shape):
        return torch.randn(*shape, generator=make, device=device)

    x, w = normal(case.tokens, case.hidden), normal(case.vocab, case.hidden)
    std = {"flat": 0.01, "extreme": 60.0, "peaked": 1.0}.get(case.logits, 2.0)
    w *= std / max(case.hidden, 1) ** 0.5
    y = _targets(case, make, device)
    if case.logits == "peaked" and case.tokens:
        top = w[(y + (torch.arange(case.tokens, device=device) % 2)) % case.vocab]
        x = 0.1 * x + 25.0 * top / (top.square().sum(-1, keepdim=True) + 1.0)
    if case.logits == "offset":
        x[:, 0], w[:, 0] = 1.0, case.offset
    cut = _ignored(case, make, device)
    y = (y + (y == case.ignore_index).to(y.dtype)) % case.vocab
    y = y.masked_fill(cut, case.ignore_index)
    x, w, rows = x.to(dtype), w.to(dtype), None
    if case.poisoned:
        x = x.masked_fill((y == case.ignore_index).unsqueeze(-1), float("nan"))
    bias = (2.0 * normal(case.vocab)).to(dtype) if case.bias else None
    if case.layout == "strided":
        x, w, y = _strided(x), w.T.contiguous().T, y.repeat_interleave(2)[::2]
    leaves = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    wanted = {name: leaf.requires_grad_() for name, leaf in leaves.items() if _wants(case, name)}
    if case.layout in ("tied", "same"):
        rows = torch.randperm(case.vocab, generator=make, device=device)[: case.tokens]
        rows = torch.arange(case.vocab, device=device) if case.layout == "same" else rows
        x = w if case.layout == "same" else w.index_select(0, rows)
        wanted.pop("input")
    options = {"reduction": case.reduction, "ignore_index": case.ignore_index}
    for name in ("softcap", "label_smoothing", "z_loss"):
        if getattr(case, name):
            options[name] = getattr(case, name)
    if case.weight:  # exact in every dtype, none of them 0
        weight = torch.randint(1, 9, (case.vocab,), generator=make, device=device) / 4
        options["weight"] = weight.to(dtype)
    y = y.to(torch.int32) if case.int32 else y
    return Operands(x, w, y, bias, _upstream(case, make, device), options, wanted, rows)


def _wants(case, name):
    return case.wants == "both" or (case.wants == "input") == (name == "input")


def _strided(tensor):
    wide = torch.cat([tensor, torch.full_like(tensor, float("nan"))], dim=-1)
    return wide.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()[..., 0]


def _targets(case, make, device):
    shape = (case.tokens,)
    y = torch.randint(case.vocab, shape, generator=make, device=device)
    if case.targets == "any":
        return y
    edges = [0, 1, *range(127, case.vocab, 128), *range(128, case.vocab, 128)]
    edges += [case.vocab - 1 - back for back in range(4)] * (1 + len(edges) // 4)
    edges = torch.tensor([edge % case.vocab for edge in edges], device=device)
    return edges[torch.randint(len(edges), shape, generator=make, device=device)]


def _ignored(case, make, device):
    row = torch.arange(case.tokens, device=device)
    if case.ignored == "some":
        return torch.rand(case.tokens, generator=make, device=device) < 0.5
    if case.ignored == "all":
        return row >= 0
    part = max(1, case.tokens // 3)
    if case.ignored == "first":
        return row < part
    return row >= (case.tokens - part if case.ignored == "last" else case.tokens)


def _upstream(case, make, device):
    """Exact in every dtype, signs of both kinds, and some zeros among many."""
    scalar = case.reduction != "none"
    if case.upstream in ("one", "zero", "expanded") or scalar:
        one = {"one": 1.0, "zero": 0.0, "expanded": 0.375}.get(case.upstream, -2.5)
        one = torch.full((), one, device=device)
        return one if scalar else one.expand(case.tokens)
    return torch.randint(-8, 9, (case.tokens,), generator=make, device=device) / 4
