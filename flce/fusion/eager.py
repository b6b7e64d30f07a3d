"""Deferred values of eager calls: the Operation that computes a value, its layout."""

import typing

import torch

from .. import torch_private
from . import steps
from .values import DeferredValue, mapped


class Memory:
    """What a value and its views share. is_touched: it was written to, or its address was given to
    what may write to it: no other value may be computed from it, or instead of it."""

    def __init__(self):
        self.is_touched = False


class Layout(typing.NamedTuple):
    shape: tuple
    strides: tuple
    offset: int
    dtype: torch.dtype

    @staticmethod
    def contiguous(shape, dtype):
        """Of values at the beginning of their memory."""
        return Layout(shape, contiguous_strides(shape), 0, dtype)

    @staticmethod
    def of(tensor):
        return Layout(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def is_contiguous(self):
        return tuple(self.strides) == contiguous_strides(self.shape)


class Operation(typing.NamedTuple):
    """function(*args, **kwargs), with DeferredValues in place of deferred Tensors. result_index:
    which of several results; None for the only one."""

    function: typing.Callable
    args: tuple
    kwargs: dict
    result_index: int | None = None

    def run(self, value_of):
        """The result; value_of: gives the real one of a DeferredValue."""

        def real(argument):
            return value_of(argument) if isinstance(argument, DeferredValue) else argument

        result = self.function(*mapped(real, self.args), **mapped(real, self.kwargs))
        return result if self.result_index is None else result[self.result_index]


class EagerValue(DeferredValue):
    """One of an eager call, with the Operation that computes it, None for a head's product. layout:
    the Layout of the real value; meta: what meta_tensor() returns, once that exists. parent: the
    value that a view shares its memory with. has_gradient: as in values.py, set before a handler
    runs. head_calls: those that the value comes from."""

    def __init__(self, head_call, record, layout, operation=None, parent=None):
        super().__init__(head_call, record, parent)
        self.layout, self.operation, self.meta = layout, operation, None
        self.head_calls, self.has_gradient = (head_call,), False
        self.memory = Memory() if parent is None else parent.memory

    def meta_tensor(self):
        """A tensor on the meta device with the layout of the real value."""
        if self.meta is None:
            layout = self.layout
            with torch_private.without_dispatch_modes():
                options = {"dtype": layout.dtype, "device": "meta"}
                self.meta = torch.empty_strided(layout.shape, layout.strides, **options)
        return self.meta

    def like(self, device=None, shape=0):
        with torch_private.without_dispatch_modes():
            return super().like(device, shape)

    def wants_gradient(self):
        return self.has_gradient and torch.is_grad_enabled()

    def then(self, record, view=None):
        """`view` is used where a handler returns a tuple, as of split: a single result's view is
        torch's own."""
        return DeferredStep((self,), record, self.head_call, view)

    def summed(self, other, head_call, record):
        return DeferredStep((self, other), record, head_call)

    def is_read_by_autograd(self):
        """Whether a backward asks for what its forward has saved: no user reads logits then."""
        return torch_private.in_backward()

    def materialize(self):
        """Views share the memory of their parent's value. Without a graph: the deferred
        Tensor has it."""
        if self.value is None:
            with torch.inference_mode(self.head_call.is_inference), torch.no_grad():
                if self.parent is None:
                    self.value = self._compute(uses_cache=True)
                else:
                    self.value = self.operation.run(EagerValue.materialize)
        return self.value

    def recompute(self):
        if self.value is not None and not self.memory.is_touched:
            return self.value
        return self._compute(uses_cache=False)

    def _compute(self, uses_cache):
        """By the Record, or by the Operation of a value that has none."""
        if self.record is None:
            return self.operation.run(EagerValue.recompute)
        with self.head_call.entered(False):
            return self.compute_from_head(uses_cache, self.memory)


class DeferredStep(typing.NamedTuple):
    """What a handler returns for a value that stays deferred, by `EagerValue.then` and `summed`.
    operands: the values that it is computed from; view: of one of several results (`split`), the
    function that gives it as a view of the only argument."""

    operands: tuple
    record: steps.Record
    head_call: object
    view: object = None


def contiguous_strides(shape):
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
