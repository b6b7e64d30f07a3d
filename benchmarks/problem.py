"""Shapes, their random tensors, the bare GEMMs, and the reference results for errors."""

import argparse
import contextlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
CHUNK_BYTES = 1 << 30  # size of a chunk of the reference's logits
FAST_SIZE = 8  # H and V of the bare GEMMs on CUDA are rounded up to a multiple of it


class Shape(NamedTuple):
    """A problem's sizes. `dtype`: the shape's own, if it has one."""

    tokens: int
    hidden: int
    vocab: int
    bias: bool = False
    dtype: str | None = None


SHAPES = {
    "head": Shape(8192, 4096, 128256),
    "half": Shape(4096, 4096, 128256),
    "small": Shape(2048, 1024, 32000),
    "gist": Shape(32768, 768, 128256, bias=True),
    "gemma": Shape(8192, 2304, 256000),
    "mid": Shape(16384, 2048, 151936),
    "long": Shape(65536, 4096, 128256),
    "fp32": Shape(4096, 2048, 32064, dtype="float32"),
    "cpu": Shape(1024, 768, 50257),
    "cpu-wide": Shape(512, 2048, 128256),
    "cpu-small": Shape(128, 128, 8192),
}


def named_shape(text):
    """(name, Shape) of a name in SHAPES or of NxHxV, NxHxV+bias; for argparse."""
    if text in SHAPES:
        return text, SHAPES[text]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(\+bias)?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(SHAPES)} or NxHxV, got {text}"
        )
    return text, Shape(int(match[1]), int(match[2]), int(match[3]), match[4] is not None)


@dataclass
class Problem:
    """One shape's tensors; `refresh` draws new values into the same memory."""

    x: torch.Tensor  # (N, H)
    w: torch.Tensor  # (V, H)
    b: torch.Tensor | None  # (V,)
    y: torch.Tensor  # (N,)
    std: float = 1.0  # of the logits
    ignored: float = 0.0  # fraction of ignored tokens, the same number in each draw
    targets: str = "random"  # or "model": drawn from the softmax of the logits
    floor: tuple | None = None  # x and w of the bare GEMMs if they differ from these
    upstream: torch.Tensor | None = None  # (N,): gradients of the tokens' losses, not of their mean
    given: dict | None = None  # a model's input, weight and target, which `refresh` embeds

    @property
    def valid(self):
        """How many tokens are not ignored."""
        return len(self.y) - round(self.ignored * len(self.y))

    @property
    def leaves(self):
        return [leaf for leaf in (self.x, self.w, self.b) if leaf is not None]

    @torch.no_grad()
    def refresh(self):
        if self.upstream is not None:
            self.upstream.normal_()
        if self.given is not None:
            return self._embed_given()
        self.x.normal_(0.0, math.sqrt(self.std))
        self.w.normal_(0.0, math.sqrt(self.std / self.x.shape[1]))
        if self.floor is not None:
            self.floor[0].normal_(0.0, math.sqrt(self.std))
            self.floor[1].normal_(0.0, math.sqrt(self.std / self.x.shape[1]))
        if self.b is not None:
            self.b.normal_()
        if self.targets == "model":
            self._sample_targets()
        else:
            self.y.random_(0, self.w.shape[0])
        if self.valid < len(self.y):
            self.y[torch.randperm(len(self.y), device=self.y.device)[self.valid :]] = IGNORE_INDEX

    def _embed_given(self):
        """x Q and W Q, Q of random orthonormal rows: the model's logits at this hidden size."""
        given, hidden = self.given, self.x.shape[1]
        rows = torch.randperm(len(self.y), device=self.y.device)
        random = torch.randn(hidden, given["weight"].shape[1], device=self.w.device)
        basis = torch.linalg.qr(random)[0].T
        self.x.copy_(given["input"][rows].float() @ basis)
        self.w.copy_(given["weight"].float() @ basis)
        self.y.copy_(given["target"][rows])

    def _sample_targets(self):
        """Draws targets from the softmax p of the logits: argmax of p / Exp(1) is a draw from
        p."""
        for rows in row_chunks(self.y, self.w, 4):
            p = F.linear(self.x[rows], self.w, self.b).float().softmax(-1)
            self.y[rows] = p.div_(torch.empty_like(p).exponential_()).argmax(-1)


def row_chunks(y, w, itemsize):
    """Slices of rows whose logits, with two tensors of the same size, take at most CHUNK_BYTES."""
    rows = max(1, CHUNK_BYTES // (3 * len(w) * itemsize))
    return [slice(begin, begin + rows) for begin in range(0, len(y), rows)]


def make_problem(shape, device, dtype, std=1.0, **draw):
    """Tensors of a shape, not yet drawn; `draw`: the fields of Problem after std."""

    def leaf(*size):
        return torch.empty(*size, device=device, dtype=dtype, requires_grad=True)

    target = torch.empty(shape.tokens, device=device, dtype=torch.int64)
    b = leaf(shape.vocab) if shape.bias else None
    x, w = leaf(shape.tokens, shape.hidden), leaf(shape.vocab, shape.hidden)
    hidden, vocab = (-(-size // FAST_SIZE) * FAST_SIZE for size in (shape.hidden, shape.vocab))
    if device == "cuda" and (hidden, vocab) != (shape.hidden, shape.vocab):
        draw["floor"] = (
            torch.empty(shape.tokens, hidden, device=device, dtype=dtype),
            torch.empty(vocab, hidden, device=device, dtype=dtype),
        )
    return Problem(x, w, b, target, std, **draw)


def load_operands(path, shape, device):
    """The file of sampled_training.py --save-operands, checked against the shape."""
    given = torch.load(path, map_location=device)
    (tokens, width), vocab = given["input"].shape, len(given["weight"])
    if (tokens, vocab, False) != (shape.tokens, shape.vocab, shape.bias) or width > shape.hidden:
        raise SystemExit(
            f"{path}: {tokens} rows of width {width}, {vocab} classes and no bias; got {shape}"
        )
    return given


def bare_products(problem, pass_name):
    """The GEMMs that a forward, or a step, cannot do without: the lower bound that times are
    compared with.

    On CUDA, with sizes rounded up to multiples of 8: at other sizes torch's own GEMMs are several
    times slower, which would not be a lower bound.
    """
    x, w = problem.floor or (problem.x, problem.w)
    with torch.no_grad():
        z = x @ w.T
        return (z,) if pass_name == "forward" else (z @ w, z.T @ x)


# ---- truth ----


@contextlib.contextmanager
def exact_products():
    """Disables TF32 in the reference, whatever the contestants use."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def wide_dtype(device):
    """The dtype of the reference: float64 would take hours at a GPU's shapes."""
    return torch.float32 if device == "cuda" else torch.float64


@torch.no_grad()
def reference(problem, device):
    """Mean loss, or the losses times problem.upstream, and dX, dW (and db) of it, in a wide dtype,
    with one chunk of logits in memory at a time."""
    wide = wide_dtype(device)
    w = problem.w.to(wide)
    b = None if problem.b is None else problem.b.to(wide)
    loss, dx, dw, db = 0.0, torch.empty_like(problem.x, dtype=wide), torch.zeros_like(w), 0.0
    with exact_products():
        for rows in row_chunks(problem.y, w, wide.itemsize):
            x, y = problem.x[rows].to(wide), problem.y[rows]
            z = F.linear(x, w, b).log_softmax(-1)
            valid = y != IGNORE_INDEX
            index, y = valid.nonzero()[:, 0], y[valid]
            factor = valid.to(wide) / problem.valid
            if problem.upstream is not None:
                factor = valid * problem.upstream[rows]
            loss = loss - (z[index, y] * factor[index]).double().sum()
            z.exp_()
            z[index, y] -= 1
            z.mul_(factor[:, None])
            dx[rows] = z @ w
            dw.addmm_(z.T, x)
            db = db + z.sum(0)
    results = (loss, dx, dw)
    return results if problem.b is None else (*results, db)


def errors(results, truth):
    """Relative errors of loss, dX, dW, db by name; a forward has only the loss."""
    names = ("loss", "dx", "dw", "db")
    return {
        name: ((value.to(true.dtype) - true).norm() / true.norm()).item()
        for name, value, true in zip(names, results, truth, strict=False)
    }


def error_columns(row):
    return "".join(f"  {name} {error:.1e}" for name, error in row.get("errors", {}).items())
