"""flce.fuse on log-probabilities: options, dtypes, torch.compile, metrics, tensors made."""

import pytest
import torch
import torch.nn.functional as F

import flce
from harness.logprob_forms import (
    FORMS,
    Y,
    entropy,
    fused_run,
    log_p,
    model_of,
    selective,
)
from harness.tiny_models import HIDDEN, IDS, ROWS, VOCAB, LogitsMade, Model, equal, equal_runs, run


def both(z, y):
    return log_p(z, y) + 0.5 * entropy(z) + z.logsumexp(-1)


@pytest.mark.parametrize("options", [{"z_loss": 0.5}, {"valid_bound": 1}, {"save": "grads"}])
def test_options_of_losses_do_not_reach_them(options):
    model = model_of(both)
    equal_runs(fused_run(model, **options)[0], run(model), 1e-11)


def test_accumulation():
    model = model_of(both)
    expected = run(model)[1]
    model.zero_grad()
    with flce.fuse(model, strict=True, accumulate_into="grad"):
        for times in (1.0, 2.0):
            model(IDS, IDS)[0].backward()
            equal(model.lm_head.weight.grad, times * expected[1], 1e-11)


@pytest.mark.filterwarnings("ignore:flce.fuse.*is not deferred")
def test_indices_without_rows_or_ids():
    model = Model()
    with flce.fuse(model, when="always") as handle:
        z = model(IDS)[1].log_softmax(-1)
        assert z.gather(-1, IDS[..., :0, None]).shape == (*IDS[:, :0].shape, 1)
        z = model(IDS)[1].log_softmax(-1)
        assert z.gather(-1, IDS[..., None][..., :0]).shape == (*IDS.shape, 0)
        row = model.lm_head(torch.ones(HIDDEN, dtype=torch.float64))
        assert row.gather(0, torch.tensor(3)).shape == ()
    assert handle.fallbacks == {"torch.Tensor.gather is not deferred": 3}


@pytest.mark.parametrize("form", [log_p, both, selective, entropy])
def test_sampled_gradients(form):
    """Those of log p are drawn, and exact with every class in the sample; all others are exact."""
    model = model_of(form, dtype=torch.float32, scale=0.5)
    expected = run(model)
    equal_runs(fused_run(model, gradient="sampled", gradient_eps=2**-12)[0], expected, 1e-4)
    loss, gradients, _ = fused_run(model, gradient="sampled", gradient_eps=1.0)[0]
    equal(loss, expected[0], 1e-5)
    error = (gradients[1] - expected[1][1]).norm() / expected[1][1].norm()
    assert error <= 1e-4 if form is entropy else 1e-2 < error < 10


def in_float32(z, y):
    return F.log_softmax(z, -1, dtype=torch.float32).gather(-1, y[..., None])[..., 0]


def cast_early(z, y):
    return both(z.float(), y)


def cast_late(z, y):
    return z.log_softmax(-1).float().gather(-1, y[..., None]).squeeze(-1)


def assert_as_exact(got, eager, truth):
    """Of runs: the types are the eager ones, the gradients' errors at most theirs."""
    assert got[0].dtype == eager[0].dtype
    for one, other, exact in zip(got[1], eager[1], truth[1], strict=True):
        assert one.dtype == other.dtype
        assert (one - exact).norm() <= (other - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("form", [log_p, selective, entropy, in_float32, cast_early, cast_late])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(form, dtype):
    """Eager torch rounds logits and log p."""
    model = model_of(form, dtype=dtype, scale=0.5)
    exact = model_of(form, scale=0.5)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits, expected = model(IDS)[1], form(exact(IDS)[1], Y)
        eager = form(logits, Y)
        with flce.fuse(model, when="always", strict=True):
            got = form(model(IDS)[1], Y)
    assert got.dtype == eager.dtype
    step = torch.finfo(got.dtype).eps * expected.abs().max()
    assert (got - expected).norm() <= 1.1 * (eager - expected).norm() + step
    assert_as_exact(fused_run(model)[0], run(model), run(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", [log_p, entropy, selective, both])
def test_autocast(form, dtype):
    """softmax and log_softmax are float32 there. float64 is not cast; else the errors are below
    those of eager torch, which rounds the logits."""
    model = model_of(form, dtype=dtype, scale=0.5)
    truth = run(model)

    def losses():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(model)

    eager = losses()
    with flce.fuse(model, strict=True):
        assert_as_exact(losses(), eager, truth)


COMPILED = ["torch.log_softmax", "F.log_softmax", "take_along_dim", "logits less logsumexp"]
COMPILED += ["probability", "nll_loss", "entropy", "entropy of softmax", "entropy by means"]
COMPILED += ["shifted", "sum of log p", "mean logits"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    model = model_of(FORMS[name], dtype=torch.float32, scale=0.5)
    expected = run(model)
    with flce.fuse(model, strict=True) as handle:
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            equal_runs(run(model, called=called), expected, 2e-5)
    assert handle.losses


@pytest.mark.parametrize("when", ["labels", "always"])
def test_metrics_after_the_loss(when):
    """In loops of one's own, detached logits, their mean and predictions are read without them."""
    model = Model(dtype=torch.float32, scale=0.5)
    real = model(IDS)[1].detach()
    expected = real.argmax(-1), real[1, 2:].mean(-1), real.mean(), entropy(real)
    with flce.fuse(model, when=when, strict=True) as handle:
        logits = model(IDS, IDS)[1]
        assert entropy(logits).requires_grad
        with LogitsMade(ROWS, VOCAB) as seen:
            detached = logits.detach()
            assert (type(detached) is torch.Tensor) == (when == "labels")
            got = detached.argmax(-1), detached[1, 2:].mean(-1), detached.mean(), entropy(detached)
        for one, other in zip(got, expected, strict=True):
            assert not one.requires_grad and one.dtype == other.dtype
            torch.testing.assert_close(one, other)
        assert bool(handle.reads) == (when == "labels")
        assert any(VOCAB in shape[1:] for _, shape in seen.found) == (when == "labels")
        assert torch.equal(detached, real)


def test_a_frozen_head():
    model = model_of(both)
    model.requires_grad_(False)
    model.embedding.requires_grad_(True)
    with flce.fuse(model, strict=True):
        model(IDS, IDS)[0].backward()
    got, model.embedding.weight.grad = model.embedding.weight.grad, None
    model(IDS, IDS)[0].backward()
    equal(got, model.embedding.weight.grad, 1e-11)


def test_generation_reads_logits():
    """Without a loss before it, argmax acts on the logits that an unfused head would give."""
    model = Model()
    with flce.fuse(model, when="always", strict=True) as handle, torch.no_grad():
        model(IDS)[1][:, -1].argmax(-1)
        assert handle.reads == {"torch.Tensor.argmax": 1}


def test_one_row():
    x = torch.randn(HIDDEN, dtype=torch.float64)
    model = Model()
    z = model.lm_head(x)
    expected = [z.log_softmax(0)[3:4], z.logsumexp(0), entropy(z)]
    with flce.fuse(model, when="always", strict=True):
        z = model.lm_head(x)
        got = [z.log_softmax(0).gather(0, torch.tensor([3])), z.logsumexp(0), entropy(z)]
        ids = torch.tensor([3, 0, 3])
        equal(z.gather(0, ids), model.lm_head.linear_forward(x).gather(0, ids))
    for one, other in zip(got, expected, strict=True):
        equal(one, other)


def test_a_graph_that_is_used_twice():
    """The gradients of two losses of one call, one backward after the other."""
    model = Model()

    def gradients():
        z = model(IDS)[1]
        one, two = log_p(z, Y).sum(), entropy(z).sum()
        return torch.autograd.grad(one, list(model.parameters()), retain_graph=True) + (
            torch.autograd.grad(two, list(model.parameters()))
        )

    expected = gradients()
    with flce.fuse(model, when="always", strict=True):
        for one, other in zip(gradients(), expected, strict=True):
            equal(one, other, 1e-11)
