"""flce.fuse under DistributedDataParallel and FSDP2, in two processes."""

import itertools

import cases
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from tiny_models import HIDDEN, VOCAB, Adapted, Model, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

import flce

TOKENS = 12
DDP = ({}, {"static_graph": True}, {"find_unused_parameters": True})
# (a unit of its own for the head, reshard_after_forward)
FSDP = tuple(itertools.product((True, False), (True, False)))


class Body(nn.Linear):
    """A layer that is checkpointed."""

    def forward(self, x):
        return torch.tanh(checkpoint(super().forward, x, use_reentrant=False))


def make(adapted):
    body = Body(HIDDEN, HIDDEN)
    model = Model(lambda z: z.float() / 2, dtype=torch.float32, body=body, scale=0.3)
    if adapted:
        model.lm_head = Adapted(model.lm_head, torch.float32)
    return model


def sharded(model, own_unit, reshard):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    if own_unit:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def compare(rank, wrap, name):
    """Three steps with data of its own in each process: losses, gradients and logits of a fused
    and a plain model, wrapped alike."""
    plain, fused = make("adapted" in name), make("adapted" in name)
    fused.load_state_dict(plain.state_dict())
    for parameter, other in zip(plain.parameters(), fused.parameters(), strict=True):
        dist.broadcast(parameter.data, 0)
        other.data.copy_(parameter.data)
    early = flce.fuse(fused, strict=True) if "early" in name else None
    wrapped = wrap(plain), wrap(fused)
    handle = early or flce.fuse(fused, strict=True)
    torch.manual_seed(rank)
    for step in range(3):
        ids = torch.randint(VOCAB, (2, TOKENS))
        (expected, expected_logits), (loss, logits) = (m(ids, labels=ids) for m in wrapped)
        if "own unit False, reshard True" in name:
            with pytest.raises(RuntimeError, match="read outputs.logits before the forward"):
                logits.sum()
        else:
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


@pytest.mark.parametrize("ways", ["ddp", "fsdp"])
@on_ranks(2)
def test_equals_the_unfused_model(ways):
    rank = dist.get_rank()
    if ways == "ddp":
        for options in DDP:

            def wrap(model, options=options):
                return nn.parallel.DistributedDataParallel(model, **options)

            compare(rank, wrap, f"ddp {options}")
    else:
        for (own, reshard), order in itertools.product(FSDP, ("early", "late")):

            def wrap(model, own=own, reshard=reshard):
                return sharded(model, own, reshard)

            name = f"fsdp, own unit {own}, reshard {reshard}, fused {order}"
            compare(rank, wrap, name)
            compare(rank, wrap, f"{name}, adapted")
