"""Calls into the heads' Modules, so that their hooks act around what needs the weights."""

from torch import nn

# Hooks that gather, move or cast weights: they act around the re-entry, and deferred logits need
# none of them. Others may look at the output, so they get real logits.
_KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.")
_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def foreign_hook(module):
    """The name of a hook of `module` that would miss the real logits; None if there is none."""
    if nn.modules.module._has_any_global_hook():
        return "a hook of all Modules"
    for name in _HOOK_DICTS:
        for hook in module.__dict__[name].values():
            hook = getattr(hook, "__func__", hook)
            if not (getattr(hook, "__module__", None) or "").startswith(_KNOWN_HOOKS):
                return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def fusion_in(module):
    """The Fusion for which a Module makes logits; None if it does not."""
    return module.__dict__.get("_flce_fusion")


def enclosing_of(linear):
    """What the model calls for the output of an nn.Linear that makes logits: it, or an adapter."""
    enclosing = linear._flce_enclosing()
    return linear if enclosing is None else enclosing


class Request:
    """Work to run inside a head's hooks, passed to its __call__ as a second argument. Hooks that
    cast or move the tensors among the arguments of a Module leave an object of this class alone,
    but may cast or move x, so `run` stores the x that the Module received."""

    def __init__(self, sources, modules, work):
        self.sources, self.waiting, self.work = list(sources), modules, work

    def run(self, module=None, x=None):
        """Called by `module` inside its hooks: goes on to the next Module, or does the work."""
        for i, source in enumerate(self.sources):
            if source.linear is module and source.x is not x:
                self.sources[i] = source._replace(x=x)
        if not self.waiting:
            return self.work(tuple(self.sources))
        module, x = self.waiting.pop(0)
        return module(x, self)


def modules_of(sources):
    """[(Module, x)]: what encloses an nn.Linear (an adapter's Module), then the nn.Linear. None if
    one is not fused any more, or has got a hook, which would act on what is no output of it."""
    found = {}
    for linear, x, _ in sources:
        if fusion_in(linear) is None:
            return None
        for module in (enclosing_of(linear), linear):
            if id(module) not in found and foreign_hook(module):
                return None
            found.setdefault(id(module), (module, x))  # id: torch.compile guards by it
    return list(found.values())


def call_through(sources, work):
    """work(sources) inside the hooks of all Modules of the sources, if these may be called."""
    modules = modules_of(sources)
    return work(sources) if modules is None else Request(sources, modules, work).run()
