"""flce.fuse under DistributedDataParallel and FSDP2, in two processes."""

import itertools

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import flce

HIDDEN, VOCAB, TOKENS = 16, 40, 12
DDP = ({}, {"static_graph": True}, {"find_unused_parameters": True})
# (a unit of its own for the head, reshard_after_forward)
FSDP = tuple(itertools.product((True, False), (True, False)))


class Adapted(nn.Module):
    """The head with an adapter as PEFT writes them."""

    def __init__(self):
        super().__init__()
        self.out_features = VOCAB
        self.base_layer = nn.Linear(HIDDEN, VOCAB)
        self.down, self.up = nn.Linear(HIDDEN, 3, bias=False), nn.Linear(3, VOCAB, bias=False)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.up(self.down(x)) * 2.0


class Model(nn.Module):
    def __init__(self, adapted):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = Adapted() if adapted else nn.Linear(HIDDEN, VOCAB)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids, labels=None):
        x = checkpoint(self.body, self.embedding(ids), use_reentrant=False)
        logits = self.lm_head(torch.tanh(x)).float() / 2
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)), logits


def sharded(model, own_unit, reshard):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    if own_unit:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(rank, wrap, name):
    """Three steps with data of its own in each process: losses, gradients and logits of a fused
    and a plain model, wrapped alike."""
    plain, fused = Model("adapted" in name), Model("adapted" in name)
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
