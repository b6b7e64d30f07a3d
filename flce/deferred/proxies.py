"""What a caller holds in place of logits: a Tensor without memory, or a plain object while
torch.compile traces."""

import sys

import torch

from . import forms
from .node import node_of
from .operations import HANDLERS, count_of
from .reentry import enclosing_modules

# Answered from the shape, dtype and device, while there are no real logits.
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex")
_METHODS += ("element_size", "get_device", "__len__", "is_inference", "is_signed")
_METHODS += ("is_conj", "is_neg")
_ANSWERED = {getattr(torch.Tensor, name) for name in _METHODS}
_ANSWERED |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
_OF_LAYOUT = {getattr(torch.Tensor, n) for n in ("stride", "is_contiguous", "storage_offset")}
_PROPERTIES = {"shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta"}
_PROPERTIES |= {"is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "names"}
_PROPERTIES |= {"is_maia", "is_vulkan", "is_sparse_csr", "itemsize", "nbytes", "is_leaf", "grad_fn"}
_PROPERTIES |= {"retains_grad", "output_nr", "name", "_base", "_version", "_backward_hooks"}
_PROPERTIES |= {"requires_grad", "grad", "_grad"}
_ZERO = "deepspeed.runtime.zero.parameter_offload"
# A hook on the logits would not see the gradient of a loss that was computed without them.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}


def dispatch(function, args, kwargs):
    """The result of a torch function one of whose arguments is deferred."""
    given, node = args, node_of(args[0]) if args else None
    if node is None and len(args) == 2 and not kwargs and function in _COMMUTATIVE:
        args = args[::-1]
        node = node_of(args[0])
    if function is _DETACH and node is not None and _is_called_by_hook(args[0], node):
        return HookedLogits(node) if node.call.requires_grad else DeferredLogits(node)
    if node is not None and node.is_pending() and not _has_own_graph(args[0]):
        _hook_gradient(args[0], node)
        result = _answered(function, node, args, kwargs)
        if result is not NotImplemented:
            return result
    return function(*real(given, function), **real(kwargs, function))


def _is_called_by_hook(proxy, node):
    """Whether a hook of DeepSpeed's ZeRO-3 detaches the proxy, and neither reads the values nor
    is needed for their gradient: it passes every Tensor that a Module takes or returns through an
    autograd Function, which gathers the Module's own parameters before their backward."""
    is_traced = isinstance(proxy, TracedLogits)
    if is_traced or not node.call.fusion.loss_is_inside() or _has_own_graph(proxy):
        return False
    frame = sys._getframe(3)  # of __torch_function__'s caller
    if frame.f_globals.get("__name__") != _ZERO:
        return False
    while frame is not None and "module" not in frame.f_locals:
        frame = frame.f_back
    module = None if frame is None else frame.f_locals["module"]
    if not isinstance(module, torch.nn.Module):
        return False
    if node.call.loss_is_done or module in enclosing_modules(node.record.sources):
        return True  # its hook gets the loss as well
    return not (module._parameters or getattr(module, "_external_params", None))


def _answered(function, node, args, kwargs):
    """The result without real logits, or NotImplemented."""
    if node.form is None:
        handler = HANDLERS.get(function)
    else:
        handler = forms.HANDLERS.get((type(node.form), function))
    if handler is not None:
        return handler(node, args, kwargs)
    is_traced = isinstance(args[0], TracedLogits)
    if function in _OF_LAYOUT and not is_traced:
        return function(node.layout(), *args[1:], **kwargs)
    if function in _ANSWERED:
        if is_traced:
            return getattr(args[0], function.__name__)(*args[1:], **kwargs)
        return _of_proxy(function, args, kwargs)
    if function.__name__ == "__get__" and function.__self__.__name__ in _PROPERTIES:
        if function == _REQUIRES_GRAD:
            # In the forward of a custom autograd Function, which saves what its backward needs.
            return node.call.requires_grad and not torch.is_grad_enabled()
        if function == _GRAD_FN:
            return None  # that of HookedLogits is no way of a gradient
        return _of_proxy(function, args, kwargs)
    if function in _HOOKS and node.call.loss_is_done:
        raise RuntimeError(
            f"flce.fuse: {function.__name__}: expected a tensor that the loss is computed "
            "from, got logits whose loss was computed without them"
        )
    return NotImplemented


_COMMUTATIVE = {torch.add, torch.mul, torch.multiply, torch.Tensor.add, torch.Tensor.mul}
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__
_DETACH = torch.Tensor.detach
_GRAD_FN = torch.Tensor.grad_fn.__get__


def _of_proxy(function, args, kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def real(value, function):
    """`value` with real tensors for all that is deferred in it, in lists, tuples and dicts too."""
    node = node_of(value)
    if node is not None:
        _hook_gradient(value, node)
        made = node.make_for(function)
        return _Attached.apply(value, made) if _has_own_graph(value) else made
    if isinstance(value, dict):
        return {name: real(item, function) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(real(item, function) for item in value)
    return value


def _has_own_graph(proxy):
    """Whether a custom autograd Function (a reentrant checkpoint) has returned the proxy: the
    gradient has to go through that Function's node. So it is with what a Function of ZeRO-3
    returned under no_grad, which is a constant."""
    kind = type(proxy)
    if kind is TracedLogits:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        graph = proxy.grad_fn
    if graph is None:
        return kind is HookedLogits
    return kind is DeferredLogits or getattr(type(graph), "_forward_cls", type).__module__ != _ZERO


class _Attached(torch.autograd.Function):
    """The values of a proxy that a custom Function has returned, with that Function's graph."""

    @staticmethod
    def forward(ctx, proxy, made):
        return made.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _hook_gradient(proxy, node):
    """Where gradients are off, the caller may be the forward of a custom autograd Function that
    has taken the proxy for its input, and will return the gradient to it."""
    if node.call.requires_grad and not torch.is_grad_enabled():
        if not isinstance(proxy, DeferredLogits):
            return  # a plain object, which no Function takes for a Tensor
        if "_has_gradient_hook" in proxy.__dict__:
            return
        proxy._has_gradient_hook = True
        with torch._C.DisableTorchFunctionSubclass():
            if proxy.requires_grad:  # HookedLogits may be constants
                proxy.register_hook(node.backward_hook)


class DeferredLogits(torch.Tensor):
    """A Tensor with shape, dtype and device of the logits, and no memory.

    For C++ it requires grad where the logits do, so that `Node.backward_hook` receives a gradient.
    In Python `requires_grad` is False as long as there are no logits: what is hooked to a tensor
    that requires grad, as FSDP2 does with a Module's outputs, is hooked to the loss instead.
    """

    @staticmethod
    def __new__(cls, node):
        call = node.call
        proxy = torch.Tensor._make_wrapper_subclass(
            cls,
            node.shape,
            dtype=node.record.dtype,
            device=call.device,
            requires_grad=call.requires_grad and cls is DeferredLogits,
        )
        proxy._flce = node
        return proxy

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Reached by C++ that does not ask __torch_function__. It runs below autograd, where
        logits can be read, but neither kept nor written to."""
        if any(a.alias_info and a.alias_info.is_write for a in function._schema.arguments):
            raise RuntimeError(
                f"flce.fuse: {function}: expected real tensors, got logits that have not been "
                "made; make them first, for example by logits = logits.clone() + 0"
            )

        def values(value):
            node = node_of(value)
            if node is not None:
                _hook_gradient(value, node)
                return node.replay() if node.made is None else node.made.detach()
            return type(value)(map(values, value)) if type(value) in (tuple, list) else value

        kwargs = {name: values(value) for name, value in (kwargs or {}).items()}
        return function(*values(args), **kwargs)


class HookedLogits(DeferredLogits):
    """What ZeRO-3's autograd Function returns for deferred logits, where no gradient has to go
    through it: the loss passes the hooks of the head's Modules (reentry.py) and of the model.
    Requires grad by that Function alone."""


class TracedLogits:
    """Deferred logits under torch.compile, which traces a plain object with __torch_function__
    but no subclass of Tensor without memory. Its attributes are those of a Tensor."""

    def __init__(self, node):
        self._flce, self.device = node, node.call.device
        self.shape, self.dtype = torch.Size(node.shape), node.record.dtype
        self.ndim, self.requires_grad = len(self.shape), False
        self.is_cuda, self.is_cpu = self.device.type == "cuda", self.device.type == "cpu"
        self.is_leaf, self.layout, self.itemsize = False, torch.strided, self.dtype.itemsize

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.ndim

    def numel(self):
        return count_of(self.shape)

    def __len__(self):
        return self.shape[0]

    def get_device(self):
        return -1 if self.is_cpu else self.device.index

    def element_size(self):
        return self.itemsize

    def is_floating_point(self):
        return True

    def is_signed(self):
        return True

    def is_complex(self):
        return False

    def is_inference(self):
        return False

    ndimension, nelement, is_conj, is_neg = dim, numel, is_complex, is_complex
    __hash__ = object.__hash__  # Python drops it where __eq__ is set


def _method(function):
    def method(self, *args, **kwargs):
        return dispatch(function, (self, *args), kwargs)

    return method


def _dunders():
    arithmetic = ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod")
    yield from (f"__{side}{name}__" for name in arithmetic for side in ("", "r", "i"))
    yield from ("__getitem__", "__setitem__", "__neg__", "__len__", "__iter__", "__lt__", "__gt__")
    yield from ("__le__", "__ge__", "__abs__", "__bool__", "__float__", "__int__", "__array__")
    yield from ("__eq__", "__ne__", "__invert__", "__and__", "__or__", "__xor__")


# Tensor's methods, all of them: each goes through the same table as a Tensor's would. object has
# comparisons of its own, by identity.
for _name in (*(name for name in dir(torch.Tensor) if not name.startswith("_")), *_dunders()):
    _function = getattr(torch.Tensor, _name, None)
    is_new = getattr(TracedLogits, _name, None) is getattr(object, _name, None)
    if callable(_function) and is_new:
        setattr(TracedLogits, _name, _method(_function))
