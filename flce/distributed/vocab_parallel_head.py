"""`VocabParallelHead`: the ParallelStyle of a head whose vocabulary is sharded. Imported on first
access, because torch.distributed.tensor takes long to import."""

import functools

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .. import validate
from ..modules import LinearCrossEntropyHead, LinearCrossEntropyLoss
from ..validate import is_dtensor
from .dtensor import shown


class VocabParallelHead(ParallelStyle):
    """Divides the vocabulary of a `LinearCrossEntropyHead` or `LinearCrossEntropyLoss`:
    ``parallelize_module(model, tp_mesh, {"lm_head": flce.VocabParallelHead()})``.

    Weight and bias become DTensors with Shard(0), and so do their gradients. A call with labels
    takes the input and the labels of all tokens on every rank and gives the whole loss on every
    rank, plain. A call without labels gives the logits as a DTensor with Shard(-1), of which
    ``full_tensor()`` is the whole. A parameter that is a DTensor with Shard(0) on the mesh already
    is left unchanged. Any other is replaced by a new Parameter, which unties a shared weight; to
    tie it again, before fully_shard, set ``model.lm_head.weight = model.embedding.weight`` of an
    embedding with ``RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())``.

    Args:
        sequence: the plain input is this rank's equal share of the tokens along its first
            dimension, and its gradient is too; labels are those of all tokens.

    Raises TypeError if `sequence` is no bool. parallelize_module raises TypeError if the Module is
    none of the two, and ValueError if the mesh has more than one dimension, a parameter is a
    DTensor of another kind, or the Module has the option vocab_parallel.

    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    >>> model = nn.ModuleDict({"lm_head": flce.LinearCrossEntropyHead(8, 16)})
    >>> model = parallelize_module(model, mesh, {"lm_head": flce.VocabParallelHead()})
    >>> model["lm_head"](torch.randn(5, 8), torch.arange(5)).shape
    torch.Size([])
    """

    def __init__(self, *, sequence: bool = False) -> None:
        super().__init__()
        self.sequence: bool = validate.check_flag("sequence", sequence)

    def _apply(self, module, device_mesh):
        if not isinstance(module, (LinearCrossEntropyHead, LinearCrossEntropyLoss)):
            expected = "a flce.LinearCrossEntropyHead or LinearCrossEntropyLoss"
            validate.refuse("VocabParallelHead", expected, type(module).__name__, TypeError)
        if device_mesh.ndim != 1:
            validate.refuse("device_mesh", "one dimension, that of the vocabulary", device_mesh)
        if module.vocab_parallel is not None:
            validate.refuse("vocab_parallel", "None with VocabParallelHead", module.vocab_parallel)
        linear = module.linear if isinstance(module, LinearCrossEntropyLoss) else module
        for name, parameter in list(linear.named_parameters(recurse=False)):
            if not is_dtensor(parameter):
                source = {"src_data_rank": self.src_data_rank}
                sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], **source)
                sharded = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
                linear.register_parameter(name, sharded)
            elif parameter.device_mesh != device_mesh or parameter.placements != (Shard(0),):
                expected = f"a plain tensor, or a DTensor with Shard(dim=0) on {device_mesh}"
                validate.refuse(name, expected, shown(parameter))
        prepare = functools.partial(_with_distributed_input, device_mesh, self.sequence)
        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def __repr__(self):
        return f"VocabParallelHead(sequence={self.sequence})"


def _with_distributed_input(mesh, sequence, module, args, kwargs):
    """A forward pre-hook: makes the input, where it is plain, a DTensor on `mesh`."""
    input = args[0] if args else kwargs.get("input")
    if input is None:
        return args, kwargs
    if not is_dtensor(input):
        placement = Shard(0) if sequence else Replicate()
        input = DTensor.from_local(input, mesh, [placement], run_check=False)
    labels = args[1] if len(args) > 1 else kwargs.get("labels", kwargs.get("target"))
    if labels is None:
        # The product for the logits needs all rows on every rank.
        input = input.redistribute(placements=[Replicate()])
    return ((input, *args[1:]), kwargs) if args else (args, {**kwargs, "input": input})


# Pickles refer to the package, so that a class may move to another file.
VocabParallelHead.__module__ = __package__.rpartition(".")[0]
