"""Apple's cut_cross_entropy (CCE): its linear_cross_entropy, wherever it is called."""

import functools

from flce.compat import cce as compat

from ._rebind import Installation, is_ours, parameters_of

# Options for distributed weights, which flce does not have; zero3_params is of Axolotl's fork.
_ONLY_THEIRS = ("vocab_parallel_options", "zero3_params")
_KNOWN = (*parameters_of(compat.linear_cross_entropy), "zero3_params")


def install():
    """Makes every call of `cut_cross_entropy.linear_cross_entropy` run flce: those by
    `LinearCrossEntropy` and by the forwards which `cce_patch` puts into models, too.

    Values and gradients are those of `flce.compat.cce`: exact, without CCE's gradient filter. A
    call with `vocab_parallel_options`, or with the `zero3_params` of Axolotl's fork, remains CCE's
    own. Returns and raises as `flce.integrations` says.
    """
    import cut_cross_entropy

    original = cut_cross_entropy.linear_cross_entropy
    names = parameters_of(original)
    ours = functools.partial(_linear_cross_entropy, original, names)
    served = names if set(names) <= set(_KNOWN) else f"some of {_KNOWN}"
    known = "cut_cross_entropy", original.__name__, served, names
    pairs = [(original, functools.update_wrapper(ours, original))]
    return Installation("cce", pairs, known=[known])


def _linear_cross_entropy(original, names, *args, **options):
    arguments = {**dict(zip(names, args, strict=False)), **options}
    # An argument given twice, too many or an unknown one: the original raises the TypeError.
    is_valid_call = len(arguments) == len(args) + len(options) and arguments.keys() <= set(names)
    is_distributed = any(arguments.pop(name, None) is not None for name in _ONLY_THEIRS)
    if not is_ours("cce", is_valid_call and not is_distributed):
        return original(*args, **options)
    if arguments.get("filter_eps") == "high":  # 25.1.1's name for 25.6's "auto"
        arguments["filter_eps"] = "auto"
    return compat.linear_cross_entropy(**arguments)
