"""Heads of transformers' tensor parallelism: an nn.Linear whose weight is a DTensor sharded by
classes, and whose `forward` gathers the logits. Their losses are computed without that."""

from ..validate import is_dtensor
from . import steps

# transformers' names of the styles that take whole rows and give whole logits, plain Tensors.
_TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"
_GATHERING_STYLES = ("colwise_gather_output", "colwise_rep")


def gathering_linears(model):
    """{nn.Linear: the `forward` that transformers has set} for those in the model whose style in a
    `tp_plan` is one of _GATHERING_STYLES. A plan names what PEFT has put into a `base_layer`."""
    forwards = {}
    for planned in model.modules():
        plan = getattr(planned, "tp_plan", None)
        names = {name for name, style in (plan or {}).items() if style in _GATHERING_STYLES}
        for name, module in planned.named_modules() if names else ():
            forward = module.__dict__.get("forward")
            is_style = getattr(forward, "__module__", None) == _TENSOR_PARALLEL
            if is_style and name.removesuffix(".base_layer") in names:
                forwards[module] = forward
    return forwards


def is_sharded(source):
    """Whether the weight, inside the Module's hooks, is that of a fused head of this kind."""
    weight, gathers = source.parameters()[0], "_flce_gathering_forward" in source.linear.__dict__
    is_on_one_axis = gathers and is_dtensor(weight) and weight.device_mesh.ndim == 1
    return is_on_one_axis and weight.placements[0].is_shard(0)


def unsupported(record, fuse_options, has_probabilities):
    """Why a loss of the record needs the gathered logits; None if it does not."""
    what = "a vocabulary sharded over ranks"
    if len(record.sources) > 1:
        return f"{what}, with an adapter"
    if steps.kinds(record.steps) & {steps.BIAS, steps.CLASSES} or has_probabilities:
        return f"{what}, with a bias, a slice of the classes or probabilities"
    if fuse_options.get("accumulate_into"):
        return f"accumulate_into with {what}"
    return None


def replicated(x, weight):
    """x as the input of linear_cross_entropy with `weight`: the same rows on every rank."""
    if not is_dtensor(weight):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
