"""What a caller holds in place of logits: a Tensor without memory."""

import sys

import torch
from torch._C._dynamo import eval_frame
from torch._guards import detect_fake_mode
from torch.compiler import is_compiling, is_dynamo_compiling

from .node import node_of
from .operations import HANDLERS
from .reentry import modules_of
from .steps import Unknown, require


def _functions(names):
    """Methods of Tensor, and what reads its properties, as __torch_function__ gets them."""
    found = [getattr(torch.Tensor, name) for name in names.split()]
    return {function if callable(function) else function.__get__ for function in found}


# Answered from the shape, dtype and device, while there are no real logits.
_ANSWERED = _functions("""size dim ndimension numel nelement is_floating_point is_complex is_signed
element_size __len__ is_inference is_conj is_neg shape dtype layout ndim itemsize nbytes is_leaf
name is_sparse is_quantized is_nested is_mkldnn is_sparse_csr retains_grad output_nr _base _version
grad _grad _backward_hooks""")
_ANSWERED |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
_OF_LAYOUT = _functions("stride is_contiguous storage_offset")
# They take no more than dtype and device from the logits.
_OF_LIKE = _functions("""device is_cuda is_cpu is_meta is_xpu is_mps is_maia is_vulkan get_device
new_zeros new_ones new_full new_empty new_tensor""")
_COMMUTATIVE = {torch.add, torch.mul, torch.multiply, torch.Tensor.add, torch.Tensor.mul}
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__
_GRAD_FN = torch.Tensor.grad_fn.__get__
_DDP = "torch.nn.parallel.distributed"
_ZERO3 = "deepspeed.runtime.zero.parameter_offload"
# A hook on the logits would not see the gradient of a loss that was computed without them.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


def _dispatch(cls, function, types, args=(), kwargs=None):
    """__torch_function__: the result of a function one of whose arguments is deferred."""
    kwargs = kwargs or {}
    if _is_asked_by_compiler():
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    operands, node = args, node_of(args[0]) if args else None
    if node is None and len(args) == 2 and not kwargs and function in _COMMUTATIVE:
        operands = args[::-1]
        node = node_of(operands[0])
    if node is not None:
        proxy = operands[0]
        if function is torch.Tensor.detach and _is_called_by_hook(proxy, node):
            return HookedLogits(node) if node.call.requires_grad else DeferredLogits(node)
        if node.is_pending():
            has_graph = _has_own_graph(proxy)
            if function == _GRAD_FN:
                # HookedLogits' own grad_fn gets no gradient: hide it. DDP with static_graph only
                # tests outputs for `grad_fn is None`; a true value counts as differentiable.
                is_ddp = not is_compiling() and sys._getframe(1).f_globals.get("__name__") == _DDP
                is_ddp = is_ddp and node.call.requires_grad and not node.call.loss_is_done
                return _own_graph(proxy) if has_graph else is_ddp or None
            if not has_graph:
                _hook_gradient(proxy, node)
                try:
                    return _answered_without_logits(function, node, operands, kwargs)
                except Unknown:
                    pass

    def make(proxy, node):
        value = node.make_for(function)
        return _attached(proxy, value) if _has_own_graph(proxy) else value

    return function(*_materialized(args, make), **_materialized(kwargs, make))


# torch.compile traces _dispatch as a part of the function that calls it. Called by itself, after a
# break of the graph, it runs uncompiled, with all that it calls: torch.compile does not guard by an
# argument that is a function of torch, so a graph for one function would serve the next.
_SKIP = eval_frame._FrameAction.SKIP
_UNCOMPILED = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
eval_frame.set_code_exec_strategy(_dispatch.__code__, _UNCOMPILED)


def _is_asked_by_compiler():
    """Whether torch.compile itself calls, to describe a Tensor that a graph is given: the proxy is,
    whether there are real logits or not. A call that it traces is none of its own."""
    return not is_dynamo_compiling() and detect_fake_mode() is not None


def _is_called_by_hook(proxy, node):
    """Whether a hook of DeepSpeed's ZeRO-3 detaches the proxy, and neither reads the values nor
    is needed for their gradient: it passes every Tensor that a Module takes or returns through an
    autograd Function, which gathers the Module's own parameters before their backward. That gets
    the tensors alone: only its callers' frames tell which Module is hooked, or that none is."""
    if type(proxy) is TracedLogits or node.call.fusion.when == "always" or _has_own_graph(proxy):
        return False
    frame = sys._getframe(2)  # of __torch_function__'s caller
    if frame.f_globals.get("__name__") != _ZERO3:
        return False
    while frame is not None and "module" not in frame.f_locals:
        frame = frame.f_back
    module = None if frame is None else frame.f_locals["module"]
    if not isinstance(module, torch.nn.Module):
        return False
    # If the Module is the head's, or around it, its hook gets the loss as well.
    gets_loss = node.call.loss_is_done or module in dict(modules_of(node.record.sources) or ())
    return gets_loss or not (module._parameters or getattr(module, "_external_params", None))


def _answered_without_logits(function, node, args, kwargs):
    handler, arity = HANDLERS.get((node.record.form(), function), (None, None))
    if handler is not None:
        require(arity is None or (len(args) == arity and not kwargs))
        return handler(function, node, args, kwargs)
    if function in _OF_LAYOUT or function in _OF_LIKE:
        like = node.layout() if function in _OF_LAYOUT else node.like()
        return function(like, *args[1:], **kwargs)
    if function == _REQUIRES_GRAD:
        # In the forward of a custom autograd Function, which saves what its backward needs.
        return node.call.requires_grad and not torch.is_grad_enabled()
    if function in _ANSWERED:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if function in _HOOKS and node.call.loss_is_done:
        raise RuntimeError(
            f"flce.fuse: {function.__name__}: expected a tensor that the loss is computed "
            "from, got logits whose loss was computed without them"
        )
    raise Unknown


def _materialized(value, make):
    """`value` with make(proxy, node) for all that is deferred in it: in lists, tuples, dicts."""
    node = node_of(value)
    if node is not None:
        _hook_gradient(value, node)
        return make(value, node)
    if isinstance(value, dict):
        return {name: _materialized(item, make) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_materialized(item, make) for item in value)
    return value


def _has_own_graph(proxy):
    """Whether a custom autograd Function (a reentrant checkpoint) has returned the proxy, through
    whose node the gradient has to go; or one of ZeRO-3 under no_grad: then it is a constant."""
    kind = type(proxy)
    if kind is TracedLogits or (graph := _own_graph(proxy)) is None:
        return kind is HookedLogits
    return kind is DeferredLogits or getattr(type(graph), "_forward_cls", type).__module__ != _ZERO3


def _own_graph(proxy):
    with torch._C.DisableTorchFunctionSubclass():
        return proxy.grad_fn


def _attached(proxy, value):
    if is_dynamo_compiling():
        torch._dynamo.graph_break()  # in a graph the proxy would be a constant
    return _Attached.apply(proxy, value)


class _Attached(torch.autograd.Function):
    """The values of a proxy that a custom Function has returned, with that Function's graph."""

    @staticmethod
    def forward(ctx, proxy, value):
        return value.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _hook_gradient(proxy, node):
    """Where gradients are off, the caller may be the forward of a custom autograd Function that
    has taken the proxy for its input, and will return the gradient to it."""
    is_first = isinstance(proxy, DeferredLogits) and "_has_gradient_hook" not in proxy.__dict__
    if is_first and node.call.requires_grad and not torch.is_grad_enabled():
        proxy._has_gradient_hook = True
        with torch._C.DisableTorchFunctionSubclass():
            if proxy.requires_grad:  # HookedLogits may be constants
                proxy.register_hook(node.backward_hook)


class DeferredLogits(torch.Tensor):
    """A Tensor with shape, dtype and device of the logits, and no memory. For C++ it requires grad
    where the logits do, for `Node.backward_hook`; in Python it does not while there are no logits:
    what FSDP2 hooks to a Module's outputs that require grad is hooked to the loss instead."""

    @staticmethod
    def __new__(cls, node):
        call = node.call
        options = {"dtype": node.record.dtype, "device": call.device}
        options["requires_grad"] = call.requires_grad and cls is DeferredLogits
        proxy = torch.Tensor._make_wrapper_subclass(cls, node.record.shape, **options)
        proxy._flce = node
        return proxy

    __torch_function__ = classmethod(_dispatch)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Reached by C++ that does not ask __torch_function__. It runs below autograd, where
        logits can be read, but neither kept nor written to."""
        if any(a.alias_info and a.alias_info.is_write for a in function._schema.arguments):
            raise RuntimeError(
                f"flce.fuse: {function}: expected real tensors, got logits that have not been "
                "made; make them first, for example by logits = logits.clone() + 0"
            )

        def make(proxy, node):
            return node.replay() if node.value is None else node.value.detach()

        return function(*_materialized(args, make), **_materialized(kwargs or {}, make))


class HookedLogits(DeferredLogits):
    """What ZeRO-3's autograd Function returns for deferred logits, through which no gradient has to
    go, as the loss passes the Modules' hooks (reentry.py). Requires grad by that Function alone."""


class TracedLogits(torch.Tensor):
    """Deferred logits under torch.compile, which traces no wrapper. On the meta device: code that
    does not ask __torch_function__ finds no values."""

    __torch_function__ = classmethod(_dispatch)


def proxy_of(node):
    """What the caller holds for a Node."""
    if not is_compiling():
        return DeferredLogits(node)
    proxy = torch.empty_like(node.layout()).as_subclass(TracedLogits)
    proxy._flce = node
    return proxy
