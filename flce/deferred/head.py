"""Subclasses put on a head's Modules. A normal call returns deferred logits; a call with a Request
runs its work inside the Module's hooks."""

import types
import weakref

import torch
from torch import nn
from torch.compiler import is_compiling

from .. import validate
from ..dtensor import is_dtensor
from . import proxies, reentry, steps
from .divided import gathering_forward
from .node import HeadCall, Node
from .reentry import foreign_hook
from .snapshot import Snapshot


class LinearState:
    """Of an nn.Linear that makes logits. name: of the head. enclosing: the Module that the model
    calls, which is the nn.Linear itself unless an adapter wraps it; held weakly, because it holds
    this."""

    def __init__(self, fusion, name, enclosing):
        self.fusion, self.name, self._enclosing = fusion, name, weakref.ref(enclosing)

    def enclosing(self, linear):
        """Of `linear`, whose state this is; itself, if PEFT has taken it out of an adapter."""
        enclosing = self._enclosing()
        return linear if enclosing is None else enclosing

    def __getstate__(self):
        """Of a copy: the Modules that are copied along enter themselves (`_adopt`)."""
        return {**self.__dict__, "_enclosing": None}


def _adopt(module):
    """Enters a Module that was unpickled or copied in the states of the nn.Linears in it. What
    encloses them is restored after they are."""
    if (own := module.__dict__.get("_flce_linear")) is not None:
        own._enclosing = weakref.ref(module)
        if own.fusion.is_attached():
            own.fusion.adopt(module)
        return
    for linear in module.modules():
        if (state := linear.__dict__.get("_flce_linear")) is not None:
            state._enclosing = weakref.ref(module)


class Reentrant:
    """Mixed into a Module that encloses the nn.Linear: runs Requests in its forward."""

    def forward(self, *args, **kwargs):
        if len(args) == 2 and type(args[1]) is reentry.Request:
            return args[1].run(self, args[0])
        own = self.__dict__.get("_flce_gathers") or super().forward
        return own(*args, **kwargs)

    def __setstate__(self, state):
        super().__setstate__(state)
        _adopt(self)


class _Deferring(Reentrant):
    """Mixed into an nn.Linear whose products are logits."""

    def __call__(self, *args, **kwargs):
        # torch.compile inlines forward without __call__ where there are no hooks.
        if len(args) == 1 and not is_compiling():
            if _try_to_defer(self, args, kwargs):
                return _deferred(self, args[0])
        return super().__call__(*args, **kwargs)

    def forward(self, *args, **kwargs):
        if len(args) == 1 and is_compiling() and _try_to_defer(self, args, kwargs):
            return _deferred(self, args[0])
        return super().forward(*args, **kwargs)

    def compute_logits(self, x):
        """The real logits, without hooks."""
        gathers = "_flce_gathers" in self.__dict__
        if is_dtensor(self.weight) and not is_dtensor(x) and not gathers:
            raise RuntimeError(
                "flce.fuse: expected the head's weight to be whole where logits are made, got a "
                "sharded one: read outputs.logits before the forward of the model ends, give the "
                "head an FSDP unit of its own, or leave the root's weights unsharded after forward"
            )
        return super().forward(x)


def _try_to_defer(linear, args, kwargs):
    """Whether this call of the head defers. Counts the call, and notes why it falls back if it
    does."""
    fusion = linear._flce_linear.fusion
    is_on = fusion.is_on()
    fusion.note_call(is_on)
    if kwargs or not is_on:
        return False
    if "_is_replica" in linear.__dict__:
        raise RuntimeError("flce.fuse: " + DATA_PARALLEL)
    if not is_standard_linear(linear):
        fusion.fall_back("the head's forward was replaced")
        return False
    x = args[0]
    if type(x) not in (torch.Tensor, nn.Parameter):
        fusion.fall_back(f"the head's input is a {type(x).__name__}")
        return False
    if not x.is_floating_point() or x.dim() == 0 or x.is_meta:
        return False
    if "parametrizations" in linear._modules:
        fusion.fall_back("the head is parametrized, so that each use would make its weight anew")
        return False
    if validate.function_transforms_are_on():
        fusion.fall_back("a transform of torch.func is active")
        return False
    enclosing = linear._flce_linear.enclosing(linear)
    for module in (linear,) if linear is enclosing else (linear, enclosing):
        if hook := foreign_hook(module):
            fusion.fall_back(f"{hook} is hooked to {type(module).__name__}, the head")
            return False
    return True


DATA_PARALLEL = (
    "model: expected one replica per process (DistributedDataParallel, FSDP), got nn.DataParallel, "
    "whose replicas are copies without the state of fuse"
)


def _deferred(linear, x):
    weight, bias = linear.weight, linear.bias
    grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    grad = torch.is_grad_enabled() and grad
    device = x.device if weight.is_meta else weight.device
    snapshots = [Snapshot(linear, x, weight, bias)]
    call = HeadCall(linear._flce_linear.fusion, proxies.proxy_of, device, grad, snapshots)
    shape = (*x.shape[:-1], linear.out_features)
    record = steps.Record((steps.Source(linear, x),), (), shape, call.product_dtype(x))
    return call.proxy(Node(call, record))


_classes = {}


def _class_of(base, mixin):
    """`base` with the mixin in front, under the name of `base`: one class for each."""
    if (base, mixin) not in _classes:
        made = type(base.__name__, (mixin, base), {"__module__": base.__module__})
        made.__reduce_ex__ = _reduce
        made._flce_base = base
        _classes[base, mixin] = made
    return _classes[base, mixin]


def _reduce(module, protocol):
    """A class that was made here cannot be found by its name: pickle and deepcopy remake it."""
    mixin = _Deferring if isinstance(module, _Deferring) else Reentrant
    return _rebuilt, (module._flce_base, mixin), module.__dict__


def _rebuilt(base, mixin):
    made = _class_of(base, mixin)
    return made.__new__(made)


def _swap(module, mixin):
    if isinstance(module, mixin):
        return  # of an earlier fusion, from whose class FSDP2 has derived its own
    module.__class__ = _class_of(type(module), mixin)
    if "_old_forward" in module.__dict__:
        # accelerate's hook, which is `forward` of the instance, calls this one.
        module._old_forward = types.MethodType(type(module).forward, module)


def attach(fusion, name, enclosing, linears):
    """Makes each nn.Linear of a head defer its products."""
    for linear in linears:
        if gathers := gathering_forward(linear):
            # It would not pass Requests on.
            del linear.forward
            linear._flce_gathers = gathers
        _swap(linear, _Deferring)
        linear._flce_linear = LinearState(fusion, name, enclosing)
        fusion.adopt(linear)
    if all(enclosing is not linear for linear in linears):
        _swap(enclosing, Reentrant)


def detach(enclosing, linears):
    """Undoes `attach`. A class that others have derived since (FSDP2's) stays: it does nothing
    once the Fusion is off."""
    for module in {id(m): m for m in (*linears, enclosing)}.values():
        base = type(module).__dict__.get("_flce_base")
        if base is not None:
            module.__class__ = base
            if "_old_forward" in module.__dict__:
                module._old_forward = types.MethodType(base.forward, module)
            module.__dict__.pop("_flce_linear", None)
            if gathers := module.__dict__.pop("_flce_gathers", None):
                module.forward = gathers


def is_standard_linear(module):
    """Whether an nn.Linear computes what the class nn.Linear does."""
    forward = type(module).forward
    is_replaced = "forward" in module.__dict__ and "_old_forward" not in module.__dict__
    is_replaced = is_replaced and gathering_forward(module) is None
    return forward in (nn.Linear.forward, _Deferring.forward) and not is_replaced


def fusion_of(model):
    """The Fusion of the first head in `model` that is fused; None if there is none."""
    linears = (module for module in model.modules() if isinstance(module, _Deferring))
    fusions = (linear._flce_linear.fusion for linear in linears)
    return next((fusion for fusion in fusions if fusion.is_attached()), None)
