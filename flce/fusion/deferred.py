"""Deferred logits: a Tensor without memory that autograd and the dispatcher take for any other.

A *deferred Tensor* is what a caller holds: a DeferredLogits, or a step of one (`logits / 2`); under
torch.compile a traced.TracedLogits. Its attribute `_flce` is a *DeferredValue*, which knows how the
real values are computed. In flce/fusion a variable `deferred` is a DeferredValue.

Autograd records what is done to it, by itself: it is the output of a `backward.HeadProduct`.
__torch_function__ hands what `operations` recognises to flce; a recognised step is done by autograd
too, on Tensors without values. Everything else comes to __torch_dispatch__, whatever way it went,
and finds real values (values.py lists the functions that compute these).

What __torch_function__ knows of a step, its Record, cannot be an argument of torch's function. So
`_step_by_torch` sets `_state.step` while that runs, and __torch_dispatch__, which is called by it,
reads that: with a step set, an operator gives a deferred Tensor without a fall-back, and
`_deferred_result` takes the shape from the step's Record.
"""

import functools
import threading

import torch
from torch.compiler import is_compiling

from .. import torch_private
from . import steps
from .backward import HeadProduct, LossOfLogits, ReplacedCall, count_paths_to_heads
from .eager import DeferredStep, EagerValue, Layout, Operation
from .gradient import mark_steps
from .operations import HANDLERS
from .reentry import is_gathered
from .steps import Unknown, require
from .values import DeferredValue, instances_in, mapped, with_deferred_first


class _State(threading.local):
    """step: the DeferredStep whose function of torch runs now, on Tensors without values; None
    where none does. Set by `_step_by_torch`, below __torch_function__; read by __torch_dispatch__
    and `_deferred_result`, to which the operators of that function come."""

    step = None


_state = _State()


# ---- what a caller holds ----


class DeferredLogits(torch.Tensor):
    """A Tensor with shape, strides, dtype and device of the logits, and no memory."""

    @staticmethod
    def __new__(cls, deferred):
        layout = deferred.layout
        options = {"strides": layout.strides, "storage_offset": layout.offset}
        options |= {"dtype": layout.dtype, "device": deferred.head_call.device}
        tensor = torch_private.make_wrapper_subclass(cls, layout.shape, **options)
        torch_private.forbid_addresses(tensor)
        tensor._flce = deferred
        return tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_compiling() or function in _OF_METADATA or torch_private.is_in_dispatch():
            return _by_torch(function, args, kwargs)
        try:
            return _handle(function, args, kwargs)
        except Unknown:
            pass
        if function == _SET_DATA:
            _refuse_replacement("data")
        for tensor in instances_in(DeferredLogits, (args, kwargs)):
            tensor._flce.materialize_for(function)
        if function in torch_private.OF_MEMORY:
            args, kwargs = mapped(_with_memory(function), (args, kwargs))
        return _by_torch(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind_of(function)
        if _state.step is not None and kind != "write":  # called by `_step_by_torch`
            return _deferred_result(function, args, kwargs)
        if kind == "view":
            return _view(function, args, kwargs)
        if function in _FACTORIES:
            first, *sizes = args
            return function(first._flce.like(), *sizes, **kwargs)
        for tensor in instances_in(DeferredLogits, (args, kwargs)):
            tensor._flce.materialize_for(function)
        if kind != "write":
            return function(*mapped(_value, args), **mapped(_value, kwargs))
        return _write(function, args, kwargs)


for _method in (DeferredLogits.__torch_function__, DeferredLogits.__torch_dispatch__):
    torch_private.run_uncompiled(_method.__func__)


def deferred_product(head_call, linear, x):
    """The product of an nn.Linear, as a deferred Tensor."""
    operands = x, linear.weight, linear.bias
    head_call.leaves = _leaves(*operands, head_call.accumulates or is_gathered(linear))
    shape, dtype = (*x.shape[:-1], linear.out_features), head_call.product_dtype(x)
    source = steps.Source(linear, head_call.leaves[0], (), head_call.leaves[1:])
    record = steps.Record((source,), (), shape, dtype, steps.Rows())
    with torch_private.without_torch_function():
        deferred = EagerValue(head_call, record, Layout.contiguous(shape, dtype))
        return HeadProduct.apply(DeferredLogits, deferred, *operands)


def _leaves(x, weight, bias, keeps_weight):
    """What flce's graphs end in: views without a graph, whose hooks do not run there. keeps_weight:
    a Parameter stays itself, as accumulate_into adds to its .grad and ZeRO-3 swaps its memory."""
    keeps_weight = keeps_weight and weight.is_leaf
    leaves = [x.detach(), weight if keeps_weight else weight.detach()]
    leaves.append(None if bias is None else bias.detach())
    for leaf, operand in zip(leaves, (x, weight, bias), strict=True):
        if leaf is not None and leaf is not operand and operand.requires_grad:
            leaf.requires_grad_()
    return tuple(leaves)


# ---- __torch_function__ ----


def _by_torch(function, args, kwargs):
    with torch_private.without_torch_function():
        return function(*args, **kwargs)


def _is_deferred_tensor(value):
    return isinstance(value, DeferredLogits)


_SET_DATA = torch.Tensor.data.__set__


def _handle(function, args, kwargs):
    """What a handler of `operations` returns, with its graph."""
    deferred, operands = with_deferred_first(function, args, kwargs)
    require(deferred is not None and deferred.record is not None and deferred.is_pending())
    handler, arity = HANDLERS.get((deferred.record.form(), function), (None, None))
    require(handler is not None and (arity is None or (len(args) == arity and not kwargs)))
    handle = functools.partial(handler, function, deferred, operands, kwargs)
    return handle_with_graph(function, args, kwargs, handle)


def _deferred_tensors(args, kwargs):
    return [argument for argument in (*args, *kwargs.values()) if _is_deferred_tensor(argument)]


def handle_with_graph(function, args, kwargs, handle):
    """What `handle()` returns for function(*args, **kwargs), as a function of the deferred Tensors
    among its arguments for autograd. Raises Unknown where the function has to be called itself."""
    operands = _deferred_tensors(args, kwargs)
    if not operands:  # those of a graph of torch.compile, which records by itself
        return handle()
    for tensor in operands:
        require(not tensor._flce.memory.is_touched)
        with torch_private.without_torch_function():
            tensor._flce.has_gradient = tensor.requires_grad
    result = handle()
    if type(result) is DeferredStep:
        return _step_by_torch(function, args, kwargs, result)
    if isinstance(result, tuple):
        # Each piece as a view of its own, not by one call of the function, whose backward makes
        # zeros for the pieces that no loss reads.
        values = tuple(_step_by_torch(step.view, args[:1], {}, step) for step in result)
        return iter(values) if function is torch.Tensor.__iter__ else values
    if _is_deferred_tensor(result) or not result.requires_grad:
        return result
    operands = [tensor for tensor in operands if tensor._flce.has_gradient]
    if not torch.is_grad_enabled() or not operands:
        return result.detach()
    (operand,) = operands
    replaced_call = ReplacedCall(function, args, kwargs, operand._flce)
    paths_to_heads = None
    # The forms of a product or a difference: their values may reach one head on two paths.
    if operand._flce.record.form() in (steps.P_LOG_P, steps.P_Z, steps.KL):
        with torch_private.without_torch_function():
            paths_to_heads = count_paths_to_heads(operand.grad_fn)
    return LossOfLogits.apply([result], replaced_call, paths_to_heads, operand)


def _step_by_torch(function, args, kwargs, step):
    """The function itself, of Tensors without values: autograd records it. __torch_dispatch__,
    which it calls, finds the step in `_state.step`."""
    outer_step, _state.step = _state.step, step
    try:
        with torch_private.without_dispatch_modes():
            value = _by_torch(function, args, kwargs)
    finally:
        _state.step = outer_step
    operands = {tensor._flce: tensor for tensor in _deferred_tensors(args, kwargs)}
    deferred = value._flce
    if deferred in operands:  # the argument itself, as of flatten(0, -2) of a matrix
        return value
    deferred.record, deferred.head_call = step.record, step.head_call
    deferred.head_calls = tuple(
        dict.fromkeys(head_call for operand in step.operands for head_call in operand.head_calls)
    )
    with torch_private.without_torch_function():
        if value.grad_fn is not None:
            mark_steps(value, operands.values())
    return value


def _methods(names):
    attributes = [getattr(torch.Tensor, name, None) for name in names.split()]
    return {
        attribute if callable(attribute) else attribute.__get__
        for attribute in attributes
        if attribute is not None
    }


# Answered without values, by torch itself.
_OF_METADATA = _methods("""size dim ndimension numel nelement is_floating_point is_complex is_signed
element_size __len__ is_inference is_conj is_neg shape dtype layout ndim itemsize nbytes is_leaf
name is_sparse is_quantized is_nested is_mkldnn is_sparse_csr retains_grad output_nr _base _version
grad _grad _backward_hooks requires_grad requires_grad_ grad_fn stride is_contiguous storage_offset
device is_cuda is_cpu is_meta is_xpu is_mps is_maia is_vulkan get_device new_zeros new_ones new_full
new_empty new_tensor __hash__ _is_view register_hook retain_grad""")
_OF_METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
_OF_METADATA |= {torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__set__}
# A TorchDispatchMode calls aten.detach itself again for a Tensor that autograd has saved (see
# gradient.GradientOfLogits.__torch_function__). That is not below autograd: is_in_dispatch() is
# False.
_OF_METADATA |= {torch.ops.aten.detach.default}


def _with_memory(function):
    def real(value):
        if not _is_deferred_tensor(value):
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
_PACKETS = [getattr(torch.ops.aten, name) for name in ("div", "mul", "neg", "tanh", "exp", "clone")]
_SAME_LAYOUT = {getattr(packet, name) for packet in _PACKETS for name in packet.overloads()}
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
    return value._flce.materialize() if _is_deferred_tensor(value) else value


def _write(function, args, kwargs):
    """An operator that writes to deferred values: into the real ones, which all views share."""
    if torch.Tag.inplace_view in function.tags:
        _refuse_replacement(function)
    mutable = [a.name for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
    arguments = dict(zip([a.name for a in function._schema.arguments], args, strict=False)) | kwargs
    # For operators that return what they wrote to.
    deferred_tensors = {}  # {id of the real value: its deferred Tensor}
    for tensor in instances_in(DeferredLogits, [arguments.get(name) for name in mutable]):
        tensor._flce.memory.is_touched = True
        deferred_tensors[id(tensor._flce.materialize())] = tensor
    results = function(*mapped(_value, args), **mapped(_value, kwargs))
    return mapped(lambda value: deferred_tensors.get(id(value), value), results)


def _refuse_replacement(what):
    raise RuntimeError(
        f"flce.fuse: {what}: expected the logits to keep their shape and memory, got an operation "
        "that replaces them in place: use one that returns a new Tensor (logits = "
        "logits.transpose(0, 1))"
    )


def _view(function, args, kwargs):
    """A view: real if the values are, which then may be written to by others."""
    tensor = _first_deferred_tensor(args, kwargs)
    if tensor._flce.is_pending():
        return _deferred_result(function, args, kwargs)
    tensor._flce.memory.is_touched = True
    return function(*mapped(_value, args), **mapped(_value, kwargs))


def _first_deferred_tensor(args, kwargs):
    first, *_ = instances_in(DeferredLogits, (args, kwargs))
    return first


def _deferred_result(function, args, kwargs):
    """The result of an operator, as a deferred Tensor."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    is_flat = (
        _is_deferred_tensor(args[0]) and len(tensors) == 1 and not any(map(_nests_tensors, args))
    )
    deferred = (args[0] if is_flat else _first_deferred_tensor(args, kwargs))._flce
    if is_flat:
        operation = Operation(function, (deferred, *args[1:]), kwargs)
    else:
        operation = Operation(function, *mapped(_by_value, (args, kwargs)))
    record = _state.step.record if _state.step else None  # None for a view that nobody recognised
    layout = _known_layout(function, deferred, record, tensors, args, kwargs)
    if layout is not None:
        parent = deferred if function is _VIEW else None
        return DeferredLogits(EagerValue(deferred.head_call, None, layout, operation, parent))
    meta_args, meta_kwargs = mapped(_meta_tensor_of, (operation.args, operation.kwargs))
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    meta_results = function(*meta_args, **meta_kwargs)
    parent = deferred if _kind_of(function) == "view" else None

    def deferred_tensor(meta, index=None):
        indexed = operation._replace(result_index=index)
        result_value = EagerValue(deferred.head_call, None, Layout.of(meta), indexed, parent)
        result_value.meta = meta
        return DeferredLogits(result_value)

    if isinstance(meta_results, torch.Tensor):
        return deferred_tensor(meta_results)
    return [deferred_tensor(meta, i) for i, meta in enumerate(meta_results)]


def _known_layout(function, deferred, record, tensors, args, kwargs):
    """The Layout of an operator's result, if it follows from the record of the step; else None.
    deferred: the DeferredValue of the first deferred Tensor among the arguments; tensors: the
    arguments that are Tensors."""
    if record is None:
        return None
    is_of_rows = function in _SAME_LAYOUT and _are_contiguous_rows(record, tensors, kwargs)
    # With a real Tensor among the arguments, an index or a vector, the result is new memory.
    if is_of_rows or function in _SOFTMAXES or not all(map(_is_deferred_tensor, tensors)):
        dtype = deferred.layout.dtype if is_of_rows and len(tensors) == 1 else record.dtype
        return Layout.contiguous(record.shape, dtype)
    if function is _VIEW and _is_whole_view(deferred.layout, record, args[1]):
        return Layout.contiguous(record.shape, deferred.layout.dtype)
    return None


def _nests_tensors(value):
    return type(value) in (list, tuple) and any(isinstance(x, torch.Tensor) for x in value)


def _meta_tensor_of(value):
    return value.meta_tensor() if isinstance(value, DeferredValue) else value


def _by_value(value):
    """An argument by its value: the caller may write to an index or a vector later."""
    if _is_deferred_tensor(value):
        return value._flce
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _are_contiguous_rows(record, operands, options):
    """Whether an operator of _SAME_LAYOUT gives contiguous values of the record's shape. A step may
    be several operators, and the record has the shape after the last one: `reshape` of rows with
    gaps is a clone, in the shape of its operand, and then a view."""
    layouts = [tensor._flce.layout for tensor in operands if _is_deferred_tensor(tensor)]
    is_copy = options.get("memory_format") is torch.contiguous_format
    return all(
        tuple(layout.shape) == tuple(record.shape) and (is_copy or layout.is_contiguous())
        for layout in layouts
    )


def _is_whole_view(layout, record, sizes):
    """Whether view(sizes) of contiguous values at the beginning of their memory has the
    record's shape."""
    has_shape = len(sizes) == len(record.shape)
    has_shape = has_shape and all(a in (-1, b) for a, b in zip(sizes, record.shape, strict=True))
    return has_shape and layout.offset == 0 and layout.is_contiguous()
