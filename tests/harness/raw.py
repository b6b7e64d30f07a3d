"""Builds the arguments of the inner operators (csrc/binding/op.cpp), which are positional."""

from flce.options import CHOICES, OPTIONS
from flce.packing import GRADIENTS, CallContext, replaced, split

TENSORS = 10  # of flce::forward: input ... num_items, seed, classes
LOSS_TENSORS = 6  # of flce::cross_entropy_forward: logits ... num_items


def settings(
    save, *, valid_vocab=None, rows=None, max_memory=1 << 20, grads=(True, True, False), **others
):
    """The arguments after the tensors, with exact logits. `others`: options, and integers by their
    name in flce.packing.INTEGERS."""
    own = {name: others.pop(name) for name in list(others) if name not in OPTIONS}
    given = {name: value for name, value in others.items() if value or name != "softcap"}
    packed, _ = split(given)
    values = {"save": CHOICES["save"].index(save), "max_memory": max_memory, **own}
    values["kept_memory"] = max_memory
    values |= dict(zip(GRADIENTS, grads, strict=True))
    integers = replaced(packed.integers(CallContext()), **values)
    return valid_vocab, rows, integers, packed.numbers, None


def forward(
    x,
    w,
    target,
    save,
    *,
    bias=None,
    weight=None,
    token_weight=None,
    seed=None,
    classes=None,
    **rest,
):
    tensors = (x, w, target, bias, weight, token_weight, None, None, seed, classes)
    return (*tensors, *settings(save, **rest))


def backward(arguments, made, grad_output, grad_stats=None, **changed):
    """The backward of a forward with `arguments` that returned `made`; `changed`: by name."""
    stats, scalars, saved, class_logits = (
        None if made[output] is None else made[output].detach() for output in (1, 2, 4, 8)
    )
    given = {
        "grad_output": grad_output,
        "grad_stats": grad_stats,
        "stats": stats,
        "scalars": scalars,
        "saved": saved,
        "classes": arguments[TENSORS - 1],
        "class_logits": class_logits,
        "grad_classes": None,
        **changed,
    }
    operands = (*arguments[: TENSORS - 3], given["classes"], given["class_logits"])
    kept = (given["stats"], given["scalars"], given["saved"])
    upstream = (given["grad_output"], given["grad_stats"], given["grad_classes"])
    return (*upstream, *operands, *kept, *arguments[TENSORS:])


def cross_entropy_forward(logits, target, *, weight=None, reduction="mean", label_smoothing=0.0):
    lists = settings("nothing", reduction=reduction, label_smoothing=label_smoothing)[2:4]
    return (logits, target, weight, None, None, None, *lists)


def cross_entropy_backward(arguments, made, grad_output, **changed):
    stats, scalars = (tensor.detach() for tensor in made[1:3])
    given = {"grad_output": grad_output, "stats": stats, "scalars": scalars, **changed}
    operands = arguments[: LOSS_TENSORS - 1]
    kept = (given["stats"], given["scalars"])
    return (given["grad_output"], None, *operands, *kept, *arguments[LOSS_TENSORS:])


def described(outputs):
    return [None if one is None else (tuple(one.shape), one.dtype) for one in outputs]
