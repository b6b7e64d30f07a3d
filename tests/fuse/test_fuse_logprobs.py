"""flce.fuse on log-probabilities, logsumexp and entropies: what is recognised, in how many GEMMs,
and what makes logits instead."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import flce
from harness.cases import gemms_of
from harness.logprob_forms import (
    FORMS,
    Y,
    entropy,
    entropy_of_chunks,
    entropy_of_means,
    fused_run,
    log_p,
    model_of,
    policy_loss,
    selective,
)
from harness.tiny_models import (
    BATCH,
    IDS,
    LENGTH,
    ROWS,
    VOCAB,
    Adapted,
    LogitsMade,
    Model,
    equal,
    equal_runs,
    run,
    same,
)

BIAS = torch.linspace(-2, 2, VOCAB, dtype=torch.float64)


GEMMS = {"rows one by one": BATCH, "sum of log p": 2}  # of logits in the forward; else 1
USES = {
    "plain": same,
    "temperature": lambda z: z / 0.7,
    "softcap": lambda z: torch.tanh(z / 3) * 3,
    "bias": lambda z: (z + BIAS) * 0.5,
    "classes": lambda z: z[..., : VOCAB - 3],
    "later classes": lambda z: z[..., 2:],
    "a row twice": lambda z: z[torch.tensor([1, 1])],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, use):
    form, gemms = FORMS[name], GEMMS.get(name, 1)
    model = model_of(form, USES[use], bias=use != "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, handle = fused_run(model)
    equal_runs(got, run(model), 1e-11)
    assert sum(handle.losses.values()) >= 1 and not handle.fallbacks and not handle.reads
    if use == "plain":
        with flce.fuse(model):
            made = []
            assert gemms_of(lambda: made.append(model(IDS, IDS)[0])) == gemms
            assert gemms_of(made[0].backward) == 2 * gemms


def between(z, y):
    """What has no gradient does not take the place of what has."""
    logp = log_p(z, y)
    with torch.no_grad():
        other = log_p(z, y * 0)
    return (logp * other + entropy(z)).sum()


SHARED = {  # what the loss computes, how many logits GEMMs the forward takes
    "policy": (policy_loss, 1),
    "temperature twice": (lambda z, y: policy_loss(z, y, cut=lambda z: z / 0.7), 2),
    "a cast for each": (lambda z, y: policy_loss(z, y, cut=lambda z: z.clone()), 1),
    "TRL's": (lambda z, y: selective(z, y).sum() + entropy_of_chunks(z).sum(), 1),
    "verl's": (lambda z, y: selective(z, y).sum() + entropy_of_means(z).sum(), 1),
    "the same twice": (lambda z, y: log_p(z, y).sum() + log_p(z, y).square().sum(), 1),
    "two targets": (lambda z, y: log_p(z, y).sum() + log_p(z, y * 0).square().sum(), 2),
    "one without a gradient": (between, 2),
    "two equal slices": (lambda z, y: log_p(z[:, 1:], y[:, 1:]).sum() + entropy(z[:, 1:]).sum(), 1),
    "two slices": (lambda z, y: log_p(z[:, 1:], y[:, 1:]).sum() + entropy(z[:, 2:]).sum(), 2),
    "flat twice": (
        lambda z, y: sum(f(z.view(ROWS, -1), y.view(-1)).sum() for f in (log_p, entropy)),
        1,
    ),
    "a product of equal slices": (
        lambda z, y: -(z[..., 1:, :].softmax(-1) * z[:, 1:].log_softmax(-1)).sum(-1).square().sum(),
        1,
    ),
    "a part of it": (lambda z, y: log_p(z, y).sum() + entropy(z[:, 2:]).sum(), 1),
    "all of the parts": (lambda z, y: sum(entropy(part).sum() for part in z.chunk(2)), 1),
    "parts of parts": (lambda z, y: sum(r.logsumexp(-1).sum() for q in z for r in q.split(3)), 1),
    "columns": (lambda z, y: sum(entropy(part).sum() for part in z.split(3, 1)), None),
}


@pytest.mark.parametrize("name", SHARED)
def test_results_of_one_call(name):
    loss_of, gemms = SHARED[name]
    model = Model(loss_of=lambda z, y: loss_of(z, Y))
    expected = run(model)
    if gemms is None:
        with pytest.warns(UserWarning, match="split is not deferred"), flce.fuse(model):
            equal_runs(run(model), expected, 1e-11)
        return
    equal_runs(fused_run(model)[0], expected, 1e-11)
    with flce.fuse(model):
        made = []
        assert gemms_of(lambda: made.append(model(IDS, IDS)[0])) == gemms
        assert gemms_of(made[0].backward) == (2 if loss_of is between else 2 * gemms)


def test_a_softcap_does_not_pay_for_an_entropy():
    """It is computed when it is wanted: its gradient would keep the logits in float32."""
    model = Model(USES["softcap"], lambda z, y: log_p(z, y).sum() + z.logsumexp(-1).sum())
    with flce.fuse(model, strict=True):
        assert gemms_of(lambda: run(model)) == 3
        model.loss_of = lambda z, y: log_p(z, y).sum() + entropy(z).sum()
        assert gemms_of(lambda: run(model)) == 6


def without_gradients_first(z, y):
    with torch.no_grad():
        old, constant = log_p(z, Y), entropy(z)
    assert not old.requires_grad and not constant.requires_grad
    loss = (log_p(z, Y) - 2 * old).exp().sum() + constant.sum() * entropy(z).sum()
    with torch.no_grad():
        assert not log_p(z, Y).requires_grad
    return loss


def results_written_to(z, y):
    """They are tensors of their own."""
    logp, lse, h = log_p(z, Y) * 1, z.logsumexp(-1), entropy(z)
    with torch.no_grad():
        for values in (log_p(z, Y), z.logsumexp(-1), entropy(z)):
            values.masked_fill_(Y % 3 == 0, 0.0)
    return (logp * lse * h + log_p(z, Y) * z.logsumexp(-1) * entropy(z)).sum()


@pytest.mark.parametrize("loss_of", [without_gradients_first, results_written_to])
def test_results_that_are_used_again(loss_of):
    model = Model(loss_of=loss_of)
    equal_runs(fused_run(model)[0], run(model), 1e-11)


def test_a_target_that_is_written_to():
    def loss_of(z, y):
        target = Y.clone()
        with torch.no_grad():
            return log_p(z, target).sum() - 3 * log_p(z, target.zero_()).sum()

    model = Model(loss_of=loss_of)
    expected = model(IDS, IDS)[0]
    with flce.fuse(model, strict=True):
        equal(model(IDS, IDS)[0], expected)


def test_memory_that_is_used_again():
    """By other targets and other rows than those that are known."""

    def loss_of(z, y):
        rows = [torch.full((20,), i % LENGTH) for i in range(64)]
        loss = sum(z[0, one].logsumexp(-1).sum() * i for i, one in enumerate(rows))
        return loss + sum(log_p(z, (Y + i) % VOCAB).sum() * i for i in range(8))

    model = Model(loss_of=loss_of)
    with torch.no_grad():
        expected = model(IDS, IDS)[0]
        with flce.fuse(model, strict=True):
            equal(model(IDS, IDS)[0], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model = Model(loss_of=lambda z, y: selective(z, Y).sum() + entropy(z).sum())
    with mode():
        expected = model(IDS, IDS)[0]
        with flce.fuse(model, strict=True):
            assert gemms_of(lambda: equal(model(IDS, IDS)[0], expected)) == 1


def written_to_later(z, y):
    """As of real tensors, whose log_softmax is no view."""
    logp, p = z.log_softmax(-1), z.softmax(-1)
    z = z.mul_(2)
    return logp.gather(-1, Y[..., None]).sum() + (p * p).sum() + z.logsumexp(-1).sum()


def copies_written_to(z, y):
    """Each has memory of its own, whatever was made before."""
    first, copies = z.clone(), [z.clone(), z.log_softmax(-1).clone(), z.log_softmax(-1).clone()]
    before = first.sin().sum()
    after = sum(one.mul_(i).sin().sum() for i, one in enumerate(copies))
    return before + after + first.cos().sum() + z.sin().sum()


@pytest.mark.filterwarnings("ignore:flce.fuse.*sin is not deferred")
@pytest.mark.parametrize("loss_of", [written_to_later, copies_written_to])
def test_logits_that_are_written_to(loss_of):
    model = Model(loss_of=loss_of)
    expected = run(model)
    with pytest.warns(UserWarning, match="mul_ is not deferred"), flce.fuse(model):
        equal_runs(run(model), expected, 1e-11)


MADE = {  # a loss of real logits, and the operation that made them
    "log_softmax, elements": (lambda z: z.log_softmax(-1)[0, 0, 3], "__getitem__"),
    "log_softmax over rows": (lambda z: z.log_softmax(0)[:, 0, 3].sum(), "log_softmax"),
    "log_softmax over all but classes": (lambda z: z.log_softmax(1).square().sum(), "log_softmax"),
    "gather along rows": (lambda z: z.gather(1, Y[..., None] % BATCH).sum(), "gather"),
    "gather of fewer rows": (
        lambda z: z.log_softmax(-1).gather(-1, Y[:, :3, None]).square().sum(),
        "gather",
    ),
    "logits in place": (lambda z: log_p(z.div_(2), Y).sum(), "div_"),
    "a copy in place": (
        lambda z: log_p(z, Y).sum() + z.log_softmax(-1).clone().mul_(2).sum(),
        None,
    ),
    "temperatures that require grad": (
        lambda z: log_p(z / torch.full((), 0.7, requires_grad=True), Y).sum(),
        "div",
    ),
    "temperature of each row": (lambda z: log_p(z / (1.0 + Y[..., None]), Y).sum(), "div"),
    "products of two distributions": (
        lambda z: (z.softmax(-1) * (z / 2).log_softmax(-1)).sum(-1).square().sum(),
        "mul",
    ),
    "products of other rows": (
        lambda z: (z[:1].softmax(-1) * z[1:].log_softmax(-1)).sum(-1).square().sum(),
        "mul",
    ),
    "p without a gradient": (lambda z: -(without_gradient(z) * z.log_softmax(-1)).sum(), "mul"),
    "p times p": (lambda z: (z.softmax(-1) * z.softmax(-1)).sum(-1).square().sum(), "mul"),
    "p log p, all": (lambda z: (z.softmax(-1) * z.log_softmax(-1)).sum(), "sum"),
    "p log p of a mask": (
        lambda z: ((z.softmax(-1) * z.log_softmax(-1)) * (BIAS > 0)).sum(-1).square().sum(),
        "mul",
    ),
    "sum in float64": (
        lambda z: (z.softmax(-1) * z.log_softmax(-1)).float().sum(-1, dtype=torch.float64).sum(),
        "sum",
    ),
    "softmax of minus log p": (lambda z: (-z.log_softmax(-1)).softmax(-1).square().sum(), "softm"),
    "classes of log p": (
        lambda z: z.log_softmax(-1)[..., :9].logsumexp(-1).square().sum(),
        "__getitem__",
    ),
    "log p plus a vector": (lambda z: (z.log_softmax(-1) + BIAS).logsumexp(-1).sum(), "add"),
    "nll_loss of logits": (lambda z: F.nll_loss(z.flatten(0, 1), Y.flatten()), "nll_loss"),
    "nll_loss of logits, classes second": (lambda z: F.nll_loss(z.transpose(1, 2), Y), "nll_loss"),
    "nll_loss of minus log p": (
        lambda z: F.nll_loss(-z.log_softmax(-1).flatten(0, 1), Y.flatten()),
        "nll_loss",
    ),
    "predictions": (lambda z: z.logsumexp(-1)[z.argmax(-1) > 9].sum(), "argmax"),
}


def without_gradient(z):
    with torch.no_grad():
        return z.softmax(-1)


@pytest.mark.parametrize("name", MADE)
def test_made_instead(name):
    loss_of, operation = MADE[name]
    model = Model(loss_of=lambda z, y: loss_of(z))
    expected = run(model)
    with warnings.catch_warnings(record=True) as caught, flce.fuse(model) as handle:
        warnings.simplefilter("always")
        equal_runs(run(model), expected, 1e-11)
    if operation is None:
        assert not caught and handle.reads
    else:
        assert any(operation in str(one.message) for one in caught), caught


def test_ids_out_of_range():
    """-100 is no class: where eager torch raises, so does this."""
    for ids in (torch.full_like(Y, -100), Y + VOCAB):
        model = Model(loss_of=lambda z, y, ids=ids: log_p(z, ids).sum())
        with pytest.raises(RuntimeError):
            model(IDS, IDS)
        with flce.fuse(model), pytest.raises(IndexError, match=r"target\[0\] is "):
            model(IDS, IDS)


class ProductsMade(LogitsMade):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if "mm" in str(function) and made.shape[-1] == VOCAB and made.dim() == 2:
            self.found.append(str(function))
        return made


def test_real_logits_are_made_once():
    model = Model(
        loss_of=lambda z, y: (
            z.log_softmax(-1).square().sum() + z.softmax(-1).square().sum() + z.square().sum()
        )
    )
    expected = run(model)
    with pytest.warns(UserWarning), flce.fuse(model), ProductsMade(ROWS, VOCAB) as seen:
        equal(model(IDS, IDS)[0], expected[0])
    assert len(seen.found) == 1
    with pytest.warns(UserWarning), flce.fuse(model):
        equal_runs(run(model), expected, 1e-11)


def test_a_vocabulary_of_an_adapter():
    model = model_of(lambda z, y: selective(z, y) + entropy(z))
    model.lm_head = Adapted(model.lm_head)
    expected = run(model)
    got, handle = fused_run(model)
    equal_runs(got, expected, 1e-11)
    assert handle.losses == {"sum of 2 products": 1}
