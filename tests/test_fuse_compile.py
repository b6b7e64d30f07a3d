"""flce.fuse under torch.compile: one graph, the same results."""

import warnings

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from tiny_models import BATCH, HIDDEN, IDS, VOCAB, Model, equal, equal_runs, run, same, shifted_loss
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flce

BAR = 1e-5  # float32


def make(use=same):
    return Model(use, shifted_loss, dtype=torch.float32, scale=0.5)


def compiled(model, **options):
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **options})


USES = {
    "plain": same,
    "scale, cap, cast": lambda z: torch.tanh(z.to(torch.float32) / 3) * 3.0,
    "bias": lambda z: (z * 0.5).float() + torch.linspace(-1, 1, VOCAB),
}


@pytest.mark.parametrize("name", USES)
def test_one_graph(name):
    model = make(USES[name])
    expected = run(model)
    assert dynamo.explain(model)(IDS, labels=IDS).graph_break_count == 0
    dynamo.reset()
    with flce.fuse(model, strict=True) as handle:
        got = run(model, called=compiled(model))
        assert handle.losses
        assert torch.equal(got[2].argmax(-1), expected[2].argmax(-1))
        equal(torch.add(got[2], 0), expected[2], BAR)
        equal_runs(got, expected, BAR)
        dynamo.reset()
        assert dynamo.explain(model)(IDS, labels=IDS).graph_break_count == 0


@pytest.mark.parametrize("name", ["plain", "exp"])
def test_compiles_once(name):
    """What falls back is compiled once more, without its warning."""
    model = make(USES.get(name, torch.exp))
    counter = CompileCounterWithBackend("aot_eager")
    with flce.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called = torch.compile(model, backend=counter)
        counts = []
        for _ in range(5):
            called(IDS, labels=IDS)[0].backward()
            counts.append(counter.frame_count)
    assert counts[1:] == counts[1:2] * 4 and (name == "exp" or counts[0] == counts[1] == 1)


def test_a_compiled_forward_of_an_eager_model():
    """As transformers compiles: the hooks of the model run outside."""
    model = make()
    expected = run(model)
    with flce.fuse(model, strict=True) as handle:
        model.forward = compiled(model.forward)
        for _ in range(2):
            equal_runs(run(model), expected, BAR)
    assert handle.losses == {"none": 1}


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("was_called", [False, True])
def test_a_compiled_model_is_fused(when, was_called):
    model = make()
    expected = run(model)
    called = compiled(model)
    if was_called:
        run(model, called=called)
    with flce.fuse(called, when=when, strict=True) as handle:
        got = run(model, called=called)
        assert handle.model is model and handle.losses and flce.explain(called).is_fused
        assert torch.equal(got[2].argmax(-1), expected[2].argmax(-1))
    equal_runs(got, expected, BAR)


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_give_logits(when, strict):
    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make()

        def forward(self, ids):
            return self.model(ids, labels=ids)

    module = Exported()
    expected = module(IDS)
    with flce.fuse(module, when=when), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = torch.export.export(module, (IDS,), strict=strict).module()(IDS)
    for got, one in zip(made, expected, strict=True):
        equal(got, one, BAR)


def test_a_checkpoint_in_a_graph():
    """Nothing that flce notes there breaks the graph."""
    model = make()

    def of_rows(x):
        return F.cross_entropy(model.lm_head(x)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    def loss_of(ids):
        return checkpoint(of_rows, model.embedding(ids), use_reentrant=False)

    loss = loss_of(IDS)
    with flce.fuse(model, when="always", strict=True):
        got = compiled(loss_of)(IDS)
        got.backward()
    equal(got, loss, BAR)


def test_a_head_that_is_replaced_or_compiled_later():
    model = make()
    with flce.fuse(model, strict=True) as handle:
        called = compiled(model)
        run(model, called=called)
        model.lm_head = nn.Linear(HIDDEN, VOCAB)
        got = run(model, called=called)
        assert handle.losses == {"none": 2}  # graphs
        equal_runs(got, run(model), BAR)
    with flce.fuse(model, strict=True) as handle:
        model.lm_head = torch.compile(model.lm_head, backend="aot_eager")
        equal_runs(run(model), got, BAR)
    assert handle.losses == {"none": 1}


def test_logits_of_a_compiled_call_are_a_tensor():
    """In functions that ask for instances, as inputs of other graphs, in collectives' copies."""
    model = make()
    expected = model(IDS)[1].detach()
    with flce.fuse(model, strict=True):
        called = compiled(model)
        logits = called(IDS, labels=IDS)[1]
        assert torch.is_tensor(logits) and logits.shape == expected.shape
        assert logits.dtype == expected.dtype and logits.untyped_storage().nbytes() > 4
        for _ in range(2):
            logits = called(IDS, labels=IDS)[1]
            summed = torch.compile(lambda z: z.exp().sum() * z.shape[0], backend="aot_eager")
            equal(summed(logits), expected.exp().sum() * BATCH, BAR)
            assert (logits.detach() == expected).all() and logits.numpy(force=True).any()
            equal(summed(logits), expected.exp().sum() * BATCH, BAR)  # made by now


def test_dynamic_shapes():
    model = make(USES["scale, cap, cast"])
    with flce.fuse(model, strict=True):
        called = compiled(model, dynamic=True)
        for length in (7, 5, 6):
            ids = IDS[:, :length]
            equal_runs(run(model, ids, called), run(model, ids), BAR)


def test_evaluation_and_inference():
    model = make()
    with torch.no_grad():
        loss, logits = model(IDS, labels=IDS)
        with flce.fuse(model, strict=True) as handle:
            called = compiled(model)
            equal(called(IDS, labels=IDS)[0], loss, BAR)
            assert handle.losses and torch.equal(called(IDS)[1], logits)
