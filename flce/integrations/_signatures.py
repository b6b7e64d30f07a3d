"""Functions with another package's signature, stated once, as the last of their overloads."""

import functools
import inspect
import typing
from collections.abc import Callable

import typing_extensions

_Result = typing.TypeVar("_Result")


def takes_by_name(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a function of keywords, the implementation of overloads: it is called as the last
    of them, and gets all arguments of that by name, with their defaults. help() and inspect show
    that signature."""
    signature = inspect.signature(typing_extensions.get_overloads(function)[-1])
    parameters = signature.parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    count = len(parameters)

    @functools.wraps(function)
    def call(*args: object, **keywords: object) -> _Result:
        arguments = {**dict(zip(names, args, strict=False)), **keywords}
        named = {**defaults, **arguments}
        if len(arguments) != len(args) + len(keywords) or len(named) != count:
            # Raises the TypeError. Not `signature`: torch.compile cannot take it into a graph.
            inspect.signature(call).bind(*args, **keywords)
        return function(**named)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
