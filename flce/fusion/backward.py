"""The autograd nodes of deferred logits: the head's product, and the losses computed without it.

A loss by flce has a graph of its own, to the leaves of a head's call, which are the operands
without their graphs. Autograd sees a function of the deferred Tensor instead, `Routed`, whose
gradient has no values (gradient.py); `HeadProduct` runs flce's graph, after the hooks that make the
weights whole.
"""

import collections
import contextlib
import functools

import torch

from .. import torch_private
from ..autograd import all_gradients_wanted, refuse_double_backward
from .gradient import GradientOfLogits, Part, Sum, Term, is_gradient, is_step
from .node import Node, mapped, whole_product


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
        if is_gradient(gradient):
            parts, real = _split(gradient, ctx)
        found = [None] * 3
        if parts:
            found = _of_parts(ctx, parts)
        if real is not None:
            of_real = _of_product(ctx, real)
            found = [_sum_of(a, b) for a, b in zip(found, of_real, strict=True)]
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
            sums[i] = _sum_of(sums[i], found.get(id(leaf)))
    return sums


def _sum_of(one, other):
    """The sum of two gradients, each of which may be None."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


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
        ctx.calls = deferred._flce.calls
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
        self.args, self.kwargs = mapped(self._by_value, (args, kwargs))

    def _by_value(self, value):
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


def paths_from(node, counts=None):
    """{node of a HeadProduct: on how many paths autograd's `node` leads to it}, through steps and
    custom Functions."""
    counts = collections.Counter() if counts is None else counts
    if isinstance(node, HeadProduct._backward_cls):
        counts[node] += 1
    elif isinstance(node, torch.autograd.function.BackwardCFunction) or is_step(node):
        for one, _ in node.next_functions:
            paths_from(one, counts)
    return counts
