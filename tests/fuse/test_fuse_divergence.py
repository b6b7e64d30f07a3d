"""flce.fuse on KL divergences of a student's and a teacher's logits: what is recognised, values and
gradients, and what makes logits instead."""

import pytest
import torch
import torch.nn.functional as F

import flce
from harness.tiny_models import IDS as FEW
from harness.tiny_models import VOCAB, Adapted, LogitsMade, Model, equal_runs

IDS = FEW.repeat(3, 1)  # more rows than the weight has columns
MASK = (IDS % 3 > 0).double()


def pair(teacher_body=None):
    student, teacher = Model(), Model(body=teacher_body)
    generator = torch.Generator().manual_seed(7)
    for parameter in teacher.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.add_(noise)
    return student, teacher.requires_grad_(False)


def step(student, teacher, loss_of):
    student.zero_grad(set_to_none=True)
    with torch.no_grad():
        taught = teacher(IDS)[1]
    loss = loss_of(student(IDS)[1], taught)
    loss.backward()
    return loss.detach(), [p.grad for p in student.parameters()]


def batchmean(z, t):
    p = F.softmax(t / 2.0, -1)
    return F.kl_div(F.log_softmax(z / 2.0, -1), p, reduction="batchmean") * 4.0


def log_target(z, t):
    z, t = z.view(-1, VOCAB), t.view(-1, VOCAB)
    return F.kl_div(z.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="sum")


def mean_of_all(z, t):
    return F.kl_div(z.log_softmax(-1), t.log_softmax(-1), log_target=True)


def masked(z, t):
    rows = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
    return (rows * MASK).sum() / MASK.sum()


def reverse(z, t):
    rows = F.kl_div(t.log_softmax(-1), z.log_softmax(-1), reduction="none", log_target=True)
    return rows.sum() / 3.0


def shifted(z, t):
    z, t = (3.0 * torch.tanh(a[:, :-1] / 3.0) for a in (z, t))
    return F.kl_div(F.log_softmax(z, -1), F.softmax(t, -1), reduction="batchmean")


def some_classes(z, t):
    return F.kl_div(z[..., :31].log_softmax(-1), t[..., :31].softmax(-1), reduction="batchmean")


KNOWN = (batchmean, log_target, mean_of_all, masked, reverse, shifted, some_classes)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("loss_of", KNOWN)
def test_no_logits_are_made(loss_of):
    student, teacher = pair()
    expected = step(student, teacher, loss_of)
    with flce.fuse(student, when="always", strict=True) as fused, flce.fuse(teacher, when="always"):
        with LogitsMade(IDS[:, 1:].numel(), VOCAB) as made:
            fused_run = step(student, teacher, loss_of)
    assert sum(fused.losses.values()) == 1 and not made.found, made.found
    equal_runs(fused_run, expected)


@pytest.mark.parametrize("loss_of", (batchmean, masked))
@pytest.mark.parametrize(
    "option", ({"save": "grads"}, {"save": "logits"}, {"valid_bound": 1}, {"z_loss": 1.0})
)
def test_options_that_no_divergence_has_are_dropped(loss_of, option):
    student, teacher = pair()
    expected = step(student, teacher, loss_of)
    with flce.fuse(student, when="always", **option) as fused, flce.fuse(teacher, when="always"):
        equal_runs(step(student, teacher, loss_of), expected)
    assert sum(fused.losses.values()) == 1


def elements(z, t):
    kl = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none")
    return kl[MASK > 0].sum()


def masked_reverse(z, t):
    kl = F.kl_div(t.log_softmax(-1), z.log_softmax(-1), reduction="none", log_target=True)
    return (kl * MASK.unsqueeze(-1)).sum()


def trained_teacher(z, t):
    return F.kl_div(z.log_softmax(-1), (z * 0.5).softmax(-1), reduction="sum")


@pytest.mark.parametrize("loss_of", (elements, masked_reverse, trained_teacher, batchmean))
def test_others_make_logits(loss_of):
    """Among them a divergence of an adapter."""
    student, teacher = pair()
    if loss_of is batchmean:
        student.lm_head = Adapted(student.lm_head)
    expected = step(student, teacher, loss_of)
    told = "a divergence of an adapter" if loss_of is batchmean else "is not deferred"
    with flce.fuse(student, when="always"), flce.fuse(teacher, when="always"):
        with pytest.warns(UserWarning, match=told):
            fused_run = step(student, teacher, loss_of)
    equal_runs(fused_run, expected)


def unwanted(z, t):
    p, q = z.log_softmax(-1), t.softmax(-1)
    with torch.no_grad():
        kl = F.kl_div(p, q, reduction="none")
    return batchmean(z, t) + kl.sum(-1).mean() + kl.sum()


def overwritten(z, t):
    with torch.no_grad():
        p, q = z.log_softmax(-1), t.softmax(-1)
        kl = F.kl_div(p, q, reduction="none")
        q.zero_()
        return batchmean(z, t) + kl.sum()


@pytest.mark.parametrize("loss_of", (unwanted, overwritten))
def test_values_are_of_the_time_of_kl_div(loss_of):
    """Without a gradient where that was off, and before what was written later."""
    student, teacher = pair()
    expected = loss_of(student(IDS)[1], teacher(IDS)[1])
    with flce.fuse(student, when="always"), flce.fuse(teacher, when="always"):
        made = loss_of(student(IDS)[1], teacher(IDS)[1])
    assert made.requires_grad == expected.requires_grad
    assert abs(made - expected) <= 1e-12 * abs(expected)
    if made.requires_grad:
        weight = student.lm_head.weight
        one, other = (torch.autograd.grad(loss, weight)[0] for loss in (made, expected))
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_accumulate_into():
    student, teacher = pair()
    loss, grads = step(student, teacher, masked)
    weight = student.lm_head.weight
    weight.main_grad = torch.zeros_like(weight)
    options = {"when": "always", "strict": True, "accumulate_into": "main_grad"}
    with flce.fuse(student, **options), flce.fuse(teacher, when="always"):
        fused_loss, fused_grads = step(student, teacher, masked)
    index = next(i for i, p in enumerate(student.parameters()) if p is weight)
    assert fused_grads[index] is None
    fused_grads[index] = weight.main_grad
    equal_runs((fused_loss, fused_grads), (loss, grads))
