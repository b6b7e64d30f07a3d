"""TRL's distillation trainers (GKD, GOLD): their generalized_jsd_loss of two fused models."""

from flce.fusion.divergence import divergence
from flce.fusion.node import node_of
from flce.fusion.steps import Unknown

from ._rebind import Installation, is_ours, parameters_of

_NAME = "generalized_jsd_loss"
_PARAMETERS = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction")


def install(trainer):
    """Makes a trainer's `generalized_jsd_loss` one call of `flce.linear_divergence`.

    The models are fused in addition: ``flce.fuse(student, when="always")``, and the teacher alike.
    Logits that are none of a fused model, and reductions other than "batchmean" and "sum", remain
    TRL's own.

    Args:
        trainer: a class that has the function, such as `trl.experimental.gkd.GKDTrainer`.

    Returns and raises as `flce.integrations` says.
    """
    named = vars(trainer).get(_NAME)
    original = getattr(named, "__func__", None)
    found, ours = parameters_of(original), staticmethod(_loss_with(original))
    ours.flce_original = named
    first = found if found[:6] == _PARAMETERS else _PARAMETERS
    known = "trl", f"{trainer.__name__}.{_NAME}", first, found
    return Installation("trl_distillation", [(named, ours)], (trainer,), [known])


def _loss_with(original):
    def generalized_jsd_loss(
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
        serves = None not in both and reduction in ("batchmean", "sum") and not any(others.values())
        total = None
        if serves:
            name, weight = {0: ("forward_kl", 0.5), 1: ("reverse_kl", 0.5)}.get(beta, ("jsd", beta))
            try:
                total = divergence(*both, name, "sum", labels, weight)
            except Unknown:
                serves = False
        if not is_ours("trl_distillation", serves):
            given = labels, beta, temperature, reduction
            if num_items_in_batch is not None:
                others["num_items_in_batch"] = num_items_in_batch
            return original(student_logits, teacher_logits, *given, **others)
        if num_items_in_batch is None and reduction == "sum":
            return total
        if num_items_in_batch is None and labels is None:
            num_items_in_batch = student_logits.shape[0]
        elif num_items_in_batch is None:
            num_items_in_batch = (labels != -100).sum().clamp_min(1)
        return total / num_items_in_batch

    return generalized_jsd_loss
