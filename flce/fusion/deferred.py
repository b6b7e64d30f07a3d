"""Deferred logits: a Tensor without memory that autograd and the dispatcher take for any other.

Autograd records what is done to it, by itself: it is the output of a `backward.HeadProduct`.
__torch_function__ hands what `operations` recognises to flce; a recognised step is done by autograd
too, on values that are not made. Everything else comes to __torch_dispatch__, whatever way it went,
and finds real values.
"""

import functools
import threading
import typing

import torch
from torch.compiler import is_compiling

from .. import torch_private
from . import steps
from .backward import HeadProduct, Origin, Routed, paths_from
from .gradient import mark_steps
from .node import Node, instances_in, mapped, name_of, node_of
from .operations import HANDLERS
from .reentry import is_gathered
from .steps import Unknown, require


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
    def contiguous(shape, dtype, offset=0):
        return Layout(shape, contiguous_strides(shape), offset, dtype)

    @staticmethod
    def of(tensor):
        return Layout(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def is_contiguous(self):
        return tuple(self.strides) == contiguous_strides(self.shape)


class Operation(typing.NamedTuple):
    """function(*args, **kwargs), with nodes in place of deferred Tensors. pick: which of several
    results; None for the only one."""

    function: typing.Callable
    args: tuple
    kwargs: dict
    pick: int | None = None

    def run(self, value_of):
        """The result; value_of: gives the value of a node."""
        real = lambda one: value_of(one) if isinstance(one, Node) else one  # noqa: E731
        made = self.function(*mapped(real, self.args), **mapped(real, self.kwargs))
        return made if self.pick is None else made[self.pick]


class LazyNode(Node):
    """One value, with the Operation that makes it, None for a head's product. layout_of: the Layout
    of the real value; meta: a meta tensor of that, if there is one. parent: the node that a view
    shares its memory with. has_gradient: whether the Tensor requires grad. calls: of the heads that
    the value comes from."""

    def __init__(self, call, record, layout, operation=None, parent=None):
        super().__init__(call, record, parent)
        self.layout_of, self.operation, self.meta = layout, operation, None
        self.calls, self.has_gradient = (call,), False
        self.memory = Memory() if parent is None else parent.memory

    def layout(self):
        """A meta tensor with the layout of the real value."""
        if self.meta is None:
            own = self.layout_of
            with torch_private.without_dispatch_modes():
                options = {"dtype": own.dtype, "device": "meta"}
                self.meta = torch.empty_strided(own.shape, own.strides, **options)
        return self.meta

    def like(self, device=None, shape=0):
        with torch_private.without_dispatch_modes():
            return super().like(device, shape)

    def wants_gradient(self):
        return self.has_gradient and torch.is_grad_enabled()

    def then(self, record, view=None):
        return _Step((self,), record, self.call, view)

    def summed(self, other, call, record):
        return _Step((self, other), record, call)

    def make_for(self, function):
        """The real values, because `function` is not deferred."""
        if self.is_pending() and not torch_private.in_backward():
            self.note_made(name_of(function))
        return self.values()

    def values(self):
        """The real values, made once; views share them. Without a graph, which is the proxy's."""
        if self.value is None:
            with torch.inference_mode(self.call.is_inference), torch.no_grad():
                is_view = self.parent is not None
                make = LazyNode.values
                self.value = self.operation.run(make) if is_view else self.unwritten(True)
        return self.value

    def unwritten(self, may_share=False):
        """The real values before anything was written to them; may_share: those that exist."""
        if self.value is not None and not self.memory.is_touched:
            return self.value
        if self.record is None:
            return self.operation.run(LazyNode.unwritten)
        with self.call.entered(False):
            return self.replay(may_share, self.memory)

    def again(self):
        return self.unwritten()


class _Step(typing.NamedTuple):
    """What a handler returns for a value that stays deferred. origins: the nodes it comes from;
    view: of one of several results, as a view of the only argument."""

    origins: tuple
    record: steps.Record
    call: object
    view: object = None


class _State(threading.local):
    """expected: the _Step that torch's function makes now, of values that are not made."""

    expected = None


_state = _State()


# ---- what a caller holds ----


class DeferredLogits(torch.Tensor):
    """A Tensor with shape, strides, dtype and device of the logits, and no memory."""

    @staticmethod
    def __new__(cls, node):
        layout = node.layout_of
        options = {"strides": layout.strides, "storage_offset": layout.offset}
        options |= {"dtype": layout.dtype, "device": node.call.device}
        proxy = torch.Tensor._make_wrapper_subclass(cls, layout.shape, **options)
        torch_private.forbid_addresses(proxy)
        proxy._flce = node
        return proxy

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_compiling() or function in _OF_METADATA or torch_private.is_in_dispatch():
            return _by_torch(function, args, kwargs)
        try:
            return _recognised(function, args, kwargs)
        except Unknown:
            pass
        if function == _SET_DATA:
            _refuse_replacement("data")
        for one in instances_in(DeferredLogits, (args, kwargs)):
            one._flce.make_for(function)
        if function in torch_private.OF_MEMORY:
            args, kwargs = mapped(_with_memory(function), (args, kwargs))
        return _by_torch(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind_of(function)
        if _state.expected is not None and kind != "write":
            return _lazily(function, args, kwargs)
        if kind == "view":
            return _viewed(function, args, kwargs)
        if function in _FACTORIES:
            first, *sizes = args
            return function(first._flce.like(), *sizes, **kwargs)
        for one in instances_in(DeferredLogits, (args, kwargs)):
            one._flce.make_for(function)
        if kind != "write":
            return function(*mapped(_value, args), **mapped(_value, kwargs))
        return _written(function, args, kwargs)


for _method in (DeferredLogits.__torch_function__, DeferredLogits.__torch_dispatch__):
    torch_private.run_uncompiled(_method.__func__)


def deferred_product(call, linear, x):
    """The proxy of the product of an nn.Linear."""
    operands = x, linear.weight, linear.bias
    call.leaves = _leaves(*operands, call.accumulates or is_gathered(linear))
    shape, dtype = (*x.shape[:-1], linear.out_features), call.product_dtype(x)
    source = steps.Source(linear, call.leaves[0], (), call.leaves[1:])
    record = steps.Record((source,), (), shape, dtype, steps.Rows())
    with torch_private.without_torch_function():
        node = LazyNode(call, record, Layout.contiguous(shape, dtype))
        return HeadProduct.apply(DeferredLogits, node, *operands)


def _leaves(x, weight, bias, keeps_weight):
    """What flce's graphs end in: views without a graph, whose hooks do not run there. keeps_weight:
    a Parameter stays itself, as accumulate_into adds to its .grad and ZeRO-3 swaps its memory."""
    keeps_weight = keeps_weight and weight.is_leaf
    made = [x.detach(), weight if keeps_weight else weight.detach()]
    made.append(None if bias is None else bias.detach())
    for leaf, operand in zip(made, (x, weight, bias), strict=True):
        if leaf is not None and leaf is not operand and operand.requires_grad:
            leaf.requires_grad_()
    return tuple(made)


# ---- __torch_function__ ----


def _by_torch(function, args, kwargs):
    with torch_private.without_torch_function():
        return function(*args, **kwargs)


def _is_deferred(value):
    return isinstance(value, DeferredLogits)


_COMMUTATIVE = {torch.add, torch.Tensor.add, torch.mul, torch.multiply, torch.Tensor.mul}
_SET_DATA = torch.Tensor.data.__set__


def _recognised(function, args, kwargs):
    """What a handler of `operations` returns, with its graph."""
    node, operands = node_of(args[0]) if args else None, args
    if node is None and len(args) == 2 and not kwargs and function in _COMMUTATIVE:
        operands = args[::-1]
        node = node_of(operands[0])
    require(node is not None and node.record is not None and node.is_pending())
    handler, arity = HANDLERS.get((node.record.form(), function), (None, None))
    require(handler is not None and (arity is None or (len(args) == arity and not kwargs)))
    return with_graph(function, args, kwargs, lambda: handler(function, node, operands, kwargs))


def with_graph(function, args, kwargs, handle):
    """What `handle()` returns for function(*args, **kwargs), as a function of its deferred
    arguments for autograd. Raises Unknown where the function has to be called itself."""
    found = [one for one in (*args, *kwargs.values()) if _is_deferred(one)]
    if not found:  # those of a graph of torch.compile, which records by itself
        return handle()
    for one in found:
        require(not one._flce.memory.is_touched)
        with torch_private.without_torch_function():
            one._flce.has_gradient = one.requires_grad
    result = handle()
    if type(result) is _Step:
        return _step_by_torch(function, args, kwargs, result)
    if isinstance(result, tuple):
        # Each on its own: the backward of torch's function makes zeros for those without a loss.
        values = tuple(_step_by_torch(one.view, args[:1], {}, one) for one in result)
        return iter(values) if function is torch.Tensor.__iter__ else values
    if _is_deferred(result) or not result.requires_grad:
        return result
    if not torch.is_grad_enabled() or not any(one._flce.has_gradient for one in found):
        return result.detach()
    (deferred,) = [one for one in found if one._flce.has_gradient]
    origin = Origin(function, args, kwargs, deferred._flce)
    paths = None
    if deferred._flce.record.form() in (steps.P_LOG_P, steps.P_Z, steps.KL):
        with torch_private.without_torch_function():
            paths = paths_from(deferred.grad_fn)
    return Routed.apply([result], origin, paths, deferred)


def _step_by_torch(function, args, kwargs, expected):
    """The function itself, of values that are not made: autograd records it."""
    before, _state.expected = _state.expected, expected
    try:
        with torch_private.without_dispatch_modes():
            value = _by_torch(function, args, kwargs)
    finally:
        _state.expected = before
    operands = {one._flce: one for one in (*args, *kwargs.values()) if _is_deferred(one)}
    node = value._flce
    if node in operands:  # the argument itself, as of flatten(0, -2) of a matrix
        return value
    node.record, node.call = expected.record, expected.call
    node.calls = tuple(dict.fromkeys(call for one in expected.origins for call in one.calls))
    with torch_private.without_torch_function():
        if value.grad_fn is not None:
            mark_steps(value, operands.values())
    return value


def _methods(names):
    found = [getattr(torch.Tensor, name, None) for name in names.split()]
    return {one if callable(one) else one.__get__ for one in found if one is not None}


# Answered without values, by torch itself.
_OF_METADATA = _methods("""size dim ndimension numel nelement is_floating_point is_complex is_signed
element_size __len__ is_inference is_conj is_neg shape dtype layout ndim itemsize nbytes is_leaf
name is_sparse is_quantized is_nested is_mkldnn is_sparse_csr retains_grad output_nr _base _version
grad _grad _backward_hooks requires_grad requires_grad_ grad_fn stride is_contiguous storage_offset
device is_cuda is_cpu is_meta is_xpu is_mps is_maia is_vulkan get_device new_zeros new_ones new_full
new_empty new_tensor __hash__ _is_view register_hook retain_grad""")
_OF_METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
_OF_METADATA |= {torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__set__}
# A TorchDispatchMode calls it for a Tensor that autograd has saved, not below autograd.
_OF_METADATA |= {torch.ops.aten.detach.default}


def _with_memory(function):
    def real(value):
        if not _is_deferred(value):
            return value
        value._flce.memory.is_touched |= torch_private.OF_MEMORY[function]
        with torch_private.without_torch_function():
            grad = value.requires_grad
        # torch.compile asks for the memory of what its inputs are views of under its fake mode.
        with torch_private.without_dispatch_modes():
            return _value(value).detach().requires_grad_(grad)

    return real


# ---- __torch_dispatch__ ----

_FACTORIES = {
    getattr(torch.ops.aten, name).default
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
}


# Operators that give the shape of the step that they make, in memory of their own, and its dtype or
# that of their operand: they need not be asked on the meta device.
_OF_ROWS = {getattr(torch.ops.aten, name) for name in ("div", "mul", "neg", "tanh", "exp", "clone")}
_OF_ROWS = {getattr(packet, name) for packet in _OF_ROWS for name in packet.overloads()}
_VIEW = torch.ops.aten.view.default
_SOFTMAXES = {torch.ops.aten._log_softmax.default, torch.ops.aten._softmax.default}


@functools.cache
def _kind_of(function):
    """Of an operator: "write" if it writes to arguments, "view" if results share their memory."""
    schema = function._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "write"
    return "view" if any(r.alias_info is not None for r in schema.returns) else ""


def _value(value):
    """Real values in place of deferred ones."""
    return value._flce.values() if _is_deferred(value) else value


def _written(function, args, kwargs):
    """An operator that writes to deferred values: into the real ones, which all views share."""
    if torch.Tag.inplace_view in function.tags:
        _refuse_replacement(function)
    mutable = [a.name for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
    given = dict(zip([a.name for a in function._schema.arguments], args, strict=False)) | kwargs
    written = {}
    for one in instances_in(DeferredLogits, [given.get(name) for name in mutable]):
        one._flce.memory.is_touched = True
        written[id(one._flce.values())] = one
    made = function(*mapped(_value, args), **mapped(_value, kwargs))
    return mapped(lambda value: written.get(id(value), value), made)


def _refuse_replacement(what):
    raise RuntimeError(
        f"flce.fuse: {what}: expected the logits to keep their shape and memory, got an operation "
        "that replaces them in place: use one that returns a new Tensor (logits = "
        "logits.transpose(0, 1))"
    )


def _viewed(function, args, kwargs):
    """A view: real if the values are, which then may be written to by others."""
    one = first_deferred(args, kwargs)
    if one._flce.is_pending():
        return _lazily(function, args, kwargs)
    one._flce.memory.is_touched = True
    return function(*mapped(_value, args), **mapped(_value, kwargs))


def first_deferred(args, kwargs):
    first, *_ = instances_in(DeferredLogits, (args, kwargs))
    return first


def _lazily(function, args, kwargs):
    """The result of an operator whose values are not made yet."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    is_flat = _is_deferred(args[0]) and len(tensors) == 1 and not any(map(_nests_tensors, args))
    found = (args[0] if is_flat else first_deferred(args, kwargs))._flce
    if is_flat:
        operation = Operation(function, (found, *args[1:]), kwargs)
    else:
        operation = Operation(function, *mapped(_by_value, (args, kwargs)))
    record = _state.expected.record if _state.expected else None
    layout = _known_layout(function, found, record, tensors, args, kwargs)
    if layout is not None:
        parent = found if function is _VIEW else None
        return DeferredLogits(LazyNode(found.call, None, layout, operation, parent))
    metas, of_metas = mapped(_layout_of, (operation.args, operation.kwargs))
    if "device" in of_metas:
        of_metas["device"] = torch.device("meta")
    made = function(*metas, **of_metas)
    parent = found if _kind_of(function) == "view" else None

    def proxy(meta, pick=None):
        of_one = operation if pick is None else operation._replace(pick=pick)
        node = LazyNode(found.call, None, Layout.of(meta), of_one, parent)
        node.meta = meta
        return DeferredLogits(node)

    if isinstance(made, torch.Tensor):
        return proxy(made)
    return [proxy(meta, i) for i, meta in enumerate(made)]


def _known_layout(function, found, record, tensors, args, kwargs):
    """The Layout of an operator's result, if it follows from the record of the step; else None.
    found: the node of the first deferred argument; tensors: the arguments that are Tensors."""
    if record is None:
        return None
    is_of_rows = function in _OF_ROWS and _are_contiguous_rows(record, tensors, kwargs)
    if is_of_rows or function in _SOFTMAXES or not all(map(_is_deferred, tensors)):
        dtype = found.layout_of.dtype if is_of_rows and len(tensors) == 1 else record.dtype
        return Layout.contiguous(record.shape, dtype)
    if function is _VIEW and _is_whole_view(found.layout_of, record, args[1]):
        return Layout.contiguous(record.shape, found.layout_of.dtype, found.layout_of.offset)
    return None


def _nests_tensors(value):
    return type(value) in (list, tuple) and any(isinstance(one, torch.Tensor) for one in value)


def _layout_of(value):
    return value.layout() if isinstance(value, Node) else value


def _by_value(value):
    """An argument by its value: the caller may write to an index or a vector later."""
    if _is_deferred(value):
        return value._flce
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _are_contiguous_rows(record, operands, options):
    """Whether an operator of _OF_ROWS gives contiguous values of the record's shape, which is that
    of the last operator: reshape copies rows in the shape that they have before it."""
    layouts = [one._flce.layout_of for one in operands if _is_deferred(one)]
    is_copy = options.get("memory_format") is torch.contiguous_format
    return all(
        tuple(one.shape) == tuple(record.shape) and (is_copy or one.is_contiguous())
        for one in layouts
    )


def _is_whole_view(layout, record, sizes):
    """Whether view(sizes) of contiguous values has the record's shape."""
    is_own = len(sizes) == len(record.shape)
    is_own = is_own and all(a in (-1, b) for a, b in zip(sizes, record.shape, strict=True))
    return is_own and layout.is_contiguous()


def contiguous_strides(shape):
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
