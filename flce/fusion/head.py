"""The heads of a model: what it calls for its logits, the nn.Linear in that, and their subclasses.

`attach` gives an nn.Linear that makes logits a class that derives from DeferringMixin and its own
class, and what the model calls around it (PEFT's adapter) one of RequestMixin and its own:
`module.__class__` is set. The `forward` of these classes tells two calls apart:

    linear(x)             by the model: returns deferred logits
    linear(x, request)    by `reentry.Request.run`, to compute a loss later, where the weight is
                          whole: nn.Module.__call__ runs the hooks of FSDP2 and DeepSpeed around
                          `forward`, which does not multiply but calls request.run(linear, x)
"""

import contextlib
import functools
import types
import weakref

import torch
from torch import nn
from torch.compiler import is_compiling

from .. import torch_private
from ..validate import function_transforms_are_on, is_dtensor, refuse
from . import deferred, reentry, replacements, steps, traced
from .reentry import enclosing_of, foreign_hook, own_fusion
from .sharded import gathering_linears
from .values import HeadCall, Snapshot, TracedValue

BY_HAND = "call flce.linear_cross_entropy(hidden, weight, labels) where that is done"
# Attributes of an nn.Linear that makes logits: _flce_fusion; _flce_name, the head's name;
# _flce_enclosing, a weak reference to the Module that the model calls; and, of a head of
# transformers' tensor parallelism alone, _flce_gathering_forward, the `forward` that transformers
# had set on the instance: it gathers the logits of all ranks (sharded.py).


class RequestMixin:
    """Of a Module that encloses the nn.Linear: forward(x, request) runs a Request, all other calls
    are those of its own class."""

    def forward(self, *args, **kwargs):
        if len(args) == 2 and isinstance(args[1], reentry.Request):
            x, request = args
            return request.run(self, x)
        forward = self.__dict__.get("_flce_gathering_forward") or super().forward
        return forward(*args, **kwargs)

    def __setstate__(self, state):
        """Of a copy: what encloses an nn.Linear is restored after it."""
        super().__setstate__(state)
        if (fusion := own_fusion(self)) is not None and fusion.is_attached():
            fusion.linears[self] = None
        for linear in self.modules():
            if own_fusion(linear) is not None:
                linear._flce_enclosing = weakref.ref(self)


class DeferringMixin(RequestMixin):
    """Of an nn.Linear whose products are logits: forward(x) defers them, forward(x, request) runs a
    Request."""

    def __call__(self, *args, **kwargs):
        fusion = self._flce_fusion
        if not is_compiling() and "forward" in self.__dict__ and not is_standard_linear(self):
            if len(args) == 1 and fusion.is_to_defer():
                fusion.note_fall_back("the head's forward was replaced")
        return super().__call__(*args, **kwargs)

    def forward(self, *args, **kwargs):
        logits = _deferred_tensor(self, args, kwargs)
        return super().forward(*args, **kwargs) if logits is None else logits

    def linear_forward(self, x):
        """The forward of nn.Linear, without hooks: the real product."""
        is_whole = not is_dtensor(self.weight) or is_dtensor(x)
        if not is_whole and "_flce_gathering_forward" not in self.__dict__:
            raise RuntimeError(reentry.NOT_WHOLE)
        return super().forward(x)


def _deferred_tensor(linear, args, kwargs):
    """The product of this call of the head, as a deferred Tensor; None where it is not to be one.
    Counts the call, and tells why it falls back."""
    fusion = linear._flce_fusion
    # Two arguments: a Request, or what nn.Linear refuses.
    if len(args) != 1 or not fusion.is_to_defer() or kwargs or (is_compiling() and _exports()):
        return None
    if "_is_replica" in linear.__dict__:
        raise RuntimeError("flce.fuse: " + DATA_PARALLEL)
    (x,) = args
    if isinstance(x, torch.Tensor) and (x.is_meta or not x.is_floating_point() or x.dim() == 0):
        return None
    if reason := _unsupported_call(linear, x):
        return fusion.note_fall_back(reason)
    weight, bias = linear.weight, linear.bias
    gathers = "_flce_gathering_forward" in linear.__dict__
    if not is_compiling() and is_dtensor(weight) and not gathers:
        return None  # a shard, as outside of FSDP2's hooks: nn.Linear's own error says so
    operands = [t for t in (x, weight, bias) if t is not None]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    device = x.device if weight.is_meta else weight.device
    head_call = HeadCall(fusion, device, grad, [Snapshot(linear, x, not is_compiling())])
    if not is_compiling():
        return deferred.deferred_product(head_call, linear, x)
    shape, sources = (*x.shape[:-1], linear.out_features), (steps.Source(linear, x),)
    record = steps.Record(sources, (), shape, head_call.product_dtype(x), steps.Rows())
    return traced.deferred_tensor_of(TracedValue(head_call, record))


def _exports():
    return torch.compiler.is_exporting()


torch_private.call_while_tracing(_exports)  # torch 2.10 traces is_exporting as True


def _unsupported_call(linear, x):
    """Why this call of a head cannot defer; None if it can."""
    if not is_standard_linear(linear):
        return "the head's forward was replaced"
    if type(x) not in (torch.Tensor, nn.Parameter):
        return f"the head's input is a {type(x).__name__}"
    if function_transforms_are_on():
        return "a transform of torch.func is active"
    if not is_compiling() and (reason := _unsupported_now(linear)):
        return reason
    ddp = torch_private.active_ddp() if is_compiling() else None
    if getattr(ddp, "static_graph", False) and linear._flce_fusion.when == "always":
        return "torch.compile traces DistributedDataParallel with static_graph"
    return _unsupported_in(enclosing_of(linear), [linear], f"{type(linear).__name__}, the head")


def _unsupported_now(linear):
    """Why a head cannot defer in the state that torch and its Modules are in; None if it can."""
    if replacement := replacements.find_replacement():
        return replacement
    if torch_private.forward_ad_is_on():
        return "forward-mode AD is active"
    if torch_private.jit_traces():
        return "torch.jit.trace is active"
    if reentry.is_freed_after_forward(linear):
        return (
            "FullyShardedDataParallel frees the head's weight after its forward (use fully_shard)"
        )
    return None


def _unsupported_in(head, linears, name):
    """Why the products of the nn.Linears that make a head's logits cannot be deferred, or None."""
    if any("parametrizations" in linear._modules for linear in linears):
        return f"{name} is parametrized: each use would make its weight anew"
    for module in linears if head in linears else (head, *linears):
        if hook := foreign_hook(module):
            return f"{hook} is hooked to {name}, and would not see the logits"
    return None


DATA_PARALLEL = (
    "model: expected one replica per process (DistributedDataParallel, FSDP), got nn.DataParallel, "
    "whose replicas are copies without the state of fuse"
)


@functools.cache
def _class_of(base, mixin):
    """`base` with the mixin in front, under the name of `base`."""
    attributes = {"__module__": base.__module__, "__reduce_ex__": _reduce, "_flce_base": base}
    return type(base.__name__, (mixin, base), attributes | {"_flce_mixin": mixin})


def _reduce(module, protocol):
    """For pickle and deepcopy, which cannot find a class of _class_of by its name: they call it."""
    state = {name: value for name, value in module.__dict__.items() if name != "_flce_enclosing"}
    return _rebuilt, (module._flce_base, module._flce_mixin), state


def _rebuilt(base, mixin):
    return object.__new__(_class_of(base, mixin))


def _set_class(module, new):
    """Sets the Module's class, in which Python looks `__call__` up. The `forward` of the new class
    runs inside the Module's hooks, and an attribute `forward` of the instance, which accelerate
    sets, still comes before it."""
    module.__class__ = new
    if "_old_forward" in module.__dict__:
        # accelerate's hook, which is `forward` of the instance, calls this one.
        module._old_forward = types.MethodType(new.forward, module)


def _mix_in(module, mixin):
    # Else an earlier fusion has done it, and FSDP2's class derives from that one.
    if not isinstance(module, mixin):
        _set_class(module, _class_of(type(module), mixin))


def attach(fusion, name, enclosing):
    """Makes each nn.Linear of a head defer its products. Returns why it cannot, or None."""
    if reason := why_not(fusion.model, enclosing):
        return reason
    gathering = gathering_linears(fusion.model)
    for linear in linears_of(fusion.model, enclosing):
        if gathering_forward := gathering.get(linear):
            # On the instance it would come before RequestMixin.forward, which recognises Requests
            # and calls it for everything else.
            del linear.forward
            linear._flce_gathering_forward = gathering_forward
        _mix_in(linear, DeferringMixin)
        linear._flce_fusion, linear._flce_name = fusion, name
        linear._flce_enclosing = weakref.ref(enclosing)
        fusion.linears[linear] = None
    _mix_in(enclosing, RequestMixin)
    return None


def detach(enclosing, linears):
    """Undoes `attach`. A Module whose class was derived since (FSDP2's) is left as it is: its
    Fusion is not attached any more, so it defers nothing."""
    for module in (*linears, enclosing):
        if base := type(module).__dict__.get("_flce_base"):
            _set_class(module, base)
            names = [name for name in module.__dict__ if name.startswith("_flce_")]
            attributes = {name: module.__dict__.pop(name) for name in names}
            if gathering_forward := attributes.get("_flce_gathering_forward"):
                module.forward = gathering_forward


def is_standard_linear(module):
    """Whether an nn.Linear computes what the class nn.Linear does."""
    forward = type(module).forward
    is_replaced = "forward" in module.__dict__ and "_old_forward" not in module.__dict__
    return forward in (nn.Linear.forward, DeferringMixin.forward) and not is_replaced


def find_fusion_in(model):
    """The Fusion of the first head in `model` that is fused; None if there is none."""
    fusions = map(own_fusion, model.modules())
    return next((fusion for fusion in fusions if fusion is not None and fusion.is_attached()), None)


def heads_of(model, head=None):
    """[(name, Module)]: what the model calls for its logits; head: as of flce.fuse."""
    if head is not None:
        heads = head if isinstance(head, list | tuple) else [head]
        return [_named(model, name_or_module) for name_or_module in heads]
    names = {module: name for name, module in model.named_modules()}
    name_by_head = {}
    for module in names:
        with contextlib.suppress(NotImplementedError):
            embeddings = getattr(module, "get_output_embeddings", lambda: None)()
            if embeddings in names:
                name_by_head[embeddings] = names[embeddings]
    for module, name in names.items():
        # A second head, of which get_output_embeddings() does not tell.
        if name.endswith("lm_head") and isinstance(module, nn.Linear):
            name_by_head[module] = name
    return [(name, module) for module, name in name_by_head.items()]


def _named(model, head):
    for name, module in model.named_modules(remove_duplicate=False):
        if module is head or name == head:
            return name, module
    got = repr(head) if isinstance(head, str) else type(head).__name__
    refuse("flce.fuse: head", "a Module of the model, its name, or a list of these", got)


def linears_of(model, head):
    """The plain nn.Linear in `head` that make logits: itself, or those of PEFT's Module around it
    (base layer, up projections, copies to save). Empty if one is of another class (quantised)."""
    parts = [head] if isinstance(head, nn.Linear) else [m for m in head.modules() if m is not head]
    classes = getattr(head, "out_features", None)
    linears = [m for m in parts if hasattr(m, "out_features") and m.out_features == classes]
    others = [m for m in linears if not isinstance(m, nn.Linear) or not is_standard_linear(m)]
    return linears if not others or gathering_linears(model).keys() >= {*others} else []


def why_not(model, head):
    """Why the products of `head` cannot be deferred; None if they can."""
    linears = linears_of(model, head)
    if find_fusion_in(head) is not None:  # by this call: fuse refuses what was fused before it
        return "its nn.Linear belongs to another head of this model"
    if isinstance(head, nn.Embedding):
        return f"it is an nn.Embedding, whose weight the model multiplies by: {BY_HAND}"
    if not linears:
        return f"{type(head).__name__} is no plain nn.Linear, and no adapter around one"
    return _unsupported_in(head, linears, "it")
