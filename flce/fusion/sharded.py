"""Heads of transformers' tensor parallelism: an nn.Linear whose weight is a DTensor sharded by
classes, and whose `forward` gathers the logits. Their losses are computed without that."""

import inspect

from ..validate import is_dtensor
from . import steps


def gathering_forward(linear):
    """The `forward` that transformers has set, if it takes whole rows and gives plain logits."""
    forward = linear.__dict__.get("forward")
    if getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return None
    # transformers keeps the style in the closure of the forward that it sets, and nowhere else.
    style = inspect.getclosurevars(forward).nonlocals.get("self")
    layouts = [getattr(style, f"{name}_layouts", None) for name in ("input", "output")]
    is_whole = all(layout is not None and layout.is_replicate() for layout in layouts)
    is_whole = is_whole and getattr(style, "use_local_output", False)
    return forward if is_whole and type(style).__name__ == "ColwiseParallel" else None


def is_sharded(source):
    """Whether the weight, inside the Module's hooks, is that of a fused head of this kind."""
    weight, is_one = source.parameters()[0], "_flce_gathers" in source.linear.__dict__
    is_one = is_one and is_dtensor(weight) and weight.device_mesh.ndim == 1
    return is_one and weight.placements[0].is_shard(0)


def unsupported(record, chosen, has_probabilities):
    """Why a loss of the record needs the gathered logits; None if it does not."""
    what = "a vocabulary sharded over ranks"
    if len(record.sources) > 1:
        return f"{what}, with an adapter"
    if steps.kinds(record.steps) & {steps.BIAS, steps.CLASSES} or has_probabilities:
        return f"{what}, with a bias, a slice of the classes or probabilities"
    if chosen.get("accumulate_into"):
        return f"accumulate_into with {what}"
    return None


def replicated(x, weight):
    """x as the input of linear_cross_entropy with `weight`: the same rows on every rank."""
    if not is_dtensor(weight):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
