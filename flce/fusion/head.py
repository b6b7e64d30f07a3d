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
from .node import HeadCall, Node
from .reentry import foreign_hook, fusion_in
from .sharded import gathering_forward
from .snapshot import Snapshot

# An nn.Linear that makes logits has the attributes _flce_fusion, _flce_name, of the head, and
# _flce_enclosing, a weak reference to the Module that the model calls.


def _adopt(module):
    """Enters a Module that was unpickled or copied in the nn.Linears in it. What encloses them is
    restored after they are."""
    if (fusion := fusion_in(module)) is not None and fusion.is_attached():
        fusion.adopt(module)
    for linear in module.modules():
        if fusion_in(linear) is not None:
            linear._flce_enclosing = weakref.ref(module)


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
    fusion = linear._flce_fusion
    is_on = fusion.is_on()
    fusion.note_call(is_on)
    if kwargs or not is_on or (is_compiling() and _exports()):
        return False
    if "_is_replica" in linear.__dict__:
        raise RuntimeError("flce.fuse: " + DATA_PARALLEL)
    x = args[0]
    if isinstance(x, torch.Tensor) and (x.is_meta or not x.is_floating_point() or x.dim() == 0):
        return False
    if reason := _obstacle(linear, x):
        fusion.fall_back(reason)
    return reason is None


def _exports():
    return torch.compiler.is_exporting()


_exports._dynamo_marked_constant = True  # torch 2.10 traces is_exporting as True


def _obstacle(linear, x):
    """Why this call of a head cannot defer; None if it can."""
    if not is_standard_linear(linear):
        return "the head's forward was replaced"
    if "parametrizations" in linear._modules:
        return "the head is parametrized, so that each use would make its weight anew"
    if type(x) not in (torch.Tensor, nn.Parameter):
        return f"the head's input is a {type(x).__name__}"
    if validate.function_transforms_are_on():
        return "a transform of torch.func is active"
    enclosing = reentry.enclosing_of(linear)
    for module in (linear,) if linear is enclosing else (linear, enclosing):
        if hook := foreign_hook(module):
            return f"{hook} is hooked to {type(module).__name__}, the head"
    return None


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
    call = HeadCall(linear._flce_fusion, proxies.proxy_of, device, grad, snapshots)
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
    state = {name: value for name, value in module.__dict__.items() if name != "_flce_enclosing"}
    return _rebuilt, (module._flce_base, mixin), state


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
        linear._flce_fusion, linear._flce_name = fusion, name
        linear._flce_enclosing = weakref.ref(enclosing)
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
            gathers = module.__dict__.get("_flce_gathers")
            for name in [name for name in module.__dict__ if name.startswith("_flce_")]:
                del module.__dict__[name]
            if gathers:
                module.forward = gathers


def is_standard_linear(module):
    """Whether an nn.Linear computes what the class nn.Linear does."""
    forward = type(module).forward
    is_replaced = "forward" in module.__dict__ and "_old_forward" not in module.__dict__
    is_replaced = is_replaced and gathering_forward(module) is None
    return forward in (nn.Linear.forward, _Deferring.forward) and not is_replaced


def fusion_of(model):
    """The Fusion of the first head in `model` that is fused; None if there is none."""
    fusions = [fusion for module in model.modules() if (fusion := fusion_in(module)) is not None]
    return next((fusion for fusion in fusions if fusion.is_attached()), None)
