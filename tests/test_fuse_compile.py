"""flce.fuse under torch.compile: one graph, the same results."""

import warnings

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flce

HIDDEN, VOCAB, BATCH, LENGTH = 16, 50, 2, 8
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.use = use

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        logits = self.use(self.lm_head(self.embedding(ids)))
        if labels is None:
            return None, logits
        flat = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        return F.cross_entropy(flat, labels[..., 1:].reshape(-1)), logits


def run(model, module, ids=IDS):
    module.zero_grad()
    loss, logits = model(ids, labels=ids)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in module.parameters()], logits


@pytest.fixture(autouse=True)
def _fresh():
    dynamo.reset()
    yield
    dynamo.reset()


USES = {
    "plain": lambda z: z,
    "scale, cap, cast": lambda z: torch.tanh(z.to(torch.float32) / 3) * 3.0,
    "bias": lambda z: (z * 0.5).float() + torch.linspace(-1, 1, VOCAB),
}


@pytest.mark.parametrize("name", USES)
def test_one_graph(name):
    model = Model(USES[name])
    loss, gradients, logits = run(model, model)
    with flce.fuse(model, strict=True) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got, got_gradients, got_logits = run(compiled, model)
        assert handle.losses
        assert torch.equal(got_logits.argmax(-1), logits.argmax(-1))
        assert (torch.add(got_logits, 0) - logits).abs().max() <= 1e-6
    assert abs(got - loss) <= 1e-6 * loss
    for one, other in zip(got_gradients, gradients, strict=True):
        assert (one - other).abs().max() <= 1e-6


def test_no_graph_break_more_than_without():
    model = Model(USES["plain"])
    before = dynamo.explain(model)(IDS, labels=IDS).graph_break_count
    dynamo.reset()
    with flce.fuse(model):
        assert dynamo.explain(model)(IDS, labels=IDS).graph_break_count == before == 0


@pytest.mark.parametrize("name", ["plain", "exp"])
def test_compiles_once(name):
    """Nothing that changes from step to step is part of the graph; what falls back is compiled
    once more, without its warning."""
    model = Model(USES.get(name, torch.exp))
    counter = CompileCounterWithBackend("aot_eager")
    with flce.fuse(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend=counter)
        counts = []
        for _ in range(5):
            compiled(IDS, labels=IDS)[0].backward()
            counts.append(counter.frame_count)
    assert counts[1:] == counts[1:2] * 4 and (name == "exp" or counts[0] == counts[1] == 1)


def test_a_compiled_forward_of_an_eager_model():
    """As transformers compiles: the hooks of the model run outside."""
    model = Model(USES["plain"])
    expected = run(model, model)[0]
    with flce.fuse(model, strict=True) as handle:
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert abs(run(model, model)[0] - expected) <= 1e-6 * expected
    assert handle.losses == {"none": 1}


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("was_called", [False, True])
def test_a_compiled_model_is_fused(when, was_called):
    """flce.fuse(torch.compile(model)): the model in it."""
    model = Model(USES["plain"])
    expected = run(model, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if was_called:
        run(compiled, model)
    with flce.fuse(compiled, when=when, strict=True) as handle:
        got = run(compiled, model)
        assert handle.model is model and handle.losses and flce.explain(compiled).is_fused
        assert torch.equal(got[2].argmax(-1), expected[2].argmax(-1))
    assert abs(got[0] - expected[0]) <= 1e-6 * expected[0]
    for one, other in zip(got[1], expected[1], strict=True):
        assert (one - other).abs().max() <= 1e-6


@pytest.mark.parametrize("when", ["labels", "always"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_models_give_logits(when, strict):
    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model(USES["plain"])

        def forward(self, ids):
            return self.model(ids, labels=ids)

    module = Exported()
    expected = module(IDS)
    with flce.fuse(module, when=when), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = torch.export.export(module, (IDS,), strict=strict).module()(IDS)
    for got, one in zip(made, expected, strict=True):
        assert (got - one).abs().max() <= 1e-6


def test_a_checkpoint_in_a_graph():
    """Nothing that flce notes there breaks the graph."""
    model = Model(USES["plain"])

    def of_rows(x):
        return F.cross_entropy(model.lm_head(x)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    def loss_of(ids):
        return checkpoint(of_rows, model.embedding(ids), use_reentrant=False)

    loss = loss_of(IDS)
    with flce.fuse(model, when="always", strict=True):
        got = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(IDS)
        got.backward()
    assert abs(got - loss) <= 1e-6 * loss


def test_a_replaced_head_of_a_compiled_model():
    model = Model(USES["plain"])
    with flce.fuse(model, strict=True) as handle:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        run(compiled, model)
        model.lm_head = nn.Linear(HIDDEN, VOCAB)
        got = run(compiled, model)[0]
        assert handle.losses == {"none": 2}  # graphs
    assert abs(got - run(model, model)[0]) <= 1e-6 * got


def test_a_head_that_is_compiled_later():
    model = Model(USES["plain"])
    expected = run(model, model)[0]
    with flce.fuse(model, strict=True) as handle:
        model.lm_head = torch.compile(model.lm_head, backend="aot_eager")
        assert abs(run(model, model)[0] - expected) <= 1e-6 * expected
    assert handle.losses == {"none": 1}


def test_logits_of_a_compiled_call_are_a_tensor():
    """In functions that ask for instances, as inputs of other graphs, in collectives' copies."""
    model = Model(USES["plain"])
    expected = model(IDS)[1].detach()
    with flce.fuse(model, strict=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        logits = compiled(IDS, labels=IDS)[1]
        assert torch.is_tensor(logits) and logits.shape == expected.shape
        assert logits.dtype == expected.dtype and logits.untyped_storage().nbytes() > 4
        for _ in range(2):
            logits = compiled(IDS, labels=IDS)[1]
            summed = torch.compile(lambda z: z.exp().sum() * z.shape[0], backend="aot_eager")
            assert abs(summed(logits) - expected.exp().sum() * BATCH) <= 1e-3
            assert (logits.detach() == expected).all() and logits.numpy(force=True).any()
            assert abs(summed(logits) - expected.exp().sum() * BATCH) <= 1e-3  # made by now


def test_dynamic_shapes():
    """Two lengths, one graph for both."""
    model = Model(USES["scale, cap, cast"])
    with flce.fuse(model, strict=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in (8, 5, 6):
            ids = IDS[:, :length]
            got = run(compiled, model, ids)
            expected = run(model, model, ids)
            assert abs(got[0] - expected[0]) <= 1e-6 * expected[0]


def test_a_fall_back_is_right():
    """The warning breaks the graph; the logits are real."""
    model = Model(torch.exp)
    loss, gradients, _ = run(model, model)
    with flce.fuse(model), pytest.warns(UserWarning, match="exp is not deferred"):
        got, got_gradients, logits = run(torch.compile(model, backend="aot_eager"), model)
    assert isinstance(logits, torch.Tensor)
    assert abs(got - loss) <= 1e-6 * loss
    for one, other in zip(got_gradients, gradients, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_evaluation_and_inference():
    model = Model(USES["plain"])
    with torch.no_grad():
        loss, logits = model(IDS, labels=IDS)
        with flce.fuse(model, strict=True) as handle:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            got = compiled(IDS, labels=IDS)
            assert abs(got[0] - loss) <= 1e-6 * loss and handle.losses
            assert torch.equal(compiled(IDS)[1], logits)


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from fuse_case import step, worst_error
    from tiny_models import tiny_config

    torch.manual_seed(0)
    config = tiny_config(transformers.Gemma2Config, num_hidden_layers=1, use_cache=False)
    model = transformers.Gemma2ForCausalLM(config).train()
    inputs = {"input_ids": IDS, "labels": IDS}
    loss, gradients, _ = step(model, inputs)
    with flce.fuse(model, strict=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        got = compiled(**inputs).loss
        got.backward()
    assert abs(got - loss) <= 1e-6 * loss
    found = {name: p.grad for name, p in model.named_parameters()}
    assert worst_error(found, gradients) <= 2e-5
