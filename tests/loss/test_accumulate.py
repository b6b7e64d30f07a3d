"""accumulate_into: the weight's gradient is added to the caller's .grad or .main_grad."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import flce
from harness import cases, raw

TOKENS, HIDDEN, VOCAB = 60, 16, 72
BUDGET = 17 * VOCAB * 8  # several chunks in every dtype
SAVES = ("logits", "stats")
ATTRIBUTES = ("grad", "main_grad")


def make(device, dtype, seed=3):
    """A case whose weight is a parameter; its ignored rows contain NaN."""
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, device=device, bias=True, seed=seed)
    case = cases.ignore_some(case)
    case.linear_weight = nn.Parameter(case.linear_weight)
    return case


def begin(weight, attribute, dtype=None, scale=0.01):
    wide = torch.promote_types(weight.dtype, torch.float32)
    dtype = dtype or (weight.dtype if attribute == "grad" else wide)
    held = (scale * torch.randn(weight.shape, device=weight.device)).to(dtype)
    setattr(weight, attribute, held)
    return held.double().clone()


def run(case, attribute, *, grad_output=None, **knobs):
    x = case.input.clone().requires_grad_()
    options = dict(case.options)
    bias = options.pop("linear_bias").clone().requires_grad_()
    loss = flce.linear_cross_entropy(
        x,
        case.linear_weight,
        case.target,
        linear_bias=bias,
        accumulate_into=attribute,
        **{"max_memory": BUDGET, **options, **knobs},
    )
    loss.backward(torch.full_like(loss, 0.7) if grad_output is None else grad_output)
    return x.grad, bias.grad


def plain(case, **knobs):
    """Gradients of input, weight and bias of the same call without accumulation."""
    keep, case.linear_weight.grad = case.linear_weight.grad, None
    dx, db = run(case, None, **knobs)
    dw, case.linear_weight.grad = case.linear_weight.grad, keep
    return dx, dw, db


def check(got, before, added, dtype, times=1):
    """got = before + added up to the rounding of `dtype`, that of the sum over chunks."""
    expected = before + times * added.double()
    size = before.abs() + times * added.double().abs()
    # Each chunk's sum is rounded, and so is each sum over chunks, whose terms may cancel.
    error = cases.LOGIT_ROUNDING[dtype] * 8.0 * (size + added.double().abs().max())
    assert ((got.double() - expected).abs() <= error).all(), (got.double() - expected).abs().max()


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0, "label_smoothing": 0.1},
    "padding": {"valid_vocab": VOCAB - 8},
    "probabilities": {},
    "sampled": {"gradient": "sampled", "gradient_seed": 4},
    "sampled rows": {"gradient": "sampled", "gradient_seed": 4, "reduction": "none"},
    "float32 sums": {"accum_dtype": torch.float32},
    "float32 sums, smoothing": {"accum_dtype": torch.float32, "label_smoothing": 0.1},
}


@cases.pairwise(attribute=ATTRIBUTES, save=SAVES, dtype=cases.DTYPES, options=list(OPTIONS))
def test_adds_the_plain_gradient(device, attribute, save, dtype, options):
    knobs = {**OPTIONS[options], "save": "auto" if "sampled" in options else save}
    if dtype == torch.float64 and "sampled" in options:
        pytest.skip("refused")
    if dtype == torch.float64 and "accum_dtype" in knobs:
        knobs["accum_dtype"] = torch.float64
    case = make(device, dtype)
    used = knobs.get("valid_vocab", VOCAB)
    if options == "probabilities":
        case.target = torch.rand(TOKENS, VOCAB, device=device).softmax(-1).to(dtype)
        case.input = case.input.nan_to_num()
        case.options["ignore_index"] = None
    else:
        case.target[case.target >= used] = 0
    knobs["weight"] = 0.5 + torch.rand(VOCAB, device=device)
    dx, dw, db = plain(case, **knobs)
    weight = case.linear_weight
    before = begin(weight, attribute)
    held = getattr(weight, attribute)
    held[used:] = float("nan")  # padding is neither read nor written
    for times in (1, 2):
        got = run(case, attribute, **knobs)
        assert torch.equal(got[0], dx) and torch.equal(got[1], db)
        assert getattr(weight, attribute) is held
        check(held[:used], before[:used], dw[:used], dtype, times)
    assert held[used:].isnan().all()
    assert attribute == "grad" or weight.grad is None


def test_a_float32_main_grad_keeps_what_bfloat16_loses(device):
    case = make(device, torch.bfloat16)
    truth = plain(make(device, torch.bfloat16), save="stats", accum_dtype=torch.float32)[1]
    case.linear_weight.main_grad = torch.zeros_like(case.linear_weight, dtype=torch.float32)
    for _ in range(16):
        run(case, "main_grad", save="stats")
    error = cases.relative_error(case.linear_weight.main_grad / 16.0, truth.double())
    # One rounding per chunk on the CPU, whose GEMMs write bfloat16.
    assert error <= 2.0**-8
    case.linear_weight.main_grad = torch.zeros_like(case.linear_weight)
    run(case, "main_grad", save="stats")  # Megatron's main_grad may have the weight's dtype
    check(case.linear_weight.main_grad, torch.zeros((), device=device), truth, torch.bfloat16)


@pytest.mark.parametrize("save", ["logits", "stats"])
def test_gemms_are_those_of_the_plain_path(device, save):
    """In float32, with an existing .grad into which the GEMMs of all chunks sum."""
    case = make(device, torch.float32)
    begin(case.linear_weight, "grad")
    counts = [
        cases.gemms_of(lambda attribute=attribute: run(case, attribute, save=save))
        for attribute in (None, "grad")
    ]
    assert counts[0] == counts[1] > 0


# ---- autograd ----


def head_of(device, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return flce.LinearCrossEntropyHead(HIDDEN, VOCAB, device=device, dtype=dtype, **options)


@pytest.fixture
def batch(device):
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.float64)
    return x, torch.randint(VOCAB, (TOKENS,), device=device)


def close(value, truth):
    return bool((value - truth).abs().max() <= 1e-12 * (1 + truth.abs().max()))


def retained(head, x, y):
    loss = head(x, y)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(head, x, y):
    """Two halves of a batch and the logits of an ordinary call: three uses of one weight."""
    first, second = (head(part, of) for part, of in zip(x.chunk(2), y.chunk(2), strict=True))
    (first + 2.0 * second + head(x).square().sum()).backward()


def checkpointed(reentrant, head, x, y):
    """The forward that a checkpoint runs again adds nothing."""
    checkpoint(head, x.requires_grad_(), y, use_reentrant=reentrant).backward()


USES = {
    "once": lambda head, x, y: head(x, y).backward(),
    "retained graph": retained,
    "two losses": two_losses,
    "checkpoint": functools.partial(checkpointed, False),
    "reentrant checkpoint": functools.partial(checkpointed, True),
}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("use", USES)
def test_the_sum_is_autograds(device, batch, use, begins):
    head, twin = head_of(device, accumulate_into="grad"), head_of(device)
    if begins:
        begin(head.weight, "grad")
        twin.weight.grad = head.weight.grad.clone()
    for module in (head, twin):
        USES[use](module, *batch)
    assert close(head.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("begins", [False, True])
def test_threads_lose_no_sum(device, begins):
    """Several threads call backward on one weight; without `begins` the first one makes .grad."""
    case = make(device, torch.float64)
    options = {"save": "stats", "max_memory": 8 * VOCAB * 8}  # many chunks, and so many sums
    dw = plain(case, **options)[1]
    if begins:
        case.linear_weight.grad = torch.zeros_like(case.linear_weight)
    start, steps, threads = threading.Barrier(8), 50, 8

    def train(_):
        start.wait()
        for _ in range(steps):
            run(case, "grad", **options)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(train, range(threads)))
    assert cases.relative_error(case.linear_weight.grad, threads * steps * dw) <= 1e-10


def test_frozen_and_without_gradients(device, batch):
    """No attribute is read or written, also where the weight is frozen after the forward."""
    x, y = batch
    head = head_of(device, accumulate_into="grad")
    loss = head(x, y)
    head.weight.requires_grad_(False)
    loss.backward()
    assert head.weight.grad is None
    for attribute in ATTRIBUTES:
        head = head_of(device, accumulate_into=attribute)
        with torch.no_grad():
            head(x, y)
        head.weight.requires_grad_(False)
        x = x.detach().requires_grad_()
        head(x, y).backward()
        assert head.weight.grad is None and x.grad is not None


def test_autograd_grad(device, batch):
    """It cannot return what is added elsewhere; for other inputs it leaves .grad unchanged."""
    x, y = batch[0].requires_grad_(), batch[1]
    head = head_of(device, accumulate_into="grad")
    before = begin(head.weight, "grad")
    loss = head(x, y)
    for allow_unused in (False, True):
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad\(\) cannot return it"):
            torch.autograd.grad(
                loss, (x, head.weight), retain_graph=True, allow_unused=allow_unused
            )
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].shape == x.shape
    loss.backward(inputs=[x], retain_graph=True)
    assert torch.equal(head.weight.grad, before)
    with pytest.raises(RuntimeError, match="double backward"):
        loss.backward(create_graph=True)
    assert torch.equal(head.weight.grad, before)
    loss.backward(inputs=[head.weight])
    assert not torch.equal(head.weight.grad, before)


def test_node_hooks_see_the_sum(device, batch):
    """Hooks on the AccumulateGrad node, as DDP and FSDP have them, run after the addition."""
    head, twin = head_of(device, accumulate_into="grad"), head_of(device)
    node = torch.autograd.graph.get_gradient_edge(head.weight).node
    seen = []
    node.register_hook(lambda *_: seen.append(head.weight.grad.clone()))
    head(*batch).backward()
    twin(*batch).backward()
    assert len(seen) == 1 and close(seen[0], twin.weight.grad)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_autocast(device, attribute):
    """A float32 weight with bfloat16 GEMMs has a float32 gradient."""
    case = make(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        dw = plain(case, save="stats")[1]
        before = begin(case.linear_weight, attribute)
        run(case, attribute, save="stats")
    assert getattr(case.linear_weight, attribute).dtype == torch.float32
    check(getattr(case.linear_weight, attribute), before, dw, torch.bfloat16)


def test_a_view_of_a_flat_buffer(device):
    """As in Megatron: main_grad is a view of one flat buffer, at any offset."""
    case = make(device, torch.bfloat16)
    dw = plain(case, save="stats")[1]
    flat = torch.full((VOCAB * HIDDEN + 6,), 0.25, device=device)
    case.linear_weight.main_grad = flat[3:-3].view(VOCAB, HIDDEN)
    run(case, "main_grad", save="stats")
    before = torch.full((), 0.25, dtype=torch.float64, device=device)
    check(flat[3:-3].view(VOCAB, HIDDEN), before, dw, torch.bfloat16)
    assert (flat[:3] == 0.25).all() and (flat[-3:] == 0.25).all()


def test_megatrons_protocol(device, batch):
    """grad_added_to_main_grad, if declared, becomes True, and hooks run on zeros."""
    head, twin = head_of(device), head_of(device)
    head.weight.main_grad = torch.zeros_like(head.weight)
    head(*batch, accumulate_into="main_grad").backward()
    assert head.weight.grad is None and not hasattr(head.weight, "grad_added_to_main_grad")
    head = head_of(device, accumulate_into="main_grad")
    head.weight.main_grad = torch.zeros_like(head.weight)
    head.weight.grad_added_to_main_grad = False
    seen = []

    def owner(parameter):
        seen.append((parameter.grad_added_to_main_grad, parameter.grad.abs().max().item()))
        parameter.grad = None

    head.weight.register_post_accumulate_grad_hook(owner)
    for _ in range(2):
        head(*batch).backward()
        twin(*batch).backward()
    assert seen == [(True, 0.0)] * 2
    assert head.weight.grad is None
    assert close(head.weight.main_grad, twin.weight.grad)


def test_accumulation_bumps_the_version_counter(device, batch):
    head = head_of(device, accumulate_into="grad")
    head(*batch).backward()
    factor = torch.ones_like(head.weight).requires_grad_()
    product = (factor * head.weight.grad).sum()
    head(*batch).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_streams(cuda):
    """The forward is on another stream than backward's caller, on whose stream .grad is whole."""
    x = torch.randn(TOKENS, HIDDEN, device=cuda, dtype=torch.float64)
    y = torch.randint(VOCAB, (TOKENS,), device=cuda)
    head, twin = head_of(cuda, accumulate_into="grad"), head_of(cuda)
    twin(x, y).backward()
    begin(head.weight, "grad", scale=0.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        loss = head(x, y)
    loss.backward()
    assert close(head.weight.grad, twin.weight.grad)


# ---- Modules, compile ----


def test_compile(device, batch):
    """fullgraph=True refuses the call; otherwise the graph breaks and the call runs eagerly."""
    x, y = batch
    head, twin = head_of(device, accumulate_into="grad"), head_of(device)
    refused = torch.compile(lambda x: head(x, y), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="accumulate_into is not supported under torch.compile"):
        refused(x)
    torch.compile(lambda x: 2.0 * head(2.0 * x, y), backend="eager")(x).backward()
    (2.0 * twin(2.0 * x, y)).backward()
    assert close(head.weight.grad, twin.weight.grad)
    with torch.no_grad():
        evaluate = torch.compile(lambda x: head(x, y), fullgraph=True, backend="eager")
        assert close(evaluate(x), twin(x, y))


# ---- refusals: nothing is written ----


SHAPE = (VOCAB, HIDDEN)
# What a float32 weight's gradient cannot be added to, and a part of the message. torch itself
# refuses a .grad of another shape, dtype or device.
WRONG = {
    "shape": (lambda device: torch.zeros(VOCAB, HIDDEN + 1, device=device), "expected shape"),
    "dtype": (lambda device: torch.zeros(SHAPE, device=device).half(), "expected dtype"),
    "device": (
        lambda device: torch.zeros(SHAPE, device="meta"),
        "expected the device of linear_weight",
    ),
    "layout": (lambda device: torch.zeros(HIDDEN, VOCAB, device=device).T, "expected a contiguous"),
    "sparse": (lambda device: torch.zeros(SHAPE, device=device).to_sparse(), "expected a plain"),
    "grad": (lambda device: torch.zeros(SHAPE, device=device).requires_grad_(), "requires grad"),
    "negated": (lambda device: torch._neg_view(torch.zeros(SHAPE, device=device)), "is_neg"),
}
WRONG_GRADIENTS = [("main_grad", wrong) for wrong in WRONG]
WRONG_GRADIENTS += [("grad", wrong) for wrong in ("layout", "sparse", "grad", "negated")]


@pytest.mark.parametrize("attribute, wrong", WRONG_GRADIENTS)
def test_refuses_what_it_cannot_add_to(device, attribute, wrong, batch):
    head = head_of(device, torch.float32, accumulate_into=attribute)
    x, y = batch[0].float().requires_grad_(), batch[1]
    if attribute == "main_grad":
        head.weight.main_grad = torch.zeros_like(head.weight)
    loss = head(x, y)
    content, message = WRONG[wrong]
    setattr(head.weight, attribute, content(device))
    with pytest.raises(ValueError, match=f"linear_weight.{attribute}: .*{message}"):
        loss.backward()
    assert x.grad is None and head.bias.grad is None


@pytest.mark.parametrize("shift", [0, 4, -4])
def test_refuses_memory_that_the_weight_has_too(device, batch, shift):
    """Overlapping memory, fully or in part."""
    memory = torch.zeros(VOCAB * HIDDEN + 4, device=device)
    starts = memory[max(shift, 0) :], memory[max(-shift, 0) :]
    weight, main_grad = (part[: VOCAB * HIDDEN].view(VOCAB, HIDDEN) for part in starts)
    weight.requires_grad_().main_grad = main_grad.detach()
    with pytest.raises(ValueError, match=r"linear_weight.main_grad: expected memory of its own"):
        flce.linear_cross_entropy(batch[0].float(), weight, batch[1], accumulate_into="main_grad")


def test_the_weight_may_end_where_main_grad_begins(device, batch):
    weight, main_grad = torch.zeros(2, VOCAB, HIDDEN, device=device)
    weight.requires_grad_().main_grad = main_grad
    options = {"accumulate_into": "main_grad"}
    flce.linear_cross_entropy(batch[0].float(), weight, batch[1], **options).backward()
    assert main_grad.any() and not weight.any()


def test_refuses_a_missing_main_grad(device, batch):
    head = head_of(device, accumulate_into="main_grad")
    with pytest.raises(ValueError, match="linear_weight.main_grad: expected a tensor .*NoneType"):
        head(*batch)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_refuses_hooks_that_would_not_run(device, attribute, kind, batch):
    head = head_of(device, accumulate_into=attribute)
    head.weight.main_grad = torch.zeros_like(head.weight)
    loss = head(*batch)
    handle = getattr(head.weight, kind)(lambda *_: None)
    for function in (loss.backward, lambda: head(*batch)):
        with pytest.raises(ValueError, match=f"linear_weight without gradient hooks.*{kind}"):
            function()
    assert head.weight.grad is None and not head.weight.main_grad.any()
    handle.remove()
    head(*batch).backward()


def test_refuses_weights_that_are_no_plain_leaves(device, batch):
    x, y = batch
    leaf = torch.randn(VOCAB, HIDDEN, device=device, dtype=torch.float64, requires_grad=True)
    across = leaf.detach().T.contiguous().T.requires_grad_()
    wrapped = TwoTensor(leaf.detach(), leaf.detach())
    for weight, target, message in (
        (2.0 * leaf, y, "expected a leaf as linear_weight"),
        (across, y, "expected a contiguous linear_weight"),
        (wrapped.requires_grad_(), y, "expected a plain tensor as linear_weight, got TwoTensor"),
    ):
        with pytest.raises(ValueError, match=f"accumulate_into: {message}"):
            flce.linear_cross_entropy(x, weight, target, accumulate_into="grad")


def test_refuses_transforms(device, batch):
    head = head_of(device, accumulate_into="grad")
    with pytest.raises(RuntimeError, match="flce: .* not supported in torch.func transforms"):
        torch.func.vmap(lambda x: head(x, batch[1]))(torch.stack([batch[0], batch[0]]))


def test_the_operator_checks_what_it_is_given(device):
    x, w, target = (t.detach() for t in cases.leaves(device, TOKENS, dtype=torch.float32))
    arguments = raw.forward(x, w, target, "stats")
    made = torch.ops.flce.forward(*arguments)
    passed = raw.backward(arguments, made, torch.ones((), device=device))
    for wrong, message in (
        (torch.zeros(w.shape[0], 5, device=device), "expected shape"),
        (torch.zeros_like(w).T.contiguous().T, "expected a contiguous"),
        (torch.zeros_like(w, dtype=torch.bfloat16), "expected dtype float32, got bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"grad_weight_into: {message}"):
            torch.ops.flce.backward_into(wrong, *passed)
    frozen = raw.forward(x, w, target, "stats", grads=(True, False, False))
    passed = raw.backward(frozen, made, torch.ones((), device=device))
    with pytest.raises(ValueError, match="grad_weight: expected True with grad_weight_into"):
        torch.ops.flce.backward_into(torch.zeros_like(w), *passed)
    with pytest.raises(RuntimeError, match="grad_weight_into: .* does not require grad"):
        torch.ops.flce.backward_into(torch.zeros_like(w).requires_grad_(), *passed)
