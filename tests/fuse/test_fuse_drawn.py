"""flce.fuse on drawn losses (drawn_fuse.py), eager and compiled: the loss, gradients and logits of
the eager model without flce.fuse. FLCE_DRAWS sets the number of losses."""

import os
import warnings

import pytest
import torch

import flce
from harness import drawn_fuse
from harness.tiny_models import IDS, VOCAB, Model, equal, same

DRAWS = int(os.environ.get("FLCE_DRAWS", "10"))


def whole(model, loss_of):
    return model


def with_loss_outside(model, loss_of):
    """The model gives logits, from which the caller computes the loss."""

    def call(ids, labels):
        logits = model(ids)[1]
        return loss_of(logits, labels), logits

    return call


# name: (what the model is called by, what of it is compiled, when)
PLACES = {
    "in the model": (whole, "all", "labels"),
    "in the model, always": (whole, "all", "always"),
    "outside": (with_loss_outside, "all", "always"),
    "outside of what is compiled": (with_loss_outside, "model", "always"),
    "a compiled loss of an eager model": (with_loss_outside, "loss", "always"),
}


def called_of(place, model, loss_of, backend=None):
    """What takes (ids, labels) and gives (loss, logits); compiled if there is a backend."""
    call, part, _ = PLACES[place]
    compiled = torch.compile(backend=backend, disable=backend is None)
    if part == "model":
        model = compiled(model)
    if part == "loss":
        loss_of = compiled(loss_of)
    called = call(model, loss_of)
    return compiled(called) if part == "all" else called


def results(model, called, ids):
    """Loss, gradients, logits."""
    model.zero_grad(set_to_none=True)
    loss, logits = called(ids, labels=ids)
    if loss.requires_grad:
        loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.detach(), *gradients, logits.detach()


def check(seed, place, backend):
    torch._dynamo.reset()
    drawn = drawn_fuse.Drawn(seed)
    model = Model(same, drawn.function, scale=0.7)
    others = (IDS * 3 + 7) % VOCAB
    two = [
        IDS,
        others[:, :6] if seed % 4 == 2 else others,
    ]  # with dynamic shapes, or the same graphs
    expected = [results(model, called_of(place, model, drawn.function), ids) for ids in two]
    if any(abs(float(values[0])) < 1e-12 for values in expected):
        return  # terms that cancel leave rounding alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with flce.fuse(model, when=PLACES[place][2]):
            for backend_or_none in (None, backend):
                called = called_of(place, model, drawn.function, backend_or_none)
                for ids, values in zip(two, expected, strict=True):
                    for got, value in zip(results(model, called, ids), values, strict=True):
                        equal(got, value, drawn.bar)


@pytest.mark.parametrize("place", PLACES)
def test_drawn_losses(place, one_thread):
    for seed in range(list(PLACES).index(place), DRAWS, len(PLACES)):
        try:
            check(seed, place, "aot_eager" if seed % 4 == 0 else "eager")
        except Exception as error:
            pytest.fail(f"{place}, seed {seed}: {error!r}\n{drawn_fuse.Drawn(seed).source}")
