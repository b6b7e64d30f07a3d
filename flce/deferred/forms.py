"""Logits whose classes are not the last dimension: they are the second one for F.cross_entropy, as
(B, classes, T), or split into groups that have a loss each, as (..., groups, classes).

Only what leads to a loss is deferred; everything else makes the real logits.
"""

import torch
import torch.nn.functional as F

from . import steps
from .loss import cross_entropy
from .node import Node


class ClassesSecond:
    """(B, V, T) of a record of (B, T, V)."""

    @staticmethod
    def shape(shape):
        return shape[0], shape[2], shape[1]


class SplitClasses:
    """(..., groups, V / groups) of a record of (..., V)."""

    def __init__(self, groups):
        self.groups = groups

    def shape(self, shape):
        return *shape[:-1], self.groups, shape[-1] // self.groups


def transpose(node, args, kwargs):
    """z.transpose(1, 2) and its like of three dimensions."""
    dims = (*args[1:], *kwargs.values())
    is_known = len(node.record.shape) == 3 and len(dims) == 2
    if not is_known or {dim % 3 for dim in dims if isinstance(dim, int)} != {1, 2}:
        return NotImplemented
    return node.alias(node.record, lambda z: z.transpose(1, 2), False, ClassesSecond())


def permute(node, args, kwargs):
    dims = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if kwargs or tuple(dims) not in ((0, 2, 1), (0, -1, 1), (0, -1, -2)):
        return NotImplemented
    return transpose(node, (args[0], 1, 2), {})


def split_classes(node, shape):
    """node.view(*shape, ...) where that splits the classes into groups of equal size."""
    old = node.record.shape
    is_known = len(shape) >= 3 and all(isinstance(size, int) and size > 0 for size in shape)
    if not is_known or tuple(shape[:-2]) != tuple(old[:-1]) or shape[-2] * shape[-1] != old[-1]:
        return NotImplemented
    return node.alias(node.record, lambda z: z.view(shape), True, SplitClasses(shape[-2]))


def _loss_of_classes_second(node, args, kwargs):
    """F.cross_entropy((B, V, T), target (B, T)): that of the rows (B T, V)."""
    target = args[1] if len(args) > 1 else kwargs.get("target")
    batch, length, _ = node.record.shape
    if not isinstance(target, torch.Tensor) or target.shape != (batch, length):
        return NotImplemented
    rows = Node(node.call, node.record.of_rows(lambda x: x.flatten(0, 1)))
    options = {name: value for name, value in kwargs.items() if name != "target"}
    loss = cross_entropy(rows, (args[0], target.flatten(), *args[2:]), options)
    return loss.view(batch, length) if loss is not NotImplemented and loss.dim() else loss


def _group(node, args, kwargs):
    """z[..., group, :], with slices of the rows."""
    shape, index = node.form.shape(node.record.shape), args[1]
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in index if not isinstance(item, torch.Tensor)]:
        at = next(i for i, item in enumerate(index) if item is Ellipsis)
        index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + 1)
    is_known = len(index) == len(shape) and index[-1] == slice(None)
    is_known = is_known and all(isinstance(item, slice) for item in index[:-2])
    if not is_known or not isinstance(index[-2], int) or isinstance(index[-2], bool):
        return NotImplemented
    size, rows = shape[-1], tuple(index[:-2])
    start = range(node.form.groups)[index[-2]] * size
    record = node.record.of_rows(lambda x: x[rows])
    cut = steps.Step(steps.CLASSES, (start, start + size), lambda z: z[..., start : start + size])
    index = args[1]
    return node.alias(record.then(cut, classes=size), lambda z: z[index], False)


HANDLERS = {
    (ClassesSecond, F.cross_entropy): _loss_of_classes_second,
    (SplitClasses, torch.Tensor.__getitem__): _group,
}
