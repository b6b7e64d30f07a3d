"""Trainers and packages that run flce, one module for each.

`trl`, `liger`, `cce`, `verl` and `skyrl` have an `install()`, which rebinds the package's loss
until its handle is removed, and import that package only then. `axolotl`, `nemo`, `torchtitan` and
`transformers` hold a class to name in the framework's configuration or script, and import the
framework with the module.
docs/integrations.md says what each serves.
"""

import importlib

__all__ = ["axolotl", "cce", "liger", "nemo", "skyrl", "torchtitan", "transformers", "trl", "verl"]


def __getattr__(name):
    """Imports a module of __all__ on first access, so that `import flce` imports no framework."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
