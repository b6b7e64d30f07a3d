"""The state of flce.fuse: calls that end early, copies, memory, reports, losses of flce."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.tiny_models import (
    HIDDEN,
    IDS,
    VOCAB,
    Adapted,
    Model,
    equal,
    equal_runs,
    flat_loss,
    run,
    same,
)


def is_real(model):
    """Whether a call without labels gives real logits."""
    return type(model(IDS)[1]) is torch.Tensor


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_an_interrupted_forward_does_not_stay_on(error):
    def fails(logits):
        raise error

    model = Model(fails)
    handle = flce.fuse(model)
    with pytest.raises(error):
        model(IDS, IDS)
    model.use = lambda z: z
    assert is_real(model)
    assert type(model(IDS, IDS)[1]) is not torch.Tensor and handle.losses
    assert is_real(model)


class Outer(nn.Module):
    """A wrapper that calls the model with labels and goes on if that fails."""

    def __init__(self):
        super().__init__()
        self.inner = Model()
        self.lm_head = self.inner.lm_head

    def forward(self, ids, labels=None):
        try:
            self.inner(ids, labels=labels)
        except ZeroDivisionError:
            pass
        logits = self.lm_head(self.inner.embedding(ids))
        return (None if labels is None else flat_loss(logits, labels)), logits


def test_a_hook_that_raises_before_ours():
    def hook(module, args):
        raise ZeroDivisionError

    model = Model()
    flce.fuse(model)
    removable = model.register_forward_pre_hook(hook, prepend=True)
    with pytest.raises(ZeroDivisionError):
        model(IDS, IDS)
    removable.remove()
    assert is_real(model) and type(model(IDS, IDS)[1]) is not torch.Tensor
    outer = Outer()
    flce.fuse(outer)
    outer.inner.register_forward_pre_hook(hook, prepend=True)
    assert outer(IDS, IDS)[1].shape == (*IDS.shape, VOCAB) and is_real(outer)


def test_a_head_is_copied_without_its_model():
    model = Model()
    handle = flce.fuse(model, strict=True)
    alone = len(pickle.dumps(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)))
    assert len(pickle.dumps(model.lm_head)) < alone + 2000
    head = copy.deepcopy(model.lm_head)
    x = torch.ones(2, HIDDEN, dtype=torch.float64)
    equal(head(x), model.lm_head(x))
    assert head._flce_fusion.model is None and handle.model is model
    assert type(pickle.loads(pickle.dumps(model.lm_head))(x)) is torch.Tensor


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_a_copied_model_is_fused_by_itself(copied):
    model = Model(same, flat_loss)  # functions that pickle finds by name
    model.lm_head = Adapted(model.lm_head)
    expected = model(IDS, IDS)[0]
    handle = flce.fuse(model, "lm_head", strict=True)
    other = copied(model)
    assert list(other.state_dict()) == list(model.state_dict())
    loss, _ = other(IDS, IDS)
    equal(loss, expected)
    assert not handle.losses and flce.explain(other).losses
    assert "lm_head" in [name for name, _ in flce.explain(other).heads]
    handle.remove()
    assert flce.explain(other).is_fused and not flce.explain(model).is_fused


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_model_is_freed_without_gc(when, is_adapted):
    model = Model()
    if is_adapted:
        model.lm_head = Adapted(model.lm_head)
    handle = flce.fuse(model, "lm_head", when=when)
    loss, logits = model(IDS, IDS)
    loss.backward()
    references = [weakref.ref(one) for one in (model, model.lm_head, *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        del model, loss, logits
        assert [one() for one in references] == [None] * len(references)
    finally:
        gc.enable()
    assert handle.model is None and handle.losses
    handle.remove()


def test_an_annealed_temperature_is_counted_in_few_keys():
    model = Model()
    handle = flce.fuse(model, strict=True)
    for i in range(50):
        model.use = lambda z, i=i: z / (1 + i / 50)
        model(IDS, IDS)
    assert len(handle.losses) == 17 and sum(handle.losses.values()) == 50
    assert handle.losses["other steps"] == 34
    assert "34 x loss without logits" in str(flce.explain(model))


WEIGHT = torch.linspace(-1, 1, 9 * VOCAB, dtype=torch.float64).sin().view(9, VOCAB)
OF_FLCE = {  # a loss by flce of deferred logits, and the same by torch
    "cross_entropy": (
        lambda z, y: flce.cross_entropy(z * 2, y, z_loss=0.1),
        lambda z, y: flat_loss(2 * z, y) + 0.1 * (2 * z).logsumexp(-1).square().mean(),
    ),
    "after a read": (lambda z, y: z.sum() * 0 + flce.cross_entropy(z, y), flat_loss),
    "linear_cross_entropy": (
        lambda z, y: flce.linear_cross_entropy(z, WEIGHT, y % 9),
        lambda z, y: flat_loss(F.linear(z, WEIGHT), y % 9),
    ),
}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", OF_FLCE)
def test_losses_of_flce_get_real_logits(name, compiles):
    model = Model()
    ours, model.loss_of = OF_FLCE[name]
    expected = run(model)
    model.loss_of = ours
    with pytest.warns(UserWarning, match="is not deferred"), flce.fuse(model) as handle:
        called = torch.compile(model, backend="aot_eager") if compiles else model
        equal_runs(run(model, called=called), expected)
        if name == "cross_entropy" and not compiles:
            assert list(handle.fallbacks) == ["flce.cross_entropy is not deferred"]
