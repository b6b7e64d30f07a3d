"""Targets of shifted positions, and which rows are computed."""

import torch
from torch.compiler import is_compiling

from .validate import check_integer, check_same_device, check_tensor, checks_targets, refuse


def shifted_target(target, shift, cu_seqlens, ignore_index):
    """The target of each position: that `shift` further on, `ignore_index` at a sequence's end.

    Sequences are the last dimension of `target` and, with `cu_seqlens`, end there too.
    """
    check_integer("shift", shift, 0)
    if shift == 0:
        if cu_seqlens is not None:
            refuse("cu_seqlens", "None without a shift, whose ends it marks", "a tensor")
        return target
    if target.is_floating_point():
        refuse("shift", "0 with probabilities, which a shift would have to copy", shift)
    if cu_seqlens is None and target.dim() < 2:
        expected = "an input of at least 3 dimensions, or cu_seqlens"
        refuse("shift", expected, f"an input of {target.dim() + 1} dimensions")
    # Of a target in int32 too: ignore_index may be any int64.
    shifted = torch.full_like(target, ignore_index, dtype=torch.int64)
    if shift < target.shape[-1]:
        shifted[..., :-shift] = target[..., shift:]
    if cu_seqlens is None:
        return shifted
    return shifted.masked_fill(_crosses_end(target, shift, cu_seqlens), ignore_index)


def _crosses_end(target, shift, cu_seqlens):
    """Which positions have the end of their sequence before their target, or no sequence."""
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        got = f"shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
        refuse("cu_seqlens", "a vector of torch.int32 or torch.int64 offsets", got)
    if cu_seqlens.shape[0] < 2:
        expected = "at least two offsets, the begin and the end of a sequence"
        refuse("cu_seqlens", expected, cu_seqlens.shape[0])
    check_same_device("cu_seqlens", cu_seqlens, "target", target)
    offsets = cu_seqlens.to(torch.int64)
    position = torch.arange(target.numel(), device=target.device)
    segment = torch.searchsorted(offsets, position, right=True)
    end = offsets[segment.clamp(max=offsets.shape[0] - 1)]
    # Before the first offset there is no sequence either.
    return ((position + shift >= end) | (segment == 0)).reshape(target.shape)


def check_bound(valid_bound, has_probabilities):
    if valid_bound is None:
        return
    if not isinstance(valid_bound, str):
        check_integer("valid_bound", valid_bound, 0)
    elif valid_bound != "count":
        refuse("valid_bound", 'an int, "count" or None', repr(valid_bound))
    if has_probabilities:
        expected = "None with probabilities, of which no row is ignored"
        refuse("valid_bound", expected, repr(valid_bound))


def rows_to_compute(target, valid_bound, ignore_index):
    """How many rows are to be computed, None for all.

    On the CPU the rows that are not ignored, which are counted; on CUDA `valid_bound` of them.
    """
    has_probabilities = target.is_floating_point()
    check_bound(valid_bound, has_probabilities)
    if has_probabilities:
        return None
    if isinstance(valid_bound, str):
        valid_bound = int((target != ignore_index).sum())  # waits for the device
    # Without values to count (compile, export) the operator counts them itself.
    counts = target.is_cpu and type(target) is torch.Tensor and not is_compiling()
    if valid_bound is None and not counts:
        return None
    if counts or checks_targets(target.device):
        valid = int((target != ignore_index).sum())
        if valid_bound is not None and valid > valid_bound:
            expected = f"at least {valid}, the number of rows that are not ignored"
            refuse("valid_bound", expected, valid_bound)
    # A bound of 0 still computes a row, which carries the NaN if that row is not ignored.
    rows = valid if counts else max(valid_bound, 1)
    return rows if rows < target.shape[0] else None
