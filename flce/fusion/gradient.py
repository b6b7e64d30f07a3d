"""The autograd nodes of deferred logits: the head's product, and the losses computed without it.

A loss by flce has a graph of its own, to the leaves of a head's call, which are the operands
without their graphs. Autograd sees a function of the deferred Tensor instead, `Routed`, whose
gradient has no values until somebody reads them: it passes through the nodes of the steps between
that Tensor and the head's product, hooks and custom Functions as any other, and `HeadProduct` runs
flce's graph, after the hooks that make the weights whole.
"""

import collections
import contextlib
import functools
import threading
import typing

import torch

from .. import torch_private
from ..autograd import all_gradients_wanted, refuse_double_backward
from .node import Node, mapped, whole_product


class Part:
    """What a loss adds to the gradients of heads' leaves. value: of flce, with its graph, or None
    once that is freed; gradient: of it; calls: of the heads whose leaves it is computed from;
    paths: {a head's node: on how many paths its gradient comes to it}, None for one path; found:
    {id of a leaf: gradient}, once it is known."""

    def __init__(self, value, gradient, calls, paths):
        self.value, self.gradient, self.calls, self.paths = value, gradient, calls, paths
        self.found = None

    def paths_to(self, head):
        return 1 if self.paths is None else self.paths[head]


def paths_from(node, counts=None):
    """{node of a HeadProduct: on how many paths autograd's `node` leads to it}, through steps and
    custom Functions."""
    counts = collections.Counter() if counts is None else counts
    if isinstance(node, HeadProduct._backward_cls):
        counts[node] += 1
    elif isinstance(node, torch.autograd.function.BackwardCFunction) or _is_step(node):
        for one, _ in node.next_functions:
            paths_from(one, counts)
    return counts


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

    def __init__(self, like, sum_of):
        pass

    def real(self):
        """The values, kept: whoever reads them may write to them later."""
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
        has_terms = any(one.sum_of.terms for one in _gradients_in(args))
        if has_terms and function in _SUMS and not kwargs and _are_alike(*args):
            return _sum(function, *args)
        if function in _COPIES:
            return GradientOfLogits(*args, args[0].sum_of)
        if _is_in_step() and function not in _JOINS:
            return _through(function, args, kwargs)
        result = function(*mapped(_real, args), **mapped(_real, kwargs))
        written = {id(one.sum_of.more): one for one in _gradients_in((args, kwargs))}
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


def _is_gradient(value):
    return isinstance(value, GradientOfLogits)


def _gradients_in(tree):
    found = []
    mapped(lambda one: found.append(one) if _is_gradient(one) else None, tree)
    return found


def _real(value):
    return value.real() if _is_gradient(value) else value


def _are_alike(one, other, *_):
    is_sum = isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor)
    return is_sum and (one.shape, one.dtype) == (other.shape, other.dtype)


def _sum(function, one, other):
    """The sum of two gradients, one of which at least has terms."""
    sums = [g.sum_of if _is_gradient(g) else Sum(g.device, (), g) for g in (one, other)]
    more = [g.more for g in sums if g.more is not None]
    if function is torch.ops.aten.add.Tensor:
        terms = [term for g in sums for term in g.terms]
        made = Sum(sums[0].device, terms, sum(more[1:], more[0]) if more else None)
        return GradientOfLogits(one, made)
    if not _is_gradient(one):
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
    return not _state.is_of_python and _is_step(torch_private.running_node())


def _is_step(node):
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
            return one.zeros() if _is_gradient(one) else one

        with torch.no_grad():
            return self.function(*mapped(real, self.nodes), **mapped(real, self.named))

    def of_term(self, gradient, term):
        return self.of(gradient, term.real())


def _through(function, args, kwargs):
    """The gradients of a step's operands, where the operator `function` of its backward makes them:
    each term passes it on its own."""
    found = _gradients_in((args, kwargs))
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


class HeadProduct(torch.autograd.Function):
    """The product of an nn.Linear, (x, weight, bias): for autograd, that of nn.Linear itself."""

    @staticmethod
    def forward(ctx, kind, node, x, weight, bias):
        ctx.flce_call, ctx.record = node.call, node.record
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        return kind(node)

    @staticmethod
    def backward(ctx, gradient):
        parts, real = [], gradient
        if _is_gradient(gradient):
            parts, real = _split(gradient, ctx)
        found = [None] * 3
        if parts:
            found = _of_parts(ctx, parts)
        if real is not None:
            of_real = _of_product(ctx, real)
            found = [
                b if a is None else a if b is None else a + b
                for a, b in zip(found, of_real, strict=True)
            ]
        return None, None, *found


def _split(gradient, head):
    """(the Parts of the call of this head's node, the real rest or None): those of which every path
    has brought its term; where a hook has changed one of two, both are real."""
    own, call = gradient.sum_of, head.flce_call
    counts = {}
    for term in own.terms:
        counts[term.part] = counts.get(term.part, 0) + 1
    parts = [p for p, n in counts.items() if call in p.calls and n == p.paths_to(head)]
    others = [term.real() for term in own.terms if term.part not in parts]
    others += [] if own.more is None else [own.more]
    return parts, sum(others[1:], others[0]) if others else None


def _of_parts(ctx, parts):
    """The gradients of a call's leaves by the graphs of flce, once for each new Part."""
    call, new = ctx.flce_call, [part for part in parts if part.found is None]
    if new:
        calls = {id(one): one for part in new for one in part.calls}
        wanted = _wanted_leaves(ctx) if len(calls) == 1 else None
        leaves = {id(leaf): leaf for one in calls.values() for leaf in one.leaves}
        leaves = [leaf for leaf in leaves.values() if leaf is not None and leaf.requires_grad]
        asked = [leaf for leaf in leaves if wanted is None or id(leaf) in wanted]
        accumulates = any(one.accumulates for one in calls.values())
        is_full = len(asked) == len(leaves) and not accumulates
        with all_gradients_wanted() if is_full else contextlib.nullcontext():
            _run(new, asked, accumulates, is_full)
    sums = [None] * len(call.leaves)
    for found in {id(part.found): part.found for part in parts}.values():
        for i, leaf in enumerate(call.leaves):
            if (one := found.get(id(leaf))) is not None:
                sums[i] = one if sums[i] is None else sums[i] + one
    return sums


def _wanted_leaves(ctx):
    """{id of a leaf} for those whose gradients the running backward computes, as in pipeline
    schedules that compute those of inputs and of weights apart."""
    nodes = ctx.next_functions  # of Tensors alone
    wanted = [i for i, is_one in enumerate(ctx.needs_input_grad[2:]) if is_one]
    return {id(ctx.flce_call.leaves[i]) for i in wanted if torch_private.is_executed(nodes[i][0])}


def _run(parts, leaves, accumulates, is_full):
    """Sets `found` of the Parts. accumulates: flce adds the weight's to its .grad itself; is_full:
    all leaves are asked for."""
    keeps = torch_private.keeps_graph()
    nested = [part for part in parts if not (is_full and _run_directly(part, leaves))]
    if nested:
        values, gradients = [p.value[0] for p in nested], [p.gradient for p in nested]
        if accumulates:
            torch.autograd.backward(values, gradients, keeps, inputs=leaves)
            found = {id(x): x.grad for x in leaves if not isinstance(x, torch.nn.Parameter)}
            for leaf in leaves:
                if id(leaf) in found:
                    leaf.grad = None
        else:
            made = torch_private.nested_gradients(values, leaves, gradients, keeps)
            found = {id(leaf): one for leaf, one in zip(leaves, made, strict=True)}
        for part in nested:
            part.found = found
    if not keeps:
        for part in parts:
            part.value.clear()


def _run_directly(part, leaves):
    """Runs a Part's graph node by node, if it is one node between the value and leaves, or views
    and selections of them: a nested run of the engine would be another backward for checkpoints,
    and takes longer."""
    (value,) = part.value
    node, known = value.grad_fn, {id(leaf) for leaf in leaves}
    if not isinstance(node, torch.autograd.function.BackwardCFunction) or value.output_nr:
        return False
    chains = [_chain_to_leaf(edge) for edge, _ in node.next_functions]
    if any(leaf is not None and id(leaf) not in known for leaf, _ in chains):
        return False
    part.found, gradients = {}, node.apply(part.gradient)
    for (leaf, nodes), gradient in zip(chains, gradients[: len(chains)], strict=True):
        for one in nodes:
            gradient = None if gradient is None else one(gradient)
        if leaf is not None:
            part.found[id(leaf)] = gradient
    return True


def _chain_to_leaf(node):
    """(the leaf that a node leads to, the nodes up to it); the node itself in place of the leaf, if
    it leads to several; (None, []) for None."""
    first, nodes = node, []
    while node is not None and not hasattr(node, "variable"):
        nodes.append(node)
        is_of_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_of_python or len(node.next_functions) != 1:
            return first, []
        ((node, _),) = node.next_functions
    return (None if node is None else node.variable), nodes


def _of_product(ctx, gradient):
    """As of nn.Linear, whose backward needs no product."""
    x, weight, bias = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[2:]
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        with torch.enable_grad():
            value = whole_product(ctx.record, ctx.flce_call)
        wanted = [leaf for leaf in ctx.flce_call.leaves if leaf is not None and leaf.requires_grad]
        made = dict(zip(map(id, wanted), torch.autograd.grad(value, wanted, gradient), strict=True))
        return [made.get(id(leaf)) for leaf in ctx.flce_call.leaves]
    rows, of_x, of_weight, of_bias = gradient.reshape(-1, gradient.shape[-1]), None, None, None
    if wants_x:
        of_x = (gradient @ weight.to(gradient.dtype)).to(x.dtype)
    if wants_weight:
        of_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).to(gradient.dtype)).to(weight.dtype)
    if wants_bias:
        of_bias = rows.sum(0).to(bias.dtype)
    return [of_x, of_weight, of_bias]


class Routed(torch.autograd.Function):
    """A value of flce, as a function of a deferred Tensor. value: [it], which autograd does not
    take for an operand; origin: the Origin; paths: of Part."""

    @staticmethod
    def forward(ctx, value, origin, paths, deferred):
        ctx.value, ctx.origin, ctx.paths = value, origin, paths
        ctx.calls, ctx.shape = deferred._flce.calls, deferred.shape
        result = value[0].detach()
        # So that torch refuses a second backward without its graph.
        ctx.save_for_backward(torch.empty(0))
        return result

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            refuse_double_backward()
        _ = ctx.saved_tensors
        node = ctx.origin.node
        part = Part(ctx.value, gradient, ctx.calls, ctx.paths)
        terms = [Term(part, functools.partial(ctx.origin.gradient, gradient))]
        like = node.layout()
        return None, None, None, GradientOfLogits(like, Sum(node.call.device, terms))


class Origin:
    """The call that a value of flce stands for: function(*args, **kwargs), with the nodes of
    deferred Tensors; node: of the one that has the gradient. Tensors are copied, as the caller may
    write to them before the gradient is read; of large ones (probabilities) the version has to stay
    the same."""

    def __init__(self, function, args, kwargs, node):
        self.function, self.node, self.versions = function, node, []
        self.args, self.kwargs = mapped(self._kept, (args, kwargs))

    def _kept(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if (node := getattr(value, "_flce", None)) is not None:
            return node
        if value.dim() <= 2 and not (value.dim() == 2 and value.is_floating_point()):
            return value.detach().clone()
        if not value.is_inference():
            self.versions.append((value, value._version))
        return value

    def gradient(self, gradient):
        """The gradient of the node's values, by torch."""
        for value, version in self.versions:
            if value._version != version:
                raise RuntimeError(
                    "flce.fuse: expected the arguments of the loss as they were, to compute the "
                    f"gradient of the logits, got a tensor of shape {tuple(value.shape)} that was "
                    "written to since"
                )
        node = self.node
        node.call.fusion.note_read("the gradient of the logits")

        def real(one):
            if one is node:
                return leaf
            return one.unwritten() if isinstance(one, Node) else one

        with torch_private.autograd_in_dispatch(), torch.enable_grad():
            with torch.no_grad():
                leaf = node.unwritten().detach()
            leaf.requires_grad_()
            value = self.function(*mapped(real, self.args), **mapped(real, self.kwargs))
            return torch.autograd.grad(value, leaf, gradient)[0]
