"""DTensor operands of `linear_cross_entropy`: their local parts, and the VocabParallel that follows
from their placements."""

import torch

from .. import validate
from ..validate import is_dtensor

_ROWS = ("input", "adapter_input")
_CLASSES = ("linear_weight", "linear_bias", "adapter_weight")
_OPERANDS = ("input", "linear_weight", "target")
# The tensors among the options.
_OPTIONS = ("linear_bias", "adapter_input", "adapter_weight", "weight", "token_weight")
_OPTIONS += ("temperature", "num_items", "cu_seqlens", "gradient_seed")

_REMEDIES = (
    "FSDP shards a weight over ranks with different tokens, so a sharded weight alone says nothing "
    "about the vocabulary. Call the Module, whose hooks gather the weight "
    "(flce.LinearCrossEntropyHead, or the model after flce.fuse); or call head.unshard() or "
    "torch.distributed.fsdp.register_fsdp_forward_method first; or, where the ranks have the same "
    "tokens, pass input too as a DTensor on the mesh of linear_weight, or to_local() operands with "
    "vocab_parallel=flce.VocabParallel(...)"
)


def _shown(value):
    if not is_dtensor(value):
        return "a plain tensor" if isinstance(value, torch.Tensor) else repr(value)
    placements = ", ".join(map(repr, value.placements))
    return f"a DTensor with the placements ({placements}) on {value.device_mesh}"


def _check_call(given, settings):
    """Refuses calls whose placements do not say how the vocabulary is sharded, or that also give
    vocab_parallel."""
    weight, input = given["linear_weight"], given["input"]
    if settings.get("vocab_parallel") is not None:
        which = next(name for name, value in given.items() if is_dtensor(value))
        got = f"{settings['vocab_parallel']!r} with a DTensor as {which}"
        validate.refuse("vocab_parallel", "None with DTensors, or to_local() operands", got)
    if not is_dtensor(weight):
        which = next(name for name, value in given.items() if is_dtensor(value))
        expected = f"a DTensor with the placement Shard(dim=0), as {which} is a DTensor"
        validate.refuse("linear_weight", expected, _shown(weight))
    if not is_dtensor(input):
        expected = "a plain tensor, as input is one"
        validate.refuse("linear_weight", expected, f"{_shown(weight)}. {_REMEDIES}")
    if weight.device_mesh.ndim != 1:
        expected = "a DTensor on a mesh of one dimension, that of the vocabulary"
        validate.refuse("linear_weight", expected, f"{_shown(weight)}. {_REMEDIES}")
    accumulates = settings.get("accumulate_into") is not None and weight.requires_grad
    if accumulates and torch.is_grad_enabled():
        got = f"{_shown(weight)}; use accumulate_into=None"
        validate.refuse("accumulate_into", "a plain tensor as linear_weight", got)


def _local(name, value, mesh, allowed):
    """The local part of `value`, whose gradient has its placement."""
    if value.device_mesh != mesh or value.placements not in [(one,) for one in allowed]:
        expected = " or ".join(map(repr, allowed))
        expected = f"a DTensor with the placement {expected} on {mesh}, that of linear_weight"
        validate.refuse(name, expected, _shown(value))
    return value.to_local(grad_placements=value.placements)


def _input_is_sharded(input, placements, ranks):
    """Whether `input` is sharded by tokens; the shares have to be equal."""
    if not placements[0].is_shard():
        return False
    if input.dim() < 2 or input.shape[0] % ranks != 0:
        expected = f"a first dimension that {ranks} ranks share equally, with Shard(dim=0)"
        validate.refuse("input", expected, f"shape {tuple(input.shape)}")
    return True


def local_call(name, operands, settings):
    """`operands` and `settings` of a call with DTensors as those of a call with vocab_parallel."""
    from torch.distributed.tensor import Replicate, Shard

    from .parallel import VocabParallel

    if name == "cross_entropy":
        expected = "a plain tensor, as full_tensor() makes it, or the head's loss of its labels"
        validate.refuse("logits", expected, "a DTensor", TypeError)
    given = dict(zip(_OPERANDS, operands, strict=True))
    given |= {name: settings.get(name) for name in _OPTIONS}
    _check_call(given, settings)
    input, weight = given["input"], given["linear_weight"]
    mesh, vocab, tokens = weight.device_mesh, weight.shape[0], input.placements
    sharded, whole = Shard(0), Replicate()
    local = {}
    for name, value in given.items():
        if name in _CLASSES:
            allowed = (sharded,)
        elif name in _ROWS:
            allowed = (whole, sharded) if name == "input" else tokens
        else:
            allowed = (whole,)
        if is_dtensor(value):
            local[name] = _local(name, value, mesh, allowed)
            continue
        if value is not None and name in (*_CLASSES, *_ROWS):
            expected = f"a DTensor with the placement {' or '.join(map(repr, allowed))} or None"
            validate.refuse(name, expected, _shown(value))
        if value is not None:
            local[name] = value
    sequence = _input_is_sharded(input, tokens, mesh.size())
    local["vocab_parallel"] = VocabParallel(mesh, vocab=vocab, sequence=sequence)
    operands = tuple(local.pop(name) for name in _OPERANDS)
    return operands, {**settings, **local}
