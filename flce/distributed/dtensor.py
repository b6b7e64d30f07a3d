"""DTensor operands of `linear_cross_entropy`: their local parts, and the VocabParallel that follows
from their placements."""

import functools

import torch

from .. import validate
from ..validate import is_dtensor
from .parallel import VocabParallel

# From teacher_input on, of linear_divergence alone.
_OPERANDS = ("input", "linear_weight", "target", "teacher_input", "teacher_weight", "teacher_bias")
_OPERANDS += ("teacher_temperature", "numbers")
_contiguous = functools.partial(torch.clone, memory_format=torch.contiguous_format)
_REMEDIES = (
    "FSDP shards a weight over ranks with different tokens, so a sharded weight alone says nothing "
    "about the vocabulary. Call the Module, whose hooks gather the weight "
    "(flce.LinearCrossEntropyHead, or the model after flce.fuse); or call head.unshard() or "
    "torch.distributed.fsdp.register_fsdp_forward_method first; or, where the ranks have the same "
    "tokens, pass input too as a DTensor on the mesh of linear_weight, or to_local() operands with "
    "vocab_parallel=flce.VocabParallel(...)"
)


def shown(value):
    """`value` in the words of a refusal."""
    if not is_dtensor(value):
        return "a plain tensor" if isinstance(value, torch.Tensor) else repr(value)
    placements = ", ".join(map(repr, value.placements))
    return f"a DTensor with the placements ({placements}) on {value.device_mesh}"


def _check_call(given, first):
    """Refuses calls whose placements do not say how the vocabulary is sharded, or that also give
    vocab_parallel. `first`: the name of the first DTensor."""
    weight, vocab_parallel = given["linear_weight"], given.get("vocab_parallel")
    if vocab_parallel is not None:
        got = f"{vocab_parallel!r} with a DTensor as {first}"
        validate.refuse("vocab_parallel", "None with DTensors, or to_local() operands", got)
    if not is_dtensor(weight):
        expected = f"a DTensor with the placement Shard(dim=0), as {first} is a DTensor"
        validate.refuse("linear_weight", expected, shown(weight))
    whole = not is_dtensor(given["input"])
    if whole or weight.device_mesh.ndim != 1:
        on_mesh = "a DTensor on a mesh of one dimension, that of the vocabulary"
        expected = "a plain tensor, as input is one" if whole else on_mesh
        validate.refuse("linear_weight", expected, f"{shown(weight)}. {_REMEDIES}")
    accumulates = given.get("accumulate_into") is not None and weight.requires_grad
    if accumulates and torch.is_grad_enabled():
        got = f"{shown(weight)}; use accumulate_into=None"
        validate.refuse("accumulate_into", "a plain tensor as linear_weight", got)


def _of_dimensions(placement, count):
    """The placement; a Shard of a dimension counted from the end with that from 0 on."""
    from torch.distributed.tensor import Shard

    counts = type(placement) is Shard and placement.dim < 0
    return Shard(placement.dim + count) if counts else placement


def local_call(name, operands, settings):
    """`operands` and `settings` of a call with DTensors as those of a call with vocab_parallel."""
    from torch.distributed.tensor import Replicate, Shard

    names = ("logits", "target") if name == "cross_entropy" else _OPERANDS[: len(operands)]
    if len(operands) > 4 and operands[4] is None:
        names = tuple("teacher_logits" if one == "teacher_input" else one for one in names)
    given = dict(zip(names, operands, strict=True)) | settings
    first = next(one for one, value in given.items() if is_dtensor(value))
    if name == "cross_entropy":
        expected = "a plain tensor, as full_tensor() makes it, or the head's loss of its labels"
        validate.refuse(first, expected, "a DTensor", TypeError)
    _check_call(given, first)
    input, weight, *_ = operands
    mesh, whole, sharded = weight.device_mesh, Replicate(), Shard(0)
    # Of what has to be a DTensor; a teacher may be one. Others are the same on all ranks.
    placements = {"input": (whole, sharded)}
    placements |= dict.fromkeys(("adapter_input", "teacher_input"), input.placements)
    placements |= dict.fromkeys(("linear_weight", "linear_bias", "adapter_weight"), (sharded,))
    placements |= dict.fromkeys(("teacher_weight", "teacher_bias"), (whole, sharded))
    placements["teacher_logits"] = (whole, Shard(-1))  # as a head with a sharded weight gives them
    for name, value in given.items():
        allowed = placements.get(name, (whole,))
        fits = value is None or name not in placements or name.startswith("teacher")
        if is_dtensor(value):
            allowed = [_of_dimensions(one, value.dim()) for one in allowed]
            given_as = tuple(_of_dimensions(one, value.dim()) for one in value.placements)
            fits = value.device_mesh == mesh and given_as in [(one,) for one in allowed]
        if not fits:
            expected = f"a DTensor with the placement {' or '.join(map(repr, allowed))} on {mesh}"
            validate.refuse(name, f"{expected}, that of linear_weight", shown(value))
        if is_dtensor(value):
            given[name] = value.to_local(grad_placements=value.placements)
            if given[name].requires_grad and given.get("adapter_weight") is not None:
                # A gradient of columns: torch < 2.13 replicates one of other strides.
                given[name].register_hook(_contiguous)
    sequence, ranks = input.placements[0].is_shard(), mesh.size()
    if sequence and (input.dim() < 2 or input.shape[0] % ranks != 0):
        expected = f"a first dimension that {ranks} ranks share equally, with Shard(dim=0)"
        validate.refuse("input", expected, f"shape {tuple(input.shape)}")
    given["vocab_parallel"] = VocabParallel(mesh, vocab=weight.shape[0], sequence=sequence)
    return tuple(given.pop(name) for name in names), given
