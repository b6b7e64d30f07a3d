"""Rebinding of a package's functions, and their undoing."""

import sys


class Installation:
    """What an `install()` has rebound: `remove()`, or the end of a `with` block, undoes it."""

    def __init__(self, package, pairs):
        """`pairs`: (original, ours), where ours has the original as `flce_original`. Every imported
        module's global that is the original becomes ours; a later import takes it from the
        modules that were changed.

        Raises:
            RuntimeError: flce is installed there already.
        """
        if any(hasattr(original, "flce_original") for original, _ in pairs):
            raise RuntimeError(
                f"flce.integrations.{package}: expected {package} without flce, got an earlier "
                "install(); call remove() of its handle first"
            )
        self._pairs = tuple(pairs)
        for original, ours in self._pairs:
            _rebind(original, ours)

    def remove(self):
        """Binds the originals again, also where ours were imported since. A second call has no
        effect."""
        pairs, self._pairs = self._pairs, ()
        for original, ours in pairs:
            _rebind(ours, original)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def _rebind(old, new):
    # By identity and in all modules, because `from package import name` copies the binding.
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
