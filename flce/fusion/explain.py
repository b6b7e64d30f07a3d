"""A printable report of what `flce.fuse` did or would do."""

from torch import nn

from .head import fusion_of, heads_of, why_not


class Explanation:
    """The report of `flce.explain`: str() of it is text.

    model: the name of its class; is_fused: whether a head of it is fused. heads: [(name, what it
    consists of)]; refused: [(name, reason)]; losses, reads, fallbacks: the counts of the handle
    that flce.fuse returned, empty if the model is not fused; summary: these in a phrase.
    """

    def __init__(self, model):
        self.model, fusion = type(model).__name__, fusion_of(model)
        self.is_fused = fusion is not None
        heads = {module: name for name, module in heads_of(model)}
        for name, module, _ in fusion.attached() if self.is_fused else ():
            heads.setdefault(module, name)
        self.heads, self.refused = [], []
        for module, name in heads.items():
            reason = None if fusion_of(module) else why_not(module)
            if reason is None:
                self.heads.append((name, _consists_of(module)))
            else:
                self.refused.append((name, reason))
        if fusion is not None:  # what head= named, which heads_of may not find
            self.refused += [one for one in fusion.refused if one[0] not in heads.values()]
        self.summary = "" if fusion is None else fusion.summary()
        for name in ("losses", "reads", "fallbacks"):
            setattr(self, name, dict(getattr(fusion, name, {})))

    def __str__(self):
        state = "fused" if self.is_fused else "not fused"
        lines = [f"{self.model}: {state}"]
        lines += [f"  head {name}: {text}" for name, text in self.heads]
        lines += [f"  head {name}: left alone: {reason}" for name, reason in self.refused]
        if self.is_fused and not self.losses and not self.fallbacks:
            lines.append(f"  {self.summary}")
        for record, count in self.losses.items():
            lines.append(f"  {count} x loss without logits (steps after the head: {record})")
        for reason, count in self.fallbacks.items():
            lines.append(f"  {count} x fall-back: {reason}")
        for name, count in self.reads.items():
            lines.append(f"  {count} x logits read in addition to the loss: by {name}")
        return "\n".join(lines)


def _consists_of(head):
    if isinstance(head, nn.Linear):
        shape = f"nn.Linear({head.in_features}, {head.out_features})"
        return f"{shape}, {head.weight.dtype}, bias {'no' if head.bias is None else 'yes'}"
    names = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    return f"{type(head).__name__} of {', '.join(names)}"


def explain(model):
    """What `flce.fuse` did with a model, or would do.

    Args:
        model: an nn.Module, fused or not.

    Returns:
        An Explanation; print it.

    Raises:
        TypeError: the model is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"flce.explain: model: expected an nn.Module, got {type(model).__name__}")
    return Explanation(model)
