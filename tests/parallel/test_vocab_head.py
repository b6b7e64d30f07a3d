"""flce.VocabParallelHead: heads with a sharded vocabulary, in four processes over gloo."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flce
from harness.meshes import square_mesh, whole_mesh
from harness.processes import on_ranks, run_on_ranks
from harness.tiny_models import HeadModel
from harness.tiny_models import whole as whole_of

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module  # noqa: E402

RANKS, HIDDEN, VOCAB, LENGTH, STEPS = 4, 8, 11, 6, 3
FLOAT = torch.float64


def Model(bias=True, **options):  # noqa: N802
    return HeadModel(HIDDEN, VOCAB, FLOAT, bias=bias, **options)


def pair(**options):
    torch.manual_seed(0)
    model, whole = Model(**options), Model(**options)
    whole.load_state_dict(model.state_dict())
    return model, whole


def batches(rank=0, sequences=4):
    """(ids, labels) of each step; some labels are ignored, another number on each `rank`."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (sequences, LENGTH), generator=generator)
        labels = torch.randint(VOCAB, (sequences, LENGTH), generator=generator)
        labels.view(-1)[: 2 + rank] = -100
        yield ids, labels


def assert_equal(model, expected, step):
    """`expected`: the Module, or its parameters and gradients by name."""
    if isinstance(expected, nn.Module):
        expected = {name: (p, p.grad) for name, p in expected.named_parameters()}
    for name, one in model.named_parameters():
        for which, a, b in zip(("value", "gradient"), (one, one.grad), expected[name], strict=True):
            torch.testing.assert_close(
                whole_of(a).detach(), b.detach(), rtol=1e-11, atol=1e-12,
                msg=lambda text, label=f"step {step}, {which} of {name}": f"{label}: {text}",
            )  # fmt: skip


def train(model, whole, parts=((0,),), group=None, own=0):
    """Three steps of Adam of a model with part `own` of `parts`, and of its copy with all."""
    models = model, whole
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.05, foreach=False) for one in models]
    for step, drawn in enumerate(zip(*(batches(*part) for part in parts), strict=True)):
        ids, labels = drawn[own]
        options = {}
        if group is not None:
            options["num_items"] = flce.num_items(labels, group, averaged_over=len(parts))
        loss = model(ids, labels, **options)
        assert type(loss) is torch.Tensor
        expected = whole(*(torch.cat(tensors) for tensors in zip(*drawn, strict=True)))
        if group is None:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
        loss.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(model, whole, step)
        yield ids
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(RANKS)
def test_training():
    """The logits in between."""
    model, whole = pair(shift=1, class_weight=torch.linspace(0.5, 2.0, VOCAB, dtype=FLOAT))
    parallelize_module(model, whole_mesh(), {"head": flce.VocabParallelHead()})
    assert model.head.weight.placements == model.head.bias.placements == (Shard(0),)
    for ids in train(model, whole):
        logits = model(ids)
        assert logits.placements == (Shard(2),)
        torch.testing.assert_close(logits.full_tensor(), whole(ids), rtol=1e-11, atol=1e-12)


@on_ranks(RANKS)
def test_sequence():
    """Each rank has one of four sequences; also by keyword, and without labels."""
    mesh = whole_mesh()
    rank = mesh.get_local_rank()
    model, whole = pair()
    parallelize_module(model, mesh, {"head": flce.VocabParallelHead(sequence=True)})
    for step, (ids, labels) in enumerate(batches()):
        x = model.hidden(ids).detach()
        own, every = x[rank : rank + 1].clone().requires_grad_(), x.clone().requires_grad_()
        if step == 0:
            model.head(own, labels).backward()
        else:
            model.head(input=own, labels=labels).backward()
        whole.head(every, labels).backward()
        torch.testing.assert_close(own.grad, every.grad[rank : rank + 1], rtol=1e-12, atol=1e-14)
        assert_equal(model.head, whole.head, step)
        torch.testing.assert_close(model.head(own).full_tensor(), whole.head(x))
        model.zero_grad(), whole.zero_grad()


@on_ranks(RANKS)
def test_targets_by_keyword():
    """The input stays divided where there are labels, under each of their names."""
    x, labels = torch.randn(1, HIDDEN, dtype=FLOAT), torch.arange(RANKS)
    for kind, named in (
        (flce.LinearCrossEntropyHead, {"labels": labels}),
        (flce.LinearCrossEntropyLoss, {"target": labels}),
        (flce.LinearCrossEntropyHead, {}),
    ):
        module = kind(HIDDEN, VOCAB, dtype=FLOAT, bias=True, label_smoothing=0.1)
        whole, inputs = copy.deepcopy(module), []
        parallelize_module(module, whole_mesh(), flce.VocabParallelHead(sequence=True))
        module.register_forward_pre_hook(
            lambda _, args, given, inputs=inputs: inputs.append(given["input"]), with_kwargs=True
        )
        output = module(input=x, **named)
        assert inputs[0].placements == ((Shard(0) if named else Replicate()),), named
        if named:
            for loss in (output, whole(x.expand(RANKS, HIDDEN), labels)):  # x of all ranks is equal
                loss.backward()
            assert_equal(module, whole, kind.__name__)


@on_ranks(RANKS)
def test_parameters():
    mesh = whole_mesh()
    rank = mesh.get_local_rank()
    for source in (0, None):
        head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, dtype=FLOAT)
        torch.nn.init.constant_(head.weight, float(rank))
        head.weight.requires_grad_(False)
        parallelize_module(head, mesh, flce.VocabParallelHead(), src_data_rank=source)
        assert not head.weight.requires_grad and head.bias.requires_grad
        assert (head.weight.to_local() == (rank if source is None else source)).all()


def divide(model, mesh, tied, whole):
    """The head over the ranks of the mesh; if tied, the embedding by its rows too."""
    parallelize_module(model, mesh, {"head": flce.VocabParallelHead()})
    if tied:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, mesh, {"embedding": rows})
        model.head.weight, whole.head.weight = model.embedding.weight, whole.embedding.weight


@pytest.mark.parametrize(
    ("own_unit", "reshard", "tied"),
    [*itertools.product((True, False), (True, False), (False,)), (False, False, True)],
)
@on_ranks(RANKS)
def test_fsdp(own_unit, reshard, tied):
    """FSDP2 over "dp", the vocabulary over "tp"; the mean over the tokens of both dp ranks."""
    mesh = square_mesh()
    model, whole = pair(bias=not tied)
    dp = mesh["dp"]
    divide(model, mesh["tp"], tied, whole)
    if tied:
        fully_shard([model.embedding, model.head], mesh=dp, reshard_after_forward=reshard)
    elif own_unit:
        fully_shard(model.head, mesh=dp, reshard_after_forward=reshard)
    fully_shard(model, mesh=dp, reshard_after_forward=reshard)
    assert model.head.weight.device_mesh.ndim == 2
    assert len(list(train(model, whole, ((0,), (1,)), dp, dp.get_local_rank()))) == STEPS


@on_ranks(RANKS)
def test_plain_shards():
    """FSDP2 over "dp" of a head that holds plain rows of W, with the option vocab_parallel."""
    mesh = square_mesh()
    model, whole = pair()
    dp, tp = mesh["dp"], mesh["tp"]
    share = -(-VOCAB // 2)
    own = slice(tp.get_local_rank() * share, min(VOCAB, (tp.get_local_rank() + 1) * share))
    vp = flce.VocabParallel(tp, vocab=VOCAB)
    head = flce.LinearCrossEntropyHead(HIDDEN, own.stop - own.start, dtype=FLOAT, vocab_parallel=vp)
    for name in ("weight", "bias"):
        getattr(head, name).data.copy_(getattr(model.head, name).data[own])
    model.head = fully_shard(head, mesh=dp)
    fully_shard(model, mesh=dp)
    ids, labels = next(batches(dp.get_local_rank()))
    model(ids, labels, num_items=flce.num_items(labels, dp, averaged_over=2)).backward()
    every = zip(*(next(batches(rank)) for rank in (0, 1)), strict=True)
    whole(*(torch.cat(tensors) for tensors in every)).backward()
    expected = {name: (p, p.grad) for name, p in whole.named_parameters()}
    for name in ("head.weight", "head.bias"):
        expected[name] = [tensor[own] for tensor in expected[name]]
    assert_equal(model, expected, 0)


@on_ranks(RANKS)
def test_hsdp():
    """FSDP2 over replicas and shards: all tokens differ, the vocabulary is whole."""
    mesh = square_mesh()
    model, whole = pair()
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = tuple((rank, 1) for rank in range(RANKS))
    assert len(list(train(model, whole, parts, dist.group.WORLD, dist.get_rank()))) == STEPS


@on_ranks(RANKS)
def test_refusals():
    """Of the style, and of the functions with the weight of an FSDP unit."""
    mesh, square = whole_mesh(), square_mesh()
    style = flce.VocabParallelHead()
    assert repr(style) == "VocabParallelHead(sequence=False)"
    with pytest.raises(TypeError, match="VocabParallelHead: expected a flce.Linear.*, got Linear"):
        parallelize_module(nn.Linear(HIDDEN, VOCAB), mesh, style)
    with pytest.raises(TypeError, match="sequence: expected True or False"):
        flce.VocabParallelHead(sequence=1)
    head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, bias=False)
    with pytest.raises(ValueError, match="device_mesh: expected one dimension"):
        style._apply(head, square)
    head.vocab_parallel = flce.VocabParallel(mesh, vocab=4 * VOCAB)
    with pytest.raises(ValueError, match="vocab_parallel: expected None with VocabParallelHead"):
        parallelize_module(head, mesh, style)
    head.vocab_parallel = None
    head.weight = nn.Parameter(distribute_tensor(head.weight, mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"weight: expected .*Shard\(dim=0\).*got .*Replicate"):
        parallelize_module(head, mesh, style)

    class Losses(flce.LinearCrossEntropyHead):
        def loss_of(self, x, labels):
            return flce.linear_cross_entropy(x, self.weight, labels)

    torch.manual_seed(0)
    head = fully_shard(Losses(HIDDEN, VOCAB, bias=False), mesh=mesh)
    x, labels = torch.randn(LENGTH, HIDDEN), torch.arange(LENGTH)
    ways = "Call the Module.*head.unshard.*register_fsdp_forward_method.*vocab_parallel"
    with pytest.raises(ValueError, match=f"linear_weight: expected a plain tensor.*{ways}"):
        head.loss_of(x, labels)
    expected = head(x, labels)
    head.reshard()
    assert flce.linear_cross_entropy(x, head.weight.full_tensor(), labels) == expected
    head.unshard()
    assert flce.linear_cross_entropy(x, head.weight, labels) == expected
    head.reshard()
    register_fsdp_forward_method(head, "loss_of")
    assert head.loss_of(x, labels) == expected


def save_head(folder):
    rank, vp = dist.get_rank(), flce.VocabParallel(dist.group.WORLD, vocab=VOCAB)
    head = flce.LinearCrossEntropyHead(HIDDEN, 6 - rank, dtype=FLOAT, vocab_parallel=vp)
    x, labels = torch.ones(3, HIDDEN, dtype=FLOAT), torch.tensor([1, 7, 10])
    torch.save((head, x, labels, head(x, labels)), folder / f"head{rank}")


def load_head(folder):
    """No VocabParallel has been made in this process."""
    head, x, labels, loss = torch.load(folder / f"head{dist.get_rank()}", weights_only=False)
    assert torch.equal(head(x, labels), loss)


def test_unpickled_in_other_processes(tmp_path):
    run_on_ranks(2, save_head, folder=tmp_path)
    run_on_ranks(2, load_head, fresh=True, folder=tmp_path)
