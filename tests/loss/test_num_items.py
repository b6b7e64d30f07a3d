"""flce.num_items: the denominator of a loss over micro-batches and ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flce
from harness import cases
from harness.processes import on_ranks
from harness.tiny_models import HeadModel

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


def zero_items(target, device, soft=False, **options):
    """Loss and gradients with num_items 0, and with return_z_loss that part."""
    generator = cases.generator(2)
    leaves = [torch.randn(n, 8, generator=generator).to(device).requires_grad_() for n in (6, 20)]
    if soft:
        target = torch.rand(6, 20, generator=generator).to(device)
    made = flce.linear_cross_entropy(*leaves, target, num_items=0, z_loss=0.1, **options)
    loss, z_loss = (made, None) if isinstance(made, torch.Tensor) else (made.loss, made.z_loss)
    return loss, *torch.autograd.grad(loss, leaves), *([] if z_loss is None else [z_loss])


def of_items(function, target, device):
    """A function of a loss with num_items 0 as zero_items."""
    x, w = torch.ones(6, 8, device=device), torch.ones(20, 8, device=device)
    pair = torch.arange(3, device=device).expand(6, 3), torch.full((6, 3), 0.2, device=device)
    pair = torch.where((target < 0).unsqueeze(-1), -100, pair[0]), pair[1]
    calls = {
        "cross_entropy": lambda: flce.cross_entropy(x @ w.T, target, num_items=0),
        "divergence": lambda: flce.linear_divergence(
            x, w, teacher_logits=x @ w.T, target=target, num_items=0
        ),
        "sparse target": lambda: flce.linear_cross_entropy(x, w, pair, num_items=0),
        "sparse teacher": lambda: flce.linear_divergence(
            x, w, teacher_logits=(pair[0], pair[1].log()), num_items=0
        ),
    }
    return calls[function]()


REFUSED = "num_items: expected a number other than 0 for {} rows that are not ignored, got 0"
SAVED = [{"save": save} for save in cases.SAVES] + [
    {"gradient": "sampled"},
    {"return_z_loss": True},
]


@pytest.mark.parametrize("options", SAVED, ids=str)
def test_no_items(device, options, monkeypatch):
    """Of no valid row: 0 and zero gradients. Of valid ones: refused where the value can be seen,
    NaN where it cannot, and refused there with FLCE_CHECK=1."""
    ignored = torch.full((6,), -100, device=device)
    assert all(not one.any() for one in zero_items(ignored, device, **options))
    target = torch.tensor([1, -100, 3, 4, -100, 6], device=device)
    if device == "cuda":
        assert all(one.isnan().any() for one in zero_items(target, device, **options))
        monkeypatch.setenv("FLCE_CHECK", "1")
    with pytest.raises(ValueError, match=f"^{REFUSED.format(4)}$"):
        zero_items(target, device, **options)
    if "gradient" not in options:
        with pytest.raises(ValueError, match=f"^{REFUSED.format(6)}$"):
            zero_items(target, device, soft=True, **options)


@pytest.mark.parametrize(
    "function", ["cross_entropy", "divergence", "sparse target", "sparse teacher"]
)
def test_no_items_of_other_functions(device, function):
    assert of_items(function, torch.full((6,), -100, device=device), device) == 0
    target = torch.tensor([1, -100, 3, 4, -100, 6], device=device)
    if device == "cuda":
        assert of_items(function, target, device).isnan()
        return
    with pytest.raises(ValueError, match=f"^{REFUSED.format(4)}$"):
        of_items(function, target, device)


def test_no_items_of_the_definition():
    operands, target = (torch.ones(2, 3), torch.ones(5, 3)), torch.tensor([1, -100])
    reference = flce.reference.linear_cross_entropy
    assert reference(*operands, torch.full((2,), -100), num_items=0) == 0
    assert reference(*operands, target, num_items=0).isnan()


def test_an_ignore_index_beyond_int32(device):
    """torch compares a number with int32 in int32, where this one is class 3."""
    far, wide = 2**32 + 3, {"ignore_index": 2**32 + 3}
    x, w = torch.randn(2, 8, device=device), torch.randn(20, 8, device=device)
    ids, y = torch.tensor([[3, 4], [5, 6]], device=device), torch.tensor([3, 1], device=device)
    w[3] = 5 * x[0]
    chances = torch.full((2, 2), 0.4, device=device)
    functions = (
        lambda t, i: flce.linear_cross_entropy(x, w, t, return_accuracy=True, **wide)[:4],
        lambda t, i: flce.linear_cross_entropy(x, w, t, classes=i, **wide)[6:7],
        lambda t, i: flce.linear_cross_entropy(x, w, t, valid_bound="count", **wide),
        lambda t, i: flce.linear_cross_entropy(x, w, (i, chances), **wide),
        lambda t, i: flce.linear_logprobs_at(x, w, i, **wide),
        lambda t, i: flce.linear_divergence(x, w, teacher_logits=(i, chances.log()), **wide),
        lambda t, i: flce.num_items(t, ignore_index=far),
        lambda t, i: flce.num_items(t, shift=1, cu_seqlens=torch.tensor([0, 2]).to(t), **wide),
        lambda t, i: flce.reference.linear_cross_entropy(x, w, t, classes=i, **wide)[6:7],
        lambda t, i: flce.reference.linear_cross_entropy(x[None], w, t[None], shift=1, **wide),
    )
    for number, function in enumerate(functions):
        made, expected = function(y.int(), ids.int()), function(y, ids)
        pairs = zip(made, expected, strict=True) if isinstance(made, tuple) else [(made, expected)]
        assert all(a is b or torch.equal(a, b) for a, b in pairs), number
