"""A user's script, for type checkers and to run: test_typing.py has each type that `assert_type`
states compared with the checkers' and with the value's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import Unpack, assert_type

import flce
import flce.integrations.torch
from flce import LinearCrossEntropyHead, LinearCrossEntropyOutput, Plan, TopLogprobs
from flce.fusion import Explanation, Fusion
from flce.integrations import cce, liger
from flce.integrations._rebind import Installation
from flce.integrations.liger import CrossEntropyOutput
from flce.options import Options, Save

x = torch.randn(4, 8, requires_grad=True)
w = torch.randn(16, 8, requires_grad=True)
y = torch.randint(16, (4,))
ids = torch.randint(16, (4, 2))


def losses(wants_lse: bool = False) -> None:
    loss = assert_type(flce.linear_cross_entropy(x, w, y, softcap=30.0), Tensor)
    torch.autograd.backward(loss)  # Tensor.backward has no types
    every = flce.linear_cross_entropy(
        x,
        w,
        y,
        linear_bias=torch.zeros(16),
        adapter_input=None,
        reduction="sum",
        temperature=torch.ones(4),
        valid_bound="count",
        accum_dtype=torch.float32,
        save="stats",
        max_memory="1MiB",
        classes=None,
    )
    assert_type(every, Tensor)
    probabilities = torch.full((4, 2), 0.5)
    assert_type(flce.linear_cross_entropy(x, w, (ids, probabilities)), Tensor)
    assert_type(flce.linear_cross_entropy(x, w, y, return_lse=False), Tensor)
    made = flce.linear_cross_entropy(x, w, y, return_lse=True, reduction="none")
    assert_type(made.loss, Tensor)
    assert_type(made.lse, Tensor)
    assert_type(made.entropy, Tensor | None)
    both = flce.linear_cross_entropy(x, w, y, return_lse=True, return_entropy=True, topk=2)
    assert_type(both.lse.exp(), Tensor)
    assert_type(both[0], Tensor)
    assert_type(flce.cross_entropy(torch.randn(4, 16), y, return_lse=True).lse, Tensor)
    detached = flce.linear_cross_entropy(x, w, y, return_entropy="detached", return_accuracy=True)
    assert_type(detached, LinearCrossEntropyOutput)
    assert_type(flce.linear_cross_entropy(x, w, y, topk=2), LinearCrossEntropyOutput)
    assert_type(flce.linear_cross_entropy(x, w, y, classes=ids), LinearCrossEntropyOutput)
    either = flce.linear_cross_entropy(x, w, y, return_z_loss=True, return_lse=wants_lse)
    assert_type(either, Tensor | LinearCrossEntropyOutput)
    assert_type(wrapped(x, return_lse=wants_lse), Tensor | LinearCrossEntropyOutput)
    logits = torch.randn(4, 16)
    assert_type(flce.cross_entropy(logits, y, z_loss=1e-4), Tensor)
    assert_type(flce.cross_entropy(logits, y, return_predictions=True), LinearCrossEntropyOutput)


def wrapped(hidden: Tensor, **options: Unpack[Options]) -> Tensor | LinearCrossEntropyOutput:
    save: Save = "logits"
    options["save"] = save
    return flce.linear_cross_entropy(hidden, w, y, **options)


def logprobs() -> None:
    assert_type(flce.linear_logprobs(x, w, y, temperature=0.7), tuple[Tensor, Tensor])
    assert_type(flce.linear_logprobs(x, w, y, entropy="detached"), tuple[Tensor, Tensor])
    assert_type(flce.linear_logprobs(x, w, y, entropy=None), tuple[Tensor, None])
    made = flce.linear_logprobs(x, w, y, return_topk=2)
    assert_type(made, tuple[Tensor, Tensor, TopLogprobs])
    assert_type(made[2].ids, Tensor)
    top = flce.linear_logprobs(x, w, y, entropy=None, return_topk=2)
    assert_type(top, tuple[Tensor, None, TopLogprobs])
    assert_type(flce.linear_logprobs_at(x, w, ids, valid_vocab=16), Tensor)


def negative(logprobs: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
    return -logprobs.sum()


def counted(logprobs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs.sum(), {"entropy": entropy.sum()}


def chunked_losses() -> None:
    assert_type(flce.linear_loss(x, w, y, negative, rows=2), Tensor)
    assert_type(flce.linear_divergence(x, w, x.detach(), w, beta=0.3, divergence="jsd"), Tensor)
    assert_type(flce.linear_loss(x, w, y, negative, entropy="detached"), Tensor)
    assert_type(flce.linear_loss(x, w, y, lambda logprobs, _, rows: -logprobs.sum()), Tensor)
    made = flce.linear_loss(x, w, y, counted, entropy="differentiable", accumulate_into=None)
    assert_type(made, tuple[Tensor, dict[str, Tensor]])
    offsets = torch.tensor([0, 2, 4])
    total = flce.linear_loss(x, w, y, lambda p, _, rows: (-p.sum(), 1.0), cu_seqlens=offsets)
    assert_type(total, tuple[Tensor, float])
    assert_type(flce.num_items([y, y], averaged_over=2), Tensor)


def modules() -> None:
    head = LinearCrossEntropyHead(8, 16, bias=False, softcap=30.0)
    assert_type(head(x), Tensor)
    assert_type(head(x, y, token_weight=torch.ones(4)), Tensor)
    assert_type(head(x, labels=y, return_lse=True).lse, Tensor)
    assert_type(head(x, labels=y, return_accuracy=True), LinearCrossEntropyOutput)
    labels: Tensor | None = y if head.out_features else None
    assert_type(head(x, labels), Tensor)
    assert_type(head(x, labels=labels, reduction="sum"), Tensor)
    assert_type(head.forward(x, y), Tensor | LinearCrossEntropyOutput)
    assert_type(head.softcap, float | None)
    head.temperature, head.save = 0.5, "stats"
    assert_type(head.weight, Tensor)
    loss = flce.LinearCrossEntropyLoss(8, 16, reduction="none", weight=torch.ones(16))
    assert_type(loss(x, y), Tensor)
    assert_type(loss(x, y, return_entropy=True), LinearCrossEntropyOutput)
    assert_type(loss(x, y, return_lse=True).lse, Tensor)
    assert_type(loss.linear, torch.nn.Linear)


def plans() -> None:
    made = flce.plan(4, 8, 16, device="cpu", dtype=torch.float32, save="stats", ranks=2)
    assert_type(made, Plan)
    assert_type(made.save, str)
    assert_type(made.peak_bytes, int)
    assert_type(made.buffers, dict[str, int])
    assert_type(made.collectives["statistics"].bytes, int)
    assert_type(str(made), str)
    assert_type(made.text, str)
    assert_type(made.as_dict(), dict[str, object])


def fusion() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16))
    fused = flce.fuse(model, head="0", when="always", save="stats")
    assert_type(fused, Fusion)
    assert_type(fused.losses["none"], int)
    fused.remove()
    with flce.fuse(model, [model[0]], when="always", strict=True) as handle:
        assert_type(handle, Fusion)
        assert_type(handle.model, torch.nn.Module | None)
        assert_type(handle.summary(), str)
        report = assert_type(flce.explain(model), Explanation)
    assert_type(report.heads, list[tuple[str, str]])
    assert_type(report.fallbacks, dict[str, int])
    print(report)


def replacements(wants: bool = True) -> None:
    assert_type(cce.linear_cross_entropy(x, w, y, softcap=30.0), Tensor)
    assert_type(cce.linear_cross_entropy(x, w, y, None, -100), Tensor | tuple[Tensor, Tensor])
    assert_type(cce.linear_cross_entropy(x, w, y, return_lse=True), tuple[Tensor, Tensor])
    assert_type(cce.LinearCrossEntropy(shift=0)(x, w, y), Tensor)
    assert_type(cce.LinearCrossEntropy(return_lse=True)(x, w, y), tuple[Tensor, Tensor])
    criterion = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=0, softcap=30.0)
    assert_type(criterion(w, x, y), Tensor)
    outputs = liger.LigerFusedLinearCrossEntropyLoss(return_z_loss=True)
    assert_type(outputs(w, x, y), CrossEntropyOutput)
    assert_type(outputs(w, x, y).z_loss, Tensor | None)
    either = liger.LigerFusedLinearCrossEntropyLoss(return_z_loss=wants)
    assert_type(either(w, x, y), Tensor | CrossEntropyOutput)
    assert_type(liger.liger_fused_linear_cross_entropy(x, w, y), Tensor)
    made = liger.liger_fused_linear_cross_entropy(x, w, y, return_token_accuracy=True)
    assert_type(made, CrossEntropyOutput)
    applied = liger.LigerFusedLinearCrossEntropyFunction.apply(x, w, y)
    assert_type(applied[0], Tensor)
    assert_type(flce.integrations.torch.linear_cross_entropy(x, w, y, reduction="sum"), Tensor)
    assert_type(flce.integrations.torch.LinearCrossEntropyLoss(8, 16)(x, y), Tensor)


def definitions() -> None:
    assert_type(flce.reference.linear_cross_entropy(x, w, y, softcap=30.0), Tensor)
    made = flce.reference.linear_cross_entropy(x, w, y, return_lse=True)
    assert_type(made, LinearCrossEntropyOutput)
    assert_type(flce.reference.cross_entropy(torch.randn(4, 16), y), Tensor)
    assert_type(flce.reference.linear_logprobs(x, w, y), tuple[Tensor, Tensor])
    assert_type(flce.__version__, str)
    assert_type(flce.integrations.cce.IMPLS, tuple[str, ...])


# ---- for type checkers alone: these need a process group or a framework ----


def of_groups(group: torch.distributed.ProcessGroup) -> None:
    shards = flce.VocabParallel(group, sequence=True, reduce_dtype=torch.float32)
    assert_type(shards.ranks, int)
    assert_type(flce.linear_cross_entropy(x, w, y, vocab_parallel=shards), Tensor)
    assert_type(flce.linear_logprobs(x, w, y, vocab_parallel=shards), tuple[Tensor, Tensor])
    LinearCrossEntropyHead(8, 8, vocab_parallel=shards)
    style: ParallelStyle = flce.VocabParallelHead(sequence=True)
    assert_type(flce.num_items(y, group), Tensor)
    print(style)


def of_frameworks() -> None:
    assert_type(flce.integrations.liger.install(), Installation)
    with flce.integrations.trl.install(entropy="detached") as handle:
        assert_type(handle.calls["flce"], int)
    for package in (flce.integrations.cce, flce.integrations.skyrl, flce.integrations.verl):
        package.install().remove()
    assert_type(flce.integrations.trl_distillation.install(torch.nn.Module), Installation)
    assert_type(flce.integrations.verl_distillation.install(), Installation)
    callback = flce.integrations.transformers.FuseCallback(when="always", max_memory="1GiB")
    assert_type(callback.handle, Fusion | None)
    criterion = flce.integrations.nemo.FlceLinearCrossEntropy(z_loss=1e-4)
    assert_type(criterion.forward(x, y, w, num_label_tokens=4), Tensor)
    flce.integrations.axolotl.FlcePlugin()
    print(flce.integrations.torchtitan.FlceLoss)


def of_mistakes(model: torch.nn.Module, head: LinearCrossEntropyHead) -> None:
    """Checkers refuse each line: they report an ignored error that is none."""
    flce.linear_cross_entropy(x, w, y, softcaps=30.0)  # type: ignore[call-overload]
    flce.linear_cross_entropy(x, w, y, save="nothing")  # type: ignore[call-overload]
    flce.linear_cross_entropy(x, w, y, vocab_parallel=model)  # type: ignore[call-overload]
    print(flce.linear_cross_entropy(x, w, y).lse)  # type: ignore[attr-defined]
    flce.cross_entropy(x, y, shift=1)  # type: ignore[call-overload]
    flce.linear_logprobs(x, w, y, entropy="none")  # type: ignore[call-overload]
    flce.linear_logprobs_at(x, w, ids, shift=1)  # type: ignore[call-arg]
    flce.linear_loss(x, w, y, counted)  # type: ignore[arg-type]
    cce.linear_cross_entropy(x, w, y, softcaps=30.0)  # type: ignore[call-overload]
    liger.LigerFusedLinearCrossEntropyLoss()(x, w)  # type: ignore[call-arg]
    flce.integrations.torch.linear_cross_entropy(x, w, y, None)  # type: ignore[call-arg]
    flce.integrations.trl.install(entropy="none")  # type: ignore[arg-type]
    flce.plan(4, 8, 16, vocab_parallel=None)  # type: ignore[call-arg]
    flce.fuse(model, when="never")  # type: ignore[arg-type]
    head.save = "nothing"  # type: ignore[assignment]
    head(x, y, softcaps=30.0)  # type: ignore[call-overload]
