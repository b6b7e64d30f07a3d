"""Work where the weights of heads are whole: in the state that FSDP2 unshards, or inside the hooks
of the heads' Modules."""

import contextlib
import sys

import torch

from .. import torch_private
from ..validate import is_dtensor

# Hooks that gather, move or cast weights: they act around the re-entry, and deferred logits need
# none of them. Others may look at the output, so they get real logits.
KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.")
NOT_WHOLE = (
    "flce.fuse: expected the head's weight to be whole where logits are made, got a sharded one: "
    "read outputs.logits before the forward of the model ends, give the head an FSDP unit of its "
    "own, or leave the root's weights unsharded after forward"
)
_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def foreign_hook(module):
    """The name of a hook of `module` that would miss the real logits; None if there is none."""
    if torch_private.has_any_global_hook():
        return "a hook of all Modules"
    for name in _HOOK_DICTS:
        for hook in module.__dict__[name].values():
            hook = getattr(hook, "__func__", hook)
            if not (getattr(hook, "__module__", None) or "").startswith(KNOWN_HOOKS):
                return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def own_fusion(module):
    """The Fusion for which this Module itself makes logits, whatever the Modules in it do; None if
    it makes none."""
    return module.__dict__.get("_flce_fusion")


def enclosing_of(linear):
    """What the model calls for the output of an nn.Linear that makes logits: it, or an adapter."""
    enclosing = linear._flce_enclosing()
    return linear if enclosing is None else enclosing


class Request:
    """Runs work(sources) inside the hooks of `modules`, [(Module, x)], the first one's outermost.
    Each is called as module(x, request); its forward (`head.RequestMixin`) calls
    request.run(module, x). Hooks that cast or move the tensors among the arguments of a Module
    leave an object of this class alone, but may cast or move x, so `run` stores the x that the
    Module received."""

    def __init__(self, sources, modules, work):
        self.sources, self.waiting, self.work = list(sources), modules, work

    def run(self, module=None, x=None):
        """Called without arguments first, then by each `module` inside its hooks: goes on to the
        next Module, or does the work."""
        for i, source in enumerate(self.sources):
            if source.linear is module and source.x is not x:
                self.sources[i] = source._replace(x=x)
        if not self.waiting:
            return self.work(tuple(self.sources))
        module, x = self.waiting.pop(0)
        return module(x, self)


def modules_of(sources):
    """[(Module, x)]: what encloses an nn.Linear (an adapter's Module), then the nn.Linear. None if
    one of them is not fused any more, or has a hook of the user's, which would take the result of
    the work for the Module's output."""
    callers = {}
    for linear, x, *_ in sources:
        if own_fusion(linear) is None:
            return None
        for module in (enclosing_of(linear), linear):
            if id(module) not in callers and foreign_hook(module):
                return None
            callers.setdefault(id(module), (module, x))  # id: torch.compile guards by it
    return list(callers.values())


def call_through(sources, work):
    """work(sources) inside the hooks of all Modules of the sources, if these may be called."""
    modules = modules_of(sources)
    return work(sources) if modules is None else Request(sources, modules, work).run()


class _RequestByAttribute(Request):
    """A Request whose `result` is an attribute: the Modules' hooks act on an empty output."""

    def run(self, module=None, x=None):
        if self.waiting:
            module, x = self.waiting.pop(0)
            return module(x.detach(), self)
        self.result = self.work(tuple(self.sources))
        return torch.empty(0)


def with_whole_weights(sources, work):
    """work(sources), run while the weights are whole: inside the hooks of the heads' Modules where
    torch.compile traces or DeepSpeed's hooks gather weights; elsewhere with FSDP2's units of freed
    weights unsharded."""
    if sources[0].weight_and_bias is None:  # torch.compile traces
        return call_through(sources, work)
    modules = _modules_that_gather(sources)
    if modules:
        request = _RequestByAttribute(sources, modules, work)
        request.run()
        return request.result
    with contextlib.ExitStack() as units:
        for source in sources:
            weight, _ = source.parameters()
            if _is_freed(weight):
                units.enter_context(_unsharded(source))
        return work(sources)


def _modules_that_gather(sources):
    """`modules_of` the sources if hooks of DeepSpeed act around one of the heads; else None."""
    linears = [s.linear for s in sources if own_fusion(s.linear) is not None]
    return modules_of(sources) if any(map(is_gathered, linears)) else None


def is_gathered(linear):
    """Whether hooks of DeepSpeed act around a head."""
    for module in (linear, enclosing_of(linear)):
        for hook in module._forward_pre_hooks.values():
            hook = getattr(hook, "__func__", hook)
            if (getattr(hook, "__module__", None) or "").startswith("deepspeed."):
                return True
    return False


def _is_freed(weight):
    """Whether FSDP2 has given back the memory of a whole weight."""
    return not is_dtensor(weight) and weight.numel() > 0 and not weight.untyped_storage().size()


@contextlib.contextmanager
def _unsharded(source):
    """A context in which the unit of FSDP2 that holds a weight is unsharded."""
    unit = _unit_of(source.linear)
    if unit is not None:
        unit.unshard()
    weight, _ = source.parameters()
    if unit is None or _is_freed(weight):
        raise RuntimeError(NOT_WHOLE)
    try:
        yield
    finally:
        unit.reshard()


def is_freed_after_forward(linear):
    """Whether FullyShardedDataParallel has a unit of an nn.Linear, inside of the fused model, whose
    weights it frees after the forward: nothing public makes them whole in the middle of a step."""
    if not torch_private.is_in_flat_parameter(linear):
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel as Unit
    from torch.distributed.fsdp import ShardingStrategy

    frees = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD
    model = own_fusion(linear).model
    units = [unit for unit in Unit.fsdp_modules(model) if unit is not model]
    return any(
        unit.sharding_strategy in frees and any(module is linear for module in unit.modules())
        for unit in units
    )


def _unit_of(linear):
    """The innermost Module around an nn.Linear, or itself, that FSDP2 manages; None without."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    model = linear._flce_fusion.model if own_fusion(linear) is not None else None
    kind = getattr(fsdp, "FSDPModule", ())
    around = [m for m in (linear,) if isinstance(m, kind)]
    for module in () if around or model is None else model.modules():
        if isinstance(module, kind) and any(member is linear for member in module.modules()):
            around.append(module)
    return around[-1] if around else None
