"""The table of operations that deferred logits record or answer.

A handler takes (function, node, args, kwargs), args[0] being the deferred value, and returns the
result, or NotImplemented where the operation is not one that it knows: the real logits are made
then. Shapes, dtypes and devices of results come from the function itself, of empty tensors.
"""

import copy
import math
import numbers

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from . import loss, steps
from .node import CLASSES_SECOND, CLASSES_SPLIT, Node, node_of

HANDLERS = {}  # {(class_layout of the node, function): (handler, number of arguments or None)}


def _handles(names, arity=None, class_layout=None):
    """The handler of torch's functions and Tensor's methods of these names. arity: the number of
    positional arguments without keywords that it knows; None: it checks them itself."""

    def register(handler):
        for name in names.split():
            for space in (torch.Tensor, torch):
                if callable(function := getattr(space, name, None)):
                    HANDLERS[class_layout, function] = handler, arity
        return handler

    return register


_DIVISIONS = {torch.Tensor.div, torch.div, torch.Tensor.true_divide, torch.true_divide}


@_handles("mul multiply div true_divide", arity=2)
def _scale(function, node, args, kwargs):
    number = args[1]
    if not steps.is_number(number):
        return NotImplemented
    factor = float(number)
    if function in _DIVISIONS:
        factor = 1 / factor if factor else math.inf
    if not steps.is_scale(factor, node.record.steps):
        return NotImplemented
    return node.then(node.record.then(steps.SCALE, factor, lambda z: function(z, number)))


@_handles("tanh", arity=1)
def _tanh(function, node, args, kwargs):
    if steps.TANH in steps.kinds(node.record.steps):
        return NotImplemented
    return node.then(node.record.then(steps.TANH, None, torch.tanh))


@_handles("add", arity=2)
def _add(function, node, args, kwargs):
    record, vector = node.record, args[1]
    if (other := node_of(vector)) is not None:
        return _add_product(node, other)
    if not isinstance(vector, torch.Tensor):
        return NotImplemented
    is_vector = vector.dim() >= 1 and vector.shape[-1] == vector.numel() == record.shape[-1]
    is_vector = is_vector and vector.dim() <= len(record.shape) and vector.is_floating_point()
    if not is_vector or steps.TANH in steps.kinds(record.steps):
        return NotImplemented
    if vector.requires_grad and torch.is_grad_enabled() and not node.call.requires_grad:
        return NotImplemented
    dtype = torch.promote_types(record.dtype, vector.dtype)
    vector = vector.flatten().clone()  # the caller may write to it later
    return node.then(record.then(steps.BIAS, vector, lambda z: z + vector, dtype=dtype))


def _add_product(node, other):
    if not other.is_pending():
        return NotImplemented
    one, two = node.record, other.record
    linears = {id(source.linear) for record in (one, two) for source in record.sources}
    kinds = steps.kinds((*one.steps, *two.steps))
    is_sum = one.shape == two.shape and kinds <= {steps.SCALE, steps.CAST}
    if not is_sum or len(linears) < len(one.sources) + len(two.sources):
        return NotImplemented
    first, second = node.call, other.call
    if first.grad != second.grad or first.autocast != second.autocast:
        return NotImplemented
    if torch.float64 in (one.dtype, two.dtype) and one.dtype != two.dtype:
        return NotImplemented
    sources = tuple(
        source._replace(steps=(*source.steps, *record.steps))
        for record in (one, two)
        for source in record.sources
    )
    dtype = torch.promote_types(one.dtype, two.dtype)
    owner = node if node.call.requires_grad else other  # the sum has the gradients of both
    call = copy.copy(owner.call.now())
    call.snapshots = first.snapshots + second.snapshots
    return call.proxy(Node(call, steps.Record(sources, (), one.shape, dtype)))


@_handles("to type_as float double half bfloat16")
def _cast(function, node, args, kwargs):
    """Casts of the logits become casts of the loss, which is computed in float32 at least, so
    one to float64 is not deferred. One to the own dtype is the same object, as of real tensors."""
    if not set(kwargs) <= {"dtype", "device", "non_blocking", "copy"} or kwargs.get("copy"):
        return NotImplemented
    if any(a is True for a in args[3:]):  # copy
        return NotImplemented
    like = [a if node_of(a) is None else a._flce.like() for a in args]
    cast, own = function(*like, **kwargs), node.record.dtype
    if cast.device != node.call.device:
        return NotImplemented
    dtype = cast.dtype
    if dtype == own:
        return args[0]
    if not dtype.is_floating_point or dtype == torch.float64:
        return NotImplemented
    return node.then(node.record.then(steps.CAST, dtype, lambda z: z.to(dtype), dtype=dtype))


@_handles("contiguous clone", arity=1)
def _copy(function, node, args, kwargs):
    is_same = function == torch.Tensor.contiguous and node.is_contiguous()
    return args[0] if is_same else node.then(node.record)


@_handles("view reshape flatten")
def _reshape(function, node, args, kwargs):
    """Another shape of the rows, or classes that are split into groups of equal size."""
    record, old = node.record, node.record.shape
    if 0 in old:
        return NotImplemented
    result = function(node.layout(), *args[1:], **kwargs)
    shape, class_layout = tuple(result.shape), None
    if result.dtype != record.dtype:
        return NotImplemented
    # While torch.compile traces, writes to logits make them first: nothing has to be shared.
    is_view = node.is_contiguous() or (not is_compiling() and result._is_view())
    if shape[-1:] == old[-1:]:
        record = record.of_rows(lambda x: x.reshape(*shape[:-1], x.shape[-1]))
    elif is_view and len(shape) == len(old) + 1 > 2 and shape[:-2] == old[:-1]:
        class_layout = CLASSES_SPLIT
    else:
        return NotImplemented
    return (
        node.then(record, lambda z: z.view(shape), class_layout) if is_view else node.then(record)
    )


@_handles("transpose swapaxes swapdims permute")
def _transpose(function, node, args, kwargs):
    """(B, V, T) of (B, T, V), however that is called."""
    example = torch.empty(2, 3, 5, device="meta")
    is_known = len(node.record.shape) == 3
    if not is_known or function(example, *args[1:], **kwargs).shape != (2, 5, 3):
        return NotImplemented
    return node.then(node.record, lambda z: z.transpose(1, 2), CLASSES_SECOND)


def _split_index(index, dims):
    """(index of the rows, index of the classes or None) for a tensor of `dims` dimensions; None
    where a part of the index is not known or the classes' dimension moves."""
    index = list(index) if isinstance(index, tuple) else [index]
    sizes = [_dims_taken(item) for item in index]
    if None in sizes or sizes.count(Ellipsis) > 1:
        return None
    taken = sum(size for size in sizes if size is not Ellipsis)
    if Ellipsis in sizes:
        at = sizes.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (dims - taken)
        taken = dims
    if taken > dims or (taken == dims and (not index or not isinstance(index[-1], slice))):
        return None
    return (tuple(index[:-1]), index[-1]) if taken == dims else (tuple(index), None)


def _dims_taken(item):
    if item is Ellipsis:
        return Ellipsis
    if item is None:
        return 0
    if isinstance(item, bool):
        return None
    if isinstance(item, torch.Tensor) and node_of(item) is None:
        return item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
    return 1 if isinstance(item, slice | numbers.Integral) else None


def _cut(record, classes):
    """The record of the classes in a range."""
    start, stop = classes.start, classes.stop
    select = lambda z: z[..., start:stop]  # noqa: E731
    return record.then(steps.CLASSES, (start, stop), select, classes=stop - start)


@_handles("__getitem__")
def _select(function, node, args, kwargs):
    record, index = node.record, args[1]
    if (split := _split_index(index, len(record.shape))) is None:
        return NotImplemented
    rows, classes = split
    tensors = [item for item in rows if isinstance(item, torch.Tensor)]
    if any(item.dim() == 0 for item in tensors):
        return NotImplemented  # a view for an integer
    if tensors or any(item != slice(None) for item in rows):
        record = record.of_rows(lambda x: x[rows])
    if classes is not None and classes != slice(None):
        kept = range(record.shape[-1])[classes]
        if kept.step != 1 or kept.stop <= kept.start:
            return NotImplemented
        record = _cut(record, kept)
    return node.then(record, None if tensors else lambda z: z[index])


@_handles("__getitem__", class_layout=CLASSES_SPLIT)
def _select_group(function, node, args, kwargs):
    """z[..., group, :], with slices of the rows."""
    shape, index = node.shape, args[1]
    if (split := _split_index(index, len(shape))) is None or split[1] != slice(None):
        return NotImplemented
    *rows, group = split[0]
    is_known = all(isinstance(item, slice) for item in rows) and len(rows) == len(shape) - 2
    if not is_known or not isinstance(group, int):
        return NotImplemented
    rows, size = tuple(rows), shape[-1]
    start = range(shape[-2])[group] * size
    record = _cut(node.record.of_rows(lambda x: x[rows]), range(start, start + size))
    return node.then(record, lambda z: z[index])


@_handles("new_zeros new_ones new_full new_empty new_tensor")
def _new(function, node, args, kwargs):
    """They take no more than dtype and device from the logits."""
    return function(node.like(), *args[1:], **kwargs)


_handles("logsumexp")(loss.logsumexp)
HANDLERS[None, F.cross_entropy] = loss.cross_entropy, None
HANDLERS[CLASSES_SECOND, F.cross_entropy] = loss.cross_entropy_of_classes_second, None
