"""The order of a sharded vocabulary's calls in a graph that TorchInductor compiles.

Inductor orders independent operators by the sizes of their results, which differ between ranks
whose shares of the vocabulary differ. The exchanges of two calls, or of a call and a collective of
torch over the same group, would then not match: wrong gradients, or a hang. So each of them
depends on the one before it. (torch's own effect tokens keep the order up to Inductor, which drops
it in torch 2.11 and 2.13.)
"""

import functools

import torch

from .. import torch_private
from ..validate import warn


def order_exchanges():
    """Registers the lowerings, once Inductor is imported: its import takes long."""
    try:
        if torch_private.inductor_is_imported():
            _register()
    except (AttributeError, ImportError) as error:
        warn(
            f"flce: this torch does not order exchanges under torch.compile ({error}): use equal "
            "shares of the vocabulary, or one exchange of a group in a graph, torch's included"
        )


@functools.cache
def _register():
    lowering, layout_constraint_tag = torch_private.inductor_lowering()
    of_flce = {torch.ops.flce.graph_forward.default, torch.ops.flce.graph_backward.default}
    for op in of_flce:
        if op not in lowering.lowerings:  # as Inductor does for an operator without a lowering
            tag = layout_constraint_tag(op, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)
    overloads = (op for op in lowering.lowerings if isinstance(op, torch_private.OpOverload))
    of_torch = {op for op in overloads if op.namespace in ("_c10d_functional", "_dtensor")}
    for op in of_flce | of_torch:
        lowering.lowerings[op] = _ordered(op, lowering.lowerings[op], of_flce)


def _group_of(op, args, kwargs):
    """The name of the group over which `op` exchanges with these arguments, or None."""
    arguments = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    arguments |= kwargs
    return arguments.get("group", arguments.get("group_name"))


def _ordered(op, lower, of_flce):
    """`lower`, the lowering of `op`, with a dependency on the exchange before of the same group,
    where one of the operators `of_flce` exchanges over that group in the graph."""
    ir, virtualized = torch_private.inductor_graph()

    @functools.wraps(lower)
    def ordered(*args, **kwargs):
        graph = virtualized.V.graph
        first = len(graph.operations)
        result = lower(*args, **kwargs)
        if not hasattr(graph, "_flce_last_exchanges"):  # by group: a name, None before the first
            calls = [node for node in graph.module.graph.nodes if node.target in of_flce]
            groups = {_group_of(node.target, node.args, node.kwargs) for node in calls}
            graph._flce_last_exchanges = dict.fromkeys(groups - {None})
        group, last = _group_of(op, args, kwargs), graph._flce_last_exchanges
        # The other operations realise arguments, or take an output; an operator of torch may have
        # no kernel of its own.
        kinds = ir.FallbackKernel, ir.ExternKernelOut
        calls = [
            operation for operation in graph.operations[first:] if isinstance(operation, kinds)
        ]
        if group not in last or (op not in of_flce and not calls):
            return result
        if last[group] is not None:
            graph.additional_buffer_deps[calls[0].get_operation_name()].add(last[group])
        last[group] = calls[0].get_name()
        return result

    return ordered
