"""FLCE_CHECK=1: every option and argument is compared in which the calls of ranks that divide the
vocabulary may not differ. On ranks over gloo."""

import functools
import inspect
import os
import unittest.mock

import torch

import flce
from flce.options import RETURNS
from harness.vocab_case import TOKENS, VOCAB, make
from harness.vocab_exchanges import raised
from harness.vocab_ranks import on

DTYPE = torch.bfloat16
# What may differ between ranks, and operands whose values are not compared.
NOT_COMPARED = {"input", "linear_weight", "target", "vocab_parallel", "gradient_seed"}
NOT_COMPARED |= {"valid_bound", "teacher_weight", "teacher_logits"}


def rows(*columns, dtype=DTYPE):
    return torch.ones(TOKENS, *columns, dtype=dtype)


def of_losses(shard):
    """By name: the options of rank 0 and of rank 1. `shard`: makes a tensor of a rank's classes."""
    sampled, offsets = {"gradient": "sampled"}, torch.tensor([0, TOKENS])
    adapter = {"adapter_input": rows(2), "adapter_weight": shard(2)}
    shifted, top = {"shift": 1, "cu_seqlens": offsets}, {"topk": 2}

    class Torchs:  # torch.nn.LinearCrossEntropyOptions
        acc_dtype, acc_policy, batch_chunk_size = torch.float32, "", None

    return {
        "linear_bias": ({}, {"linear_bias": shard()}),
        "adapter_input": ({}, adapter),
        "adapter_weight": ({}, adapter),
        "weight": ({}, {"weight": torch.ones(VOCAB)}),
        "reduction": ({}, {"reduction": "sum"}),
        "ignore_index": ({}, {"ignore_index": -1}),
        "label_smoothing": ({}, {"label_smoothing": 0.1}),
        "options": ({}, {"options": Torchs()}),
        "softcap": ({"softcap": 3.0}, {"softcap": 4.0}),
        "logit_scale": ({}, {"logit_scale": 0.5}),
        "temperature": ({}, {"temperature": 0.5}),
        "z_loss": ({}, {"z_loss": 0.1}),
        "token_weight": ({}, {"token_weight": rows()}),
        "num_items": ({}, {"num_items": 3.0}),
        "shift": (shifted, {**shifted, "shift": 2}),
        "cu_seqlens": (shifted, {**shifted, "cu_seqlens": torch.tensor([0, 3, TOKENS])}),
        "valid_vocab": ({"valid_vocab": 41}, {"valid_vocab": 40}),
        "accum_dtype": ({}, {"accum_dtype": torch.float32}),
        "logits_dtype": ({}, {"logits_dtype": DTYPE}),
        "save": ({"save": "logits"}, {"save": "stats"}),
        "max_memory": ({"max_memory": 1 << 16}, {"max_memory": "128KiB"}),
        "accumulate_into": ({}, {"accumulate_into": "grad"}),
        "gradient": ({}, sampled),
        "gradient_eps": (sampled, {**sampled, "gradient_eps": 0.5}),
        "classes": (
            {"classes": rows(2, dtype=torch.int64)},
            {"classes": rows(1, dtype=torch.int32)},
        ),
        "topk": ({"topk": 2}, {"topk": 3}),
        **{name: ({}, {name: True}) for name in RETURNS},
        "return_entropy": ({"return_entropy": "detached"}, {"return_entropy": True}),
        "return_tail_lse": (top, {**top, "return_tail_lse": True}),
    }


def of_divergences(shard, target):
    logits, jsd = {"teacher_logits": rows(VOCAB)}, {"divergence": "jsd", "beta": 0.3}
    head = {"teacher_input": rows(3), "teacher_weight": shard(3)}
    return {
        "teacher_input": (head, {"teacher_input": rows(4), "teacher_weight": shard(4)}),
        "divergence": (logits, {**logits, "divergence": "reverse_kl"}),
        "beta": ({**logits, **jsd}, {**logits, **jsd, "beta": 0.4}),
        "hard_weight": (
            {**logits, "target": target},
            {**logits, "target": target, "hard_weight": 0.5},
        ),
        "teacher_bias": (head, {**head, "teacher_bias": shard()}),
        "teacher_softcap": (logits, {**logits, "teacher_softcap": 3.0}),
        "teacher_logit_scale": (logits, {**logits, "teacher_logit_scale": 0.5}),
        "teacher_temperature": (logits, {**logits, "teacher_temperature": 2.0}),
        # Of K classes of each row.
        "tail": ({}, {"tail": "renormalize"}),
    }


# What is named in place of an option that becomes another.
NAMED = {"adapter_input": "input", "adapter_weight": "input", "options": "accum_dtype"}
NAMED |= {"return_predictions": "wants_predictions", "return_accuracy": "wants_predictions"}
NAMED |= {"return_lse": "wants_lse", "return_tail_lse": "wants_tail"}
NAMED |= {"return_z_loss": "wants_statistics", "return_entropy": "entropy_gradient"}


@on(2)
def test_every_option_is_compared(ranks):
    case, classes = make(DTYPE, bias=False), ranks.classes(VOCAB)
    own, vp = ranks.divided(case), ranks.parallel(VOCAB)
    known = (torch.arange(3).expand(TOKENS, 3).contiguous(), rows(3).float() / 4)
    fewer = tuple(one[:, : 3 - ranks.rank].contiguous() for one in known)

    def shard(*columns):
        return torch.ones(VOCAB, *columns, dtype=DTYPE)[classes]

    def refuses(name, function, *operands, **options):
        w = own.linear_weight.clone().requires_grad_()
        w.main_grad = torch.zeros_like(w)
        call = functools.partial(function, own.input, w, *operands, vocab_parallel=vp, **options)
        raised(ranks, f"{name}: expected the same on all ranks, got ", ValueError, call)

    losses, divergences = of_losses(shard), of_divergences(shard, own.target)
    for function, compared in (
        (flce.linear_cross_entropy, losses.keys()),
        (flce.linear_divergence, losses.keys() | divergences.keys()),
    ):
        lacking = inspect.signature(function).parameters.keys() - compared - NOT_COMPARED
        ranks.note(not lacking, f"{function.__name__} has options that this test lacks: {lacking}")
    flce.linear_cross_entropy(own.input, own.linear_weight, own.target, vocab_parallel=vp)
    with unittest.mock.patch.dict(os.environ, FLCE_CHECK="1"):
        for name, options in losses.items():
            what = NAMED.get(name, name)
            refuses(what, flce.linear_cross_entropy, own.target, **options[ranks.rank])
        for name in ("reduction", "token_weight", "num_items", "z_loss", "softcap"):
            options = losses[name][ranks.rank]
            refuses(name, flce.linear_cross_entropy, known, **options)
        teacher = {"teacher_logits": (known[0], known[1].log())}
        for name, options in divergences.items():
            given = teacher if name == "tail" else {}
            refuses(name, flce.linear_divergence, **given, **options[ranks.rank])
        for name in ("divergence", "beta"):
            options = divergences[name][ranks.rank]
            refuses(name, flce.linear_divergence, **{**options, **teacher})
        for function, operands in ((flce.linear_logprobs_at, fewer[:1]),
                                   (flce.linear_cross_entropy, (fewer,))):  # fmt: skip
            refuses("ids", function, *operands)
        refuses("ids", flce.linear_divergence, teacher_logits=(fewer[0], fewer[1].log()))
        one = (flce.linear_cross_entropy, flce.linear_logprobs_at)[ranks.rank]
        refuses("call", one, (own.target, known[0])[ranks.rank])
    ranks.compare(make())
