"""Rebinds a package's functions, and restores them."""

import collections
import contextlib
import importlib.metadata
import importlib.util
import inspect
import sys

from typing_extensions import Self

from flce.torch_private import call_while_tracing
from flce.validate import refuse

# What pip installs for a package that an integration needs, where that is not its name.
_DISTRIBUTIONS = {
    "transformers": "flce[integrations]",
    "trl": "flce[integrations]",
    "cut_cross_entropy": "cut-cross-entropy",
    "liger_kernel": "liger-kernel",
    "nemo_automodel": "nemo-automodel",
}


@contextlib.contextmanager
def imports_of(package):
    """A context of the imports from a package that flce does not depend on: a ModuleNotFoundError
    says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or package
        remedy = f'pip install "{_DISTRIBUTIONS.get(package, package)}"'
        if missing.partition(".")[0] == package and importlib.util.find_spec(package):
            remedy = f"the installed {package} has another version than those that flce knows"
        text = f"flce.integrations: {package}: no module named {missing!r}; {remedy}"
        raise ModuleNotFoundError(text, name=missing) from error


_calls = collections.defaultdict(collections.Counter)


def count_call(package, serves=True):
    """Counts a call of what `install()` has rebound. serves: whether flce computes it."""
    _calls[package]["flce" if serves else package] += 1


# Traced, it would be compiled again for each value of the count.
call_while_tracing(count_call)


def parameters_of(function):
    """The names of a function's parameters, or those of a class's forward, without the ctx of an
    autograd Function. Of None, where the package lacks the function, words that say so."""
    if function is None:
        return "no such function"
    function = getattr(function, "forward", function)
    return tuple(name for name in inspect.signature(function).parameters if name != "ctx")


def same_parameters(distribution, *pairs):
    """`signatures` of an Installation where each original has to take what ours takes, in this
    order."""
    for original, ours in pairs:
        yield distribution, original.__name__, parameters_of(ours), parameters_of(original)


class Installation:
    """What an `install()` has rebound: `remove()`, or the end of a `with` block, undoes it.

    calls: {"flce": how many calls flce has computed, package: how many were left to it}, of graphs
    where torch.compile traces them.
    """

    calls: collections.Counter[str]

    def __init__(self, package, pairs, classes=(), signatures=()):
        """`pairs`: (original, ours), which gets the original as its `flce_original`. Every imported
        module's global that is the original becomes ours, and every attribute of `classes`; a later
        import takes it from the modules that were changed. `signatures`: (distribution, name of a
        function, the parameters that flce knows, those that it has), read after the check for an
        earlier install. RuntimeError: flce is installed already; ImportError: there are other
        parameters.
        """
        if any(hasattr(original, "flce_original") for original, _ in pairs):
            got = "an earlier install(); call remove() of its handle first"
            refuse(f"flce.integrations.{package}", f"{package} without flce", got, RuntimeError)
        for distribution, name, expected, parameters in signatures:
            if expected != parameters:
                got = f"{importlib.metadata.version(distribution)} with {parameters}"
                refuse(distribution, f"a version whose {name} takes {expected}", got, ImportError)
        self._pairs, self._package, self._classes = tuple(pairs), package, classes
        self.calls = _calls[package] = collections.Counter()
        for original, ours in self._pairs:
            ours.flce_original = original
            _rebind(original, ours, self._classes)

    def remove(self) -> None:
        """Binds the originals again, where ours were imported since too; only the first call."""
        pairs, self._pairs = self._pairs, ()
        for original, ours in pairs:
            _rebind(ours, original, self._classes)

    def __repr__(self):
        state = "installed" if self._pairs else "removed"
        counts = ", ".join(f"{count} calls by {name}" for name, count in self.calls.items())
        return f"<flce.integrations.{self._package}: {state}, {counts or 'no calls yet'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _rebind(old, new, classes):
    # By identity and in all modules, because `from package import name` copies the binding.
    for space in (*sys.modules.values(), *classes):
        names = getattr(space, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            setattr(space, name, new)
