"""The inner operators, called directly: outputs, checks, what they change in place."""

import cases
import pytest
import raw
import torch

import flce
from flce.packing import replaced

TOKENS, HIDDEN, VOCAB = 24, 16, 40


def leaves(device, scale=1.0):
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device=device, seed=5)
    x, w = ((t * scale).clone().requires_grad_() for t in (case.input, case.linear_weight))
    return x, w, case.target


@pytest.mark.parametrize("save", cases.SAVES)
def test_saved_tensor_hooks_keep_their_memory(device, save):
    """A buffer that a hook uses again: scaling it in place would change .grad."""
    buffers = {}

    def pack(tensor):
        key = (tuple(tensor.shape), tensor.dtype)
        buffers.setdefault(key, torch.empty_like(tensor)).copy_(tensor)
        return key

    def step(scale, factor):
        x, w, target = leaves(device, scale)
        with torch.autograd.graph.saved_tensors_hooks(pack, buffers.__getitem__):
            loss = flce.linear_cross_entropy(x, w, target, save=save)
        (loss * factor).backward()
        return w.grad

    first = step(1.0, 2.0)
    kept = first.clone()
    step(2.0, 3.0)
    assert torch.equal(first, kept)


def test_raw_forward_keeps_the_outputs_it_gave(device):
    x, w, target = leaves(device)
    *_, grad_weight, _, _, _ = made = torch.ops.flce.forward(*raw.forward(x, w, target, "grads"))
    before = grad_weight.clone()
    (made[0] * 5.0).backward()
    assert torch.equal(grad_weight, before)
    assert torch.equal(w.grad, 5.0 * before)


OUTPUTS = "loss stats scalars predictions saved grad_input grad_weight grad_bias".split()
OUTPUTS += ["class_logits", "top_classes"]
KEPT = {"logits": {"stats", "scalars", "saved"}, "stats": {"stats", "scalars"}}
MADE = {"grads": {"grad_input", "grad_weight"}}


@pytest.mark.parametrize("save", ["nothing", *cases.SAVES])
def test_raw_outputs_that_nobody_wants_are_none(device, save):
    x, w, target = leaves(device)
    grads = (save != "nothing",) * 2 + (False,)
    always = {"loss"} | KEPT.get(save, set()) | MADE.get(save, set())
    for options, wanted in (
        ({}, set()),
        ({"wants_statistics": True}, {"stats", "scalars"}),
        ({"wants_predictions": True}, {"predictions"}),
    ):
        made = torch.ops.flce.forward(*raw.forward(x, w, target, save, grads=grads, **options))
        given = {name for name, tensor in zip(OUTPUTS, made, strict=True) if tensor is not None}
        assert given == always | wanted


@pytest.mark.parametrize("save", ["logits", "stats"])
def test_raw_gradients_that_nobody_wants_are_none(device, save):
    x, w, target = (t.detach() for t in leaves(device))
    grad_output = torch.ones((), device=device)
    for grads in ((True, False, False), (False, True, False)):
        arguments = raw.forward(x, w, target, save, grads=grads)
        passed = raw.backward(arguments, torch.ops.flce.forward(*arguments), grad_output)
        made = torch.ops.flce.backward(*passed)
        assert tuple(grad is not None for grad in made) == grads
        if grads[1]:
            assert torch.ops.flce.backward_into(torch.zeros_like(w), *passed) == (None, None)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_keep_what_scales_them(device, reduction):
    """On CUDA in a unit that only the scalars contain; the CPU saves float32."""
    x, w, target = leaves(device)
    options = {"reduction": reduction}
    made = torch.ops.flce.forward(*raw.forward(x.half(), w.half(), target, "grads", **options))
    assert (made[2] is not None) == (device == "cuda")
    (made[0] * 5.0).backward()
    expected = torch.nn.functional.cross_entropy(x.half().float() @ w.half().float().T, target)
    expected = expected * (1.0 if reduction == "mean" else TOKENS)
    truth = torch.autograd.grad(expected * 5.0, w)[0]
    assert cases.relative_error(w.grad, truth.double()) <= 5e-3


def test_scale_bumps_the_version_counter(device):
    leaf = torch.ones(3, device=device, requires_grad=True)
    doubled = leaf * 2.0
    squares = (doubled * doubled).sum()
    factor = torch.tensor(5.0, device=device)
    torch.ops.flce.scale_(None, doubled.detach(), None, factor, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with pytest.raises(RuntimeError, match="grad_input: expected a tensor that does not require"):
        torch.ops.flce.scale_(leaf, None, None, factor, None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1), (0, 2, None), (None,) * 3])
def test_scale_takes_several_of_any_types(device, order):
    """On CUDA consecutive tensors of one dtype share a kernel, including unaligned ones."""
    wide, unaligned = torch.randn(70001, device=device), torch.randn(10, device=device)[1:]
    narrow = torch.randn(3, 7, device=device).to(torch.bfloat16)
    grads = [None if at is None else (wide, unaligned, narrow)[at] for at in order]
    factor = torch.tensor(-0.5, device=device)
    expected = [None if grad is None else grad * factor for grad in grads]
    torch.ops.flce.scale_(*grads, factor, None)
    for grad, scaled in zip(grads, expected, strict=True):
        assert grad is scaled is None or torch.equal(grad, scaled)


@pytest.mark.parametrize("argument", ["grad_output", "grad_stats", "stats", "scalars", "saved"])
@pytest.mark.parametrize("prefix", ["", "cross_entropy_"])
def test_raw_backward_checks_what_it_is_given(device, argument, prefix):
    if prefix and argument in ("grad_stats", "saved"):
        pytest.skip("not of cross_entropy")
    x, w, target = (t.detach() for t in leaves(device))
    forward, backward = (getattr(torch.ops.flce, prefix + end) for end in ("forward", "backward"))
    given = (x @ w.T, target) if prefix else (x, w, target, "logits")
    arguments = getattr(raw, prefix + "forward")(*given)
    made = forward(*arguments)
    grads = {"grad_output": torch.ones((), device=device), "grad_stats": torch.zeros_like(made[1])}
    saved = {"stats": made[1], "scalars": made[2], "saved": None if prefix else made[4]}
    right = {**grads, **saved}[argument]
    wrongs = [(right.double(), TypeError), (right[..., None], ValueError)]
    for wrong, error in wrongs + [(None, ValueError)] * (argument == "saved"):
        changed = {"grad_output": grads["grad_output"]} if prefix else grads
        passed = getattr(raw, prefix + "backward")(arguments, made, **{**changed, argument: wrong})
        with pytest.raises(error, match=f"{argument}: expected"):
            backward(*passed)


def of_classes(ids):
    """Changed arguments of a backward with the classes `ids`, and the refusal of each."""
    rows, count = ids.shape
    grad = torch.rand(rows, count, device=ids.device)
    shape = rf"grad_classes: expected shape \({rows}, {count}\)"
    return [
        ({"grad_classes": grad, "classes": None}, "classes: expected those of the forward, got"),
        ({"grad_classes": grad[:-1]}, shape),
        ({"grad_classes": grad[:, 0].contiguous()}, shape),
        ({"grad_classes": grad[:, :-1].contiguous()}, shape),
        ({"grad_classes": grad.double()}, "grad_classes: expected dtype torch.float32, got"),
        ({"grad_classes": grad.t().contiguous().t()}, "grad_classes: expected a contiguous"),
        (
            {"grad_classes": grad, "class_logits": None},
            "class_logits: expected those of the forward",
        ),
        ({"class_logits": grad[:-1]}, rf"class_logits: expected shape \({rows}, {count}\)"),
        ({"class_logits": grad.double()}, "class_logits: expected dtype torch.float32, got"),
        ({"classes": ids[:-1]}, rf"classes: expected shape \({rows}, {count}\), .*, got \("),
        ({"classes": ids[:, :0]}, r"classes: expected shape \(24, 1\), .*, got \(24, 0\)"),
        ({"classes": ids[0, 0].clone()}, r"classes: expected shape .*, got \(\)"),
        ({"classes": ids.float()}, "classes: expected dtype torch.int64, got torch.float32"),
    ]


@pytest.mark.parametrize("save", ["logits", "stats"])
@pytest.mark.parametrize("topk", [0, 3])
def test_raw_backward_checks_the_classes(device, save, topk):
    x, w, target = (t.detach() for t in leaves(device))
    given = torch.randint(VOCAB, (TOKENS, 4), generator=cases.generator(1)).to(device)
    options = {"reduction": "none", "topk": topk, "classes": None if topk else given}
    arguments = raw.forward(x, w, target, save, **options)
    made = torch.ops.flce.forward(*arguments)
    ids = made[-1] if topk else given
    right = {"classes": ids, "grad_classes": torch.ones_like(ids, dtype=torch.float32)}
    grad_output = torch.zeros(TOKENS, device=device)
    for wrong, match in of_classes(ids):
        passed = raw.backward(arguments, made, grad_output, **{**right, **wrong})
        for op, into in (("backward", ()), ("backward_into", (torch.zeros_like(w),))):
            with pytest.raises((TypeError, ValueError), match=match):
                getattr(torch.ops.flce, op)(*into, *passed)
    ours = torch.ops.flce.backward(*raw.backward(arguments, made, grad_output, **right))[:2]
    wide = [t.double().requires_grad_() for t in (x, w)]
    sums = (wide[0] @ wide[1].T).gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0).sum()
    for grad, truth in zip(ours, torch.autograd.grad(sums, wide), strict=True):
        assert cases.relative_error(grad, truth) <= 1e-6


def test_raw_forward_names_what_its_backward_lacks(device):
    x, w, target = leaves(device)
    made = torch.ops.flce.forward(*raw.forward(x, w, target, "grads", grads=(True, False, False)))
    with pytest.raises(RuntimeError, match="grad_weight: expected True in the options"):
        made[0].backward()
    made = torch.ops.flce.forward(*raw.forward(x, w, target, "nothing", grads=(False,) * 3))
    with pytest.raises(ValueError, match='save: expected .* in a backward, got "nothing"'):
        made[0].backward()


def test_raw_forward_computes_every_row_of_probabilities(device):
    x, w, _ = (t.detach() for t in leaves(device))
    t = torch.rand(TOKENS, VOCAB, device=device)
    with pytest.raises(ValueError, match=f"rows: expected {TOKENS} with probabilities, .*got 3"):
        torch.ops.flce.forward(*raw.forward(x, w, t, "grads", rows=3))


def divergence_of(device, save="grads", divergence=1, **changed):
    """A raw flce::forward with a teacher; `changed`: its options."""
    x, w, target = (t.detach() for t in leaves(device))
    arguments = raw.forward(x, w, target, save, divergence=divergence, **changed)
    return torch.ops.flce.forward(*arguments, torch.randn(TOKENS, VOCAB, device=device))


OF_LOSSES = ("wants_statistics", "wants_predictions", "wants_entropy", "entropy_gradient")
OF_LOSSES += ("class_gradient",)


def test_raw_divergence_refuses_options_of_losses(device):
    """Whose outputs it has not."""
    options = [dict.fromkeys([name], True) for name in OF_LOSSES]
    for given in [*options, {"topk": 2}, {"label_smoothing": 0.1}, {"z_loss": 0.1}]:
        with pytest.raises(ValueError, match=f"{next(iter(given))}: expected .* a divergence, got"):
            divergence_of(device, **given)
    with pytest.raises(ValueError, match="save: expected .* with a divergence, got .samples."):
        divergence_of(device, save="samples", gradient_eps=0.1)
    for kind in (-1, 4):
        with pytest.raises(ValueError, match="divergence: expected 0 to 3, got"):
            divergence_of(device, divergence=kind)


def test_raw_forward_has_a_divergence_and_a_teacher_or_neither(device):
    x, w, target = (t.detach() for t in leaves(device))
    arguments, teacher = raw.forward(x, w, target, "grads"), [None] * 4
    for place, name in enumerate(("input", "weight", "bias", "temperature")):
        given = [*teacher[:place], x, *teacher[place + 1 :]]
        with pytest.raises(ValueError, match=f"teacher_{name}: expected None without"):
            torch.ops.flce.forward(*arguments, *given)
    arguments = raw.forward(x, w, target, "grads", divergence=1)
    with pytest.raises(ValueError, match="teacher_input: expected a tensor with a divergence"):
        torch.ops.flce.forward(*arguments)
    made = torch.ops.flce.forward(*raw.forward(x, w, target, "stats"))
    arguments = raw.backward(raw.forward(x, w, target, "stats", divergence=1), made, torch.ones(()))
    with pytest.raises(ValueError, match="divergence: expected 0 in an operator without"):
        torch.ops.flce.backward(*arguments)


def sampled_backward(device, damage=None, **changed):
    """The gradients of a raw backward of sampled gradients, whose lists `damage` has changed."""
    x, w, target = (t.detach() for t in leaves(device))
    target[1] = -100
    options = {"gradient": "sampled", "gradient_eps": 2**-4}
    arguments = raw.forward(x, w, target, "auto", seed=torch.tensor(3, device=device), **options)
    made = torch.ops.flce.forward(*arguments)
    if damage is not None:
        damage(made[4])
    integers = replaced(arguments[-3], **{"save": 4, **changed})
    arguments = (*arguments[:-3], integers, *arguments[-2:])
    factor = torch.ones((), device=device)
    return torch.ops.flce.backward(*raw.backward(arguments, made, factor))


@pytest.mark.parametrize(("place", "value"), [
    (0, -(2**31)), (0, -1), (0, VOCAB), (1, -1), (1, 2**20), (2, -1), (2, VOCAB),
])  # fmt: skip
def test_raw_backward_refuses_lists_that_no_forward_makes(place, value):
    def damage(lists):
        lists[0, place] = value

    with pytest.raises(ValueError, match="saved: expected .* in row 0, got"):
        sampled_backward("cpu", damage)


def test_raw_backward_takes_the_strategy_that_it_is_given(device):
    assert all(grad is not None for grad in sampled_backward(device)[:2])
    for save in (0, 2):
        with pytest.raises(ValueError, match="save: expected"):
            sampled_backward(device, save=save)


def test_raw_calls_check_targets_and_missing_tensors():
    x, w, target = (t.detach() for t in leaves("cpu"))
    arguments = raw.forward(x, w, target, "stats")
    made = torch.ops.flce.forward(*arguments)
    factor = torch.ones(())
    passed = list(raw.backward(arguments, made, factor))
    passed[5] = torch.full_like(target, VOCAB)
    with pytest.raises(IndexError, match=rf"target\[0\] is {VOCAB}: expected"):
        torch.ops.flce.backward(*passed)
    for ops, given in (
        (torch.ops.flce.forward, arguments[:3]),
        (torch.ops.flce.cross_entropy_forward, (x @ w.T, target)),
    ):
        names = [argument.name for argument in ops.default._schema.arguments]
        complete = arguments if ops is torch.ops.flce.forward else raw.cross_entropy_forward(*given)
        for at in range(len(given)):
            missing = [*complete[:at], None, *complete[at + 1 :]]
            refused = pytest.raises(Exception, match=f"{names[at]}: expected a tensor, got None")
            with refused:  # by Python, or in inference mode by the operator of C++
                ops(*missing)
            with torch.inference_mode(), refused:
                ops(*missing)


def test_raw_plan_refuses_sizes_beyond_int64():
    lists = raw.settings("auto")
    sizes = {"on_cpu": 0, "tokens": 8, "rows": 8, "hidden": 8, "weight_rows": 8}
    for changed in (
        {"teacher_hidden": -5}, {"teacher_hidden": 2**62}, {"tokens": 2**40, "weight_rows": 2**40},
        {"classes": 2**62}, {"hidden": -1}, {"tokens": -1},
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="expected"):
            torch.ops.flce.plan("h100", 0, None, *lists[2:4], **{**sizes, **changed})
    for name, value in {"ranks": 2**40, "rank": -1, "vocab": -2, "topk": 2**62}.items():
        integers = replaced(lists[2], **{"ranks": 2, name: value})
        with pytest.raises(RuntimeError, match=f"{name}: expected"):
            torch.ops.flce.plan("h100", 0, None, integers, lists[3], **sizes)
