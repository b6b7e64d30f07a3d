"""Builds the arguments of the inner operators (csrc/binding/op.cpp), which are positional."""

import torch

from flce.options import NUMBERS, OPTIONS, SHARDS, Settings
from flce.strategy import stat_dtype

TENSORS = 9  # of flce::forward: input ... num_items, seed
LOSS_TENSORS = 6  # of flce::cross_entropy_forward: logits ... num_items


def settings(
    save,
    *,
    reduction="mean",
    valid_vocab=None,
    rows=None,
    wants_entropy=False,
    wants_predictions=False,
    wants_statistics=False,
    max_memory=1 << 20,
    gradient="exact",
    grads=(True, True, False),
    dtype=torch.float32,
    frozen_hidden=0,
    **numbers,
):
    """The arguments after the tensors, for operands of `dtype` and exact logits. `numbers`: those
    of the loss that are not their default, 0.0 for None."""
    numbers = {name: OPTIONS[name].default or 0.0 for name in NUMBERS} | numbers
    grad_input, grad_weight, grad_bias = grads
    return Settings(
        valid_vocab=valid_vocab,
        rows=rows,
        reduction=reduction,
        ignore_index=-100,
        accum_dtype=dtype,
        logits_dtype=stat_dtype(dtype),
        save=save,
        max_memory=max_memory,
        gradient=gradient,
        dtype=dtype,
        frozen_hidden=frozen_hidden,
        wants_entropy=wants_entropy,
        wants_predictions=wants_predictions,
        wants_statistics=wants_statistics,
        saves_memory=False,
        grad_input=grad_input,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        allow_tf32=False,
        **dict.fromkeys(SHARDS, 0),
        group=None,
        **numbers,
    ).arguments()


def forward(x, w, target, save, *, bias=None, weight=None, token_weight=None, seed=None, **rest):
    return (x, w, target, bias, weight, token_weight, None, None, seed, *settings(save, **rest))


def backward(arguments, made, grad_output, grad_stats=None, **changed):
    """Runs the backward of a forward with `arguments` that returned `made`; `changed` replaces
    arguments by name."""
    stats, scalars, saved = (
        None if made[output] is None else made[output].detach() for output in (1, 2, 4)
    )
    given = {
        "grad_output": grad_output,
        "grad_stats": grad_stats,
        "stats": stats,
        "scalars": scalars,
        "saved": saved,
        **changed,
    }
    operands = arguments[: TENSORS - 2]
    kept = (given["stats"], given["scalars"], given["saved"])
    return (given["grad_output"], given["grad_stats"], *operands, *kept, *arguments[TENSORS:])


def cross_entropy_forward(logits, target, *, weight=None, reduction="mean", label_smoothing=0.0):
    lists = settings("nothing", reduction=reduction, label_smoothing=label_smoothing)[2:4]
    return (logits, target, weight, None, None, None, *lists)


def cross_entropy_backward(arguments, made, grad_output, **changed):
    stats, scalars = (tensor.detach() for tensor in made[1:3])
    given = {"grad_output": grad_output, "stats": stats, "scalars": scalars, **changed}
    operands = arguments[: LOSS_TENSORS - 1]
    kept = (given["stats"], given["scalars"])
    return (given["grad_output"], None, *operands, *kept, *arguments[LOSS_TENSORS:])
