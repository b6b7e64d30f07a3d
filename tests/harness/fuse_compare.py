"""A model and its twin fused: the loss, the gradients and how often hooks run are the same,
whatever a loss does with the logits."""

import functools
import typing

import torch
import torch.nn.functional as F

import flce
from harness.tiny_models import IDS, Model, equal, same

Y = IDS.flatten()


class Results(typing.NamedTuple):
    """runs: how often each parameter's hook ran."""

    loss: torch.Tensor
    gradients: list
    runs: list


def results(model, loss_of):
    model.zero_grad(set_to_none=True)
    counts = [0] * len(list(model.parameters()))

    def count(i, parameter):
        counts[i] += 1

    hooks = [
        p.register_post_accumulate_grad_hook(functools.partial(count, i))
        for i, p in enumerate(model.parameters())
    ]
    loss = loss_of(model(IDS)[1])
    loss.backward()
    for hook in hooks:
        hook.remove()
    return Results(loss.detach(), [p.grad for p in model.parameters()], counts)


def compare(loss_of, use=same, **options):
    model = Model(use)
    expected = results(model, loss_of)
    with flce.fuse(model, when="always", **options) as handle:
        got = results(model, loss_of)
    equal(got.loss, expected.loss, 1e-11)
    for one, other in zip(got.gradients, expected.gradients, strict=True):
        equal(one, other, 1e-11)
    assert got.runs == expected.runs
    return handle


def flat_loss(z):
    return F.cross_entropy(z.flatten(0, 1), Y)


class OwnLoss(torch.autograd.Function):
    """As Liger's, Megatron's and apex's: values in the forward, the gradient of them saved."""

    @staticmethod
    def forward(ctx, z, y):
        p = z.float().softmax(-1).to(z.dtype)
        ctx.save_for_backward(p, y)
        return F.nll_loss(z.log_softmax(-1), y)

    @staticmethod
    def backward(ctx, gradient):
        p, y = ctx.saved_tensors
        return gradient * (p - F.one_hot(y, p.shape[-1])) / len(y), None
