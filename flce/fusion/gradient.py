"""The gradient of a deferred Tensor: a Tensor without values until somebody reads them.

It passes through autograd's nodes of the steps between a loss and the head's product, and through
hooks and custom Functions, as any other. For `loss = F.cross_entropy(logits[:, :-1] / 2, labels)`:

    LossOfLogits.backward   a GradientOfLogits for logits[:, :-1] / 2. Its Summands are one
                            GradientTerm: the LossBackward of the loss, and a function that computes
                            the real gradient of logits[:, :-1] / 2, by torch
    DivBackward             a GradientOfLogits for logits[:, :-1], with a term of the same
                            LossBackward, whose function divides the result of the former by 2
    SliceBackward           one for logits, whose function pads that with zeros
    HeadProduct.backward    runs the LossBackward of the term, through flce's graph, and calls no
                            function: no real gradient of logits has been computed
"""

import functools
import threading
import typing

import torch

from .. import torch_private
from .values import DeferredValue, instances_in, mapped


class LossBackward:
    """A backward through the graph of a loss that flce has computed (or of log p, lse, ...), which
    a HeadProduct.backward runs. Of `loss = F.cross_entropy(logits[:, :-1] / 2, labels)`:

    value: [the loss, with flce's graph], empty once that is freed. grad_output: of the loss, 1.
    head_calls: (the HeadCall of logits,); of several heads for a divergence or an adapter.
    paths_to_heads: {node of a HeadProduct: the number of paths in autograd's graph from the loss to
    it}; None for one path, as here. Of (p * log_p).sum() {node: 2}: one through each factor.
    leaf_gradients: None; after it has run {id(leaf): gradient} of the leaves of these calls.
    """

    def __init__(self, value, grad_output, head_calls, paths_to_heads):
        self.value, self.grad_output, self.head_calls = value, grad_output, head_calls
        self.paths_to_heads, self.leaf_gradients = paths_to_heads, None

    def paths_to(self, head_node):
        """On how many paths autograd goes from the loss to a node of a HeadProduct. As many
        GradientTerms of this backward arrive there, if nobody has read one on the way."""
        return 1 if self.paths_to_heads is None else self.paths_to_heads[head_node]


class GradientTerm(typing.NamedTuple):
    """What one loss adds to the gradient of one Tensor. compute: a function without arguments that
    gives it as a real Tensor, by torch's own backward of the loss and of the steps up to here."""

    loss_backward: LossBackward
    compute: typing.Callable[[], torch.Tensor]


class Summands:
    """What a GradientOfLogits is the sum of, shared by its aliases: `terms`, without values, and
    `tensor`, a real Tensor or None. Of two losses of the same logits there are two terms; a loss by
    flce and one of real logits give one term and a tensor."""

    def __init__(self, device, terms=(), tensor=None):
        self.device, self.terms, self.tensor = device, list(terms), tensor


class GradientOfLogits(torch.Tensor):
    """The gradient of a deferred Tensor, without memory: the sum of its Summands. Autograd sums and
    passes it as any other; what reads it finds real values, of which it consists from then on."""

    @staticmethod
    def __new__(cls, like, summands):
        with torch_private.without_torch_function():
            options = {"dtype": like.dtype, "device": summands.device}
            gradient = torch_private.make_wrapper_subclass(cls, like.shape, **options)
        torch_private.forbid_addresses(gradient)
        gradient.summands = summands
        return gradient

    def materialize(self):
        """Computes the values. They replace the terms, because the reader may write to them."""
        summands = self.summands
        values = [term.compute() for term in summands.terms]
        tensor = sum_of_tensors([*values, summands.tensor])
        summands.terms, summands.tensor = [], self.zeros() if tensor is None else tensor
        return summands.tensor

    def zeros(self):
        with torch_private.without_torch_function():
            return torch.zeros(self.shape, dtype=self.dtype, device=self.summands.device)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = (args, kwargs or {})
        if function in torch_private.OF_MEMORY:
            args, kwargs = mapped(_real, (args, kwargs))
        # Two callers come here: Python code; and, with a TorchDispatchMode on, the mode's
        # __torch_dispatch__, which calls an operator of autograd's own again. The latter is below
        # autograd: then is_of_python is False.
        before, _state.is_of_python = _state.is_of_python, not torch_private.is_in_dispatch()
        try:
            with torch_private.without_torch_function():
                return function(*args, **kwargs)
        finally:
            _state.is_of_python = before

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _SUMS and not kwargs and _have_terms(*args):
            return _sum(function, *args)
        if function in _COPIES:
            (gradient,) = args
            return GradientOfLogits(gradient, gradient.summands)
        if _is_in_step() and function not in _JOINS:
            return _pass_on(function, args, kwargs)
        result = function(*mapped(_real, args), **mapped(_real, kwargs))
        # An operator that writes returns the Tensor that it wrote to.
        gradients = instances_in(GradientOfLogits, (args, kwargs))
        gradients = {id(gradient.summands.tensor): gradient for gradient in gradients}
        return mapped(lambda value: gradients.get(id(value), value), result)


class _State(threading.local):
    """is_of_python: Python has called the function that runs, as a hook does; what autograd's own
    nodes do comes to __torch_dispatch__ alone."""

    is_of_python = False


_state = _State()


_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def is_gradient(value):
    return isinstance(value, GradientOfLogits)


def _real(value):
    return value.materialize() if is_gradient(value) else value


def _have_terms(left, right):
    """Whether these are Tensors of one shape and dtype, of which one at least has terms."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    has_terms = any(is_gradient(g) and g.summands.terms for g in (left, right))
    return has_terms and (left.shape, left.dtype) == (right.shape, right.dtype)


def _sum(function, left, right):
    """The sum of two gradients, one of which at least has terms."""
    of_left, of_right = (
        g.summands if is_gradient(g) else Summands(g.device, (), g) for g in (left, right)
    )
    if function is torch.ops.aten.add.Tensor:
        tensor = sum_of_tensors([of_left.tensor, of_right.tensor])
        summands = Summands(of_left.device, of_left.terms + of_right.terms, tensor)
        return GradientOfLogits(left, summands)
    if not is_gradient(left):
        return left.add_(right.materialize())
    of_left.terms += of_right.terms
    if of_right.tensor is not None:
        of_left.tensor = of_right.tensor + (0 if of_left.tensor is None else of_left.tensor)
    return left


def sum_of_tensors(tensors):
    """The sum of gradients, each of which may be None, from the first one on; None of none."""
    tensors = [tensor for tensor in tensors if tensor is not None]
    return sum(tensors[1:], tensors[0]) if tensors else None


# ---- the steps between a loss and the head's product ----

_STEP = "flce.fuse: a step of deferred logits"


def mark_steps(value, operands):
    """Marks the nodes of autograd that a step has recorded, from its value to its operands."""
    ends, nodes = {operand.grad_fn for operand in operands}, [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in ends or not isinstance(node.metadata, dict):
            continue
        if _STEP not in node.metadata and not hasattr(node, "variable"):
            node.metadata[_STEP] = True
            nodes += [next_node for next_node, _ in node.next_functions]


def _is_in_step():
    """Whether the backward of a step runs. It is linear in the gradient."""
    return not _state.is_of_python and is_step(torch_private.running_node())


def is_step(node):
    return node is not None and _STEP in node.metadata


class _LinearOperator(typing.NamedTuple):
    """An operator of a step's backward, linear in the gradients without values among its arguments:
    aten.div(gradient, 2). args, kwargs: with DeferredValues in place of deferred Tensors."""

    function: object
    args: tuple
    kwargs: dict

    def run(self, gradient, value):
        """The result for the value of one of the gradients, and zeros for others."""

        def real(argument):
            if argument is gradient:
                return value
            if isinstance(argument, DeferredValue):
                return argument.recompute()
            return argument.zeros() if is_gradient(argument) else argument

        with torch.no_grad():
            return self.function(*mapped(real, self.args), **mapped(real, self.kwargs))

    def run_on_term(self, gradient, term):
        return self.run(gradient, term.compute())


def _pass_on(function, args, kwargs):
    """What `function`, an operator in the backward of a step, makes of the gradients without values
    among its arguments. It is linear in them, so it acts on each of their terms apart: a term of
    the result runs it, when it is computed, on the term that it comes from."""
    gradients = instances_in(GradientOfLogits, (args, kwargs))
    device = gradients[0].summands.device
    linear = _LinearOperator(function, *mapped(_by_deferred_value, (args, kwargs)))
    like = _Like.of(function, args) or _meta_of(function, linear.args, linear.kwargs)
    if function in _FACTORIES:
        return GradientOfLogits(like, Summands(device))
    terms = [
        GradientTerm(term.loss_backward, functools.partial(linear.run_on_term, gradient, term))
        for gradient in gradients
        for term in gradient.summands.terms
    ]
    tensors = [(gradient, gradient.summands.tensor) for gradient in gradients]
    tensors = [linear.run(gradient, tensor) for gradient, tensor in tensors if tensor is not None]
    return GradientOfLogits(like, Summands(device, terms, sum_of_tensors(tensors)))


def _by_deferred_value(value):
    """The DeferredValue of a deferred Tensor; any other argument itself."""
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
        others = [tensor for tensor in args[1:] if isinstance(tensor, torch.Tensor)]
        is_alike = all((x.shape, x.dtype) == (first.shape, first.dtype) for x in others)
        return _Like(first.shape, first.dtype) if function in _OF_FIRST and is_alike else None


def _meta_of(function, args, kwargs):
    """The result on the meta device."""

    def meta(argument):
        if isinstance(argument, DeferredValue):
            return argument.meta_tensor()
        if isinstance(argument, torch.Tensor):
            with torch_private.without_torch_function():
                return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    with torch_private.without_dispatch_modes():
        return function(*mapped(meta, args), **mapped(meta, kwargs))
