"""What flce.linear_divergence refuses, by the argument's name."""

import re

import pytest
import torch

import flce
from harness import cases

REFUSED = (TypeError, ValueError)


def good(device):
    x, w, target = cases.leaves(device, 6, hidden=8, vocab=20)
    teacher = {"teacher_input": x.detach()[:, :4], "teacher_weight": w.detach()[:, :4]}
    return {"input": x, "linear_weight": w, "target": target, **teacher}


def moved(value, device):
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def refused(device, change, match):
    given = {**good(device), **{name: moved(value, device) for name, value in change.items()}}
    with pytest.raises(REFUSED, match=match):
        flce.linear_divergence(**given)


LOGITS = {"teacher_input": None, "teacher_weight": None, "target": None}
IDS, LOG_Q = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3)


def few(teacher_logits=LOG_Q, ids=IDS, **others):
    return {**LOGITS, "teacher_logits": (ids, teacher_logits), **others}


def whole(*shape, **options):
    return torch.zeros(*shape, **{"dtype": torch.float64, **options})


# The argument that is refused, and what changes in a good call: its value, or several.
BAD = [
    ("divergence", "tvd"),
    ("divergence", None),
    ("divergence", few(divergence=None)),
    # A tensor is no number, and must not be left out.
    ("beta", torch.tensor(0.3)),
    ("hard_weight", torch.tensor(0.5)),
    ("teacher_softcap", torch.tensor(3.0)),
    ("teacher_logit_scale", torch.tensor(2.0)),
    ("teacher_temperature", "2"),
    ("beta", 1.0),
    ("hard_weight", 1.5),
    ("teacher_softcap", -1.0),
    ("teacher_softcap", 0.0),
    ("teacher_logit_scale", 0.0),
    ("teacher_temperature", 0.0),
    ("teacher_temperature", {"target": None, "teacher_temperature": torch.ones(5)}),
    ("temperature", {"target": None, "temperature": torch.ones(5)}),
    ("gradient", "sampled"),  # of float64 operands
    ("gradient", few(gradient="sampled")),
    ("save", "logits"),
    ("teacher_input", whole(5, 4)),
    ("teacher_input", {"teacher_logits": whole(6, 20)}),
    ("teacher_weight", whole(19, 4)),
    ("teacher_bias", whole(19)),
    ("teacher_bias", {**LOGITS, "teacher_logits": whole(6, 20), "teacher_bias": whole(20)}),
    ("num_items", -1.0),
    ("token_weight", torch.zeros(5)),
    ("target", torch.zeros(6, 20)),
    ("teacher_logits", {**LOGITS, "teacher_logits": (IDS,)}),
    ("teacher_logits", {**LOGITS, "teacher_logits": (IDS, LOG_Q, None)}),
    # What the composition in torch of few classes would broadcast, convert or differentiate.
    ("reduction", few(reduction="avg")),
    ("beta", few(beta="0.5")),
    ("token_weight", few(token_weight=torch.ones(6, 1))),
    ("token_weight", few(token_weight=torch.ones(6, requires_grad=True))),
    ("token_weight", few(token_weight=[1.0] * 6)),
    ("teacher_logits", few(IDS)),
    ("ids", few(ids=[[1, 2, 3]] * 6)),
    *((name, [1.0]) for name in ("teacher_input", "teacher_weight")),
]


def test_a_temperature_on_the_cpu_is_checked(device):
    with pytest.raises(REFUSED, match="^teacher_temperature: expected"):
        flce.linear_divergence(**good(device), teacher_temperature=torch.tensor(-2.0))


@pytest.mark.parametrize(("name", "change"), BAD)
def test_refusals_name_the_argument(device, name, change):
    change = change if isinstance(change, dict) else {name: change}
    refused(device, change, f"^{name}: expected")


@pytest.mark.parametrize(
    ("name", "value"),
    [("divergence", None), ("divergence", "tvd"), ("beta", torch.tensor(0.3)), ("beta", "0.5"),
     ("teacher_softcap", 0.0), ("teacher_temperature", "2")],
)  # fmt: skip
def test_what_the_operators_schema_would_take_or_word_is_refused_before_it(device, name, value):
    """The operator is called where a call is traced or transformed."""
    options = good(device) | {name: value}

    def loss(x):
        return flce.linear_divergence(**{**options, "input": x})

    with pytest.raises(REFUSED, match=f"^{name}: expected"):
        torch.func.grad(loss)(options["input"].detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 2.0, "hard_weight": 0.5}, "hard_weight: expected 0 with a temperature"),
        ({"target": None, "hard_weight": 0.5}, "target: expected classes with hard_weight"),
        ({"teacher_weight": None}, "teacher_input: expected teacher_input and teacher_weight"),
        ({"z_loss": 1.0}, "unexpected keyword argument 'z_loss'"),
        ({**few(), "target": IDS[:, 0]}, "teacher_logits: expected no target"),
        ({"teacher_bias": [1.0]}, "teacher_bias: expected a tensor, got list"),
    ],
)
def test_refusals_say_what_is_expected(device, change, message):
    refused(device, change, re.escape(message))


def test_all_rows_count_without_a_target(device):
    named = {name: value for name, value in good(device).items() if name != "target"}
    expected = flce.linear_divergence(**named)
    assert flce.linear_divergence(**named, ignore_index=0) == expected


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
    dtype = torch.int64 if name == "target" else torch.float64
    for other in ("meta", "cpu") if device == "cuda" else ("meta",):
        given = {**good(device), **(LOGITS if name == "teacher_logits" else {})}
        given[name] = torch.zeros(OF_TEACHER[name], dtype=dtype, device=other)
        with pytest.raises(REFUSED, match=rf"^{name}: expected the device of input, {device}"):
            flce.linear_divergence(**given)


def test_a_teacher_of_another_dtype_is_refused(device):
    given = good(device)
    narrow = {name: given[name].float() for name in ("teacher_input", "teacher_weight")}
    refused(device, narrow, "teacher_input: expected the dtype of the student's")
