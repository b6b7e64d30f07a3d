"""flce.integrations.torchtitan against torchtitan's ChunkedLossWrapper with CrossEntropyLoss."""

import copy

import pytest
import torch
import torch.distributed as dist

from harness.processes import on_ranks
from harness.tiny_models import whole

titan = pytest.importorskip("torchtitan.components.loss", exc_type=ImportError)

from flce.integrations.torchtitan import FlceLoss  # noqa: E402  imports torchtitan

B, L, H, V = 2, 12, 16, 40


def model():
    """torchtitan's decoder without attention, whose kernels need a GPU: embedding, norm, head."""
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = []
    config.dim = config.norm.normalized_shape = config.lm_head.in_features = H
    config.tok_embeddings.embedding_dim = H
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = V
    torch.manual_seed(0)
    made = config.build()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    made._skip_lm_head = True
    return made


def batch(length=L):
    tokens = torch.randint(V, (B, length))
    return tokens, torch.where(torch.rand(B, length) < 0.2, titan.IGNORE_INDEX, tokens.roll(-1, 1))


def step(model, config, tokens, labels, valid):
    """The loss and every parameter's gradient of one step, as torchtitan's trainer takes it."""
    loss_fn = config.build(compile_config=None)
    loss_fn.set_lm_head(model.lm_head)
    loss, metrics = loss_fn(model(tokens), labels, valid)
    assert metrics == {}
    loss.backward()
    return loss.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}


def same(mine, theirs):
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=0)
    assert mine[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert gradient.norm() > 0, name
        assert (mine[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("length, chunks", [(L, 4), (13, 1)])
@pytest.mark.parametrize("valid", [None, torch.tensor(19)])
def test_loss_and_gradients(valid, length, chunks):
    plain = model()
    mine = copy.deepcopy(plain)
    theirs = titan.ChunkedLossWrapper.Config(num_chunks=chunks)
    data = batch(length)
    same(step(mine, FlceLoss.Config(), *data, valid), step(plain, theirs, *data, valid))


def test_evaluation():
    plain = model()
    made, loss_fn = plain.lm_head, FlceLoss.Config().build()
    loss_fn.set_lm_head(made)
    tokens, labels = batch()
    with torch.no_grad():
        hidden = plain(tokens)
        loss, _ = loss_fn(hidden, labels)
        logits = made(hidden)  # without labels it gives them, as ever
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, made.weight).flatten(0, 1),
        labels.flatten(),
        reduction="sum",
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, torch.nn.functional.linear(hidden, made.weight))


def test_options():
    plain = model()
    loss_fn = FlceLoss.Config(softcap=3.0, z_loss=0.5, max_memory="1MiB").build()
    loss_fn.set_lm_head(plain.lm_head)
    tokens, labels = batch()
    hidden = plain(tokens)
    loss, _ = loss_fn(hidden, labels)
    logits = 3.0 * torch.tanh(torch.nn.functional.linear(hidden, plain.lm_head.weight) / 3.0)
    rows = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    valid = labels != titan.IGNORE_INDEX
    expected = rows * valid.sum() + 0.5 * (logits.logsumexp(-1).square() * valid).sum()
    torch.testing.assert_close(loss, expected)


def test_refusals():
    with pytest.raises(ValueError, match="loss_fn: expected CrossEntropyLoss.Config, got MSELoss"):
        FlceLoss.Config(loss_fn=titan.MSELoss.Config()).build()
    loss_fn = FlceLoss.Config().build()
    with pytest.raises(ValueError, match=r"lm_head: expected set_lm_head\(\) before"):
        loss_fn(torch.zeros(B, L, H), torch.zeros(B, L, dtype=torch.int64))

    class Scaled(torch.nn.Linear):
        def forward(self, input):
            return 2.0 * super().forward(input)

    with pytest.raises(TypeError, match="lm_head: expected an nn.Linear, got .*Scaled"):
        loss_fn.set_lm_head(Scaled(H, V))


def fsdp(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.tok_embeddings, mesh=mesh)
    fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


@on_ranks(2)
def test_fsdp2():
    """The units are torchtitan's: the norm and the head are one."""
    mesh = dist.init_device_mesh("cpu", (2,))
    plain = model()
    mine = copy.deepcopy(plain)
    torch.manual_seed(dist.get_rank())
    data = batch()
    theirs = titan.ChunkedLossWrapper.Config(num_chunks=4)
    valid = torch.tensor(31)
    expected = step(fsdp(plain, mesh), theirs, *data, valid)
    same(step(fsdp(mine, mesh), FlceLoss.Config(), *data, valid), expected)


@on_ranks(1)
def test_a_split_head_is_refused():
    from torch.distributed.tensor import Shard, distribute_tensor

    head = torch.nn.Linear(H, V, bias=False)
    mesh = dist.init_device_mesh("cpu", (1,))
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    loss_fn = FlceLoss.Config().build()
    loss_fn.set_lm_head(head)
    with pytest.raises(TypeError, match="lm_head.weight: expected a plain tensor"):
        loss_fn(torch.zeros(B, L, H), torch.zeros(B, L, dtype=torch.int64))
