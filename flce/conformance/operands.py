"""`build` makes a case's tensors on a device, from the case's own seed."""

from __future__ import annotations

import math
import typing

import torch

from .cases import NAMES, Case

# Standard deviation of the logits; the others have 2. Of "peaked", before the peaks are added.
_DEVIATION = {"flat": 0.01, "extreme": 60.0, "huge": 5000.0, "peaked": 1.0}
_UPSTREAM = {"one": 1.0, "zero": 0.0, "expanded": 0.375, "scaled": 65536.0}  # the others: -2.5


class Operands(typing.NamedTuple):
    """The tensors of a case. `leaves`: by name, those of which gradients are asked for; of a tied
    case without "input". `rows`: of a tied case, the rows of w that x is, or None."""

    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    bias: torch.Tensor | None
    upstream: torch.Tensor
    options: dict
    leaves: dict[str, torch.Tensor]
    rows: torch.Tensor | None

    def upstream_in(self, dtype: torch.dtype) -> torch.Tensor:
        """The upstream gradient of a loss of this dtype, with the strides that it has; those of a
        tensor with gaps are lost in a plain conversion."""
        if self.upstream.dtype == dtype:
            return self.upstream
        numbers = self.upstream.untyped_storage().nbytes() // self.upstream.itemsize
        memory = self.upstream.as_strided((numbers,), (1,), 0).to(dtype)
        strides, offset = self.upstream.stride(), self.upstream.storage_offset()
        return memory.as_strided(self.upstream.shape, strides, offset)


def build(case: Case, device: torch.device | str) -> Operands:
    """The case's tensors, made on the device from the case's seed."""
    draws = torch.Generator(device).manual_seed(case.seed)
    dtype, y = NAMES[case.dtype], _targets(case, draws, device)
    x, w = _head(case, y, draws, device)
    y = _with_ignored_rows(case, y, draws, device)
    x, w = x.to(dtype), w.to(dtype)
    if case.poisoned:
        x = x.masked_fill((y == case.ignore_index).unsqueeze(-1), math.nan)
    bias, weight = _bias(case, y, draws, device), _class_weights(case, y, draws, device)
    y, upstream = y.to(torch.int32 if case.int32 else y.dtype), _upstream(case, draws, device)
    x, w, y, bias, weight = (_laid_out(case.layout, tensor) for tensor in (x, w, y, bias, weight))
    if case.layout == "strided":  # classes next to each other, as in a weight that is transposed
        w = w.T.contiguous().T
    leaves = {"input": x, "weight": w} | ({} if bias is None else {"bias": bias})
    wanted = {"both": leaves.keys(), "weight": {"weight", "bias"}}.get(case.wants, {case.wants})
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if name in wanted}
    rows = None
    if case.layout in ("tied", "same"):
        rows = torch.randperm(case.vocab, generator=draws, device=device)[: case.tokens]
        rows = torch.arange(case.vocab, device=device) if case.layout == "same" else rows
        x = w if case.layout == "same" else w.index_select(0, rows)
        leaves.pop("input", None)
    options: dict = {"reduction": case.reduction, "ignore_index": case.ignore_index}
    for name in ("softcap", "label_smoothing", "z_loss"):
        options |= {name: getattr(case, name)} if getattr(case, name) else {}
    options |= {} if weight is None else {"weight": weight}
    return Operands(x, w, y, bias, upstream, options, leaves, rows)


def _normal(draws, device, *shape):
    return torch.randn(*shape, generator=draws, device=device)


def _head(case, y, draws, device):
    """x and w, in float32."""
    x = _normal(draws, device, case.tokens, case.hidden)
    w = _normal(draws, device, case.vocab, case.hidden)
    w *= _DEVIATION.get(case.logits, 2.0) / case.hidden**0.5
    if case.logits == "peaked":
        row = torch.arange(case.tokens, device=device)
        top = w[(y + row % 2) % case.vocab]
        x = 0.1 * x + 25.0 * top / (top.square().sum(-1, keepdim=True) + 1.0)
    if case.logits == "offset":
        x[:, 0], w[:, 0] = 1.0, case.offset
    return x, w


def _targets(case, draws, device):
    y = torch.randint(case.vocab, (case.tokens,), generator=draws, device=device)
    if case.targets == "equal":
        return torch.full_like(y, case.vocab // 2)
    if case.targets == "any":
        return y
    edges = [0, 1, *range(127, case.vocab, 128), *range(128, case.vocab, 128)]
    edges += [case.vocab - 1 - back for back in range(4)] * (1 + len(edges) // 4)
    edges = torch.tensor([edge % case.vocab for edge in edges], device=device)
    return edges[torch.randint(len(edges), y.shape, generator=draws, device=device)]


def _with_ignored_rows(case, y, draws, device):
    row, part = torch.arange(case.tokens, device=device), max(1, case.tokens // 3)
    spans = {"none": (0, 0), "first": (0, part), "last": (case.tokens - part, case.tokens)}
    begin, end = spans.get(case.ignored, (0, case.tokens))
    cut = (row >= begin) & (row < end)
    if case.ignored == "some":
        cut = torch.rand(case.tokens, generator=draws, device=device) < 0.5
    y = (y + (y == case.ignore_index).to(y.dtype)) % case.vocab
    return y.masked_fill(cut, case.ignore_index)


def _bias(case, y, draws, device):
    """masked: a third of the classes that are no target have -inf."""
    if case.bias is None:
        return None
    bias = (2.0 * _normal(draws, device, case.vocab)).to(NAMES[case.dtype])
    if case.bias == "masked":
        off = torch.rand(case.vocab, generator=draws, device=device) < 1 / 3
        off[y.masked_fill(y == case.ignore_index, 0)] = False
        off[0] = False  # of no rows too, a class remains
        bias = bias.masked_fill(off, -math.inf)
    return bias


def _class_weights(case, y, draws, device):
    """Exact in every dtype. That of the first target that is not ignored is positive: a mean whose
    weights are all 0 is no number."""
    if case.weight is None:
        return None
    weight = torch.randint(1, 9, (case.vocab,), generator=draws, device=device) / 4
    if case.weight != "positive":
        odd = torch.rand(case.vocab, generator=draws, device=device) < 1 / 3
        weight = weight.masked_fill(odd, 0.0 if case.weight == "zeros" else -0.25)
    if case.tokens:
        valid = y != case.ignore_index
        first = y.masked_fill(~valid, 0).gather(0, valid.int().argmax(0, keepdim=True))
        weight.index_fill_(0, first, 2.0)
    return weight.to(NAMES[case.dtype])


def _upstream(case, draws, device):
    """Exact in every dtype, but for 65536 in float16 (Adapter.lacks). Of both signs, with some
    zeros, where there is one for each row."""
    if case.reduction == "none" and case.upstream in ("other", "strided"):
        each = torch.randint(-8, 9, (case.tokens,), generator=draws, device=device) / 4
        return _laid_out(case.upstream, each)
    number = torch.full((), _UPSTREAM.get(case.upstream, -2.5), device=device)
    return number.expand(case.tokens) if case.reduction == "none" else number


def _laid_out(layout, tensor):
    """The values of the tensor in a larger one, whose other elements are NaN (targets: -1)."""
    if tensor is None or layout not in ("strided", "padded", "unaligned"):
        return tensor
    fill = math.nan if tensor.is_floating_point() else -1
    shape = tensor.shape
    if layout == "strided":
        return tensor.new_full((*shape, 2), fill)[..., 0].copy_(tensor)
    if layout == "padded":  # rows that are contiguous, with a distance
        return tensor.new_full((*shape[:-1], shape[-1] + 3), fill)[..., : shape[-1]].copy_(tensor)
    return tensor.new_full((tensor.numel() + 1,), fill)[1:].view(shape).copy_(tensor)
