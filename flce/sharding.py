"""What flce.distributed does in a call whose vocabulary is divided among ranks. It depends on the
core, and the core must not import it, so it registers its functions here."""

import typing


class ShardedCall(typing.NamedTuple):
    """What ranks that divide the vocabulary may compare before a call.

    call: a calls.ForwardCall without a seed. options: of the call, by name.
    caller: the name ("call") and the arguments of a public function that is composed of this call;
    None where the user has made this call.
    """

    call: object
    options: dict
    caller: dict | None


class Hooks(typing.NamedTuple):
    """before_call(sharded_call): compares what the ranks call, before the operator runs.
    local_call(function, operands, options): the operands and options of a call with DTensors, as
    local tensors and a VocabParallel; function: a functional.PublicFunction.
    pending_error(text): the exception that has ended a collective of this thread, or None; text:
    the operator's error."""

    before_call: typing.Callable
    local_call: typing.Callable
    pending_error: typing.Callable


_registered = []


def register(hooks):
    _registered[:] = [hooks]


def hooks():
    """The registered Hooks."""
    (registered,) = _registered
    return registered
