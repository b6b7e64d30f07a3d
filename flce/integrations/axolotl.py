"""Axolotl: the plugin to name in a configuration. Importing this module imports axolotl."""

from flce.validate import refuse

from . import cce, liger
from ._rebind import imports_of

with imports_of("axolotl"):
    from axolotl.integrations.base import BasePlugin

_FLAGS = {"liger_fused_linear_cross_entropy": liger, "cut_cross_entropy": cce}


class FlcePlugin(BasePlugin):
    """Makes the loss that Axolotl's Liger or Cut Cross Entropy plugin puts into a model run flce.

    Under `plugins:` together with that plugin, in any order, with the flag of the other:
    liger_fused_linear_cross_entropy or cut_cross_entropy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._installed = []

    def pre_model_load(self, cfg: object) -> None:
        """Installs flce in the packages whose flag `cfg` sets; ValueError if it sets none of them,
        else as their `install()`."""
        chosen = [package for flag, package in _FLAGS.items() if getattr(cfg, flag, None)]
        if not chosen:
            refuse("plugins", f"FlcePlugin with one of {', '.join(_FLAGS)}: true", "neither")
        self._installed += [package.install() for package in chosen]

    def post_train_unload(self, cfg: object) -> None:
        """Removes what `pre_model_load` installed."""
        while self._installed:
            self._installed.pop().remove()
