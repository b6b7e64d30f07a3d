"""`flce.fuse` and `flce.explain`. The files, in the order of a step:

handle        fuse, explain, when to defer, counts of what happened
head          subclasses of the heads' Modules, whose calls return deferred logits
deferred      the Tensor that the caller holds; traced: the same in a graph of torch.compile
values        what such a Tensor stands for, and how real values are made; eager: of eager calls
operations    the table of functions that deferred logits record or answer
steps         the record of these functions, and what it means as options of flce
replacements  whether those functions are torch's own
loss          calls of flce, where the heads' weights are whole
reentry       where the weights of heads are whole; sharded: heads of transformers' TP
backward      the autograd nodes; gradient: the gradient of deferred logits

Not named fuse: importing the package would put a module in the place of the function `flce.fuse`.
"""

from .handle import Explanation, Fusion, explain, fuse

__all__ = ["Explanation", "Fusion", "explain", "fuse"]
