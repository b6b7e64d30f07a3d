"""The autograd nodes of deferred logits: the head's product, and the losses computed without it.

A loss by flce has a graph of its own, to the leaves of a head's call, which are the operands
without their graphs. Autograd sees a function of the deferred Tensor instead, `LossOfLogits`, whose
gradient has no values (gradient.py, which begins with an example); `HeadProduct` runs flce's graph,
after the hooks that make the weights whole.
"""

import collections
import contextlib
import functools

import torch

from .. import torch_private
from ..autograd import all_gradients_wanted, refuse_double_backward
from .gradient import (
    GradientOfLogits,
    GradientTerm,
    LossBackward,
    Summands,
    is_gradient,
    is_step,
    sum_of_tensors,
)
from .values import DeferredValue, compute_logits, mapped


class HeadProduct(torch.autograd.Function):
    """The product of an nn.Linear, (x, weight, bias): for autograd, that of nn.Linear itself."""

    @staticmethod
    def forward(ctx, tensor_class, deferred, x, weight, bias):
        ctx.head_call, ctx.record = deferred.head_call, deferred.record
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        return tensor_class(deferred)

    @staticmethod
    def backward(ctx, gradient):
        loss_backwards, real_gradient = [], gradient
        if is_gradient(gradient):
            loss_backwards, real_gradient = _split(gradient, ctx)
        gradients = [None] * 3
        if loss_backwards:
            gradients = _gradients_by_flce(ctx, loss_backwards)
        if real_gradient is not None:
            by_torch = _gradients_by_torch(ctx, real_gradient)
            gradients = [sum_of_tensors(pair) for pair in zip(gradients, by_torch, strict=True)]
        return None, None, *gradients


def _split(gradient, head_node):
    """(the LossBackwards that run at this node of a HeadProduct, the real sum of all other terms or
    None). A LossBackward gives the sum of the gradients along all of its paths, so it runs only if
    each path has brought a term. If a hook has read the gradient of one of two paths, which makes
    it real, the term of the other path is computed as a real one too."""
    summands, head_call = gradient.summands, head_node.head_call
    terms_of = collections.Counter(term.loss_backward for term in summands.terms)
    loss_backwards = [
        loss_backward
        for loss_backward, terms in terms_of.items()
        if head_call in loss_backward.head_calls and terms == loss_backward.paths_to(head_node)
    ]
    others = [term for term in summands.terms if term.loss_backward not in loss_backwards]
    return loss_backwards, sum_of_tensors([*(t.compute() for t in others), summands.tensor])


def _gradients_by_flce(ctx, loss_backwards):
    """The gradients of a call's leaves by the graphs of flce. A LossBackward of several heads is
    run by the first one's HeadProduct, for the leaves of all."""
    head_call = ctx.head_call
    new = [backward for backward in loss_backwards if backward.leaf_gradients is None]
    if new:
        calls = {id(call): call for backward in new for call in backward.head_calls}
        wanted = _wanted_leaves(ctx) if len(calls) == 1 else None
        leaves = {id(leaf): leaf for call in calls.values() for leaf in call.leaves}
        leaves = [leaf for leaf in leaves.values() if leaf is not None and leaf.requires_grad]
        inputs = [leaf for leaf in leaves if wanted is None or id(leaf) in wanted]
        accumulates = any(call.accumulates for call in calls.values())
        is_full = len(inputs) == len(leaves) and not accumulates
        with all_gradients_wanted() if is_full else contextlib.nullcontext():
            _run(new, inputs, accumulates, is_full)
    # Those that were run together share a dict, which has their sum.
    gradients = [backward.leaf_gradients for backward in loss_backwards]
    gradients = list({id(by_leaf): by_leaf for by_leaf in gradients}.values())
    return [
        sum_of_tensors([by_leaf.get(id(leaf)) for by_leaf in gradients])
        for leaf in head_call.leaves
    ]


def _wanted_leaves(ctx):
    """{id of a leaf} for those whose gradients the running backward computes, as in pipeline
    schedules that compute those of inputs and of weights apart."""
    nodes = ctx.next_functions  # of Tensors alone
    wanted = [i for i, is_wanted in enumerate(ctx.needs_input_grad[2:]) if is_wanted]
    return {id(ctx.head_call.leaves[i]) for i in wanted if torch_private.is_executed(nodes[i][0])}


def _run(loss_backwards, leaves, accumulates, is_full):
    """Sets `leaf_gradients` of the LossBackwards. accumulates: flce adds the weight's to its .grad
    itself; is_full: all leaves are asked for, and flce adds to no .grad."""
    keeps_graph = torch_private.keeps_graph()
    nested = [
        backward for backward in loss_backwards if not (is_full and _run_directly(backward, leaves))
    ]
    if nested:
        values = [backward.value[0] for backward in nested]
        grad_outputs = [backward.grad_output for backward in nested]
        if accumulates:
            torch.autograd.backward(values, grad_outputs, keeps_graph, inputs=leaves)
            by_leaf = {id(x): x.grad for x in leaves if not isinstance(x, torch.nn.Parameter)}
            for leaf in leaves:
                if id(leaf) in by_leaf:
                    leaf.grad = None
        else:
            gradients = torch_private.nested_gradients(values, leaves, grad_outputs, keeps_graph)
            by_leaf = dict(zip(map(id, leaves), gradients, strict=True))
        for backward in nested:
            backward.leaf_gradients = by_leaf
    if not keeps_graph:
        for backward in loss_backwards:
            backward.value.clear()


def _run_directly(loss_backward, leaves):
    """Runs the graph of a loss node by node, if it is one node between the value and leaves, or
    views and selections of them: a nested run of the engine would be another backward for
    checkpoints, and takes longer. Whether it did."""
    (value,) = loss_backward.value
    node, known = value.grad_fn, {id(leaf) for leaf in leaves}
    if not isinstance(node, torch.autograd.function.BackwardCFunction) or value.output_nr:
        return False
    chains = [_chain_to_leaf(edge) for edge, _ in node.next_functions]
    if any(leaf is not None and id(leaf) not in known for leaf, _ in chains):
        return False
    gradients = node.apply(loss_backward.grad_output)[: len(chains)]
    loss_backward.leaf_gradients = {}
    for (leaf, chain), gradient in zip(chains, gradients, strict=True):
        for chain_node in chain:
            gradient = None if gradient is None else chain_node(gradient)
        if leaf is not None:
            loss_backward.leaf_gradients[id(leaf)] = gradient
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


def _gradients_by_torch(ctx, gradient):
    """Those of nn.Linear for a real gradient of its output: GEMMs, which need no logits. A weight
    of another class (a DTensor) has a backward of its own, for which the logits are computed."""
    x, weight, bias = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[2:]
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        with torch.enable_grad():
            logits = compute_logits(ctx.record, ctx.head_call)
        wanted = [leaf for leaf in ctx.head_call.leaves if leaf is not None and leaf.requires_grad]
        gradients = torch.autograd.grad(logits, wanted, gradient)
        by_leaf = dict(zip(map(id, wanted), gradients, strict=True))
        return [by_leaf.get(id(leaf)) for leaf in ctx.head_call.leaves]
    rows, of_x, of_weight, of_bias = gradient.reshape(-1, gradient.shape[-1]), None, None, None
    if wants_x:
        of_x = (gradient @ weight.to(gradient.dtype)).to(x.dtype)
    if wants_weight:
        of_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).to(gradient.dtype)).to(weight.dtype)
    if wants_bias:
        of_bias = rows.sum(0).to(bias.dtype)
    return [of_x, of_weight, of_bias]


class LossOfLogits(torch.autograd.Function):
    """A loss by flce (or log p, lse, ...), as a function of the deferred Tensor that the caller has
    passed. value: the loss in a list, so that autograd does not take it for an operand;
    paths_to_heads: of LossBackward."""

    @staticmethod
    def forward(ctx, value, replaced_call, paths_to_heads, tensor):
        ctx.value, ctx.replaced_call, ctx.paths_to_heads = value, replaced_call, paths_to_heads
        ctx.head_calls = tensor._flce.head_calls
        result = value[0].detach()
        # So that torch refuses a second backward without its graph.
        ctx.save_for_backward(torch.empty(0))
        return result

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            refuse_double_backward()
        _ = ctx.saved_tensors
        deferred = ctx.replaced_call.deferred
        loss_backward = LossBackward(ctx.value, gradient, ctx.head_calls, ctx.paths_to_heads)
        compute = functools.partial(ctx.replaced_call.compute_gradient, gradient)
        summands = Summands(deferred.head_call.device, [GradientTerm(loss_backward, compute)])
        return None, None, None, GradientOfLogits(deferred.meta_tensor(), summands)


class ReplacedCall:
    """The call of torch's function that flce has computed in its place, to run it after all where
    somebody reads the gradient: F.cross_entropy(z, labels), of deferred logits z.

    args, kwargs: with DeferredValues in place of deferred Tensors; deferred: the DeferredValue of
    the one that has the gradient. Other Tensors are copied, as the caller may write to them before
    the gradient is read; of large ones (probabilities) the version has to stay the same.
    """

    def __init__(self, function, args, kwargs, deferred):
        self.function, self.deferred, self.versions = function, deferred, []
        self.args, self.kwargs = mapped(self._by_value, (args, kwargs))

    def _by_value(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        if (deferred := getattr(value, "_flce", None)) is not None:
            return deferred
        if value.dim() <= 2 and not (value.dim() == 2 and value.is_floating_point()):
            return value.detach().clone()
        if not value.is_inference():
            self.versions.append((value, value._version))
        return value

    def compute_gradient(self, grad_output):
        """The gradient of the deferred value, by torch."""
        for value, version in self.versions:
            if value._version != version:
                raise RuntimeError(
                    "flce.fuse: expected the arguments of the loss as they were, to compute the "
                    f"gradient of the logits, got a tensor of shape {tuple(value.shape)} that was "
                    "written to since"
                )
        deferred = self.deferred
        deferred.head_call.fusion.note_read("the gradient of the logits")

        def real(argument):
            if argument is deferred:
                return leaf
            return argument.recompute() if isinstance(argument, DeferredValue) else argument

        with torch_private.autograd_in_dispatch(), torch.enable_grad():
            with torch.no_grad():
                leaf = deferred.recompute().detach()
            leaf.requires_grad_()
            value = self.function(*mapped(real, self.args), **mapped(real, self.kwargs))
            return torch.autograd.grad(value, leaf, grad_output)[0]


def count_paths_to_heads(node):
    """{node of a HeadProduct: the number of paths in autograd's graph from `node` to it}, through
    steps and custom Functions."""
    if isinstance(node, HeadProduct._backward_cls):
        return collections.Counter([node])
    counts = collections.Counter()
    if isinstance(node, torch.autograd.function.BackwardCFunction) or is_step(node):
        for next_node, _ in node.next_functions:
            counts += count_paths_to_heads(next_node)
    return counts
