"""Behaviour with torch.library and torch.compile."""

import cases
import pytest
import raw
import torch
import torch._dynamo.testing
from small_case import BUDGET, HIDDEN, VOCAB, call, leaves_of, make
from torch.fx.experimental.proxy_tensor import make_fx

import flce
from flce.packing import value_of

# ---- torch.library ----


def sample_tensors(device):
    case = make(device)
    return (*leaves_of(case), case.target)


def opcheck_linear_cross_entropy(device):
    """Arguments of torch.ops.flce.linear_cross_entropy, one set for each strategy."""
    x, w, b, target = sample_tensors(device)
    for save in cases.SAVES:
        yield (x, w, target), {"linear_bias": b, "save": save, "max_memory": BUDGET}
    yield (x, w, target), {"reduction": "none", "label_smoothing": 0.1}
    yield (x, w, target), {"gradient": "sampled", "gradient_seed": torch.tensor(2, device=device)}


def opcheck_linear_cross_entropy_outputs(device):
    x, w, b, target = sample_tensors(device)
    wanted = {"return_lse": True, "return_entropy": True, "return_accuracy": True}
    for save in ("logits", "stats"):
        yield (x, w, target), {"linear_bias": b, "save": save, "z_loss": 0.1, **wanted}
    rows = dict.fromkeys(("token_weight", "token_temperature"), torch.ones(len(x), device=device))
    rows["num_items"] = torch.tensor(11.0, device=device)
    yield (x, w, target % 50), {**rows, "valid_vocab": 50, "save": "stats", **wanted}
    drawn = {"gradient": "sampled", "gradient_seed": torch.tensor(2, device=device)}
    yield (x, w, target), {**drawn, "return_lse": True}
    wanted = {"return_predictions": True, "return_z_loss": True}
    yield (x, w, target), {"softcap": 3.0, "shift": 0, "reduction": "none", **wanted}


def opcheck_forward(device):
    x, w, b, target = sample_tensors(device)
    every = (True, True, True)
    options = {"bias": b, "label_smoothing": 0.1, "max_memory": BUDGET, "grads": every}
    for save in cases.SAVES:
        yield raw.forward(x, w, target, save, **options), {}
    yield raw.forward(x, w, target, "grads", wants_statistics=True, **options), {}
    yield sampled_forward(x, w, b, target), {}
    # Softcap with smoothing saves the logits themselves.
    yield raw.forward(x, w, target, "logits", **{**options, "softcap": 5.0}), {}
    one = {"reduction": "none", "label_smoothing": 0.1, "grads": (True, False, False)}
    yield raw.forward(x, w, target, "logits", **one), {}
    # No E: the logits, if they were saved, would have another dtype than the operands.
    soft = torch.softmax(torch.randn(len(target), len(w), device=device), -1).to(torch.bfloat16)
    narrow = (tensor.detach().to(torch.bfloat16) for tensor in (x, w))
    yield raw.forward(*narrow, soft, "stats", grads=(False,) * 3), {}
    x, w, b = (tensor.detach() for tensor in (x, w, b))
    outputs = {"wants_entropy": True, "wants_predictions": True, "grads": (False, False, False)}
    yield raw.forward(x, w, target, "nothing", grads=(False, False, False)), {}
    yield raw.forward(x, w, target, "nothing", weight=torch.ones_like(b), **outputs), {}
    ids = torch.zeros(*target.shape, 2, dtype=torch.int64, device=target.device)
    yield raw.forward(x, w, target, "nothing", classes=ids, grads=(False, False, False)), {}
    yield raw.forward(x, w, target, "nothing", topk=3, grads=(False, False, False)), {}
    teacher = x, w / 2, None, None
    for save, grads in (("grads", every), ("nothing", (False,) * 3)):
        options = {"bias": b, "max_memory": BUDGET, "grads": grads, "divergence": 1}
        yield (*raw.forward(x, w, target, save, **options), *teacher), {}


def sampled_forward(x, w, b, target):
    options = {"gradient": "sampled", "gradient_eps": 2**-6, "reduction": "none", "bias": b}
    seed, every = torch.tensor(2, device=x.device), (True, True, True)
    options |= {"seed": seed, "wants_statistics": True, "grads": every}
    return raw.forward(x, w, target, "samples", **options)


def opcheck_backward(device):
    x, w, b, target = sample_tensors(device)
    arguments = sampled_forward(x, w, b, target)
    made = torch.ops.flce.forward(*arguments)
    grads = torch.rand_like(made[0]), torch.rand_like(made[1])
    yield raw.backward(arguments, made, *grads), {}
    for save in ("logits", "stats"):
        for grads in ((True, True, True), (True, False, False)):
            options = {"label_smoothing": 0.1, "max_memory": BUDGET, "grads": grads}
            arguments = raw.forward(x, w, target, save, bias=b, wants_entropy=True, **options)
            made = torch.ops.flce.forward(*arguments)
            grad_stats = torch.rand_like(made[1])
            grad_output = torch.tensor(0.3, device=device)
            yield raw.backward(arguments, made, grad_output, grad_stats), {}
            ids = torch.zeros(*target.shape, 2, dtype=torch.int64, device=device)
            upstream = {"grad_classes": torch.rand(ids.shape, device=device)}
            classes = {"classes": ids, "class_logits": torch.rand(ids.shape, device=device)}
            yield raw.backward(arguments, made, grad_output, **classes, **upstream), {}


def opcheck_backward_into(device):
    for args, kwargs in opcheck_backward(device):
        linear_weight, integers = args[4], args[-3]
        if value_of(integers, "grad_weight"):
            yield (torch.randn_like(linear_weight).detach(), *args), kwargs


def opcheck_scale_(device):
    factor = torch.tensor(0.3, device=device)
    yield (torch.randn(9, 7, device=device), None, None, factor, None), {}
    both = (torch.randn(size, 7, device=device) for size in (9, 5))
    yield (*both, None, factor, None), {}


def opcheck_scaled(device):
    grad = torch.randn(9, 7, device=device, requires_grad=True)
    yield (grad, torch.tensor(0.3, device=device), None, torch.float32), {}


def opcheck_cross_entropy(device):
    x, w, b, target = sample_tensors(device)
    logits = (x @ w.T + b).detach().requires_grad_()
    yield (logits, target), {}
    yield (logits, target), {"reduction": "none", "label_smoothing": 0.1}


def opcheck_cross_entropy_outputs(device):
    for args, kwargs in opcheck_cross_entropy(device):
        yield args, {**kwargs, "return_lse": True, "return_entropy": True, "return_accuracy": True}


def test_raw_logits_without_a_class_are_refused(device):
    """Also while tracing."""
    for where in (device, "meta"):
        logits = torch.randn(3, 0, device=where)
        with pytest.raises(ValueError, match=r"logits: expected at least one class, got shape \(3"):
            torch.ops.flce.cross_entropy_forward(*raw.cross_entropy_forward(logits, logits))


def opcheck_cross_entropy_forward(device):
    (logits, target), _ = next(opcheck_cross_entropy(device))
    yield raw.cross_entropy_forward(logits, target, label_smoothing=0.1), {}
    weight = torch.ones(VOCAB, device=device)
    yield raw.cross_entropy_forward(logits, target, weight=weight, reduction="none"), {}


def opcheck_cross_entropy_backward(device):
    (logits, target), _ = next(opcheck_cross_entropy(device))
    arguments = raw.cross_entropy_forward(logits, target, label_smoothing=0.1)
    made = torch.ops.flce.cross_entropy_forward(*arguments)
    grad_output = torch.tensor(0.3, device=device)
    yield raw.cross_entropy_backward(arguments, made, grad_output), {}


def opcheck_linear_divergence(device):
    """A teacher's head and, for rows and in the backward, its logits."""
    x, w, b, target = sample_tensors(device)
    head = {"teacher_weight": w.detach() / 2, "teacher_bias": b.detach(), "teacher_softcap": 5.0}
    head |= {"divergence": "jsd", "beta": 0.3, "hard_weight": 0.2}
    yield (x, w, target, x.detach()), {"linear_bias": b, "max_memory": BUDGET, **head}
    logits = torch.randn(len(x), len(w), device=device)
    temperature = {"divergence": "reverse_kl", "teacher_temperature": 2.0}
    yield (x, w, target, logits), {"reduction": "none", **temperature}
    yield (x, w, target, logits), {"save": "stats", **temperature}
    of_rows = {"token_teacher_temperature": torch.rand(len(x), device=device) + 0.5}
    yield (x, w, target, logits), of_rows


# One for every operator that takes tensors; test_every_op_has_a_sample checks that.
OPCHECK_SAMPLES = {
    name.removeprefix("opcheck_"): function
    for name, function in list(globals().items())
    if name.startswith("opcheck_")
}
TRACED = ("forward", "backward", "scaled", "cross_entropy_forward", "cross_entropy_backward")
OPCHECK_SAMPLES |= {f"graph_{name}": OPCHECK_SAMPLES[name] for name in TRACED}
# Operators without tensors: opcheck does not apply, they have no fake and no gradient.
WITHOUT_TENSORS = "describe plan option_names cpu_variant cuda_describe gemm_count"
WITHOUT_TENSORS += " gpu_names find_gpu wide_sum_chunks"
# Called by the operators themselves, by all ranks of a group: test_vocab_*.py.
WITHOUT_TENSORS += " comm_all_gather comm_all_to_all comm_wait comm_send_buffer comm_abandon"
WITHOUT_TENSORS += " comm_error"
# These refuse to be differentiated: their values are checked on detached tensors.
REFUSE_GRADIENTS = {"backward", "backward_into", "cross_entropy_backward", "scaled"}
REFUSE_GRADIENTS |= {"graph_backward", "graph_cross_entropy_backward", "graph_scaled"}


def registered_ops():
    prefix = "flce::"
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    return {name.removeprefix(prefix).split(".")[0] for name in names}


def test_every_op_has_a_sample():
    assert registered_ops() == {*WITHOUT_TENSORS.split(), *OPCHECK_SAMPLES}


@pytest.mark.parametrize("name", sorted(OPCHECK_SAMPLES))
def test_opcheck(device, name):
    op = getattr(torch.ops.flce, name).default
    samples = list(OPCHECK_SAMPLES[name](device))
    assert samples
    for args, kwargs in samples:
        recorded = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if recorded:
            torch.library.opcheck(op, args, kwargs, test_utils="test_autograd_registration")
        if name in REFUSE_GRADIENTS:
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
        torch.library.opcheck(op, args, kwargs, test_utils=tests)


# ---- torch.compile ----


@pytest.mark.parametrize("save", cases.SAVES)
def test_a_traced_graph_differentiates(device, save):
    """Operators in a traced graph have autograd formulas: no gradient lacks a part."""
    x, w, _, target = sample_tensors(device)

    def step(x, w, target):
        # Without a bound the CPU counts the valid rows.
        options = {"save": save, "valid_bound": len(target)}
        return flce.linear_cross_entropy(x, w, target, **options) + x.square().mean()

    step(x, w, target)
    traced = make_fx(step, tracing_mode="symbolic")(x, w, target)
    made = torch.autograd.grad(traced(x, w, target), (x, w))
    expected = torch.autograd.grad(step(x, w, target), (x, w))
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(device, backend):
    """Every strategy, in one graph: a compiler's start takes longer than all of them."""
    case = make(device)

    def step(x, w, b):
        leaves, budget = (x * 2, w, b), {"max_memory": BUDGET}
        return sum(call(case, leaves, save=save, **budget) for save in cases.SAVES) * 3

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager_leaves, leaves = leaves_of(case), leaves_of(case)
    expected, got = step(*eager_leaves), compiled(*leaves)
    expected.backward()
    got.backward()
    assert torch.allclose(got, expected, rtol=1e-6)
    for ours, truth in zip(leaves, eager_leaves, strict=True):
        assert cases.relative_error(ours.grad, truth.grad.double()) <= 1e-6


@pytest.mark.parametrize("name", ["linear_cross_entropy", "cross_entropy", "linear_logprobs"])
def test_public_functions_do_not_call_locals(name):
    """torch.compile cannot trace it before torch 2.13, and the suite mostly runs with that."""
    assert "locals" not in getattr(flce, name).__code__.co_names


@pytest.mark.parametrize("save", ["auto", *cases.SAVES])
def test_compile_with_a_dynamic_number_of_tokens(device, save):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w, y: flce.linear_cross_entropy(x, w, y, save=save),
        fullgraph=True,
        backend=counter,
    )
    for tokens in (24, 31, 7, 64):
        case = cases.make_case(tokens, HIDDEN, VOCAB, dtype=torch.float32, device=device)
        torch._dynamo.mark_dynamic(case.input, 0)
        torch._dynamo.mark_dynamic(case.target, 0)
        x, w = case.input.requires_grad_(), case.linear_weight.requires_grad_()
        loss = compiled(x, w, case.target)
        grads = torch.autograd.grad(loss, (x, w))
        expected = torch.autograd.grad(flce.linear_cross_entropy(x, w, case.target), (x, w))
        for got, truth in zip(grads, expected, strict=True):
            assert cases.relative_error(got, truth.double()) <= 1e-6
    assert counter.frame_count == 1
