"""Finds the heads of a model: what it calls for its logits, and the nn.Linear in that."""

from torch import nn
from torch.nn.utils import parametrize

from .head import fusion_of, is_standard_linear
from .reentry import foreign_hook

BY_HAND = "call flce.linear_cross_entropy(hidden, weight, labels) where that is done"


def heads_of(model, head=None):
    """[(name, Module)]: what the model calls for its logits.

    head: None to ask get_output_embeddings() of the model and of the models in it; else a Module
    of the model, its name, or a list of these.
    """
    if head is not None:
        given = head if isinstance(head, list | tuple) else [head]
        return [_named(model, one) for one in given]
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        embeddings = _asked(ask)
        if id(embeddings) in names:
            found[id(embeddings)] = names[id(embeddings)], embeddings
    for name, module in model.named_modules():
        # A second head, of which get_output_embeddings() does not tell.
        if name.rpartition(".")[2].endswith("lm_head") and isinstance(module, nn.Linear):
            found.setdefault(id(module), (name, module))
    return list(found.values())


def _asked(ask):
    try:
        return None if ask is None else ask()
    except NotImplementedError:
        return None


def _named(model, head):
    if isinstance(head, str):
        try:
            return head, model.get_submodule(head)
        except AttributeError as error:
            expected = f"the name of a Module of {type(model).__name__}"
            raise ValueError(f"head: expected {expected}, got {head!r}: {error}") from None
    for name, module in model.named_modules():
        if module is head:
            return name, module
    raise ValueError(
        f"head: expected a Module of the model, its name, or a list of these, got "
        f"{type(head).__name__}"
    )


def linears_of(head):
    """The plain nn.Linear in `head` that make logits: itself, or those of an adapter's Module
    (base layer, up projections, copies to save), which PEFT wraps around it. Empty if one of them
    is of another class (a quantised base layer): then their sum needs real logits."""
    if isinstance(head, nn.Linear):
        return [head] if is_standard_linear(head) else []
    classes = getattr(head, "out_features", None)
    inner = [module for module in head.modules() if module is not head]
    making = [
        m for m in inner if classes is not None and getattr(m, "out_features", None) == classes
    ]
    are_standard = all(isinstance(m, nn.Linear) and is_standard_linear(m) for m in making)
    return making if are_standard else []


def why_not(head, linears):
    """Why the products of `head` cannot be deferred; None if they can."""
    if fusion_of(head) is not None:  # by this call: fuse refuses what was fused before it
        return "its nn.Linear belongs to another head of this model"
    if isinstance(head, nn.Embedding):
        return f"it is an nn.Embedding, whose weight the model multiplies by: {BY_HAND}"
    if not linears:
        return f"{type(head).__name__} is no plain nn.Linear, and no adapter around one"
    if any(parametrize.is_parametrized(linear) for linear in linears):
        return "it is parametrized: each use would make its weight anew"
    for module in (head, *linears):
        if hook := foreign_hook(module):
            return f"{hook} is hooked to it, which would not see the logits"
    return None
