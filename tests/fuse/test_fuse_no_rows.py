"""flce.fuse of batches without rows: a sequence of one token after the shift, an empty pack. A mean
cross entropy over no row is 0 with zero gradients; all else is as without flce.fuse."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.tiny_models import IDS, VOCAB, Model, run, same


def rows(logits, labels):
    """The shift by slices."""
    return logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1)


def shifted_labels(logits, labels):
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.float().view(-1, VOCAB), labels.reshape(-1))


def contiguous(logits, labels):
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, VOCAB), labels[..., 1:].contiguous().view(-1))


def masked(logits, labels):
    keep = torch.zeros_like(labels, dtype=torch.bool)
    return F.cross_entropy(logits[keep], labels[keep])


def indexed(logits, labels):
    at = (labels < 0).flatten().nonzero().squeeze(-1)
    return F.cross_entropy(logits.flatten(0, 1)[at], labels.flatten()[at])


def in_groups(logits, labels):
    """Losses of two groups of classes."""
    groups = logits[:, :-1].contiguous().view(*labels[:, 1:].shape, 2, VOCAB // 2)
    targets = labels[:, 1:].reshape(-1) % (VOCAB // 2)
    return F.cross_entropy(groups[:, :, 1, :].reshape(-1, VOCAB // 2), targets)


def of_pieces(logits, labels):
    pieces = zip(logits[:, :-1].split(1), labels[:, 1:].split(1), strict=True)
    return sum(F.cross_entropy(z.flatten(0, 1), y.flatten()) for z, y in pieces)


def probabilities(logits, labels):
    logits, labels = rows(logits, labels)
    return F.cross_entropy(logits, F.one_hot(labels, VOCAB).to(logits.dtype))


MEANS = {
    "labels shifted": shifted_labels,
    "rows": lambda z, y: F.cross_entropy(*rows(z, y)),
    "module": lambda z, y: nn.CrossEntropyLoss()(*rows(z, y)),
    "contiguous": contiguous,
    "masked": masked,
    "indexed": indexed,
    "transposed": lambda z, y: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:]),
    "permuted": lambda z, y: F.cross_entropy(z[:, :-1].permute(0, 2, 1), y[:, 1:]),
    "flattened": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "smoothed": lambda z, y: F.cross_entropy(*rows(z, y), label_smoothing=0.1),
    "weighted": lambda z, y: F.cross_entropy(*rows(z, y), weight=torch.ones(VOCAB, dtype=z.dtype)),
    "probabilities": probabilities,
    "capped": lambda z, y: F.cross_entropy(*rows((z / 3).tanh() * 3, y)),
    "fewer classes": lambda z, y: F.cross_entropy(*rows(z[..., :40], y % 40)),
    "in groups": in_groups,
    "of pieces": of_pieces,
    "nll_loss": lambda z, y: F.nll_loss(*rows(z.log_softmax(-1), y)),
    "nll_loss, transposed": lambda z, y: F.nll_loss(
        z[:, :-1].log_softmax(-1).transpose(1, 2), y[:, 1:]
    ),
    "all ignored": lambda z, y: F.cross_entropy(z.flatten(0, 1), torch.full_like(y, -100).view(-1)),
}


def picked(logits, labels):
    return logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)


def entropy(logits, labels):
    logp = rows(logits, labels)[0].log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


OTHERS = {
    "sum": lambda z, y: F.cross_entropy(*rows(z, y), reduction="sum"),
    "sum over a count": lambda z, y: F.cross_entropy(*rows(z, y), reduction="sum") / 7,
    "none": lambda z, y: F.cross_entropy(*rows(z, y), reduction="none").sum(),
    "gather": lambda z, y: picked(z, y).sum(),
    "gather, mean": lambda z, y: picked(z, y).mean(),  # a mean of real values: NaN
    "gather of rows": lambda z, y: (
        rows(z, y)[0].log_softmax(-1).gather(-1, y[:, 1:].reshape(-1, 1)).sum()
    ),
    "gather of 3": lambda z, y: z[:, :-1].gather(-1, y[:, 1:, None].expand(-1, -1, 3)).sum(),
    "take_along_dim": lambda z, y: torch.take_along_dim(
        z[:, :-1].softmax(-1), y[:, 1:, None], dim=-1
    ).sum(),
    "entropy": lambda z, y: entropy(z, y).sum(),
    "logsumexp": lambda z, y: z[:, :-1].logsumexp(-1, keepdim=True).sum(),
    "mean of logits": lambda z, y: z[:, :-1].mean(-1).sum(),
    "chunks": lambda z, y: sum(piece.logsumexp(-1).sum() for piece in rows(z, y)[0].chunk(2)),
}
NO_ROWS = {"one token": IDS[:, :1], "no token": IDS[:, :0], "no sequence": IDS[:0]}


def check(loss_of, ids, when, backend=None):
    """-> the loss with flce.fuse, whose gradients are 0, and without."""
    model = Model(same, loss_of)
    expected = run(model, ids)[0]
    with flce.fuse(model, when=when, strict=True) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "flce: every label is ignore_index")  # it is meant
        called = torch.compile(model, backend=backend, disable=backend is None)
        loss, gradients, logits = run(model, ids, called)
    for gradient in gradients:
        assert gradient is not None and not gradient.any()
    assert handle.losses and not handle.fallbacks
    return loss, expected


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("shape", NO_ROWS)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_no_row_is_0(name, shape, when):
    loss, expected = check(MEANS[name], NO_ROWS[shape], when)
    assert loss == 0 and loss.dtype == expected.dtype and math.isnan(expected)


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("shape", NO_ROWS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_results_of_no_row_are_those_of_torch(name, shape, when):
    loss, expected = check(OTHERS[name], NO_ROWS[shape], when)
    assert (math.isnan(loss) and math.isnan(expected)) or loss == expected == 0


@pytest.mark.parametrize("name", ["rows", "contiguous", "transposed", "nll_loss"])
def test_a_compiled_mean_over_no_row_is_0(name):
    assert check(MEANS[name], NO_ROWS["one token"], "labels", "eager")[0] == 0


def test_a_shape_that_only_no_rows_could_have():
    """(0, 2, 3) of (0, 50) has no groups of the 50 classes."""
    with flce.fuse(model := Model(), when="always"):
        with pytest.warns(UserWarning, match="view is not deferred"):
            assert model(IDS[:0])[1].view(0, 2, 3).shape == (0, 2, 3)
