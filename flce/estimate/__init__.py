"""What flce would change in a model's training step, from its sizes alone: no GPU, no weights.

`python -m flce.estimate --model config.json --tokens 8192 --gpu h100`, or `estimate`. How the
numbers are made, and how far they were from measured ones: docs/estimate.md.
"""

from .gpus import Gpu, find_gpu, gpu_names
from .hub import hub_names
from .memory import Training
from .model import Model, model_of_sizes, read_model
from .step import Estimate, estimate

__all__ = [
    "Estimate",
    "Gpu",
    "Model",
    "Training",
    "estimate",
    "find_gpu",
    "gpu_names",
    "hub_names",
    "model_of_sizes",
    "read_model",
]
