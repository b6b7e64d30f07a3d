"""The autograd nodes of deferred logits: the head's product, and the losses computed without it.

A loss by flce has a graph of its own, to the leaves of a head's call, which are the operands
without their graphs. Autograd sees a function of the logits instead, `Routed`, whose gradient has
no values until somebody reads them: that passes hooks and custom Functions as any other, and
`HeadProduct` runs flce's graph, after the hooks that make the weights whole.
"""

import contextlib
import weakref

import torch

from .. import torch_private
from ..autograd import all_gradients_wanted
from .node import whole_product
from .steps import require


class Part:
    """What a loss adds to the gradient of logits. values: of flce; gradient: of them; calls: of the
    heads whose leaves they are computed from; origin: (function, args, kwargs, deferred) that they
    stand for; found: {leaf: gradient} of this Part and of others, once it is known."""

    def __init__(self, values, gradient, calls, origin):
        self.values, self.gradient, self.calls, self.origin = values, gradient, calls, origin
        self.found = None

    def real(self, anchor):
        """The gradient of the logits themselves, by torch."""
        function, args, kwargs, deferred = self.origin
        deferred._flce.call.fusion.note_read("the gradient of the logits")
        with torch_private.autograd_in_dispatch(), torch.enable_grad():
            with torch.no_grad():
                leaf = anchor._flce.unwritten().detach()
            value = deferred._flce.computed_from(anchor._flce, leaf.requires_grad_())
            replaced = [value if one is deferred else one for one in args]
            named = {name: value if one is deferred else one for name, one in kwargs.items()}
            loss = function(*replaced, **named)
            return torch.autograd.grad(loss, leaf, self.gradient)[0]


class Parts(list):
    """A list that can be referred to weakly."""


class GradientOfLogits(torch.Tensor):
    """The gradient of deferred logits, without memory: [(Part, the Tensor that it is of)], and a
    real Tensor or None. Autograd sums and passes it as any other; what reads it finds real
    values."""

    @staticmethod
    def __new__(cls, like, parts, more=None):
        with torch_private.without_torch_function():
            options = {"dtype": like.dtype, "device": like.device}
            made = torch.Tensor._make_wrapper_subclass(cls, like.shape, **options)
        torch_private.forbid_addresses(made)
        made.parts, made.more = parts, more
        return made

    def __init__(self, like, parts, more=None):
        pass

    def split(self, call):
        """(the Parts of this call of a head, the real rest or None)"""
        own = [part for part, _ in self.parts if call in part.calls]
        others = [part.real(anchor) for part, anchor in self.parts if call not in part.calls]
        others += [] if self.more is None else [self.more]
        return own, sum(others[1:], others[0]) if others else None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = (args, kwargs or {})
        if function in torch_private.OF_MEMORY:
            args, kwargs = torch_private.tree_map(_real, (args, kwargs))
        with torch_private.without_torch_function():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _SUMS and len(args) == 2 and not kwargs and _are_alike(*args):
            return _sum(function, *args)
        if function in _COPIES:
            return GradientOfLogits(*args, args[0].parts, args[0].more)
        args, kwargs = torch_private.tree_map(_real, (args, kwargs))
        return function(*args, **kwargs)


_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
_COPIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _are_alike(one, other):
    is_sum = isinstance(other, torch.Tensor)
    return is_sum and (one.shape, one.dtype) == (other.shape, other.dtype)


def _sum(function, one, other):
    gradients = [g for g in (one, other) if isinstance(g, GradientOfLogits)]
    parts = Parts(part for g in gradients for part in g.parts)
    more = [g.more if isinstance(g, GradientOfLogits) else g for g in (one, other)]
    more = [g for g in more if g is not None]
    more = sum(more[1:], more[0]) if more else None
    if function is torch.ops.aten.add.Tensor:
        return GradientOfLogits(gradients[0], parts, more)
    if gradients[0] is not one:
        return one.add_(_real(other))
    one.parts, one.more = parts, more
    return one


def _real(value):
    return value.split(None)[1] if isinstance(value, GradientOfLogits) else value


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
        if isinstance(gradient, GradientOfLogits):
            parts, real = gradient.split(ctx.flce_call)
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


def _of_parts(ctx, parts):
    """The gradients of a call's leaves by the graphs of flce, in one run for all new Parts."""
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
            found = _run(new, asked, accumulates)
        for part in new:
            part.found = found
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


def _run(parts, leaves, accumulates):
    """{id of a leaf: its gradient}. accumulates: flce adds the weight's to its .grad itself."""
    values, gradients = [p.values for p in parts], [p.gradient for p in parts]
    keeps = torch_private.keeps_graph()
    if accumulates:
        torch.autograd.backward(values, gradients, keeps, inputs=leaves)
        found = {id(leaf): leaf.grad for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)}
        for leaf in leaves:
            if id(leaf) in found:
                leaf.grad = None
        return found
    made = torch_private.nested_gradients(values, leaves, gradients, keeps)
    return {id(leaf): one for leaf, one in zip(leaves, made, strict=True)}


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
    """Values of flce, as a function of deferred logits. values: [the Tensor], which autograd does
    not take for an operand. operands: `count` anchors, the logits of each head in it, and what is
    signalled, of which the hooks run."""

    @staticmethod
    def forward(ctx, values, origin, count, *operands):
        ctx.values, ctx.origin = values, origin
        ctx.anchors, ctx.signals = operands[:count], [None] * (len(operands) - count)
        return values[0].detach()

    @staticmethod
    def backward(ctx, gradient):
        calls = [anchor._flce.call for anchor in ctx.anchors]
        part = Part(*ctx.values, gradient, calls, ctx.origin)
        return None, None, None, *[_added(anchor, part) for anchor in ctx.anchors], *ctx.signals


def _added(anchor, part):
    """The gradient of the anchor with the Part; None if the Part was added to what another loss has
    sent in this backward: the anchor's node runs after all of them."""
    node, now = anchor._flce, torch_private.backward_now()
    task, parts = node.sent or (None, None)
    if task == now and (parts := parts()) is not None:
        parts.append((part, anchor))
        return None
    parts = Parts([(part, anchor)])
    node.sent = now, weakref.ref(parts)
    return GradientOfLogits(anchor, parts)


def anchors_of(found, is_sum):
    """(a deferred Tensor of a function's arguments, where a loss of it sends its gradient to); None
    if none has a gradient. Unknown if it would not reach the products that flce has a graph of, or
    if the arguments are of other Tensors and the function is no sum."""
    found = [one for one in found if one._flce.has_gradient]
    if not found:
        return None
    first = found[0]._flce.anchors or (found[0],)
    for one in found:
        require(one._flce.call.requires_grad)
        anchors = one._flce.anchors or (one,)
        require(is_sum or [*map(id, anchors)] == [*map(id, first)])
        for anchor in anchors:  # of written values the graph is another
            require(not anchor._flce.memory.is_touched)
    return found[0], first
