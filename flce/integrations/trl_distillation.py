"""TRL's distillation trainers (GKD, GOLD): their generalized_jsd_loss of two fused models."""

from flce.fusion.divergence import divergence
from flce.fusion.node import node_of
from flce.fusion.steps import Unknown

from ._rebind import Installation, is_ours, parameters_of, refuse_version

_NAME = "generalized_jsd_loss"
_PARAMETERS = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction")


def install(trainer):
    """Makes a trainer's `generalized_jsd_loss` one call of `flce.linear_divergence`.

    The models are fused in addition: ``flce.fuse(student, when="always")``, and the teacher alike.
    Logits that are none of a fused model, and reductions other than "batchmean" and "sum", remain
    TRL's own.

    Args:
        trainer: a class that has the function, such as `trl.experimental.gkd.GKDTrainer`.

    Returns a handle: `remove()`, or the end of a `with` block, restores TRL's function.

    Raises ImportError where the class has another function of that name, or none; RuntimeError
    where flce is installed already.
    """
    named = vars(trainer).get(_NAME)
    found = parameters_of(named.__func__) if isinstance(named, staticmethod) else "no such function"
    if found[:6] != _PARAMETERS and not hasattr(named, "flce_original"):
        refuse_version("trl", f"{trainer.__name__}.{_NAME}", _PARAMETERS, found)
    ours = staticmethod(_loss_with(getattr(named, "__func__", None)))
    ours.flce_original = named
    return Installation("trl_distillation", [(named, ours)], (trainer,))


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
