"""The gradient of a deferred Tensor: a Tensor without values until somebody reads them.

It passes through autograd's nodes of the steps between a loss and the head's product, and through
hooks and custom Functions, as any other.
"""

import functools
import threading
import typing

import torch

from .. import torch_private
from .node import Node, instances_in, mapped


class Part:
    """What a loss adds to the gradients of heads' leaves.

    value: [that of flce, with its graph], empty once that is freed; gradient: of it. calls: of the
    heads whose leaves it is computed from. paths: {a head's node: on how many paths its gradient
    comes to it}, None for one path. found: {id of a leaf: gradient}, once it is known.
    """

    def __init__(self, value, gradient, calls, paths):
        self.value, self.gradient, self.calls, self.paths = value, gradient, calls, paths
        self.found = None

    def paths_to(self, head):
        return 1 if self.paths is None else self.paths[head]


class Term(typing.NamedTuple):
    """What a Part adds to the gradient of one Tensor. real: a function that gives it, by torch."""

    part: Part
    real: typing.Callable[[], torch.Tensor]


class GradientOfLogits(torch.Tensor):
    """The gradient of a deferred Tensor, without memory: the sum of `terms` and of `more`, a real
    Tensor or None. Autograd sums and passes it as any other; what reads it finds real values, of
    which it consists from then on."""

    @staticmethod
    def __new__(cls, like, sum_of):
        with torch_private.without_torch_function():
            options = {"dtype": like.dtype, "device": sum_of.device}
            made = torch.Tensor._make_wrapper_subclass(cls, like.shape, **options)
        torch_private.forbid_addresses(made)
        made.sum_of = sum_of
        return made

    def real(self):
        """The values. They replace the terms, as whoever reads them may write to them."""
        own = self.sum_of
        values = [term.real() for term in own.terms]
        if own.more is not None:
            values.append(own.more)
        own.terms = []
        own.more = sum(values[1:], values[0]) if values else self.zeros()
        return own.more

    def zeros(self):
        with torch_private.without_torch_function():
            return torch.zeros(self.shape, dtype=self.dtype, device=self.sum_of.device)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = (args, kwargs or {})
        if function in torch_private.OF_MEMORY:
            args, kwargs = mapped(_real, (args, kwargs))
        # A TorchDispatchMode calls an operator of autograd's again, below autograd.
        before, _state.is_of_python = _state.is_of_python, not torch_private.is_in_dispatch()
        try:
            with torch_private.without_torch_function():
                return function(*args, **kwargs)
        finally:
            _state.is_of_python = before

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _SUMS and not kwargs and _are_sums_of_terms(*args):
            return _sum(function, *args)
        if function in _COPIES:
            return GradientOfLogits(*args, args[0].sum_of)
        if _is_in_step() and function not in _JOINS:
            return _through(function, args, kwargs)
        result = function(*mapped(_real, args), **mapped(_real, kwargs))
        written = {
            id(one.sum_of.more): one for one in instances_in(GradientOfLogits, (args, kwargs))
        }
        return mapped(lambda value: written.get(id(value), value), result)


class _State(threading.local):
    """is_of_python: Python has called the function that runs, as a hook does; what autograd's own
    nodes do comes to __torch_dispatch__ alone."""

    is_of_python = False


_state = _State()


class Sum:
    """What a GradientOfLogits and its aliases share."""

    def __init__(self, device, terms=(), more=None):
        self.device, self.terms, self.more = device, list(terms), more


_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def is_gradient(value):
    return isinstance(value, GradientOfLogits)


def _real(value):
    return value.real() if is_gradient(value) else value


def _are_sums_of_terms(one, other):
    """Whether these are Tensors of one shape and dtype, of which one at least has terms."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    has_terms = any(is_gradient(g) and g.sum_of.terms for g in (one, other))
    return has_terms and (one.shape, one.dtype) == (other.shape, other.dtype)


def _sum(function, one, other):
    """The sum of two gradients, one of which at least has terms."""
    sums = [g.sum_of if is_gradient(g) else Sum(g.device, (), g) for g in (one, other)]
    more = [g.more for g in sums if g.more is not None]
    if function is torch.ops.aten.add.Tensor:
        terms = [term for g in sums for term in g.terms]
        made = Sum(sums[0].device, terms, sum(more[1:], more[0]) if more else None)
        return GradientOfLogits(one, made)
    if not is_gradient(one):
        return one.add_(other.real())
    own, added = sums
    own.terms += added.terms
    if added.more is not None:
        own.more = added.more + (0 if own.more is None else own.more)
    return one


# ---- the steps between a loss and the head's product ----

_STEP = "flce.fuse: a step of deferred logits"


def mark_steps(value, operands):
    """Marks the nodes of autograd that a step has recorded, from its value to its operands."""
    before, nodes = {one.grad_fn for one in operands}, [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in before or not isinstance(node.metadata, dict):
            continue
        if _STEP not in node.metadata and not hasattr(node, "variable"):
            node.metadata[_STEP] = True
            nodes += [one for one, _ in node.next_functions]


def _is_in_step():
    """Whether the backward of a step runs: what that does to a gradient is linear."""
    return not _state.is_of_python and is_step(torch_private.running_node())


def is_step(node):
    return node is not None and _STEP in node.metadata


class _Linear(typing.NamedTuple):
    """An operator of a step's backward, linear in the gradients without values among its arguments.
    nodes: the arguments, with nodes in place of deferred Tensors."""

    function: object
    nodes: tuple
    named: dict

    def of(self, gradient, value):
        """The result for the value of one of the gradients, and zeros for others."""

        def real(one):
            if one is gradient:
                return value
            if isinstance(one, Node):
                return one.unwritten()
            return one.zeros() if is_gradient(one) else one

        with torch.no_grad():
            return self.function(*mapped(real, self.nodes), **mapped(real, self.named))

    def of_term(self, gradient, term):
        return self.of(gradient, term.real())


def _through(function, args, kwargs):
    """The gradients of a step's operands, where the operator `function` of its backward makes them:
    each term passes it on its own."""
    found = instances_in(GradientOfLogits, (args, kwargs))
    device = found[0].sum_of.device
    nodes, named = mapped(_node_or_value, (args, kwargs))
    like = _Like.of(function, args) or _meta_of(function, nodes, named)
    if function in _FACTORIES:
        return GradientOfLogits(like, Sum(device))
    linear = _Linear(function, nodes, named)
    terms = [
        Term(term.part, functools.partial(linear.of_term, gradient, term))
        for gradient in found
        for term in gradient.sum_of.terms
    ]
    more = [linear.of(one, one.sum_of.more) for one in found if one.sum_of.more is not None]
    return GradientOfLogits(like, Sum(device, terms, sum(more[1:], more[0]) if more else None))


def _node_or_value(value):
    return getattr(value, "_flce", value) if isinstance(value, torch.Tensor) else value


_aten = torch.ops.aten
# Operators that join a list of gradients, of which some may be real: not linear in one of them.
_JOINS = {_aten.cat.default, _aten.stack.default}
_FACTORIES = {_aten.new_zeros.default, _aten.zeros_like.default}
# Operators that give the shape and dtype of their first argument, and those whose second one is
# their shape: they need not be asked on the meta device.
_OF_FIRST = {_aten.div.Tensor, _aten.div.Scalar, _aten.mul.Tensor, _aten.mul.Scalar}
_OF_FIRST |= {_aten.neg.default, _aten.clone.default, _aten.tanh_backward.default}
_OF_SHAPE = {_aten.view.default, _aten._unsafe_view.default, _aten.slice_backward.default}
_OF_SHAPE |= {_aten.select_backward.default}


class _Like(typing.NamedTuple):
    shape: tuple
    dtype: torch.dtype

    @staticmethod
    def of(function, args):
        """Shape and dtype of an operator's result, if they are known without the operator."""
        first = args[0]
        if function in _OF_SHAPE:
            return _Like(args[1], first.dtype) if -1 not in args[1] else None
        others = [one for one in args[1:] if isinstance(one, torch.Tensor)]
        is_alike = all((one.shape, one.dtype) == (first.shape, first.dtype) for one in others)
        return _Like(first.shape, first.dtype) if function in _OF_FIRST and is_alike else None


def _meta_of(function, args, kwargs):
    """The result on the meta device."""

    def layout(one):
        if isinstance(one, Node):
            return one.layout()
        if isinstance(one, torch.Tensor):
            with torch_private.without_torch_function():
                return torch.empty(one.shape, dtype=one.dtype, device="meta")
        return torch.device("meta") if isinstance(one, torch.device) else one

    with torch_private.without_dispatch_modes():
        return function(*mapped(layout, args), **mapped(layout, kwargs))
