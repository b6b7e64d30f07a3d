"""The ways of train_parallel.py to divide a model over ranks, and its losses.

A case is a function of (sizes, loss, Ranks) that gives a Division: the parameters to optimise and
the forward and backward of a step.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import llama
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import flce


class Division(NamedTuple):
    """`step`: ids and labels of all sequences, (sequences, length) -> this rank's term of the mean
    loss, after its backward. The sum of the ranks' terms is the loss."""

    parameters: list
    step: Callable


class Ranks(NamedTuple):
    device: str
    dtype: torch.dtype
    rank: int
    ranks: int

    def mesh(self, **sizes):
        return _mesh(self.device, tuple(sizes.values()), tuple(sizes))


@functools.cache  # a mesh has communicators, which stay allocated
def _mesh(device, sizes, names):
    return dist.init_device_mesh(device, sizes, mesh_dim_names=names)


# ---- losses: the head's class, and the loss of a head, hidden states and labels ----


class WideHead(nn.Linear):
    """Logits in float32 from the start: the truth of the others."""

    def forward(self, x):
        return F.linear(x.float(), self.weight.float())


def of_logits(head, hidden, labels):
    # As transformers has it: F.cross_entropy of logits in bfloat16 would give a loss in bfloat16,
    # whose steps near ln(128256) are 1/16.
    return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten())


def fused(head, hidden, labels, **options):
    return head(hidden, labels, **options)


class Loss(NamedTuple):
    head: type
    of: Callable
    style: Callable  # of the head, where the vocabulary is divided


def gathered_logits():
    return ColwiseParallel(output_layouts=Replicate())


LOSSES = {
    "plain": Loss(nn.Linear, of_logits, gathered_logits),
    "loss_parallel": Loss(
        nn.Linear, of_logits, functools.partial(ColwiseParallel, use_local_output=False)
    ),
    "flce": Loss(flce.LinearCrossEntropyHead, fused, flce.VocabParallelHead),
    "float32": Loss(WideHead, of_logits, gathered_logits),
}


def make_model(sizes, loss, ranks):
    """The whole model on each rank, with the same weights in every case. The largest shape, 16 GB,
    fits a GPU, and dividing frees it."""
    torch.manual_seed(0)
    chosen = LOSSES[loss]
    before = torch.get_default_dtype()
    torch.set_default_dtype(ranks.dtype)
    try:
        with torch.device(ranks.device):
            return llama.Decoder(sizes, chosen.head, chosen.of)
    finally:
        torch.set_default_dtype(before)


# ---- FSDP2, tensor parallelism, both ----


def divide_layers(model, mesh):
    """Heads and the feed-forward's inner dimension over the ranks; hidden states are whole on each.
    The input becomes a DTensor once for all of a block's projections, so that its gradient is
    summed once."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    whole = Replicate()
    attention = (whole, None, None)
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=attention, desired_input_layouts=attention, use_local_output=False
        ),
        "ffn": PrepareModuleInput(
            input_layouts=whole, desired_input_layouts=whole, use_local_output=False
        ),
        **{f"attention.{name}": columns for name in "qkv"},
        **{f"ffn.{name}": columns for name in ("gate", "up")},
        **{"attention.o": rows, "ffn.down": rows},
    }
    for layer in model.body.layers:
        parallelize_module(layer, mesh, plan)


def divide(model, mesh, loss, tied):
    divide_layers(model, mesh)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"head": LOSSES[loss].style(), "body.embedding": embedding})
    if tied:
        model.tie()


def shard(model, mesh, tied):
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh)
    head = [model.body.embedding, model.head] if tied else model.head
    # Gathered once: the backward begins with the head.
    fully_shard(head, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def plain_value(loss):
    """loss_parallel gives a DTensor."""
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def over_mesh(sizes, loss, ranks, dp, tp):
    """`dp` groups of ranks divide the sequences and the parameters, the `tp` ranks of each the
    heads, the feed-forward and the vocabulary."""
    mesh = ranks.mesh(dp=dp, tp=tp)
    model = make_model(sizes, loss, ranks)
    if tp > 1:
        divide(model, mesh["tp"], loss, sizes.tied)
    if dp > 1:
        shard(model, mesh["dp"], sizes.tied)
    group = ranks.rank // tp

    def step(ids, labels):
        own = ids.chunk(dp)[group], labels.chunk(dp)[group]
        with loss_parallel() if loss == "loss_parallel" else contextlib.nullcontext():
            value = model(*own)
            value.backward()
        return plain_value(value) / ranks.ranks  # the ranks of a group have the same

    return Division(list(model.parameters()), step)


def fsdp(sizes, loss, ranks):
    return over_mesh(sizes, loss, ranks, ranks.ranks, 1)


def tp(sizes, loss, ranks):
    return over_mesh(sizes, loss, ranks, 1, ranks.ranks)


def fsdp_tp(sizes, loss, ranks):
    return over_mesh(sizes, loss, ranks, ranks.ranks // 2, 2)


# ---- context parallelism ----


class GatheredAttention:
    """Of this rank's part of a sequence to itself and the parts before it, whose keys and values
    are gathered: on CPUs, where torch's context_parallel has no kernel."""

    def __init__(self, mesh):
        self.mesh, self.rank = mesh, mesh.get_local_rank()

    def __call__(self, q, k, v):
        from torch.distributed import _functional_collectives as collectives
        from torch.nn.attention.bias import causal_lower_right

        # torch 2.13 renames the function.
        newer = getattr(collectives, "all_gather_single_autograd", None)
        gather = newer or collectives.all_gather_tensor_autograd
        length = q.shape[2]
        both = torch.stack((k, v)).contiguous()
        both = gather(both, 3, self.mesh)[:, :, :, : (self.rank + 1) * length]
        mask = causal_lower_right(length, both.shape[3])
        return F.scaled_dot_product_attention(q, *both, attn_mask=mask)


@contextlib.contextmanager
def ring(mesh, *buffers):
    """This rank's part of each of the buffers, whose sequence is the last dimension, and attention
    over the parts of all ranks."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    own = [buffer.clone() for buffer in buffers]
    dims = [buffer.dim() - 1 for buffer in buffers]
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with (
        sdpa_kernel(kernels),
        context_parallel(mesh, buffers=own, buffer_seq_dims=dims, no_restore_buffers=set(own)),
    ):
        yield own


@contextlib.contextmanager
def parts(mesh, *buffers):
    yield [one.chunk(mesh.size(), -1)[mesh.get_local_rank()] for one in buffers]


def context(sizes, loss, ranks):
    """Each rank has a part of every sequence. FSDP2 averages the gradients over the same ranks."""
    mesh = ranks.mesh(context=ranks.ranks)
    model = make_model(sizes, loss, ranks)
    divided = ring if ranks.device == "cuda" else parts
    if divided is parts:
        for layer in model.body.layers:
            layer.attention.attend = GatheredAttention(mesh)
    shard(model, mesh, sizes.tied)
    group = mesh.get_group()

    def step(ids, labels):
        positions = torch.arange(ids.shape[1], device=ids.device)
        with divided(mesh, ids, labels, positions) as (own_ids, own_labels, own_positions):
            if loss == "flce":
                count = flce.num_items(own_labels, group, averaged_over=ranks.ranks)
                model.loss_of = functools.partial(fused, num_items=count)
            value = model(own_ids, own_labels, own_positions)
            value.backward()
        return plain_value(value) / ranks.ranks

    return Division(list(model.parameters()), step)


# ---- the last stage of a pipeline ----


def pipeline(sizes, loss, ranks):
    """A stage of the layers on each rank, a micro-batch of each sequence. The last stage gives
    hidden states, and the schedule's loss function has the head: weights are not tied."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = make_model(sizes._replace(tied=False), loss, ranks)
    body, first, last = model.body, ranks.rank == 0, ranks.rank == ranks.ranks - 1
    ends = [sizes.layers * one // ranks.ranks for one in range(ranks.ranks + 1)]
    body.layers = body.layers[ends[ranks.rank] : ends[ranks.rank + 1]]
    if not first:
        body.embedding = None
    if not last:
        body.norm = model.head = None
    stage = PipelineStage(body, ranks.rank, ranks.ranks, torch.device(ranks.device))
    schedule = None

    def step(ids, labels):
        nonlocal schedule
        if schedule is None:
            loss_fn = functools.partial(model.loss_of, model.head)
            schedule = Schedule1F1B(stage, len(ids), loss_fn=loss_fn)
        losses = []
        inputs = (ids,) if first else ()
        schedule.step(*inputs, **({"target": labels, "losses": losses} if last else {}))
        return torch.stack(losses).detach().mean() if last else torch.zeros((), device=ids.device)

    return Division(list(model.parameters()), step)


class Case(NamedTuple):
    divide: Callable
    losses: tuple
    name: str


MESHED = ("plain", "loss_parallel", "flce")
CASES = {
    "fsdp": Case(fsdp, ("plain", "flce"), "FSDP2"),
    "tp": Case(tp, MESHED, "tensor parallelism"),
    "fsdp-tp": Case(fsdp_tp, MESHED, "FSDP2 x tensor parallelism of 2"),
    "context": Case(context, ("plain", "flce"), "context parallelism"),
    "pipeline": Case(pipeline, ("plain", "flce"), "pipeline"),
}


def lacking(case, sizes, ranks):
    """What a case needs and has not, as a text; None if it can run."""
    if case == "fsdp-tp" and (ranks < 4 or ranks % 2 > 0):
        return "an even number of ranks, at least 4"
    if case == "tp" and sizes.kv_heads % ranks > 0:
        return f"a divisor of {sizes.kv_heads} heads as the number of ranks"
    if case == "pipeline" and not 1 < ranks <= sizes.layers:
        return f"2 to {sizes.layers} ranks"
    return None
