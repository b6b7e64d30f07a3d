from . import axolotl, cce, liger, nemo, skyrl, torchtitan, transformers, trl, verl

__all__ = ["axolotl", "cce", "liger", "nemo", "skyrl", "torchtitan", "transformers", "trl", "verl"]
