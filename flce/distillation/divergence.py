"""flce.linear_divergence: how far the softmax of a linear head is from a teacher's."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import functional
from ..options import Divergence, DivergenceOptions, show_options
from ..validate import check_tensor, local_replica, refuse
from .sparse import Tail, sparse_divergence


@show_options
def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | tuple[Tensor, Tensor] | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_temperature: float | Tensor | None = None,
    tail: Tail = "class",
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """The divergence of a student's head from a teacher's, without the logits of either in memory.

    With p the student's softmax of a row and q the teacher's: "forward_kl" is KL(q || p),
    "reverse_kl" KL(p || q), "jsd" ``beta KL(q || m) + (1 - beta) KL(p || m)`` with ``m = beta q +
    (1 - beta) p``. Two logits GEMMs and two for the gradients, which are made in the forward of a
    scalar loss. docs/semantics.md has the formulas and others' conventions.

    Args:
        input, linear_weight: the student's, (..., H) and (V, H), as in `linear_cross_entropy`.
        teacher_input, teacher_weight, teacher_bias: (..., H') of any H', (V, H') and (V,) or None;
            dtypes as the student's. Constants: no gradient is computed for them.
        divergence, beta: see above; 0 < beta < 1.
        target: classes (...), int64 or int32: rows of `ignore_index` give no loss and no gradient.
            None: all rows count.
        hard_weight: h in [0, 1]; the loss of a row becomes (1 - h) divergence + h cross entropy of
            target. Not with a temperature.
        teacher_logits: in place of input and weight (..., V), z before softcap, scale and
            temperature; or a tuple (ids, log-probabilities), both (..., K), of K classes of each
            row, final; an id of `ignore_index` counts as none. It takes no `target`.
        tail: of such a tuple: "class": the other classes are one more, with the rest of the
            probability; "renormalize": those of the K classes sum to 1, the student's too, whose
            mass outside of them then costs nothing (docs/semantics.md).
        teacher_softcap, teacher_logit_scale, teacher_temperature: of the teacher's final logits, as
            softcap, logit_scale and temperature of the student's; temperature None: the student's.
        **options: as in `linear_cross_entropy`; the signature lists them. save: "auto" makes the
            gradients in the forward, but for reduction "none"; "stats" in the backward, which
            computes all again. gradient="sampled": two gathers over a few classes of each row
            replace the two gradient GEMMs; unbiased (docs/sampled-reference.md). Gradients contain
            1/temperature; no factor temperature^2 is applied. accumulate_into: the backward adds
            linear_weight's gradient to that attribute; the forward still allocates it, in
            linear_weight's dtype, so no memory is saved.

    Returns:
        The loss, float64 for float64 operands, else float32; shape (), or (...) for "none".

    Raises: as `linear_cross_entropy`.

    >>> x, W, teacher_x, teacher_W = map(torch.randn, (5, 16, 5, 16), (8, 8, 4, 4))
    >>> loss = flce.linear_divergence(x, W, teacher_x, teacher_W)
    >>> p, q = (x @ W.T).log_softmax(-1), (teacher_x @ teacher_W.T).log_softmax(-1)
    >>> torch.testing.assert_close(loss, (q.exp() * (q - p)).sum(-1).mean())
    """
    if (teacher_input is None) != (teacher_weight is None) or (teacher_logits is None) == (
        teacher_input is None
    ):
        expected = "teacher_input and teacher_weight, or teacher_logits"
        refuse("teacher_input", expected, "another combination of the three", TypeError)
    if isinstance(teacher_logits, tuple):
        others = target, hard_weight or None, teacher_bias, teacher_softcap, teacher_temperature
        others += (None if teacher_logit_scale == 1.0 else teacher_logit_scale,)
        _check_known_classes(teacher_logits, others)
        known = [local_replica("teacher_logits", tensor) for tensor in teacher_logits]
        of_student = functional.with_local_factors(options)
        how = divergence, beta, tail
        return sparse_divergence(input, linear_weight, *known, *how, of_student)
    if hard_weight and target is None:
        refuse("target", "classes with hard_weight", None)
    if target is None:
        check_tensor("input", input)
        target = input.new_zeros(input.shape[:-1], dtype=torch.int64)
        options["ignore_index"] = -100
    if teacher_temperature is None:
        teacher_temperature = options.get("temperature", 1.0)
    of_teacher = {
        "divergence": divergence,
        "beta": beta,
        "hard_weight": hard_weight,
        "teacher_weight": teacher_weight,
        "teacher_bias": teacher_bias,
        "teacher_softcap": teacher_softcap,
        "teacher_logit_scale": teacher_logit_scale,
        "teacher_temperature": _known_temperature(teacher_temperature, target),
    }
    operands = (
        input,
        linear_weight,
        target,
        teacher_input if teacher_logits is None else teacher_logits,
    )
    return functional.divergence_of(*operands, **of_teacher, **options)


def _check_known_classes(teacher_logits, others):
    """Refuses a tuple `teacher_logits` of another length, and what it does not go with, unless that
    is None."""
    if any(other is not None for other in others):
        expected = "no target, hard_weight or option of the teacher with (ids, log-probabilities)"
        refuse("teacher_logits", expected, "one of them")
    if len(teacher_logits) != 2:
        refuse("teacher_logits", "(ids, log-probabilities)", f"{len(teacher_logits)} of them")


def _known_temperature(temperature, target):
    """A number where the value is known, as of the student's; else that of each row."""
    if not isinstance(temperature, torch.Tensor) or temperature.dim() > 0:
        return temperature
    if temperature.is_cpu and not torch.compiler.is_compiling():
        return temperature.item()
    return temperature.expand(target.shape)
