"""gradient="sampled", all but the numbers: seeds, Modules, torch.compile, fakes, CUDA graphs, the
plan."""

import math

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

import flce
from harness import cases, raw
from harness.gpu import captured
from harness.raw import described
from harness.sampled_case import HIDDEN, SAMPLED, TOKENS, VOCAB, make, sampled

# ---- seeds ----


def test_equal_seeds_give_equal_bits(device):
    case = make(device)

    def run(seed):
        return cases.outcome(flce.linear_cross_entropy, case, **sampled(seed))

    first, other = run(5), run(6)
    assert cases.same_bits(run(5), first)
    assert torch.equal(other["loss"], first["loss"])
    assert not any(torch.equal(other[name], first[name]) for name in cases.GRADIENTS)
    for shape in ((), (1,), (1, 1)):
        seed = torch.full(shape, 5, device=device)
        assert cases.same_bits(run(seed), first)


def test_without_a_seed_torchs_generator_draws(device):
    case = make(device)

    def run(seed=None):
        return cases.outcome(flce.linear_cross_entropy, case, **sampled(seed))

    torch.manual_seed(1)
    first, second = run(), run()
    assert not torch.equal(first["input"], second["input"])
    torch.manual_seed(1)
    assert cases.same_bits(run(), first) and cases.same_bits(run(), second)
    torch.manual_seed(1)
    assert cases.same_bits(run(torch.randint(2**63 - 1, (), device=device)), first)


def test_nothing_is_drawn_with_exact_gradients_or_a_seed(device):
    case = make(device)
    place = torch.cuda if device == "cuda" else torch.random
    before = place.get_rng_state()
    cases.outcome(flce.linear_cross_entropy, case)
    cases.outcome(flce.linear_cross_entropy, case, **sampled(3))
    assert torch.equal(place.get_rng_state(), before)


def test_modules_operators_and_logprobs(device):
    case = make(device)
    x, w, b = case.input.requires_grad_(), case.linear_weight, case.options["linear_bias"]
    seed = torch.tensor(9, device=device)

    def gradient(loss):
        return torch.autograd.grad(loss.sum(), x)[0]

    given = {"linear_bias": b, **sampled(9, 2**-3)}
    expected = gradient(flce.linear_cross_entropy(x, w, case.target, **given))
    operator = torch.ops.flce.linear_cross_entropy
    given["gradient_seed"] = seed
    assert torch.equal(gradient(operator(x, w, case.target, **given)), expected)
    held = {"device": device, "gradient": "sampled", "gradient_eps": 2**-3}
    head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, **held)
    head.load_state_dict({"weight": w, "bias": b})
    assert torch.equal(gradient(head(x, case.target, gradient_seed=9)), expected)
    assert "gradient='sampled', gradient_eps=0.125" in repr(head)
    made, again = (flce.linear_logprobs(x, w, case.target, **given) for _ in range(2))
    exact = flce.linear_logprobs(x, w, case.target, linear_bias=b)
    torch.testing.assert_close(made, exact, rtol=1e-6, atol=1e-6)
    given.update(reduction="none", return_entropy=True)
    rows, other = (flce.linear_cross_entropy(x, w, case.target, **given) for _ in range(2))
    assert torch.equal(made[0], -rows.loss)
    assert torch.equal(gradient(made[0]), -gradient(rows.loss))
    expected = -gradient(other.loss + 0.1 * other.entropy)
    assert torch.equal(gradient(again[0] - 0.1 * again[1]), expected)
    chunked = flce.linear_loss(
        x, w, case.target, lambda logprobs, entropy, _: (logprobs - 0.1 * entropy).sum(),
        entropy="differentiable", linear_bias=b, **sampled(9, 2**-3)
    )  # fmt: skip
    assert torch.equal(gradient(chunked), expected)


# ---- torch.compile, fakes, CUDA graphs ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_compile_with_a_seed(device, backend, kind):
    case = make(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    entropy = "differentiable" if kind == "int" else "detached"

    def step(x, w, seed):
        loss = flce.linear_cross_entropy(2 * x, w, case.target, **sampled(seed)) * 3
        made = flce.linear_logprobs(x, w, case.target, entropy=entropy, **sampled(seed))
        return loss + made[0].sum() - 0.3 * made[1].sum()

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in (3, 4, 5, 6):
        given = torch.tensor(seed, device=device) if kind == "tensor" else seed
        made = []
        for function in (step, compiled):
            x, w = case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()
            loss = function(x, w, given)
            made.append((loss, *torch.autograd.grad(loss, (x, w))))
        for ours, expected in zip(*made, strict=True):
            assert cases.relative_error(ours.detach(), expected.detach().double()) <= 1e-6
    assert counter.frame_count <= 2


CLASS_OUTPUTS = {
    "topk": lambda x, w, y: flce.linear_logprobs(x, w, y, return_topk=3, **sampled(3)),
    "classes": lambda x, w, y: flce.linear_cross_entropy(
        x, w, y, classes=y.clamp(min=0).unsqueeze(-1), return_lse=True, **sampled(3)
    ),
}


@pytest.mark.parametrize("name", CLASS_OUTPUTS)
def test_compiled_class_outputs(device, name):
    """They have no gradient with sampled ones: a compiled backward gets zeros for them, from which
    nothing follows; what does follow from another gradient is NaN."""
    case, function = make(device), CLASS_OUTPUTS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)

    def grads_of(call, of_classes):
        leaves = case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()
        made = call(*leaves, case.target)
        total = made[0].sum()
        if of_classes:
            total = total + (made[2].logprobs if name == "topk" else made.class_logits).sum()
        return torch.autograd.grad(total, leaves)

    for ours, expected in zip(grads_of(compiled, False), grads_of(function, False), strict=True):
        assert cases.relative_error(ours, expected.double()) <= 1e-6
    with pytest.raises(ValueError, match='gradient: expected "exact" for a gradient of class_log'):
        grads_of(function, True)
    assert all(grad.isnan().any() for grad in grads_of(compiled, True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_a_seed(device, backend):
    case = make(device)
    x = case.input.requires_grad_()

    def step(x):
        return flce.linear_cross_entropy(x, case.linear_weight, case.target, **SAMPLED)

    compiled = torch.compile(step, fullgraph=True, backend=backend)

    def run():
        return torch.autograd.grad(compiled(x), x)[0]

    run()
    torch.manual_seed(2)
    first, second = run(), run()
    torch.manual_seed(2)
    assert torch.equal(run(), first) and not torch.equal(first, second)


def inner_call(device, eps=2**-6, **options):
    case = make(device)
    x, w, b = case.input, case.linear_weight, case.options["linear_bias"]
    seed = torch.tensor(2, device=device)
    given = {"bias": b, "seed": seed, "gradient": "sampled", "gradient_eps": eps, **options}
    return raw.forward(x, w, case.target, "samples", grads=(True, True, True), **given)


@pytest.mark.parametrize("rows", [None, 30])
@pytest.mark.parametrize("eps", [1.0, 0.9, 0.3, 2**-6, 0.01, 1 / 3000, 2**-12])
def test_fakes_give_what_the_operator_gives(device, eps, rows):
    arguments = inner_call(device, eps, rows=rows)
    if rows is not None:
        arguments[2][rows:] = -100
    made = torch.ops.flce.forward(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        faked = torch.ops.flce.forward(*arguments)
    assert described(faked) == described(made)
    pitch = (2 * (math.floor(1.00390625 / eps) + 3) + 31) // 32 * 32
    assert described(made)[4] == ((rows or TOKENS, pitch), torch.int32)


@pytest.mark.parametrize("place", ["target", "class", "count"])
@pytest.mark.parametrize("grads", [(True, False, False), (False, True, True)])
def test_foreign_lists_are_not_followed(device, grads, place):
    """Lists of another call: nothing beyond the operands is read or written."""
    arguments = inner_call(device)
    made = list(torch.ops.flce.forward(*arguments))
    lists = made[4].clone()
    classes = len(arguments[1])
    row = 2  # of which one number is changed
    lists[row, {"target": 0, "class": 2, "count": 1}[place]] = classes + 10**6
    settings = raw.settings("samples", gradient="sampled", gradient_eps=2**-6, grads=grads)
    passed = raw.backward(arguments, made, torch.ones((), device=device), saved=lists)[:-5]
    if device == "cpu":
        with pytest.raises(ValueError, match=f"^saved: expected .* in row {row}, got "):
            torch.ops.flce.backward(*passed, *settings)
        return
    of_input, of_weight, _ = torch.ops.flce.backward(*passed, *settings)
    if of_input is not None:
        assert of_input[row].isnan().all() and of_input.isnan().any(1).sum() == 1
    elif place != "count":  # the slots of a list are as many as fit
        assert of_weight.isnan().any(1).sum() == 1


def test_a_replayed_cuda_graph_draws_anew(cuda):
    case = make(cuda, torch.bfloat16)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def step():
        loss = flce.linear_cross_entropy(x, w, case.target, **SAMPLED)
        return torch.autograd.grad(loss, (x, w))

    graph, grads = captured(step)

    def replay():
        graph.replay()
        return [grad.clone() for grad in grads]

    torch.manual_seed(4)
    first, second = replay(), replay()
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(4)
    for ours, expected in zip(replay(), first, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=0.0)


# ---- the plan ----


def test_the_plan_estimates_the_time():
    sizes = {"tokens": 4096, "hidden": 512, "device": "cpu", "dtype": torch.float32}

    def time(vocab, **options):
        return flce.plan(vocab=vocab, **sizes, **options).sampled_time

    assert time(32000) == 0.0
    fine, coarse = (time(32000, gradient="sampled", gradient_eps=eps) for eps in (2**-8, 2**-6))
    assert 0.0 < coarse < fine < time(4000, gradient="sampled", gradient_eps=2**-8)


def test_the_gradient_of_the_entropy_is_refused_with_a_softcap(device):
    """A list has E, which includes the softcap's slope, and no logit. The value is there."""
    case = make(device).with_options(softcap=3.0)
    x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()

    def call(entropy=True, **options):
        options = {"softcap": 3.0, **sampled(1), **options}
        return flce.linear_cross_entropy(x, w, case.target, return_entropy=entropy, **options)

    expected = torch.autograd.grad(call("detached").loss, (x, w))
    made = call()
    loss = made.loss - 0.1 * made.entropy.detach().mean()
    grads = torch.autograd.grad(loss, (x, w), retain_graph=True)
    assert all(map(torch.equal, grads, expected))
    message = '^return_entropy: expected no gradient of the entropy with a softcap and gradient="sa'
    for refused in (made.entropy.sum(), made.loss - 0.1 * made.entropy.mean()):
        with pytest.raises(ValueError, match=message):
            torch.autograd.grad(refused, (x, w), retain_graph=True)
    assert call(softcap=None).entropy.requires_grad
    with torch.no_grad():
        assert not call().entropy.requires_grad


@pytest.mark.parametrize("accumulate_into", [None, "grad", "main_grad"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_plan_keeps_samples(device, reduction, accumulate_into):
    sizes = (600, 64, 5000)
    options = {"dtype": torch.bfloat16, "device": device, "reduction": reduction, **SAMPLED}
    options["accumulate_into"] = accumulate_into
    plan = flce.plan(*sizes, **options)
    assert plan.save == "samples" and "save=samples" in plan.text
    assert flce.plan(*sizes, **options, grad_input=False, grad_weight=False).save == "nothing"
    fine = flce.plan(*sizes, **options, gradient_eps=2**-10)
    assert fine.peak_bytes > flce.plan(*sizes, **options).peak_bytes
