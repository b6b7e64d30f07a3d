"""What flce offers where its compiled module is not built, as on macOS and Windows: the functions
that flce.reference defines, by it, so that a program for GPUs can be imported and tried there.

All N x V logits are in memory. What has no definition there is refused when it is used, not when it
is imported. On Linux a missing module is an error (installation.py).
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from . import reference
from .options import LogitsOptions, LogprobsOptions, ModuleOptions, Options, completed, defaults

_MODULE_OPTIONS = defaults(ModuleOptions)
# Options that reference does not define, with their defaults.
_NOT_DEFINED = {"vocab_parallel": None, "accumulate_into": None}
_OF_LOGPROBS = {"return_topk": 0, "tail": False, **_NOT_DEFINED}


def _refuse(name):
    raise NotImplementedError(
        f"{name}: needs the compiled module of flce, which is built for Linux alone"
    )


def _defined(function, known, options, absent=_NOT_DEFINED):
    """`options`, which the function has, without those of `absent`, which have no definition."""
    options = completed(function, {**known, **absent}, options)
    for name, default in absent.items():
        if options.pop(name, default) != default:
            _refuse(name)
    return options


def _with_entropy(output, wanted):
    return output._replace(entropy=output.entropy.detach()) if wanted == "detached" else output


def linear_cross_entropy(input, linear_weight, target, **options):
    """flce.linear_cross_entropy by its definition."""
    options = _defined("linear_cross_entropy", defaults(Options), options)
    if not isinstance(target, torch.Tensor):
        _refuse("a target (ids, probabilities)")
    output = reference.linear_cross_entropy(input, linear_weight, target, **options)
    return _with_entropy(output, options["return_entropy"])


def cross_entropy(logits, target, **options):
    """flce.cross_entropy by its definition."""
    options = _defined("cross_entropy", defaults(LogitsOptions), options, {})
    output = reference.cross_entropy(logits, target, **options)
    return _with_entropy(output, options["return_entropy"])


def linear_logprobs(input, linear_weight, target, *, entropy="differentiable", **options):
    """flce.linear_logprobs by its definition."""
    options = _defined("linear_logprobs", defaults(LogprobsOptions), options, _OF_LOGPROBS)
    logprobs, of_rows = reference.linear_logprobs(input, linear_weight, target, **options)
    if entropy is None:
        return logprobs, None
    return logprobs, of_rows.detach() if entropy == "detached" else of_rows


class _WithOptions:
    """What both Modules share: options as attributes, and the loss with these and a call's."""

    def _keep(self, options):
        for name, value in completed(type(self).__name__, _MODULE_OPTIONS, options).items():
            setattr(self, name, value)

    def _loss(self, input, linear, target, weight, options):
        settings = {name: getattr(self, name) for name in _MODULE_OPTIONS}
        settings |= {"linear_bias": linear.bias, "weight": weight, **options}
        return linear_cross_entropy(input, linear.weight, target, **settings)


class LinearCrossEntropyLoss(_WithOptions, nn.Module):
    """flce.LinearCrossEntropyLoss by its definition, with the same state_dict."""

    def __init__(
        self,
        in_features,
        num_classes,
        *,
        bias=False,
        device=None,
        dtype=None,
        weight=None,
        **options,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self._keep(options)
        self.num_classes = num_classes
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(self, input, target, **options):
        return self._loss(input, self.linear, target, self.weight, options)


class LinearCrossEntropyHead(_WithOptions, nn.Linear):
    """flce.LinearCrossEntropyHead by its definition, with the same state_dict."""

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        class_weight=None,
        **options,
    ):
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self._keep(options)

    def forward(self, input, labels=None, **options):
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        return self._loss(input, self, labels, self.class_weight, options)


for _class in (LinearCrossEntropyLoss, LinearCrossEntropyHead):
    _class.__module__ = __package__  # pickles name it, here and on Linux


class Absent:
    """A public name without a definition: a call of it, or an attribute, is refused."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *_, **__):
        _refuse(self._name)

    def __getattr__(self, attribute):
        if attribute.startswith("__"):  # what Python asks of any object
            raise AttributeError(attribute)
        _refuse(f"{self._name}.{attribute}")


@functools.cache
def absent(name):
    return Absent(f"flce.{name}")
