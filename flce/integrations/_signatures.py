"""Functions with another package's signature, given as the names and defaults of its arguments."""

import functools
import inspect


def takes(*required, keyword_only=False, **options):
    """Decorates a function of keywords: it takes `required`, then `options` with these defaults, by
    position or, with `keyword_only` these, by name. The function gets all of them; help() and
    inspect show that signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in required]
    kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else kind
    parameters += [inspect.Parameter(name, kind, default=options[name]) for name in options]
    names = required if keyword_only else (*required, *options)
    count = len(parameters)

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **keywords):
            arguments = {**dict(zip(names, args, strict=False)), **keywords}
            named = {**options, **arguments}
            if len(arguments) != len(args) + len(keywords) or len(named) != count:
                inspect.signature(call).bind(*args, **keywords)  # raises the TypeError
            return function(**named)

        call.__signature__ = inspect.Signature(parameters)
        return call

    return decorate
