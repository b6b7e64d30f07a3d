"""Trainers and packages that run flce, one module for each.

`trl`, `trl_distillation`, `liger`, `cce`, `verl`, `verl_distillation`, `skyrl`: `install()` imports
the package and rebinds its loss until the handle is removed. `axolotl`, `nemo`, `torchtitan`,
`transformers`: a class to name in a configuration or script; these import the framework.
docs/integrations.md says what each serves.

>>> handle = flce.integrations.trl.install()  # doctest: +SKIP
"""

import importlib

__all__ = ["axolotl", "cce", "liger", "nemo", "skyrl", "torchtitan", "transformers", "trl"]
__all__ += ["trl_distillation", "verl", "verl_distillation"]


def __getattr__(name):
    """Imports a module of __all__ on first access, so that `import flce` imports no framework."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
