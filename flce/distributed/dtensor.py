"""DTensor operands of `linear_cross_entropy`: their local parts, and the VocabParallel that follows
from their placements."""

import functools

import torch

from .. import validate
from ..validate import is_dtensor
from .parallel import VocabParallel

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


def _check_call(arguments, first):
    """Refuses calls whose placements do not say how the vocabulary is sharded, or that also give
    vocab_parallel. `first`: the name of the first DTensor."""
    weight, vocab_parallel = arguments["linear_weight"], arguments.get("vocab_parallel")
    if vocab_parallel is not None:
        got = f"{vocab_parallel!r} with a DTensor as {first}"
        validate.refuse("vocab_parallel", "None with DTensors, or to_local() operands", got)
    if not is_dtensor(weight):
        expected = f"a DTensor with the placement Shard(dim=0), as {first} is a DTensor"
        validate.refuse("linear_weight", expected, shown(weight))
    whole = not is_dtensor(arguments["input"])
    if whole or weight.device_mesh.ndim != 1:
        on_mesh = "a DTensor on a mesh of one dimension, that of the vocabulary"
        expected = "a plain tensor, as input is one" if whole else on_mesh
        validate.refuse("linear_weight", expected, f"{shown(weight)}. {_REMEDIES}")
    accumulates = arguments.get("accumulate_into") is not None and weight.requires_grad
    if accumulates and torch.is_grad_enabled():
        got = f"{shown(weight)}; use accumulate_into=None"
        validate.refuse("accumulate_into", "a plain tensor as linear_weight", got)


def _of_dimensions(placement, count):
    """The placement; a Shard of a dimension counted from the end with that from 0 on."""
    from torch.distributed.tensor import Shard

    counts = type(placement) is Shard and placement.dim < 0
    return Shard(placement.dim + count) if counts else placement


def _allowed_placements(input):
    """({name: the placements that a DTensor of that name may have, on the mesh of linear_weight},
    those of any other name). `input`: a DTensor."""
    from torch.distributed.tensor import Replicate, Shard

    whole, sharded = Replicate(), Shard(0)
    allowed = {"input": (whole, sharded)}
    allowed |= dict.fromkeys(("adapter_input", "teacher_input"), input.placements)
    allowed |= dict.fromkeys(("linear_weight", "linear_bias", "adapter_weight"), (sharded,))
    allowed |= dict.fromkeys(("teacher_weight", "teacher_bias"), (whole, sharded))
    allowed["teacher_logits"] = (whole, Shard(-1))  # as a head with a sharded weight gives them
    return allowed, (whole,)


def _check_placement(name, value, mesh, allowed, by_default):
    """`allowed`, `by_default`: as _allowed_placements returns them."""
    # What has to be a DTensor; a teacher may be one.
    fits = value is None or name not in allowed or name.startswith("teacher")
    placements = allowed.get(name, by_default)
    if is_dtensor(value):
        placements = [_of_dimensions(placement, value.dim()) for placement in placements]
        actual = tuple(_of_dimensions(placement, value.dim()) for placement in value.placements)
        fits = value.device_mesh == mesh and actual in [(placement,) for placement in placements]
    if not fits:
        expected = f"a DTensor with the placement {' or '.join(map(repr, placements))} on {mesh}"
        validate.refuse(name, f"{expected}, that of linear_weight", shown(value))


def _local(value, has_adapter):
    """The local part of a DTensor; any other value itself."""
    if not is_dtensor(value):
        return value
    local = value.to_local(grad_placements=value.placements)
    if local.requires_grad and has_adapter:
        # A gradient of columns: torch < 2.13 replicates one of other strides.
        local.register_hook(_contiguous)
    return local


def local_call(function, operands, options):
    """The operands and options of a call with DTensors as those of a call with vocab_parallel.
    `function`: a functional.PublicFunction."""
    tensors = function.named(operands, options)
    arguments = tensors | options
    first = next(name for name, value in arguments.items() if is_dtensor(value))
    if function.operator == "cross_entropy":
        expected = "a plain tensor, as full_tensor() makes it, or the head's loss of its labels"
        validate.refuse(first, expected, "a DTensor", TypeError)
    _check_call(arguments, first)
    input, weight = arguments["input"], arguments["linear_weight"]
    mesh, has_adapter = weight.device_mesh, arguments.get("adapter_weight") is not None
    allowed, local = _allowed_placements(input), {}
    for name, value in arguments.items():
        _check_placement(name, value, mesh, *allowed)
        local[name] = _local(value, has_adapter)
    sequence, ranks = input.placements[0].is_shard(), mesh.size()
    if sequence and (input.dim() < 2 or input.shape[0] % ranks != 0):
        expected = f"a first dimension that {ranks} ranks share equally, with Shard(dim=0)"
        validate.refuse("input", expected, f"shape {tuple(input.shape)}")
    options = {name: local[name] for name in options}
    options["vocab_parallel"] = VocabParallel(mesh, vocab=weight.shape[0], sequence=sequence)
    return tuple(local[name] for name in tensors), options
