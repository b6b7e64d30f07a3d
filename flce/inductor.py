"""The order of a sharded vocabulary's calls in a graph that TorchInductor compiles.

Inductor orders independent operators by the sizes of their results, which differ between ranks
whose shares of the vocabulary differ. The exchanges of two calls would then not match: wrong
gradients, or a hang. So each call that exchanges depends on the one before it. (torch's own effect
tokens keep the order up to Inductor, which drops it in torch 2.11 and 2.13.)
"""

import functools
import sys
import warnings

import torch

from .options import INTEGERS

_RANKS = INTEGERS.index("ranks")
_OPERATORS = ("forward", "backward", "backward_into")


def order_exchanges():
    """Registers the lowerings, once Inductor is imported: its import takes long."""
    if "torch._inductor.lowering" not in sys.modules:
        return
    try:
        _register()
    except (AttributeError, ImportError) as error:
        warnings.warn(
            f"flce: this torch does not order exchanges under torch.compile ({error}): use equal "
            "shares of the vocabulary, or one loss in a graph",
            stacklevel=2,
        )


@functools.cache
def _register():
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for name in _OPERATORS:
        op = getattr(torch.ops.flce, name).default
        if op not in lowering.lowerings:  # as Inductor does for an operator without a lowering
            tag = get_layout_constraint_tag(op, with_default=True)
            constraint = lowering.tag_to_layout_constraint(tag)
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)
        arguments = [argument.name for argument in op._schema.arguments]
        integers = arguments.index("integers")
        lowering.lowerings[op] = _ordered(lowering.lowerings[op], integers)


def _ordered(lower, integers):
    """`lower`, a lowering, with a dependency on the call before. `integers`: the position of the
    operator's list of options."""

    @functools.wraps(lower)
    def ordered(*args, **kwargs):
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        graph, first = V.graph, len(V.graph.operations)
        made = lower(*args, **kwargs)
        if args[integers][_RANKS] == 0:
            return made
        # The other operations realise arguments, or take an output.
        (call,) = (one for one in graph.operations[first:] if isinstance(one, FallbackKernel))
        before = getattr(graph, "_flce_last_exchange", None)
        if before is not None:
            graph.additional_buffer_deps[call.get_operation_name()].add(before)
        graph._flce_last_exchange = call.get_name()
        return made

    return ordered
