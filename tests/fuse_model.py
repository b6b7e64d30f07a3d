"""A small model with a head, for the tests of flce.fuse, and its comparison with itself unfused."""

import torch
import torch.nn.functional as F
from torch import nn

import flce

HIDDEN, VOCAB, BATCH, LENGTH = 16, 50, 2, 7
ROWS = BATCH * LENGTH
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """An embedding, a head, what `use` makes of the logits, and the loss that `loss_of` makes of
    that: the class of all of transformers, in small."""

    def __init__(self, use=lambda z: z, loss_of=None, dtype=torch.float64, bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(3 * torch.randn(parameter.shape, generator=generator))
        self.use, self.loss_of = use, loss_of or flat_loss

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        logits = self.use(self.lm_head(self.embedding(ids)))
        return (None if labels is None else self.loss_of(logits, labels)), logits


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1), **options)


def run(model, ids=IDS):
    model.zero_grad(set_to_none=True)
    loss, logits = model(ids, labels=ids)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], logits


def equal(got, expected, bar=1e-12):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = got.detach(), expected.detach()
    error = float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-300)
    assert error <= bar, error


def compare(model, bar=1e-12, **options):
    """Loss, gradients and logits of the model with and without fuse."""
    loss, gradients, logits = run(model)
    with flce.fuse(model, **options) as handle:
        fused_loss, fused_gradients, fused_logits = run(model)
        equal(fused_loss, loss, bar)
        for got, expected in zip(fused_gradients, gradients, strict=True):
            equal(got, expected, bar)
        equal(fused_logits, logits.detach(), bar)
    return handle


def double(logits):
    return logits * 2
