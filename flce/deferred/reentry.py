"""Calls into the heads' Modules, so that their hooks act around what needs the weights."""


def foreign(module):
    from .head import foreign_hook

    return foreign_hook(module)


class Request:
    """What a head is to do, passed through its __call__ in place of a second argument.

    An object of an unknown class: hooks that cast or move the tensors among the arguments of a
    Module leave it alone. They do act on x, so each leaf notes the x that it received.
    """

    def __init__(self, sources, work):
        self.sources, self.work = list(sources), work
        self.waiting = _modules_of(sources)

    def begin(self):
        module, x = self.waiting.pop(0)
        return module(x, self)

    def serve(self, module, x):
        """Called by `module` inside its hooks: goes on to the next Module, or does the work."""
        for i, source in enumerate(self.sources):
            if source.leaf is module:
                self.sources[i] = source._replace(x=x)
        return self.begin() if self.waiting else self.work(tuple(self.sources))


def _modules_of(sources):
    """[(Module, x)]: what encloses the leaves (an adapter's Module), then the leaves."""
    found = []
    for source in sources:
        enclosing = source.leaf._flce_leaf.enclosing
        for module in (enclosing, source.leaf):
            if all(module is not other for other, _ in found):
                found.append((module, source.x))
    return found


def call_through(sources, work):
    """work(sources) inside the hooks of all Modules that the sources belong to; directly, where
    one of them is not fused any more."""
    if not all(hasattr(source.leaf, "_flce_leaf") for source in sources):
        return work(sources)
    if any(foreign(module) for module, _ in _modules_of(sources)):
        return work(sources)  # hooks that came after the head's call
    return Request(sources, work).begin()
