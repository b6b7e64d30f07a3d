"""Deferred logits in a graph of torch.compile: a Tensor on the meta device."""

import torch
from torch.compiler import is_dynamo_compiling

from .. import torch_private
from .operations import HANDLERS
from .steps import Unknown, require
from .values import TracedValue, deferred_value_of, with_deferred_first


def _functions(names):
    """Methods of Tensor, and the getters of its properties: what __torch_function__ receives."""
    attributes = [getattr(torch.Tensor, name) for name in names.split()]
    return {attribute if callable(attribute) else attribute.__get__ for attribute in attributes}


# Answered from the shape, dtype and device, while there are no real logits.
_ANSWERED = _functions("""size dim ndimension numel nelement is_floating_point is_complex is_signed
element_size __len__ is_inference is_conj is_neg shape dtype layout ndim itemsize nbytes is_leaf
name is_sparse is_quantized is_nested is_mkldnn is_sparse_csr retains_grad output_nr _base _version
grad _grad grad_fn _backward_hooks""")
_ANSWERED |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
_OF_LAYOUT = _functions("stride is_contiguous storage_offset")
# They take no more than dtype and device from the logits.
_OF_LIKE = _functions("""device is_cuda is_cpu is_meta is_xpu is_mps is_maia is_vulkan get_device
new_zeros new_ones new_full new_empty new_tensor""")
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__
# A hook on the logits would not see the gradient of a loss that was computed without them.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


def _answer_or_materialize(cls, function, types, args=(), kwargs=None):
    """__torch_function__: the result of a function that has a deferred Tensor as an argument,
    without logits where it is known, else by real logits."""
    kwargs = kwargs or {}
    if _is_asked_by_compiler():
        with torch_private.without_torch_function():
            return function(*args, **kwargs)
    deferred, operands = with_deferred_first(function, args, kwargs)
    if deferred is not None and deferred.is_pending():
        try:
            return _with_tensors(
                function, _answered_without_logits(function, deferred, operands, kwargs)
            )
        except Unknown:
            pass
    return function(*_with_real_values(args, function), **_with_real_values(kwargs, function))


def _with_tensors(function, result):
    """What a handler returns, with deferred Tensors in place of TracedValues."""
    if isinstance(result, TracedValue):
        return deferred_tensor_of(result)
    if isinstance(result, tuple) and result and isinstance(result[0], TracedValue):
        tensors = tuple([deferred_tensor_of(deferred) for deferred in result])
        return iter(tensors) if function is torch.Tensor.__iter__ else tensors
    return result


# Where torch.compile traces a caller, it traces this function too. Where uncompiled code calls it,
# as after a break of the graph, it runs uncompiled, with all that it calls: torch.compile does not
# guard by an argument that is a function of torch, so a graph that it compiles for one `function`
# would run for all others.
torch_private.run_uncompiled(_answer_or_materialize)


def _is_asked_by_compiler():
    """Whether torch.compile itself calls, to describe an input of a graph: that is the deferred
    Tensor, also where real logits exist. Not while it traces a call of the user's."""
    return not is_dynamo_compiling() and torch_private.is_faking()


def _answered_without_logits(function, deferred, args, kwargs):
    handler, arity = HANDLERS.get((deferred.record.form(), function), (None, None))
    if handler is not None:
        require(arity is None or (len(args) == arity and not kwargs))
        return handler(function, deferred, args, kwargs)
    if function in _OF_LAYOUT or function in _OF_LIKE:
        like = deferred.meta_tensor() if function in _OF_LAYOUT else deferred.like()
        return function(like, *args[1:], **kwargs)
    if function == _REQUIRES_GRAD:
        # False with grad mode on: this Tensor has no graph, so it can have no hook such as FSDP2's
        # of outputs that require grad. With grad mode off the forward of a custom autograd Function
        # may ask, to know what its backward will need.
        return deferred.head_call.requires_grad and not torch.is_grad_enabled()
    if function in _ANSWERED:
        with torch_private.without_torch_function():
            return function(*args, **kwargs)
    if function in _HOOKS and deferred.head_call.loss_is_settled:
        raise RuntimeError(
            f"flce.fuse: {function.__name__}: expected a tensor that the loss is computed "
            "from, got logits whose loss was computed without them"
        )
    raise Unknown


def _with_real_values(value, function):
    """`value` with real Tensors in place of deferred ones: in lists, tuples, dicts."""
    deferred = deferred_value_of(value)
    if deferred is not None:
        return deferred.materialize_for(function)
    if isinstance(value, dict):
        return {name: _with_real_values(item, function) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_with_real_values(item, function) for item in value)
    return value


class TracedLogits(torch.Tensor):
    """Deferred logits under torch.compile, which traces no wrapper. On the meta device: code that
    does not ask __torch_function__ finds no values."""

    __torch_function__ = classmethod(_answer_or_materialize)


def deferred_tensor_of(deferred):
    """What the caller holds for a DeferredValue."""
    tensor = torch.empty_like(deferred.meta_tensor()).as_subclass(TracedLogits)
    tensor._flce = deferred
    return tensor
