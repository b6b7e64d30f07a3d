"""flce.reference, with which other tests compare flce, against torch's own functions of the rows
that have a target."""

import hypothesis
import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases
from harness.drawn_options import LINEAR, PARTS, RETURNS, examples, linear_case, plans, upstream_of

FLOAT64 = {**LINEAR, "dtype": [torch.float64], "valid_bound": [None]}
pytestmark = pytest.mark.usefixtures("one_thread")


def pairs_of(target, shift, offsets):
    """(row, row of its class), where that is in the row's sequence and document."""
    rows, length = target.numel(), max(target.shape[-1:].numel(), 1)
    bounds = (0, rows) if offsets is None else offsets.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    found = [(i, i + shift) for begin, end in pairs for i in range(begin, end - shift)]
    return [(i, j) for i, j in found if not shift or i // length == j // length]


def by_torch(
    input, linear_weight, target, *, linear_bias=None, adapter_input=None, adapter_weight=None,
    weight=None, label_smoothing=0.0, softcap=None, logit_scale=1.0, temperature=1.0, z_loss=0.0,
    token_weight=None, num_items=None, reduction="mean", ignore_index=-100, shift=0,
    cu_seqlens=None, valid_vocab=None, **others,
):  # fmt: skip
    """All outputs but accuracy of probabilities."""
    shape, is_soft = input.shape[:-1], target.is_floating_point()
    rows = shape.numel()
    if is_soft:
        pairs, target = (
            [(i, i) for i in range(rows)],
            target.reshape(rows, target.shape[-1])[:, :valid_vocab],
        )
    else:
        none = -100 if ignore_index is None else ignore_index
        pairs, target = pairs_of(target, shift, cu_seqlens), target.reshape(rows).long()
        pairs = [(i, j) for i, j in pairs if target[j] != none]
    own, its = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)

    def of_rows(value):
        return torch.as_tensor(value, dtype=torch.float64).expand(shape).reshape(rows)[own]

    z = F.linear(input.reshape(rows, input.shape[-1])[own], linear_weight, linear_bias)
    if adapter_weight is not None:
        low_rank = adapter_input.reshape(rows, adapter_input.shape[-1])
        z = z + F.linear(low_rank[own], adapter_weight)
    z = logit_scale * z[:, :valid_vocab]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z, target = z / of_rows(temperature).unsqueeze(-1), target[its]
    weight = weight if weight is None else weight[:valid_vocab].double()
    options = {"weight": weight, "label_smoothing": label_smoothing, "reduction": "none"}
    loss, lse = F.cross_entropy(z, target, **options), z.logsumexp(-1)
    total = len(own) if is_soft or weight is None else weight[target].sum()
    factor, parts = of_rows(1.0 if token_weight is None else token_weight), []
    for part, items in ((loss * factor, total), (z_loss * lse.square() * factor, len(own))):
        items = items if num_items is None else num_items
        mean = part.sum() / items if items else 0.0 * part.sum()
        parts.append({"mean": mean, "sum": part.sum(), "none": part}[reduction])
    entropy = torch.distributions.Categorical(logits=z, validate_args=False).entropy()
    right = None if is_soft else (z.argmax(-1) == target).double().sum() / max(len(own), 1)
    made = [sum(parts), lse, entropy, right, z.argmax(-1), parts[1].detach()]
    for i, value in enumerate(made):
        if value is not None and value.dim() == 1:
            empty = value.new_full((rows,), -1 if i == 4 else 0)
            made[i] = empty.index_copy(0, own, value).reshape(shape)
    wanted = [others[name] for name in RETURNS]
    made[1:] = [one if want else None for one, want in zip(made[1:], wanted, strict=True)]
    return flce.LinearCrossEntropyOutput(*made)


@PARTS
def test_linear_cross_entropy(part):
    @examples("cpu", part, share=0.5)
    @hypothesis.given(plans(FLOAT64))
    def run(plan):
        case, random = linear_case(plan)
        call = {"wants": cases.LEAVES, "upstream": upstream_of(plan, random)}
        made = cases.outcome(flce.reference.linear_cross_entropy, case, **call)
        expected = cases.outcome(by_torch, case, **call)
        assert made.keys() == expected.keys()
        for name, value in expected.items():
            assert made[name].shape == value.shape, name
            error = (made[name] - value).norm() if value.dtype.is_floating_point else 0.0
            assert error <= 1e-11 * (1.0 + value.double().norm()), name

    run()
