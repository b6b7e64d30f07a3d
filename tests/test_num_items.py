"""flce.num_items: the denominator of a loss over micro-batches and ranks."""

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from tiny_models import HeadModel
from torch import nn

import flce

HIDDEN, VOCAB, LENGTH = 8, 11, 6
# Of each micro-batch on each of two ranks: sequences, and how many of the first tokens are ignored.
SHARES = (((3, 1), (2, 5)), ((1, 0), (4, 2)))


def test_counts_as_the_loss_does(device):
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(VOCAB, (5, 7), generator=generator)
    target[:, :2], target[1] = -100, -100
    target = target.to(device)
    ones = torch.zeros(5, 7, HIDDEN, device=device), torch.zeros(VOCAB, HIDDEN, device=device)
    offsets = torch.tensor([1, 9, 20, 35], device=device)
    for options in (
        {},
        {"ignore_index": None},
        {"ignore_index": 3},
        {"shift": 1},
        {"shift": 2, "cu_seqlens": offsets},
        {"shift": 9},
    ):
        labels = target.clamp(min=0) if options.get("ignore_index") == 3 else target
        count = flce.num_items(labels, **options)
        loss = flce.linear_cross_entropy(*ones, labels, reduction="sum", **options)
        assert count.shape == () and count.device == labels.device
        assert round(loss.item() / torch.tensor(float(VOCAB)).log().item()) == count.item(), options
        mean = flce.linear_cross_entropy(*ones, labels, **options)
        given = flce.linear_cross_entropy(*ones, labels, num_items=count, **options)
        assert abs(mean - given) <= 1e-6


def test_adds_up_micro_batches(device):
    target = torch.tensor([[1, 2, -100], [4, -100, 6]], device=device)
    assert flce.num_items([target, target[0].int()], averaged_over=4) == 6 / 4
    assert flce.num_items((target, target), shift=1) == 4
    offsets = [torch.tensor([0, 2, 3], device=device), torch.tensor([0, 3], device=device)]
    rows = [target[0], target[1]]
    assert flce.num_items(rows, shift=1, cu_seqlens=offsets) == 2
    assert flce.num_items(torch.full((3,), -100, device=device)) == 0


def test_is_traced(device):
    target = torch.tensor([[1, 2, -100], [4, -100, 6]], device=device)
    compiled = torch.compile(flce.num_items, fullgraph=True, backend="aot_eager")
    assert compiled([target, target], shift=1, averaged_over=2) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([],), {}, ValueError, "targets: expected at least one tensor"),
        ((3,), {}, TypeError, "targets: expected a tensor, got int"),
        ((torch.ones(3, 2),), {}, TypeError, "targets: expected class indices"),
        ((torch.zeros(3).long(),), {"averaged_over": 0}, ValueError, "averaged_over: .* positive"),
        ((torch.zeros(3).long(),), {"averaged_over": True}, TypeError, "averaged_over: .* number"),
        ((torch.zeros(3).long(),), {"shift": -1}, ValueError, "shift: expected an int of at least"),
        ((torch.zeros(3).long(),), {"shift": 1}, ValueError, "shift: expected .* 3 dimensions"),
        ((torch.zeros(3).long(),), {"ignore_index": 0.5}, TypeError, "ignore_index: expected"),
        (([torch.zeros(3).long()],), {"cu_seqlens": []}, ValueError, "cu_seqlens: expected one fo"),
        ((torch.zeros(3).long(), 7), {}, RuntimeError, "flce.num_items: expected torch.distrib"),
    ],
)
def test_refusals(arguments, options, error, message):
    with pytest.raises(error, match=message):
        flce.num_items(*arguments, **options)


def batch_of(rank, micro):
    sequences, ignored = SHARES[rank][micro]
    generator = torch.Generator().manual_seed(10 * rank + micro)
    ids = torch.randint(VOCAB, (sequences, LENGTH), generator=generator)
    target = ids.clone()
    target.view(-1)[:ignored] = -100
    return ids, target


@on_ranks(2)
def test_ddp_equals_the_whole_batch():
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model, whole = (HeadModel(HIDDEN, VOCAB, shift=1) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    parallel = nn.parallel.DistributedDataParallel(model)
    for group in (dist.group.WORLD, mesh):
        batches = [batch_of(rank, micro) for micro in (0, 1)]
        targets = [target for _, target in batches]
        count = flce.num_items(targets, group, averaged_over=2, shift=1)
        with parallel.no_sync():
            parallel(*batches[0], num_items=count).backward()
        parallel(*batches[1], num_items=count).backward()
        every = [batch_of(other, micro) for other in (0, 1) for micro in (0, 1)]
        ids, labels = (torch.cat(parts) for parts in zip(*every, strict=True))
        assert count * 2 == flce.num_items(labels, shift=1)
        whole(ids, labels).backward()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
        for module in (model, whole):
            module.zero_grad()
    square = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="group: expected a DeviceMesh of one dimension"):
        flce.num_items(targets, square)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup or a D.*, got int"):
        flce.num_items(targets, 7)


def test_a_number_that_is_infinite_in_the_dtype_of_the_loss(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(5, 3, device=device)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="^num_items: expected a finite number"):
        flce.linear_cross_entropy(x, w, target, num_items=1e39)
    assert flce.linear_cross_entropy(x.double(), w.double(), target, num_items=1e39) > 0
