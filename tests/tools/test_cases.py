"""Tests of the tests' own helpers: pairwise parameters, the truth in chunks of rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases

SIZES = [(2, 2), (4, 9, 3, 2, 3), (1, 5, 1, 4), (2, 2, 2, 2, 2, 2, 2), (3, 12, 12)]


def make(sizes):
    return {f"p{i}": [f"{i}.{value}" for value in range(size)] for i, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_occurs(sizes):
    """In at most half as many rows more than the two largest parameters require."""
    values = make(sizes)
    rows = cases.covering_rows(**values)
    for (i, some), (j, others) in itertools.combinations(enumerate(values.values()), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(some, others))
    least = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert least <= len(rows) <= max(1.5 * least, least + 4)
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("soft", [False, True])
def test_the_truth_in_chunks_is_torchs(soft):
    case = cases.make_case(11, 4, 7, dtype=torch.float64, bias=True)
    if soft:
        case.target = torch.rand(11, 7, generator=cases.generator(1), dtype=torch.float64)
    leaves = [case.input, case.linear_weight, case.options["linear_bias"]]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    rows = F.cross_entropy(F.linear(*leaves), case.target, reduction="none")
    expected = dict(zip(cases.GRADIENTS, torch.autograd.grad(rows.mean(), leaves), strict=True))
    made = cases.chunked_truth(case, 4)
    assert made.keys() == {"loss", *expected}
    for name, value in {"loss": rows.detach(), **expected}.items():
        assert (made[name] - value).norm() <= 1e-14 * (1.0 + value.norm())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": -0.5},
        {"token_weight": torch.linspace(-1, 2, 20), "num_items": 7, "temperature": 0.7},
        {
            "valid_vocab": 290,
            "adapter_input": torch.ones(20, 2),
            "adapter_weight": torch.linspace(-1, 1, 600).reshape(300, 2).cos(),
        },
        {"reduction": "sum", "weight": torch.linspace(0.5, 2, 300).double()},
    ],
    ids=["plain", "maps", "rows", "adapter", "classes"],
)
def test_one_wrong_element_is_found(options):
    """In float64, where the norm of the error is far within its bound."""
    case = cases.make_case(20, 16, 300, dtype=torch.float64, bias=True).with_options(**options)
    case.target.clamp_(max=289)
    case = case.to(torch.float64)
    wants = [name for name in cases.LEAVES if name in {*cases.GRADIENTS, *case.options}]
    yardstick = cases.Yardstick(case, wants=wants)
    assert yardstick.elements.keys() >= set(cases.GRADIENTS)
    for name in (None, *(name for name in yardstick.truth if name in yardstick.elements)):
        made = cases.outcome(flce.linear_cross_entropy, case, wants=wants)
        if name is None:
            yardstick.check(made)
            continue
        change = 2e-13 * made[name].norm()
        made[name] = made[name].contiguous()
        made[name].view(-1)[made[name].numel() // 2] += change
        assert change <= 0.5 * cases.FLOORS[torch.float64][0] * yardstick.truth[name].norm()
        with pytest.raises(AssertionError, match=f"^{name} : 1 of .* elements"):
            yardstick.check(made)
