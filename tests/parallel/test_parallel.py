"""flce.fuse, and flce's head, under DistributedDataParallel and FSDP2, in two processes."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import flce
from harness import cases
from harness.processes import on_ranks
from harness.tiny_models import HIDDEN, VOCAB, Adapted, HeadModel, Model, whole

TOKENS = 12
DDP = ({}, {"static_graph": True}, {"find_unused_parameters": True})
# (a unit of its own for the head, reshard_after_forward)
FSDP = tuple(itertools.product((True, False), (True, False)))


ORDERS = ("early", "late")


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp(model, head="lm_head", own_unit=True, reshard=True):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    if own_unit:
        fully_shard(getattr(model, head), mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def share_values(model, other):
    """Those of rank 0's `model`, in both models and on all ranks."""
    other.load_state_dict(model.state_dict())
    for parameter, copy in zip(model.parameters(), other.parameters(), strict=True):
        dist.broadcast(parameter.data, 0)
        copy.data.copy_(parameter.data)


class Body(nn.Linear):
    def forward(self, x):
        return torch.tanh(checkpoint(super().forward, x, use_reentrant=False))


def make(adapted):
    body = Body(HIDDEN, HIDDEN)
    model = Model(lambda z: z.float() / 2, dtype=torch.float32, body=body, scale=0.3)
    if adapted:
        model.lm_head = Adapted(model.lm_head, torch.float32)
    return model


def compare(wrap, name):
    """Three steps of a fused and a plain model, wrapped alike, with each process's own data."""
    plain, fused = make("adapted" in name), make("adapted" in name)
    share_values(plain, fused)
    early = flce.fuse(fused, strict=True) if "early" in name else None
    wrapped = wrap(plain), wrap(fused)
    handle = early or flce.fuse(fused, strict=True)
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        ids = torch.randint(VOCAB, (2, TOKENS))
        (expected, expected_logits), (loss, logits) = (m(ids, labels=ids) for m in wrapped)
        assert torch.equal(logits, expected_logits), f"{name}, step {step}"
        assert cases.relative_error(loss, expected.double()) <= 1e-6, f"{name}, step {step}"
        for one in (loss, expected):
            one.backward()
        for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
            error = cases.relative_error(whole(one.grad), whole(other.grad).double())
            assert error <= 2e-6, f"{name}, step {step}: {error}"
    logits = wrapped[1](ids, labels=ids)[1]
    torch.optim.SGD(fused.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="an optimizer that has stepped since"):
        logits.sum()
    assert sum(handle.losses.values()) == 4 and not handle.fallbacks, name


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@on_ranks(2)
def test_equals_the_unfused_model(way):
    for options in DDP if way == "ddp" else ():
        compare(lambda model, options=options: ddp(model, **options), f"ddp {options}")
    for (own, reshard), order in itertools.product(FSDP if way == "fsdp" else (), ORDERS):
        wrap = functools.partial(fsdp, own_unit=own, reshard=reshard)
        name = f"fsdp, own unit {own}, reshard {reshard}, fused {order}"
        compare(wrap, name)
        compare(wrap, f"{name}, adapted")


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:flce.fuse")
@on_ranks(2)
def test_ddp_with_a_static_graph_and_a_loss_outside_of_the_forward(is_compiled):
    """Its Function has the gradients of the first step reduced: logits have to pass through it."""
    plain, fused = make(False), make(False)
    share_values(plain, fused)
    flce.fuse(fused, when="always")
    wrapped = [ddp(model, static_graph=True) for model in (plain, fused)]
    if is_compiled:
        wrapped[1] = torch.compile(wrapped[1], backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(VOCAB, (2, TOKENS))
        for model in wrapped:
            model.zero_grad()
            nn.functional.cross_entropy(model(ids)[1].flatten(0, 1), ids.flatten()).backward()
        for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
            assert cases.relative_error(one.grad, other.grad.double()) <= 2e-6


# ---- flce's own head ----


@pytest.mark.parametrize("way", ["ddp", "ddp, bucket views", "fsdp"])
@on_ranks(2)
def test_accumulation_into_the_gradient(way):
    """The head's gradients with and without accumulate_into, over four steps with different data in
    each process; DDP synchronises every other step. Its hooks and those of FSDP run after the
    weight's AccumulateGrad and find the sum in .grad."""
    plain, model = (HeadModel(dtype=torch.float32, accumulate_into=into) for into in (None, "grad"))
    share_values(plain, model)
    view = way == "ddp, bucket views"
    wrap = functools.partial(ddp, gradient_as_bucket_view=view)
    if way == "fsdp":
        wrap = functools.partial(fsdp, head="head")
    wrapped = [wrap(module) for module in (plain, model)]
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        x, labels = torch.randint(VOCAB, (2, TOKENS)).unbind()
        for module in wrapped:
            if way != "fsdp" and step % 2 == 0:
                with module.no_sync():
                    module(x, labels).backward()
            else:
                module(x, labels).backward()
        expected, got = (whole(module.head.weight.grad) for module in (plain, model))
        assert cases.relative_error(got, expected.double()) <= 1e-6, f"{way}, step {step}"
        if step == 1:
            for module in wrapped:
                module.zero_grad(set_to_none=way != "ddp")


@on_ranks(1)
def test_a_dtensor_is_refused():
    from torch.distributed.tensor import distribute_tensor

    weight = torch.randn(VOCAB, HIDDEN)
    weight = nn.Parameter(distribute_tensor(weight, dist.init_device_mesh("cpu", (1,))))
    x, labels = torch.randn(TOKENS, HIDDEN), torch.randint(VOCAB, (TOKENS,))
    with pytest.raises(ValueError, match="linear_weight: expected a plain .* got a DTensor"):
        flce.linear_cross_entropy(x, weight, labels, accumulate_into="grad")
