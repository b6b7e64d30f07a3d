"""The targets that a loss counts: after a shift, and their number over micro-batches and ranks."""

import math
import typing
from collections.abc import Sequence

import torch
from torch import Tensor

from . import torch_private, validate
from .packing import ignore_index_of

if typing.TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def check_offsets(cu_seqlens):
    validate.check_tensor("cu_seqlens", cu_seqlens)
    is_vector = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 2
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or not is_vector:
        expected = "a vector of at least two torch.int32 or torch.int64 offsets"
        got = f"shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
        validate.refuse("cu_seqlens", expected, got)


def shifted_target(target, shift, cu_seqlens, ignore_index):
    """The target of each position: that `shift` later, `ignore_index` at a sequence's end.

    Sequences are slices along the last dimension of `target`; `cu_seqlens` adds boundaries to
    these. A `shift` of 0 is refused.
    """
    if shift == 0:
        validate.refuse("cu_seqlens", "None without a shift, whose ends it marks", "a tensor")
    if target.is_floating_point():
        validate.refuse("shift", "0 with probabilities, which a shift would have to copy", shift)
    if target.dim() < (2 if cu_seqlens is None else 1):
        expected = "an input of at least 3 dimensions, or of 2 and cu_seqlens"
        validate.refuse("shift", expected, f"an input of {target.dim() + 1} dimensions")
    # int64 also for an int32 target, because ignore_index may be any int64.
    shifted = torch.full_like(target, ignore_index, dtype=torch.int64)
    if shift < target.shape[-1]:
        shifted[..., :-shift] = target[..., shift:]
    if cu_seqlens is None:
        return shifted
    check_offsets(cu_seqlens)
    validate.check_same_device("cu_seqlens", cu_seqlens, "target", target)
    offsets = cu_seqlens.to(torch.int64)
    position = torch.arange(target.numel(), device=target.device)
    segment = torch.searchsorted(offsets, position, right=True)
    end = offsets[segment.clamp(max=offsets.shape[0] - 1)]
    # The target would lie beyond the sequence's end, or the position before the first offset.
    crosses = (position + shift >= end) | (segment == 0)
    return shifted.masked_fill(crosses.reshape(target.shape), ignore_index)


def _count(target, shift, cu_seqlens, ignore_index):
    """The number of valid targets, a 0-d tensor."""
    validate.check_tensor("targets", target)
    target = validate.local_replica("targets", target)
    if target.dtype not in (torch.int64, torch.int32):
        expected = "class indices of dtype torch.int64 or torch.int32"
        validate.refuse("targets", expected, target.dtype, TypeError)
    if shift != 0 or cu_seqlens is not None:
        target = shifted_target(target, shift, cu_seqlens, ignore_index)
    return (~validate.is_equal(target, ignore_index)).sum()


def num_items(
    targets: Tensor | Sequence[Tensor],
    group: "ProcessGroup | DeviceMesh | None" = None,
    *,
    averaged_over: float = 1,
    shift: int = 0,
    cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """The `num_items` with which the losses of micro-batches and ranks add up to one mean.

    ``loss = flce.linear_cross_entropy(..., num_items=flce.num_items(targets, group, ...))`` of each
    micro-batch on each rank: the gradients that result are those of the mean over all valid targets
    of the step. Nothing waits for the device.

    Args:
        targets: the targets of a micro-batch, or a list of those of all micro-batches of a step.
        group: over which the numbers are summed: the ranks that have different tokens (data and
            context parallel, not those that divide the vocabulary), a ProcessGroup or a DeviceMesh
            of one dimension. None: they are not summed.
        averaged_over: the number of ranks over which gradients are averaged, as
            DistributedDataParallel and FSDP do: their data-parallel size. 1 where they are summed.
        shift, ignore_index: as in the loss.
        cu_seqlens: as in the loss, or a list with one for each of `targets`.

    Returns:
        A 0-d float64 tensor on the targets' device: the number of valid targets divided by
        `averaged_over`.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value, by name.
        RuntimeError: a group without torch.distributed.

    >>> flce.num_items([torch.tensor([3, -100, 5]), torch.tensor([7])])
    tensor(3., dtype=torch.float64)
    """
    targets = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    if not targets:
        validate.refuse("targets", "at least one tensor", "none")
    offsets = cu_seqlens if isinstance(cu_seqlens, (list, tuple)) else [cu_seqlens] * len(targets)
    if len(offsets) != len(targets):
        validate.refuse("cu_seqlens", f"one for each of {len(targets)} targets", len(offsets))
    if not 0 < validate.check_number("averaged_over", averaged_over) < math.inf:
        validate.refuse("averaged_over", "a positive number", averaged_over)
    validate.check_integer("shift", shift, 0)
    ignore_index = ignore_index_of(ignore_index)
    total = 0
    for target, offset in zip(targets, offsets, strict=True):
        count = _count(target, shift, offset, ignore_index)
        validate.check_same_device("targets", count, "their first", targets[0])
        total = total + count
    if group is not None:
        name = process_group("flce.num_items", group).group_name
        total = torch_private.all_reduced(total, name)
    return total.to(torch.float64) / averaged_over


def process_group(caller, group):
    """The ProcessGroup of a group or of a DeviceMesh, to which this rank belongs."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        expected = "torch.distributed initialised: call init_process_group first"
        raise RuntimeError(f"{caller}: expected {expected}")
    if not isinstance(group, dist.ProcessGroup) and hasattr(group, "mesh_dim_names"):
        mesh = group
        if mesh.ndim != 1:
            validate.refuse("group", "a DeviceMesh of one dimension", f"{mesh.ndim} dimensions")
        if mesh.get_coordinate() is None:
            validate.refuse("group", "a DeviceMesh that this rank belongs to", mesh)
        group = mesh.get_group()
        # The mesh's tensor of ranks cannot be read while shapes are traced.
        if not torch.compiler.is_compiling() and torch_private.detect_fake_mode() is None:
            ranks, expected = mesh.mesh.tolist(), dist.get_process_group_ranks(group)
            if ranks != expected:
                validate.refuse("group", f"a DeviceMesh with the ranks {expected}", ranks)
    # What new_group() returns on ranks of other groups: get_rank() knows it.
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        expected = "a ProcessGroup or a DeviceMesh"
        validate.refuse("group", expected, type(group).__name__, TypeError)
    if dist.get_rank(group) < 0:
        validate.refuse("group", "a group that this rank belongs to", group)
    return group
