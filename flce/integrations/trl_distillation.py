"""TRL's distillation trainers (GKD, GOLD): their generalized_jsd_loss of two fused models."""

import contextlib
import functools

from flce.fusion.loss import divergence
from flce.fusion.node import node_of
from flce.fusion.steps import Unknown

from ._rebind import Installation, is_ours, parameters_of

_NAME = "generalized_jsd_loss"


def install(trainer):
    """Makes a trainer's `generalized_jsd_loss` one call of `flce.linear_divergence`.

    The models are fused in addition: ``flce.fuse(student, when="always")``, and the teacher alike.
    Logits that are none of a fused model, and reductions other than "batchmean" and "sum", remain
    TRL's own.

    trainer: a class that has the function, such as `trl.experimental.gkd.GKDTrainer`. Returns and
    raises as `flce.integrations` says.
    """
    named = vars(trainer).get(_NAME)
    original = getattr(named, "__func__", None)
    ours = functools.partial(_generalized_jsd_loss, original)
    found, first = parameters_of(original), parameters_of(ours)[:6]
    known = "trl", f"{trainer.__name__}.{_NAME}", found if found[:6] == first else first, found
    return Installation("trl_distillation", [(named, staticmethod(ours))], (trainer,), [known])


def _generalized_jsd_loss(
    original,
    student_logits,
    teacher_logits,
    labels=None,
    beta=0.5,
    temperature=1.0,
    reduction="batchmean",
    num_items_in_batch=None,
    **others,
):
    """TRL's, whose beta is flce's: 0 is the forward KL, 1 the reverse one."""
    both = [node_of(logits / temperature) for logits in (student_logits, teacher_logits)]
    total = None
    if None not in both and reduction in ("batchmean", "sum") and not any(others.values()):
        name, weight = {0: ("forward_kl", 0.5), 1: ("reverse_kl", 0.5)}.get(beta, ("jsd", beta))
        with contextlib.suppress(Unknown):
            total = divergence(*both, name, "sum", labels, weight)
    if not is_ours("trl_distillation", total is not None):
        if num_items_in_batch is not None:
            others["num_items_in_batch"] = num_items_in_batch
        given = labels, beta, temperature, reduction
        return original(student_logits, teacher_logits, *given, **others)
    if num_items_in_batch is None and reduction == "batchmean":
        rows = None if labels is None else (labels != -100).sum().clamp_min(1)
        num_items_in_batch = len(student_logits) if rows is None else rows
    return total if num_items_in_batch is None else total / num_items_in_batch
