"""The table of operations that deferred logits record or answer.

A handler takes (node, args, kwargs), args[0] being the deferred value, and returns the result, or
NotImplemented where the operation is not one that it knows: the real logits are made then.
"""

import math
import numbers

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from . import forms, steps
from .loss import cross_entropy, logsumexp
from .node import Node, node_of

HANDLERS = {}


def _handles(*functions):
    def register(handler):
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _then(node, kind, value, replay, dtype=None, classes=None):
    return node.copy(node.record.then(steps.Step(kind, value, replay), dtype, classes))


@_handles(torch.Tensor.mul, torch.mul, torch.multiply, torch.Tensor.multiply)
def _multiply(node, args, kwargs):
    if kwargs or len(args) != 2 or not steps.is_number(args[1]):
        return NotImplemented
    if not steps.is_scale(args[1], node.record.steps):
        return NotImplemented
    return _then(node, steps.SCALE, float(args[1]), lambda z: z * args[1])


@_handles(torch.Tensor.div, torch.div, torch.true_divide, torch.Tensor.true_divide)
def _divide(node, args, kwargs):
    if kwargs or len(args) != 2 or not steps.is_number(args[1]):
        return NotImplemented
    divisor = float(args[1])
    if divisor == 0 or not steps.is_scale(1 / divisor, node.record.steps):
        return NotImplemented
    return _then(node, steps.SCALE, 1 / divisor, lambda z: z / args[1])


@_handles(torch.Tensor.tanh, torch.tanh)
def _tanh(node, args, kwargs):
    if kwargs or len(args) != 1 or steps.is_capped(node.record.steps):
        return NotImplemented
    return _then(node, steps.TANH, None, torch.tanh)


@_handles(torch.Tensor.add, torch.add)
def _add(node, args, kwargs):
    other = args[1] if len(args) == 2 else None
    if kwargs or (not isinstance(other, torch.Tensor) and node_of(other) is None):
        return NotImplemented
    return _add_bias(node, other) if node_of(other) is None else _add_product(node, other._flce)


def _add_bias(node, vector):
    record = node.record
    is_vector = vector.dim() >= 1 and vector.shape[-1] == vector.numel() == record.shape[-1]
    is_vector = is_vector and vector.dim() <= len(record.shape) and vector.is_floating_point()
    if not is_vector or steps.is_capped(record.steps):
        return NotImplemented
    if vector.requires_grad and torch.is_grad_enabled() and not node.call.requires_grad:
        return NotImplemented
    dtype = torch.promote_types(record.dtype, vector.dtype)
    vector = vector.flatten().clone()  # the caller may write to it later
    return _then(node, steps.BIAS, vector, lambda z: z + vector, dtype)


def _add_product(node, other):
    if not other.is_pending():
        return NotImplemented
    one, two = node.record, other.record
    linears = {id(source.linear) for record in (one, two) for source in record.sources}
    is_sum = one.shape == two.shape and steps.is_linear(one.steps) and steps.is_linear(two.steps)
    if not is_sum or len(linears) < len(one.sources) + len(two.sources):
        return NotImplemented
    first, second = node.call, other.call
    if (first.grad, first.autocast) != (second.grad, second.autocast):
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
    call = owner.call.now().changed(snapshots=first.snapshots + second.snapshots)
    return call.proxy(Node(call, steps.Record(sources, (), one.shape, dtype)))


def _cast(proxy, node, dtype):
    """Casts of the logits become casts of the loss, which is computed in float32 at least. A cast
    to float64 asks for more. A cast to the own dtype is the same object, as of real tensors."""
    if dtype == node.record.dtype:
        return proxy
    if not dtype.is_floating_point or dtype == torch.float64:
        return NotImplemented
    return _then(node, steps.CAST, dtype, lambda z: z.to(dtype), dtype)


for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
):

    def _named_cast(node, args, kwargs, dtype=_dtype):
        return NotImplemented if kwargs or len(args) != 1 else _cast(args[0], node, dtype)

    HANDLERS[getattr(torch.Tensor, _name)] = _named_cast


@_handles(torch.Tensor.to, torch.Tensor.type_as)
def _to(node, args, kwargs):
    dtype = node.record.dtype
    for value in (*args[1:], *(kwargs[name] for name in kwargs if name in ("dtype", "device"))):
        device = None
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor) and len(args) == 2:
            dtype, device = value.dtype, value.device
        elif isinstance(value, str | torch.device | int) and not isinstance(value, bool):
            device = torch.device(value)
        elif value is not None and not isinstance(value, bool):
            return NotImplemented
        if device is not None and not _is_same_device(device, node.call.device):
            return NotImplemented
    if not set(kwargs) <= {"dtype", "device", "non_blocking", "copy"} or kwargs.get("copy"):
        return NotImplemented
    return NotImplemented if any(a is True for a in args[3:]) else _cast(args[0], node, dtype)


def _is_same_device(device, own):
    if device.index is None and own.index is not None and device.type == own.type:
        return own.index == torch.get_device_module(own.type).current_device()
    return device.type == own.type and device.index in (None, own.index)


@_handles(torch.Tensor.contiguous)
def _contiguous(node, args, kwargs):
    if kwargs or len(args) != 1:
        return NotImplemented
    if node.is_contiguous or (not is_compiling() and node.layout().is_contiguous()):
        return args[0]
    return node.copy(node.record)


@_handles(torch.Tensor.clone, torch.clone)
def _clone(node, args, kwargs):
    return NotImplemented if kwargs or len(args) != 1 else node.copy(node.record)


def _resolved(shape, old):
    """`shape` with its -1 filled in, if it keeps the classes as the last dimension; else None."""
    known, at = 1, None
    for i, size in enumerate(shape):
        if not isinstance(size, int) or size < -1 or size == 0 or (size == -1 and at is not None):
            return None
        if size == -1:
            at = i
        else:
            known = known * size
    count = math.prod(old)
    if count == 0 or count % known or (at is None and known != count):
        return None
    if at is not None:
        shape = (*shape[:at], count // known, *shape[at + 1 :])
    return shape if shape and shape[-1] == old[-1] else None


@_handles(torch.Tensor.view)
def _strict_view(node, args, kwargs):
    made = _view(node, args, kwargs)
    if made is not NotImplemented and not node.is_contiguous and not is_compiling():
        node.layout().view(*args[1:])  # torch's error where it is no view
    return made


@_handles(torch.Tensor.reshape, torch.reshape)
def _view(node, args, kwargs):
    sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    shape = None if kwargs else _resolved(tuple(sizes), node.record.shape)
    if shape is not None:
        return _reshaped(node, shape)
    if kwargs or not node.is_contiguous:
        return NotImplemented
    return forms.split_classes(node, tuple(sizes))


def _reshaped(node, shape):
    record = node.record.of_rows(lambda x: x.reshape(*shape[:-1], x.shape[-1]))
    if node.is_contiguous or _reshapes_to_view(node, shape):
        return node.alias(record, lambda z: z.view(shape), node.is_contiguous)
    return node.copy(record)


def _reshapes_to_view(node, shape):
    """Whether reshape shares the memory of the real value, as it does with some slices. Not asked
    while torch.compile traces, where writes to logits make them first."""
    if is_compiling():
        return False
    return node.layout().reshape(shape)._is_view()


@_handles(torch.Tensor.flatten, torch.flatten)
def _flatten(node, args, kwargs):
    old = node.record.shape
    start, end = (*args[1:], *(0, -1)[len(args) - 1 :]) if len(args) <= 3 else (None, None)
    start, end = kwargs.get("start_dim", start), kwargs.get("end_dim", end)
    if start is None or not set(kwargs) <= {"start_dim", "end_dim"}:
        return NotImplemented
    start, end = start % len(old), end % len(old)
    if not start <= end < len(old) - 1 or 0 in old:
        return NotImplemented
    return _reshaped(node, (*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :]))


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
        sizes = [_dims_taken(item) for item in index]
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


def _bounds(part, size):
    """(start, stop) of a slice of `size` elements. Dynamo of torch 2.11 cannot trace
    slice.indices."""

    def bounded(end):
        return max(end + size, 0) if end < 0 else min(end, size)

    start = 0 if part.start is None else bounded(part.start)
    return start, size if part.stop is None else bounded(part.stop)


@_handles(torch.Tensor.__getitem__)
def _select(node, args, kwargs):
    record, index = node.record, args[1]
    split = _split_index(index, len(record.shape))
    if split is None:
        return NotImplemented
    rows, classes = split
    if any(isinstance(item, torch.Tensor) and item.dim() == 0 for item in rows):
        return NotImplemented  # a view for an integer
    is_view = not any(isinstance(item, torch.Tensor) for item in rows)
    changed = any(item != slice(None) for item in rows) if is_view else True
    if changed:
        record = record.of_rows(lambda x: x[rows])
    if classes is not None:
        start, stop = _bounds(classes, record.shape[-1])
        if classes.step not in (None, 1) or stop <= start:
            return NotImplemented
        if (start, stop) != (0, record.shape[-1]):
            cut = steps.Step(steps.CLASSES, (start, stop), lambda z: z[..., start:stop])
            record, changed = record.then(cut, classes=stop - start), True
    if not is_view:
        return node.copy(record)
    return node.alias(record, lambda z: z[index], not changed)


def _new(function):
    """new_zeros and its like, which take no more than dtype and device from the logits."""

    def handler(node, args, kwargs):
        like = torch.empty(0, dtype=node.record.dtype, device=node.call.device)
        return function(like, *args[1:], **kwargs)

    return handler


for _name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
    HANDLERS[getattr(torch.Tensor, _name)] = _new(getattr(torch.Tensor, _name))
for _name in ("transpose", "swapaxes", "swapdims"):
    HANDLERS[getattr(torch.Tensor, _name)] = HANDLERS[getattr(torch, _name)] = forms.transpose
HANDLERS[torch.Tensor.permute] = HANDLERS[torch.permute] = forms.permute
HANDLERS[F.cross_entropy] = cross_entropy
HANDLERS[torch.logsumexp] = HANDLERS[torch.Tensor.logsumexp] = logsumexp
