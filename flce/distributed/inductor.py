"""The order of a sharded vocabulary's calls in a graph that TorchInductor compiles.

Inductor orders independent operators by the sizes of their results, which differ between ranks
whose shares of the vocabulary differ. The exchanges of two calls, or of a call and a collective of
torch over the same group, would then not match: wrong gradients, or a hang. So each of them
depends on the one before it. (torch's own effect tokens keep the order up to Inductor, which drops
it in torch 2.11 and 2.13.)
"""

import functools
import sys
import warnings

import torch

_OPERATORS = ("graph_forward", "graph_backward")
_OF_TORCH = ("_c10d_functional", "_dtensor")  # the namespaces of torch's collectives


def order_exchanges():
    """Registers the lowerings, once Inductor is imported: its import takes long."""
    if "torch._inductor.lowering" not in sys.modules:
        return
    try:
        _register()
    except (AttributeError, ImportError) as error:
        warnings.warn(
            f"flce: this torch does not order exchanges under torch.compile ({error}): use equal "
            "shares of the vocabulary, or one exchange of a group in a graph, torch's included",
            stacklevel=2,
        )


@functools.cache
def _register():
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    own = {getattr(torch.ops.flce, name).default for name in _OPERATORS}
    for op in own:
        if op not in lowering.lowerings:  # as Inductor does for an operator without a lowering
            tag = get_layout_constraint_tag(op, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)
    overloads = (op for op in lowering.lowerings if isinstance(op, torch._ops.OpOverload))
    for op in own | {op for op in overloads if op.namespace in _OF_TORCH}:
        if _group_index(op) is None:
            continue
        lowering.lowerings[op] = _ordered(op, lowering.lowerings[op], own)


def _group_index(op):
    """The position of the argument that names a group; None without one."""
    names = [argument.name for argument in op._schema.arguments]
    return next((i for i, name in enumerate(names) if name in ("group", "group_name")), None)


def _group_of(op, args, kwargs):
    """The name of the group over which `op` exchanges with these arguments, or None."""
    index = _group_index(op)
    return args[index] if index < len(args) else kwargs.get(op._schema.arguments[index].name)


def _last_exchanges(graph, own):
    """{group: name of the last exchange, None before the first}, for the groups over which the
    operators `own` exchange in this graph."""
    if not hasattr(graph, "_flce_last_exchanges"):
        calls = [node for node in graph.module.graph.nodes if node.target in own]
        groups = {_group_of(node.target, node.args, node.kwargs) for node in calls}
        graph._flce_last_exchanges = dict.fromkeys(groups - {None})
    return graph._flce_last_exchanges


def _ordered(op, lower, own):
    """`lower`, the lowering of `op`, with a dependency on the group's exchange before."""

    @functools.wraps(lower)
    def ordered(*args, **kwargs):
        from torch._inductor.ir import ExternKernelOut, FallbackKernel
        from torch._inductor.virtualized import V

        graph, first = V.graph, len(V.graph.operations)
        made = lower(*args, **kwargs)
        group, last = _group_of(op, args, kwargs), _last_exchanges(graph, own)
        if group not in last:
            return made
        # The other operations realise arguments, or take an output.
        kinds = FallbackKernel, ExternKernelOut
        calls = [one for one in graph.operations[first:] if isinstance(one, kinds)]
        if op not in own and not calls:
            return made  # it has no kernel of its own
        if last[group] is not None:
            graph.additional_buffer_deps[calls[0].get_operation_name()].add(last[group])
        last[group] = calls[0].get_name()
        return made

    return ordered
