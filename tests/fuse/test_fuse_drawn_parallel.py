"""flce.fuse on drawn training loops of two ranks, under DistributedDataParallel, FSDP2 and FSDP1:
losses, logits and weights after some steps are those without flce.fuse. FLCE_DRAWS sets the number
of loops."""

import os
import random
import typing
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import flce
from harness.fuse_compare import OwnLoss
from harness.processes import on_ranks
from harness.tiny_models import HIDDEN, VOCAB, equal, whole

DRAWS = int(os.environ.get("FLCE_DRAWS", "10"))
LENGTH = 6


class Parts(nn.Module):
    """Embedding, body, norm, head; the loss inside of the forward where labels are given."""

    def __init__(self, loop):
        super().__init__()
        generator = torch.Generator().manual_seed(loop.seed)
        self.embedding, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.lm_head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=loop.has_bias)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        if loop.is_tied:
            self.lm_head.weight = self.embedding.weight
        self.loop = loop

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        x = self.norm(x + torch.tanh(self.body(x)))
        logits = self.loop.change(self.lm_head(x))
        if labels is None:
            return x, logits
        return self.loop.loss_of(x, logits, labels), logits


class Loop(typing.NamedTuple):
    """A training loop. wrapper: "ddp", "fsdp" or "fsdp1"; options: of its call; mesh: the ranks
    that replicate, if any, and those that shard; unit: the Modules of the head's unit; part: "loss"
    of the logits, "auxiliary" terms of the hidden states and of the logits in addition, or a
    "function" of one's own; micro: backward passes of a step."""

    seed: int
    wrapper: str
    options: dict
    mesh: tuple
    unit: tuple
    is_tied: bool
    has_bias: bool
    when: str
    is_inside: bool
    part: str
    change: typing.Callable
    micro: int
    reads: bool
    save: str

    def loss_of(self, x, logits, labels):
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if self.part == "function":
            return OwnLoss.apply(logits, labels) + 0.1 * F.cross_entropy(logits, labels)
        loss = F.cross_entropy(logits, labels)
        if self.part == "auxiliary":
            loss = loss + 0.01 * x.square().mean() + 0.01 * logits.logsumexp(-1).square().mean()
        return loss


CHANGES = [lambda z: z, lambda z: z / 1.5, lambda z: torch.tanh(z / 5) * 5, lambda z: z.float()]


def drawn_loop(seed):
    draw = random.Random(seed)
    wrapper = draw.choice(["ddp", "fsdp", "fsdp", "fsdp1"])
    is_tied = draw.random() < 0.3
    units = [("lm_head",), ("norm", "lm_head"), ("body", "norm", "lm_head"), ()]
    if is_tied:  # FSDP2 takes a shared weight into one unit
        units = [("embedding", "lm_head"), ("embedding", "norm", "lm_head"), ()]
    options = {"reshard_after_forward": draw.choice([True, False])}
    if wrapper == "ddp":
        choices = [{}, {"static_graph": True}, {"find_unused_parameters": True}]
        options = {**draw.choice(choices), "gradient_as_bucket_view": draw.random() < 0.5}
    if wrapper == "fsdp1":
        options = {"use_orig_params": draw.random() < 0.5}
        units = [()] if is_tied else [(), ("lm_head",)]
    is_inside = draw.random() < 0.6
    return Loop(
        seed=seed,
        wrapper=wrapper,
        options=options,
        mesh=draw.choice([(2,), (2,), (1, 2), (2, 1)]),
        unit=draw.choice(units),
        is_tied=is_tied,
        has_bias=draw.random() < 0.3,
        when="labels" if is_inside and draw.random() < 0.5 else "always",
        is_inside=is_inside,
        part=draw.choice(["loss", "loss", "auxiliary", "function"]),
        change=draw.choice(CHANGES),
        micro=draw.choice([1, 1, 2]),
        # FSDP1's root frees its weights in the backward: logits that are read later are refused.
        reads=draw.random() < 0.4 and wrapper != "fsdp1",
        save=draw.choice(["grads", "stats"]),
    )


def wrapped(model, loop):
    if loop.wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, **loop.options)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if loop.wrapper == "fsdp1":
        policy = lambda module, recurse, **_: recurse or module is model.lm_head  # noqa: E731
        policy = {"auto_wrap_policy": policy} if loop.unit else {}
        options = {**loop.options, **policy, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, **options)
    names = ("replicate", "shard")[-len(loop.mesh) :]
    mesh = torch.distributed.init_device_mesh("cpu", loop.mesh, mesh_dim_names=names)
    modules = [getattr(model, name) for name in loop.unit]
    if modules:
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **loop.options)
    fully_shard(model, mesh=mesh)
    return model


def trained(loop, is_fused):
    """(losses and logits, weights)"""
    model, rank, made = Parts(loop), torch.distributed.get_rank(), []
    if is_fused:
        flce.fuse(model, when=loop.when, save=loop.save)
    called = wrapped(model, loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(2 * loop.seed + rank)
    for _ in range(3):
        for _ in range(loop.micro):
            ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
            loss, logits = called(ids, ids) if loop.is_inside else called(ids)
            if not loop.is_inside:
                loss = loop.loss_of(loss, logits, ids)
            loss.backward()
            made += [loss.detach(), *([logits.detach() + 0] if loop.reads else [])]
        optimizer.step()
        optimizer.zero_grad()
    # A rank may have no part of a weight in FSDP1's flat parameters.
    return made, [whole(p.detach()) for p in model.parameters() if p.numel()]


@on_ranks(2)
def test_drawn_loops(first=0):
    for seed in range(first, first + DRAWS):
        loop = drawn_loop(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected, got = (trained(loop, is_fused) for is_fused in (False, True))
            for one, other in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
                equal(one, other, 1e-4)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}\n{loop}") from error
