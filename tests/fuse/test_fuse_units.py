"""flce.fuse under FSDP2, with units of several Modules, and DDP with an auxiliary loss."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.fuse_compare import OwnLoss
from harness.processes import on_ranks
from harness.tiny_models import HIDDEN, IDS, VOCAB, Model, equal, whole


class Parts(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        logits = self.lm_head(self.norm(x + torch.tanh(self.body(x))))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


UNITS = [  # (tied, the head's unit, reshard_after_forward, when, read after the backward)
    (True, ("embedding", "lm_head"), True, "always", False),
    (False, ("norm", "lm_head"), True, "labels", True),
    (False, ("norm", "lm_head"), False, "labels", True),
    (False, ("norm", "lm_head"), True, "always", False),
    (False, ("norm", "lm_head"), False, "always", True),
    (False, ("lm_head",), False, "labels", True),
    (False, ("lm_head",), True, "always", True),
]


def steps_of(fused, tied, unit, reshard, when, reads, save):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, rank = Parts(tied), torch.distributed.get_rank()
    handle = flce.fuse(model, when=when, strict=True, save=save) if fused else None
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    modules = [getattr(model, name) for name in unit]
    modules = modules if len(modules) > 1 else modules[0]
    fully_shard(modules, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(9 * step + rank))
        loss, logits = model(ids, ids) if when == "labels" else model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) if loss is None else loss
        loss.backward()
        made += [loss.detach(), *([logits.detach() + 0] if reads else [])]
        optimizer.step()
        optimizer.zero_grad()
    assert handle is None or (sum(handle.losses.values()) == 3 and not handle.fallbacks)
    return made, [whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize("save", ["grads", "stats"])
@on_ranks(2)
def test_units_of_fsdp2(save):
    for case in UNITS:
        expected, got = (steps_of(fused, *case, save) for fused in (False, True))
        for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            equal(one, other, 1e-4)


@on_ranks(2)
def test_logits_of_a_sharded_weight():
    """No unit of FSDP2 in the fused model holds the head, and the unit around it has sharded the
    weight again: logits are refused after the forward, and a loss within it needs none."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = Model()
    handle = flce.fuse(model, when="always")
    around = nn.Sequential(model)
    fully_shard(around, mesh=mesh, reshard_after_forward=True)
    logits = around(IDS)[1]
    with pytest.raises(RuntimeError, match=r"^flce\.fuse: expected the head's weight to be whole"):
        logits.std()
    model.forward = functools.partial(model.forward, labels=IDS)
    around(IDS)[0].backward()
    assert sum(handle.losses.values()) == 1


class Auxiliary(Model):
    def forward(self, ids, labels):
        x = self.body(self.embedding(ids))
        loss = OwnLoss.apply(self.lm_head(x).flatten(0, 1), labels.flatten())
        return loss + x.square().mean()


@on_ranks(2)
def test_a_custom_function_and_an_auxiliary_loss_under_ddp():
    rank, made = torch.distributed.get_rank(), []
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(rank))
    for fused in (False, True):
        model = Auxiliary(body=nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64))
        if fused:
            flce.fuse(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(ids, labels=ids).backward()
        made.append([p.grad for p in model.parameters()])
    for one, other in zip(*made, strict=True):
        equal(one, other)
        gathered = [torch.empty_like(one) for _ in range(2)]
        torch.distributed.all_gather(gathered, one)
        equal(*gathered)
