"""What flce.linear_divergence refuses, by the argument's name."""

import re

import cases
import pytest
import torch

import flce

REFUSED = (TypeError, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "avg"),
        ("beta", "0.5"),
        ("token_weight", torch.ones(6, 1)),
        ("token_weight", torch.ones(6, requires_grad=True)),
        ("token_weight", [1.0] * 6),
        ("teacher_logits", torch.zeros(6, 3, dtype=torch.int64)),
        ("ids", [[1, 2, 3]] * 6),
    ],
)
def test_refusals_with_few_classes(device, name, value):
    """What the composition in torch would broadcast, convert or differentiate."""
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    x, w, _ = cases.leaves(device, 6, hidden=8, vocab=20)
    given = {"ids": torch.zeros(6, 3, dtype=torch.int64, device=device)}
    given |= {"teacher_logits": torch.zeros(6, 3, device=device), name: value}
    given["teacher_logits"] = given.pop("ids"), given["teacher_logits"]
    with pytest.raises(REFUSED, match=f"^{name}: expected"):
        flce.linear_divergence(x, w, **given)


def good(device):
    x, w, target = cases.leaves(device, 6, hidden=8, vocab=20)
    teacher = {"teacher_input": x.detach()[:, :4], "teacher_weight": w.detach()[:, :4]}
    return {"input": x, "linear_weight": w, "target": target, **teacher}


BAD = {
    "divergence": "tvd",
    "beta": 1.0,
    "hard_weight": 1.5,
    "teacher_softcap": -1.0,
    "teacher_logit_scale": 0.0,
    "teacher_temperature": 0.0,
    "gradient": "sampled",  # of float64 operands
    "save": "logits",
    "teacher_input": torch.zeros(5, 4, dtype=torch.float64),
    "teacher_weight": torch.zeros(19, 4, dtype=torch.float64),
    "teacher_bias": torch.zeros(19, dtype=torch.float64),
    "teacher_logits": torch.zeros(6, 20, dtype=torch.float64),
    "num_items": -1.0,
    "token_weight": torch.zeros(5),
    "target": torch.zeros(6, 20),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_argument(device, name):
    value = BAD[name].to(device) if isinstance(BAD[name], torch.Tensor) else BAD[name]
    named = "teacher_input" if name == "teacher_logits" else name
    with pytest.raises(REFUSED, match=rf"^{named}: expected "):
        flce.linear_divergence(**{**good(device), name: value})


def test_all_rows_count_without_a_target(device):
    named = {name: value for name, value in good(device).items() if name != "target"}
    expected = flce.linear_divergence(**named)
    assert flce.linear_divergence(**named, ignore_index=0) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("teacher_softcap", 0.0),  # taken for None; softcap=0.0 is refused
        ("teacher_temperature", torch.ones(5)),
        ("teacher_temperature", torch.tensor(-2.0)),
        ("temperature", torch.ones(5)),
        ("teacher_logits", (torch.zeros(6, 1, dtype=torch.int64),)),
        ("teacher_logits", (torch.zeros(6, 1, dtype=torch.int64), torch.zeros(6, 1), None)),
    ],
)
def test_refusals_of_the_teachers_part(device, name, value):
    given = {k: v for k, v in good(device).items() if k != "target"} | {name: value}
    if name == "teacher_logits":
        del given["teacher_input"], given["teacher_weight"]
    with pytest.raises(REFUSED, match=f"^{name}: expected"):
        flce.linear_divergence(**given)


@pytest.mark.parametrize("name", ["teacher_input", "teacher_weight", "teacher_bias"])
def test_lists_are_refused(device, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got list"):
        flce.linear_divergence(**{**good(device), name: [1.0]})


OF_TEACHER = {
    "teacher_input": (6, 4),
    "teacher_weight": (20, 4),
    "teacher_bias": (20,),
    "teacher_temperature": (6,),
    "teacher_logits": (6, 20),
    "target": (6,),
}


@pytest.mark.parametrize("name", OF_TEACHER)
def test_operands_on_another_device_are_refused(device, name):
    for other in ("meta", "cpu") if device == "cuda" else ("meta",):
        options = good(device)
        if name == "teacher_logits":
            del options["teacher_input"], options["teacher_weight"]
        dtype = torch.int64 if name == "target" else torch.float64
        options[name] = torch.zeros(OF_TEACHER[name], dtype=dtype, device=other)
        with pytest.raises(REFUSED, match=rf"^{name}: expected the device of input, {device}"):
            flce.linear_divergence(**options)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": 2.0, "hard_weight": 0.5}, "hard_weight: expected 0 with a temperature"),
        ({"target": None, "hard_weight": 0.5}, "target: expected classes with hard_weight"),
        ({"teacher_weight": None}, "teacher_input: expected teacher_input and teacher_weight"),
        ({"z_loss": 1.0}, "unexpected keyword argument 'z_loss'"),
        (
            {"teacher_logits": (0, 0), "teacher_input": None, "teacher_weight": None}
            | {"target": None, "gradient": "sampled"},
            "gradient: expected",
        ),
        (
            {"teacher_logits": (0, 0), "teacher_input": None, "teacher_weight": None},
            "teacher_logits: expected no target",
        ),
        (
            {
                "teacher_logits": torch.zeros(6, 20),
                "teacher_input": None,
                "teacher_weight": None,
                "teacher_bias": torch.zeros(20),
            },
            "teacher_bias: expected None with teacher_logits",
        ),
    ],
)
def test_combinations_are_refused(device, change, message):
    change = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in change.items()}
    with pytest.raises(REFUSED, match=re.escape(message)):
        flce.linear_divergence(**{**good(device), **change})


def test_a_teacher_of_another_dtype_is_refused(device):
    given = good(device)
    for name in ("teacher_input", "teacher_weight"):
        given[name] = given[name].float()
    with pytest.raises(TypeError, match="teacher_input: expected the dtype of the student's"):
        flce.linear_divergence(**given)
