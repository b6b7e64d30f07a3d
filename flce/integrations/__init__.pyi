from . import (
    axolotl,
    cce,
    liger,
    nemo,
    skyrl,
    torch,
    torchtitan,
    transformers,
    trl,
    trl_distillation,
    verl,
    verl_distillation,
)

__all__ = ["axolotl", "cce", "liger", "nemo", "skyrl", "torch", "torchtitan", "transformers", "trl"]
__all__ += ["trl_distillation", "verl", "verl_distillation"]
