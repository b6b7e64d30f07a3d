"""verl: its forward KL from a teacher's K log-probabilities, of a fused student's logits."""

import functools

import torch

from flce.fusion.values import deferred_value_of
from flce.validate import check_shape

from ._rebind import Installation, count_call, imports_of, same_parameters


def install() -> Installation:
    """Makes the loss_mode "forward_kl_topk" of verl's FSDP workers run flce, without the logits.

    The student is fused in addition: ``flce.fuse(module, when="always")`` of what the engine's
    `_build_module` returns. Logits that are none of a fused model remain verl's own. Log p is
    float32 at least; the metrics `overlap_ratio` and `overlap_token_advantage`, which need the
    student's own K classes, are left out. Returns and raises as `flce.integrations` says.
    """
    with imports_of("verl"):
        from verl.trainer.distillation.fsdp import losses

    original = losses.compute_forward_kl_topk
    pair = original, functools.partial(_forward_kl_topk, original)
    return Installation("verl_distillation", [pair], signatures=same_parameters("verl", pair))


def _forward_kl_topk(
    original, student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format
):
    """As verl's: student_logits (1, tokens of this rank, V), the teacher's nested tensors."""
    from verl.trainer.distillation.fsdp import losses

    teacher = teacher_topk_log_probs, teacher_topk_ids
    is_fused = deferred_value_of(student_logits) is not None
    count_call("verl_distillation", is_fused)
    if not is_fused:
        return original(student_logits, *teacher, config, data_format)
    teacher = [tensor.values().unsqueeze(0) for tensor in teacher]
    if losses.get_ulysses_sequence_parallel_world_size() > 1:
        teacher = [losses.slice_input_tensor(tensor, dim=1) for tensor in teacher]
    log_q, ids = teacher
    check_shape("teacher_topk_ids", ids, (*student_logits.shape[:-1], ids.shape[-1]))
    wide = torch.promote_types(student_logits.dtype, torch.float32)
    log_p, log_q = student_logits.to(wide).log_softmax(-1).gather(-1, ids), log_q.to(wide)
    mass = {"student_mass": log_p.exp().sum(-1), "teacher_mass": log_q.exp().sum(-1)}
    if (least := config.distillation_loss.log_prob_min_clamp) is not None:
        log_p, log_q = log_p.clamp_min(least), log_q.clamp_min(least)
    return {"distillation_losses": (log_q.exp() * (log_q - log_p)).sum(-1), **mass}
