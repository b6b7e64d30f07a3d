"""Descriptions of cases: `suite` lists some, boundary shapes first; `draw` makes one from a seed
and an index alone; `build` makes a case's tensors on a device, from the case's own seed."""

from __future__ import annotations

import dataclasses
import random
import typing

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
# What an implementation may lack: options, and what not every caller needs.
FEATURES = ("bias", "weight", "softcap", "label_smoothing", "z_loss", "sum", "none")
FEATURES += ("ignore_index", "int32", "poisoned", "strided", "no rows")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `group` is for the report alone.

    logits: normal (standard deviation 2), flat (0.01), extreme (60), peaked (one class 25 above the
    others, in every second row the target's), or offset (`offset` added to all of a row).
    targets: any, or edge: near 0, near V - 1, next to multiples of 128.
    ignored: none, some, first, last, all. poisoned: the ignored rows of x hold NaN.
    upstream: the gradient of the loss: one, zero, other; expanded: one number for all rows.
    layout: plain; strided: no operand is contiguous; tied: x is rows of w; same: x is w.
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

    def needs(self) -> set[str]:
        """What of FEATURES and of the dtypes an implementation must offer for this case."""
        given = {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        needs = (given | {self.reduction, self.layout}) & set(FEATURES)
        return needs | {self.dtype} | ({"no rows"} if self.tokens == 0 else set())

    def __str__(self) -> str:
        sizes = f"N {self.tokens}, H {self.hidden}, V {self.vocab}, {self.dtype}"
        given = (f for f in dataclasses.fields(self)[5:] if getattr(self, f.name) != f.default)
        return ", ".join([sizes, *(f"{f.name} {getattr(self, f.name)}" for f in given)])


def suite() -> list[Case]:
    """The cases of a run without a seed, a few hundred."""
    return [dataclasses.replace(case, seed=n) for n, case in enumerate((*_shapes(), *_others()))]


def _shapes() -> typing.Iterator[Case]:
    edges = [size + step for size in (8, 64, 128, 256) for step in (-1, 0, 1)]
    for n, size in enumerate(edges):
        for dtype in ("bfloat16", ("float16", "float32")[n % 2]):
            yield Case("shapes", 48, 128, size, dtype, targets="edge")
            yield Case("shapes", size, 128, 384, dtype)
            yield Case("shapes", 48, size, 384, dtype)
    for vocab in (50257, 32001, 128257):
        for dtype in ("bfloat16", "float16", "float32"):
            yield Case("shapes", 24, 128, vocab, dtype, targets="edge")
    for sizes in ((1, 128, 384), (1, 1, 1), (0, 128, 384), (48, 128, 2)):
        for dtype in ("bfloat16", "float16", "float32"):
            yield Case("shapes", *sizes, dtype)


def _others() -> typing.Iterator[Case]:
    kinds = [("flat", 0.0), ("peaked", 0.0), ("extreme", 0.0)]
    kinds += [("offset", offset) for offset in (1e3, -1e3, 1e4, -1e4)]
    cut: list[dict] = [{"ignored": pattern} for pattern in ("some", "first", "last", "all")]
    cut += [{"ignored": "some", "ignore_index": 3}, {"ignored": "some", "poisoned": True}]
    one: list[dict] = [{"bias": True}, {"weight": True, "ignored": "some"}, {"softcap": 3.0}]
    one += [{"label_smoothing": 0.1}, {"z_loss": 0.01}]
    every = dict(bias=True, weight=True, softcap=5.0, label_smoothing=0.2, z_loss=0.1)
    for dtype in ("bfloat16", "float16", "float32"):
        for kind, offset in kinds:
            yield Case("logits", 40, 128, 1000, dtype, kind, offset)
            yield Case("logits", 40, 128, 1000, dtype, kind, offset, reduction="none")
        for reduction in ("mean", "sum", "none"):
            what = {"dtype": dtype, "reduction": reduction}
            for group, some in (("ignored", cut), ("options", one), ("upstream", [{}])):
                for more in some:
                    yield Case(group, 48, 128, 504, upstream="other", **what, **more)
            yield Case("upstream", 48, 128, 504, upstream="zero", **what)
        yield Case("upstream", 48, 128, 504, dtype, reduction="none", upstream="expanded")
        yield Case("options", 48, 128, 504, dtype, ignored="some", **every)
        for layout, tokens in (("strided", 48), ("tied", 48), ("same", 128)):
            yield Case("layout", tokens, 128, 128, dtype, layout=layout, ignored="some")
        for wants in ("input", "weight"):
            yield Case("layout", 48, 128, 504, dtype, wants=wants)
        yield Case("layout", 48, 128, 32001, dtype, targets="edge", int32=True)


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
    "bias": (False, True),
    "weight": (False, False, True),
    "softcap": (None, None, None, 1.5, 30.0),
    "label_smoothing": (0.0, 0.0, 0.1, 1.0),
    "z_loss": (0.0, 0.0, 1e-4, 0.5),
    "layout": ("plain",) * 4 + ("strided", "tied", "same"),
    "wants": ("both",) * 4 + ("input", "weight"),
}


def draw(seed: int, index: int, sizes: str = "small") -> Case:
    """Case `index` of the sequence `seed`, always the same; sizes: small or large."""
    drawn = random.Random(f"{seed} {index}")
    given = {name: drawn.choice(values) for name, values in _CHOICES.items()}
    listed = (_LARGE if sizes == "large" else _SMALL).split(",")
    for name, numbers in zip(("tokens", "hidden", "vocab"), listed, strict=True):
        given[name] = int(drawn.choice(numbers.split()))
    given |= {"dtype": drawn.choice(tuple(NAMES)), "seed": drawn.getrandbits(48)}
    if given["layout"] == "same":
        given["tokens"] = given["vocab"] = min(given["vocab"], 600)
    if given["layout"] == "tied" and given["tokens"] > given["vocab"]:
        given["layout"] = "plain"
    shared = given["layout"] in ("tied", "same")
    if shared and given["logits"] == "offset":  # it would be squared
        given["logits"] = "flat"
    # An offset with a z-loss has gradients that overflow float16.
    given["z_loss" if given["logits"] == "offset" else "offset"] = 0.0
    given["poisoned"] &= not shared and given["ignored"] != "none"  # NaN in w reaches all logits
    return Case("drawn", **given | ({"wants": "both"} if shared else {}))


class Operands(typing.NamedTuple):
    """The tensors of a case. `leaves`: by name, those of which gradients are asked for; of a tied
    case "weight" alone. `rows`: of a tied case, the rows of w that x is, or None."""

    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    bias: torch.Tensor | None
    upstream: torch.Tensor
    options: dict
    leaves: dict[str, torch.Tensor]
    rows: torch.Tensor | None


def build(case: Case, device: torch.device | str) -> Operands:
    make, dtype = torch.Generator(device).manual_seed(case.seed), NAMES[case.dtype]

    def normal(*shape):
        return torch.randn(*shape, generator=make, device=device)

    x, w = normal(case.tokens, case.hidden), normal(case.vocab, case.hidden)
    w *= {"flat": 0.01, "extreme": 60.0, "peaked": 1.0}.get(case.logits, 2.0) / case.hidden**0.5
    y = _targets(case, make, device)
    row = torch.arange(case.tokens, device=device)
    if case.logits == "peaked":
        top = w[(y + row % 2) % case.vocab]
        x = 0.1 * x + 25.0 * top / (top.square().sum(-1, keepdim=True) + 1.0)
    if case.logits == "offset":
        x[:, 0], w[:, 0] = 1.0, case.offset
    part = max(1, case.tokens // 3)
    spans = {"none": (0, 0), "first": (0, part), "last": (case.tokens - part, case.tokens)}
    begin, end = spans.get(case.ignored, (0, case.tokens))
    cut = (row >= begin) & (row < end)
    if case.ignored == "some":
        cut = torch.rand(case.tokens, generator=make, device=device) < 0.5
    y = (y + (y == case.ignore_index).to(y.dtype)) % case.vocab
    y = y.masked_fill(cut, case.ignore_index)
    x, w, rows = x.to(dtype), w.to(dtype), None
    if case.poisoned:
        x = x.masked_fill((y == case.ignore_index).unsqueeze(-1), float("nan"))
    bias = (2.0 * normal(case.vocab)).to(dtype) if case.bias else None
    if case.layout == "strided":  # between the elements of x lie NaN
        x = torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]
        w, y = w.T.contiguous().T, y.repeat_interleave(2)[::2]
    leaves = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    if case.wants != "both":
        leaves = {k: v for k, v in leaves.items() if (k == "input") == (case.wants == "input")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    if case.layout in ("tied", "same"):
        rows = torch.randperm(case.vocab, generator=make, device=device)[: case.tokens]
        rows = torch.arange(case.vocab, device=device) if case.layout == "same" else rows
        x = w if case.layout == "same" else w.index_select(0, rows)
        del leaves["input"]
    options: dict = {"reduction": case.reduction, "ignore_index": case.ignore_index}
    for name in ("softcap", "label_smoothing", "z_loss"):
        options |= {name: getattr(case, name)} if getattr(case, name) else {}
    if case.weight:  # exact in every dtype, none of them 0
        weight = torch.randint(1, 9, (case.vocab,), generator=make, device=device) / 4
        options["weight"] = weight.to(dtype)
    y, upstream = y.to(torch.int32 if case.int32 else y.dtype), _upstream(case, make, device)
    return Operands(x, w, y, bias, upstream, options, leaves, rows)


def _targets(case, make, device):
    y = torch.randint(case.vocab, (case.tokens,), generator=make, device=device)
    if case.targets == "any":
        return y
    edges = [0, 1, *range(127, case.vocab, 128), *range(128, case.vocab, 128)]
    edges += [case.vocab - 1 - back for back in range(4)] * (1 + len(edges) // 4)
    edges = torch.tensor([edge % case.vocab for edge in edges], device=device)
    return edges[torch.randint(len(edges), y.shape, generator=make, device=device)]


def _upstream(case, make, device):
    """Exact in every dtype; of both signs, with some zeros, where there is one for each row."""
    if case.reduction == "none" and case.upstream == "other":
        return torch.randint(-8, 9, (case.tokens,), generator=make, device=device) / 4
    one = {"one": 1.0, "zero": 0.0, "expanded": 0.375}.get(case.upstream, -2.5)
    given = torch.full((), one, device=device)
    return given.expand(case.tokens) if case.reduction == "none" else given
