"""What can only be tested on a GPU: sizes above 2^31, streams, graphs, no synchronisation,
device memory."""

import gc
import re
import time

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import flce
from harness import cases
from harness.gpu import captured, cramped

pytestmark = pytest.mark.usefixtures("cuda")

TOKENS, HIDDEN, VOCAB = 512, 128, 5000
BUDGET = 130 * VOCAB * 4  # four chunks
WANTS = ("input", "linear_weight")


def make(dtype=torch.bfloat16, **knobs):
    return cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, device="cuda", std=4.0, **knobs)


def leaves_of(case):
    return case.input.clone().requires_grad_(), case.linear_weight.clone().requires_grad_()


@pytest.mark.parametrize(
    ("save", "budget"),
    [
        ("logits", "1GiB"),
        ("logits", "16GiB"),
        ("grads", "16GiB"),
        ("grads", "1GiB"),
        ("stats", "16GiB"),
    ],
)
def test_more_than_2_to_the_31_logits(save, budget):
    """32768 x 131072: one buffer with 16 GiB, chunks with 1 GiB."""
    case = cases.make_case(
        32768, 64, 131072, dtype=torch.bfloat16, device="cuda", std=4.0, targets="random"
    )
    case.target[-1], case.target[0] = 131071, 0
    truth = cases.chunked_truth(case, 2048)
    results = cases.outcome(flce.linear_cross_entropy, case, save=save, max_memory=budget)
    assert cases.relative_error(results["loss"], truth["loss"].mean()) <= 1e-6
    for name in WANTS:
        assert cases.relative_error(results[name], truth[name]) <= 3e-3, name
        rows = (results[name].double() - truth[name]).norm(dim=-1)
        bad = ~(rows <= 2e-2 * truth[name].norm(dim=-1))
        assert not bad.any(), f"{name}: row {int(bad.nonzero()[0])}"


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_graph_replay_equals_eager(save, dtype):
    knobs = {"save": save, "max_memory": BUDGET}
    first, second = make(dtype, seed=1), make(dtype, seed=2)
    x, w = leaves_of(first)
    y = first.target.clone()
    scale = torch.ones((), device="cuda")

    def step():
        loss = flce.linear_cross_entropy(x, w, y, **knobs)
        return (loss.detach(), *torch.autograd.grad(loss, (x, w), scale))

    graph, static = captured(step)
    for case, factor in ((first, 1.0), (second, 1.0), (second, 0.3)):
        with torch.no_grad():
            x.copy_(case.input)
            w.copy_(case.linear_weight)
            y.copy_(case.target)
            scale.fill_(factor)
        graph.replay()
        expected = cases.outcome(
            flce.linear_cross_entropy, case, wants=WANTS, grad_output=scale, **knobs
        )
        for got, truth in zip(static, expected.values(), strict=True):
            assert torch.equal(got, truth)


# Every option that reads a value from the device, and a bound of the rows that are not ignored.
DEVICE_OPTIONS = {
    "softcap": 20.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "valid_bound": TOKENS * 3 // 4,
    "return_accuracy": True,
    "return_predictions": True,
    "return_z_loss": True,
}


def device_step(case, save):
    x, w = leaves_of(case)
    vectors = {
        "temperature": torch.rand(TOKENS, device="cuda") + 0.5,
        "token_weight": torch.rand(TOKENS, device="cuda"),
        "num_items": torch.tensor(100, device="cuda"),
    }

    def step():
        made = flce.linear_cross_entropy(
            x, w, case.target, save=save, max_memory=BUDGET, **vectors, **DEVICE_OPTIONS
        )
        return (made.loss, made.accuracy, made.predictions, *torch.autograd.grad(made.loss, (x, w)))

    return step


@pytest.mark.parametrize("save", cases.SAVES)
def test_graph_replay_with_a_bound(save):
    """The number of valid rows may change between replays, within the bound; above it: NaN."""
    case = make(torch.float32)
    step = device_step(case, save)
    full = case.target.clone()
    case.target[::2] = -100
    graph, static = captured(step)
    for every in (2, 3):
        case.target.copy_(full)
        case.target[::every] = -100
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(static, step(), strict=True))
    case.target.copy_(full)
    graph.replay()
    loss, _, _, grad_input, grad_weight = static
    assert loss.isnan() and grad_input.isnan().all() and grad_weight.isnan().all()


# Calls that synchronise; a copy within the device does not.
WAITS = ("StreamSynchronize", "EventSynchronize", "Memcpy DtoH", "Memcpy HtoD")


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("bound", [None, TOKENS * 3 // 4])
def test_trace_shows_no_wait(save, bound, monkeypatch):
    """No synchronisation call, no copy to or from the host, with and without a bound."""
    monkeypatch.setitem(DEVICE_OPTIONS, "valid_bound", bound)
    step = device_step(cases.ignore_some(make(torch.float32), every=2), save)
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    names = {event.name() for event in trace.profiler.kineto_results.events()}
    assert any("LaunchKernel" in name for name in names), "the trace saw no launch"
    # cudaDeviceSynchronize is not among them: the profiler calls it when it stops.
    waits = {name for name in names if any(word in name for word in WAITS)}
    assert not waits


@pytest.mark.parametrize("save", cases.SAVES)
def test_work_runs_on_the_current_stream(save):
    """The operands get their values late, on a side stream; others would read zeros."""
    case = make()
    expected = cases.outcome(flce.linear_cross_entropy, case, save=save, wants=WANTS)
    x, w = torch.zeros_like(case.input), torch.zeros_like(case.linear_weight)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(case.input)
        w.copy_(case.linear_weight)
        late = cases.Case(x, w, case.target)
        results = cases.outcome(flce.linear_cross_entropy, late, save=save, wants=WANTS)
    side.synchronize()
    assert cases.same_bits(expected, results)


@pytest.mark.parametrize("save", cases.SAVES)
def test_second_device(save):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    expected = cases.outcome(flce.linear_cross_entropy, make(), save=save, wants=WANTS)
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16, device="cuda:1", std=4.0)
    assert torch.cuda.current_device() == 0
    results = cases.outcome(flce.linear_cross_entropy, case, save=save, wants=WANTS)
    assert torch.cuda.current_device() == 0
    moved = {name: tensor.to("cuda:0") for name, tensor in results.items()}
    assert cases.same_bits(expected, moved)


def test_out_of_memory_says_what_would_fit():
    """torch.OutOfMemoryError with the sizes; the max_memory that it suggests works."""
    case = cases.make_case(16384, 64, 32768, dtype=torch.bfloat16, device="cuda")
    x, w = leaves_of(case)
    flce.linear_cross_entropy(x, w, case.target, max_memory="16MiB").backward()
    x.grad = w.grad = None
    filling = cramped(800 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            flce.linear_cross_entropy(x, w, case.target, save="grads", max_memory="1GiB")
        message = str(caught.value)
        assert "bytes" in message and re.search(r"\d{7,}", message)
        advised = int(re.search(r"max_memory=(\d+)", message)[1])
        assert advised < 1 << 30
        loss = flce.linear_cross_entropy(x, w, case.target, save="grads", max_memory=advised)
        loss.backward()
        assert torch.isfinite(w.grad).all()
        x.grad = w.grad = None
        loss = flce.linear_cross_entropy(x, w, case.target, save="stats", max_memory="16MiB")
        filling += cramped(1 << 20)
        with pytest.raises(torch.OutOfMemoryError, match="max_memory"):
            loss.backward()
    finally:
        del filling
        torch.cuda.set_per_process_memory_fraction(1.0)


@cases.pairwise(
    tokens=[1, 2, 31, 33, 1023, 1025, 4098, 8191, 8192, 8193],
    dtype=[torch.bfloat16, torch.float32],
    save=["grads", "stats"],
)
def test_tokens_are_ordered_by_target(tokens, dtype, save):
    """Targets shared by two tokens, by hundreds, the first and last class, ignored ones."""
    case = cases.make_case(tokens, 64, 3000, dtype=dtype, device="cuda")
    target = torch.arange(tokens, device="cuda") * 7 % 2999
    target[tokens // 2 :] = target[: tokens - tokens // 2].clone()
    target[tokens // 4 : tokens // 3] = 5
    target[-1] = 2999
    target[tokens // 3 : tokens // 2 : 3] = -100
    x, w = (leaf.detach().requires_grad_() for leaf in leaves_of(case))
    flce.linear_cross_entropy(x, w, target, save=save).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, w)]
    F.cross_entropy(F.linear(*exact), target).backward()
    bar = 3e-3 if dtype == torch.bfloat16 else 1e-5
    for leaf, true in zip((x, w), exact, strict=True):
        assert cases.relative_error(leaf.grad, true.grad) <= bar


@pytest.mark.parametrize("save", cases.SAVES)
def test_memory_is_given_back(save):
    case = make()
    cases.outcome(flce.linear_cross_entropy, case, save=save)
    gc.collect()  # nothing of an earlier test is counted
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        cases.outcome(flce.linear_cross_entropy, case, save=save)
    torch.cuda.synchronize()
    for _ in range(100):  # autograd's thread may still hold a tensor that the caller has released
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40, -(2**40)])
def test_out_of_range_targets_are_nan(save, bad, monkeypatch):
    """Without synchronisation no error: the row's loss and gradients are NaN, no others."""
    case = make(torch.float32)
    case.target[7] = bad
    reduction = "sum" if save == "grads" else "none"
    broken = cases.outcome(flce.linear_cross_entropy, case, save=save, reduction=reduction)
    case.target[7] = -100
    clean = cases.outcome(flce.linear_cross_entropy, case, save=save, reduction=reduction)
    others = torch.arange(TOKENS, device="cuda") != 7
    assert broken["input"][7].isnan().all()
    assert torch.equal(broken["input"][others], clean["input"][others])
    assert not torch.isfinite(broken["linear_weight"]).all()
    if reduction == "none":
        assert broken["loss"][7].isnan()
        assert torch.equal(broken["loss"][others], clean["loss"][others])
    else:
        assert broken["loss"].isnan()
    case.target[7] = bad
    monkeypatch.setenv("FLCE_CHECK", "1")
    with pytest.raises(IndexError) as caught:
        cases.outcome(flce.linear_cross_entropy, case, save=save, reduction=reduction)
    for word in ("target", "7", str(bad), str(VOCAB)):
        assert word in str(caught.value)


@pytest.mark.parametrize("bad", [100, -1, 2**40])
def test_out_of_range_targets_of_cross_entropy(bad, monkeypatch):
    logits = torch.randn(6, 100, device="cuda", requires_grad=True)
    target = torch.tensor([0, 1, bad, 3, 4, 99], device="cuda")
    loss = flce.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, False, True, False, False, False]
    assert logits.grad.isnan().any(-1).tolist() == loss.isnan().tolist()
    monkeypatch.setenv("FLCE_CHECK", "1")
    with pytest.raises(IndexError, match="target"):
        flce.cross_entropy(logits, target)


@pytest.mark.parametrize("allow", [False, True])
def test_tf32_follows_torchs_switch(allow):
    case = make(torch.float32)
    truth = cases.chunked_truth(case, TOKENS)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        results = cases.outcome(flce.linear_cross_entropy, case)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    error = cases.relative_error(results["input"], truth["input"])
    assert error <= (1e-2 if allow else 1e-5)
    if allow:
        assert error > 1e-5, "TF32 was allowed and not used"


@pytest.mark.parametrize("save", cases.SAVES)
@pytest.mark.parametrize("vocab", [129, 1000])
def test_bias_from_anywhere(save, vocab):
    """A float32 bias that is not aligned to 16 bytes and that the GEMM itself reads."""
    case = cases.make_case(TOKENS, HIDDEN, vocab, dtype=torch.bfloat16, device="cuda", std=2.0)
    packed = torch.randn(vocab + 1, device="cuda")
    x, w = leaves_of(case)
    odd, even = (
        flce.linear_cross_entropy(x, w, case.target, linear_bias=bias, save=save).detach()
        for bias in (packed[1:], packed[1:].clone())
    )
    assert cases.relative_error(odd, even.double()) <= 1e-6
