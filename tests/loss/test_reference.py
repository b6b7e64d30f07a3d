"""flce.reference, with which other tests compare flce, against torch's own functions of the rows
that have a target."""

import math

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
    cu_seqlens=None, valid_vocab=None, classes=None, topk=0, **others,
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
    wanted = [others.get(name, False) for name in RETURNS]
    made[1:] = [one if want else None for one, want in zip(made[1:], wanted, strict=True)]
    if classes is None and not topk:
        return flce.LinearCrossEntropyOutput(*made)
    ids = z.topk(topk).indices if topk else classes.reshape(rows, -1)[own].long()
    return flce.LinearCrossEntropyOutput(*made, *of_classes(z, ids, own, shape, others, topk))


def of_classes(z, ids, own, shape, others, topk):
    """(tail_lse, class_logits, classes) of the `ids` (n, K) of the rows `own`, row by row and class
    by class. An id of -100 is no class; classes: the ids, of topk alone."""
    rows, count = shape.numel(), ids.shape[-1]
    logits, tail = z.new_zeros(rows, count), z.new_zeros(rows)
    found = torch.full((rows, count), -1)
    for row, of_row, chosen in zip(own.tolist(), z, ids.tolist(), strict=True):
        found[row] = torch.tensor([-1 if one == -100 else one for one in chosen])
        for at, one in enumerate(chosen):
            if one != -100:
                logits = logits.index_put((torch.tensor(row), torch.tensor(at)), of_row[one])
        left = [one for one in range(len(of_row)) if one not in chosen]
        rest = of_row[left].logsumexp(0) if left else torch.tensor(-math.inf).double()
        tail = tail.index_put((torch.tensor(row),), rest)
    tail = tail.reshape(shape) if others.get("return_tail_lse") else None
    return tail, logits.reshape(*shape, count), found.reshape(*shape, count) if topk else None


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


@pytest.mark.parametrize("topk", [0, 1, 4])
def test_classes(topk):
    """Logits of classes given by ids, of which some are none and some are there twice, or of the
    largest; and the logsumexp of the others."""
    generator = cases.generator(topk)
    for maps in ({}, {"softcap": 2.0, "logit_scale": -1.5}, {"valid_vocab": 6, "shift": 1}):
        shape, vocab = (2, 5), 9
        x = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
        w = torch.randn(vocab, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(6, shape, generator=generator)
        y[0, 1] = y[1, 3] = -100
        ids = torch.randint(6, (*shape, 3), generator=generator)
        ids[0, 0, 1] = ids[1, 2, 0] = -100
        asked = {"topk": topk} if topk else {"classes": ids}
        options = {**maps, **asked, "return_tail_lse": True, "temperature": 0.5 + torch.rand(shape)}
        case = cases.Case(x, w, y, options)
        upstream = {
            "loss": torch.tensor(0.7),
            "class_logits": torch.randn(*shape, topk or 3, generator=generator),
            "tail_lse": torch.randn(shape, generator=generator),
        }
        functions = flce.reference.linear_cross_entropy, by_torch
        made, expected = (cases.outcome(one, case, upstream=upstream) for one in functions)
        assert made.keys() == expected.keys()
        for name, value in expected.items():
            assert made[name].shape == value.shape, name
            assert (made[name] - value).double().norm() <= 1e-12 * (1.0 + value.double().norm())
