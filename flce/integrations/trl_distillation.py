"""TRL's distillation trainers (GKD, GOLD): their generalized_jsd_loss of two fused models."""

import contextlib
import functools

from flce.fusion.deferred import handle_with_graph
from flce.fusion.loss import divergence
from flce.fusion.steps import Unknown
from flce.fusion.values import deferred_value_of

from ._rebind import Installation, count_call, parameters_of

_NAME = "generalized_jsd_loss"


def install(trainer: type) -> Installation:
    """Makes the `generalized_jsd_loss` of a trainer, a class such as TRL's `GKDTrainer`, one call
    of `flce.linear_divergence`.

    The models are fused in addition: ``flce.fuse(student, when="always")``, and the teacher alike.
    Logits that are none of a fused model, and reductions other than "batchmean" and "sum", remain
    TRL's own. Returns and raises as `flce.integrations` says.
    """
    named = vars(trainer).get(_NAME)
    original = getattr(named, "__func__", None)
    ours = functools.partial(_generalized_jsd_loss, original)
    parameters, required = parameters_of(original), parameters_of(ours)[:6]
    expected = parameters if parameters[:6] == required else required
    signature = "trl", f"{trainer.__name__}.{_NAME}", expected, parameters
    return Installation("trl_distillation", [(named, staticmethod(ours))], (trainer,), [signature])


def _generalized_jsd_loss(
    original,
    student_logits,
    teacher_logits,
    labels=None,
    beta=0.5,
    temperature=1.0,
    reduction="batchmean",
    **others,
):
    """TRL's, whose beta is flce's: 0 is the forward KL, 1 the reverse one."""
    scaled = [logits / temperature for logits in (student_logits, teacher_logits)]
    both = [deferred_value_of(logits) for logits in scaled]
    num_items, total = others.get("num_items_in_batch"), None
    asks_more = any(value for name, value in others.items() if name != "num_items_in_batch")
    if None not in both and reduction in ("batchmean", "sum") and not asks_more:
        name, weight = {0: ("forward_kl", 0.5), 1: ("reverse_kl", 0.5)}.get(beta, ("jsd", beta))
        of_real = functools.partial(original, labels=labels, beta=beta, reduction="sum")
        with contextlib.suppress(Unknown):
            total = handle_with_graph(
                of_real, scaled, {}, lambda: divergence(*both, name, "sum", labels, weight)
            )
    count_call("trl_distillation", total is not None)
    if total is None:
        arguments = labels, beta, temperature, reduction
        return original(student_logits, teacher_logits, *arguments, **others)
    if num_items is None and reduction == "batchmean":
        num_items = len(student_logits) if labels is None else (labels != -100).sum().clamp_min(1)
    return total if num_items is None else total / num_items
