"""The head under DistributedDataParallel and FSDP2, in two processes."""

import cases
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from tiny_models import HIDDEN, VOCAB, HeadModel, whole
from torch import nn

import flce

TOKENS = 12


def wrap(model, way):
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2,))
        fully_shard(model.head, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    view = way == "ddp, bucket views"
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)


@pytest.mark.parametrize("way", ["ddp", "ddp, bucket views", "fsdp"])
@on_ranks(2)
def test_accumulation(way):
    """The head's gradients with and without accumulate_into, over four steps with different data in
    each process; DDP synchronises every other step. Its hooks and those of FSDP run after the
    weight's AccumulateGrad and find the sum in .grad."""
    plain, model = (HeadModel(dtype=torch.float32, accumulate_into=into) for into in (None, "grad"))
    model.load_state_dict(plain.state_dict())
    for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
        dist.broadcast(parameter.data, 0)
        other.data.copy_(parameter.data)
    wrapped = [wrap(module, way) for module in (plain, model)]
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
