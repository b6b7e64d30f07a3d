"""verl's forward KL of a teacher's K classes with and without flce, through its own entry."""

import copy
import types

import pytest
import torch

import flce
from harness.tiny_models import LogitsMade, tiny_llama

losses = pytest.importorskip("verl.trainer.distillation.losses")

from flce.integrations import verl_distillation as ours  # noqa: E402

LENGTHS, CLASSES, VOCAB = (20, 24), 4, 19
ACTOR = types.SimpleNamespace(strategy="fsdp2")


def teacher():
    """Nested (2, length, K) log-probabilities and ids, as verl's data has them."""
    generator = torch.Generator().manual_seed(1)
    log_q = torch.randn(sum(LENGTHS), VOCAB, generator=generator).mul(3).log_softmax(-1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    made = log_q.topk(CLASSES)
    names = zip(("teacher_logprobs", "teacher_ids"), made, strict=True)
    return {name: torch.nested.nested_tensor_from_jagged(of, offsets) for name, of in names}


TEACHER = teacher()


def step(student, clamp):
    """What the engine does with the logits (1, tokens, V) of a micro batch at temperature 1."""
    ids = torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    settings = {"log_prob_min_clamp": clamp, "use_chunked_topk": False}
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(**settings))
    logits = student(ids).logits.squeeze(0)
    made = losses.compute_topk_loss(ACTOR, config, TEACHER, logits.unsqueeze(0), "thd")
    student.zero_grad()
    (made["distillation_losses"] * torch.linspace(0.5, 1.5, sum(LENGTHS))).sum().backward()
    names = "distillation_losses", "student_mass", "teacher_mass"
    return [*(made[name].detach() for name in names), *(p.grad for p in student.parameters())], made


@pytest.mark.parametrize("clamp", [None, -10.0, -2.5])
def test_the_same_loss_without_logits(clamp):
    torch.manual_seed(0)
    student = tiny_llama()
    exact, _ = step(copy.deepcopy(student).double(), clamp)
    expected, theirs = step(student, clamp)
    with flce.fuse(student, when="always", strict=True), ours.install() as handle:
        with LogitsMade(sum(LENGTHS), VOCAB) as found:
            got, made = step(student, clamp)
    assert handle.calls == {"flce": 1} and not found.found
    assert theirs.keys() - made.keys() == {"overlap_count", "overlap_token_advantage"}
    for one, other, truth in zip(got, expected, exact, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        error, their_error = ((v.double() - truth).norm() for v in (one, other))
        assert error <= 2 * their_error + 1e-6 * truth.norm()


def test_what_remains_verls():
    student = tiny_llama()
    expected, theirs = step(student, -10.0)
    with ours.install() as handle:
        got, made = step(student, -10.0)
        with pytest.raises(RuntimeError, match="an earlier install"):
            ours.install()
    assert handle.calls == {"verl_distillation": 1} and made.keys() == theirs.keys()
    torch.testing.assert_close(got, expected)


def test_another_version_is_refused(monkeypatch):
    from verl.trainer.distillation.fsdp import losses as of_fsdp

    monkeypatch.setattr(of_fsdp, "compute_forward_kl_topk", lambda student_logits: None)
    with pytest.raises(ImportError, match="verl: expected a version whose"):
        ours.install()
