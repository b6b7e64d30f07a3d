"""What the caller can see stays the caller's: saved-tensor hooks, raw operators, chunk sums."""

import cases
import pytest
import torch

import flce

TOKENS, HIDDEN, VOCAB = 24, 16, 40


def leaves(device, scale=1.0):
    case = cases.make_case(TOKENS, HIDDEN, VOCAB, dtype=torch.float32, device=device, seed=5)
    x, w = ((t * scale).clone().requires_grad_() for t in (case.input, case.linear_weight))
    return x, w, case.target


@pytest.mark.parametrize("save", cases.SAVES)
def test_saved_tensor_hooks_keep_their_memory(device, save):
    """A hook may hand out a buffer that it uses again: scaling it in place would reach .grad."""
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


def forward_arguments(x, w, target, save):
    float32 = torch.float32
    settings = ("mean", -100, 0.0, float32, float32, float32, save, 1 << 20)
    return (x, w, target, None, None, *settings, True, True, False, False)


def test_raw_forward_keeps_the_outputs_it_gave(device):
    x, w, target = leaves(device)
    made = torch.ops.flce.forward(*forward_arguments(x, w, target, "grads"))
    before = made[5].clone()
    (made[0] * 5.0).backward()
    assert torch.equal(made[5], before)
    assert torch.equal(w.grad, 5.0 * before)


def test_scale_tells_other_graphs(device):
    leaf = torch.ones(3, device=device, requires_grad=True)
    doubled = leaf * 2.0
    squares = (doubled * doubled).sum()
    factor = torch.tensor(5.0, device=device)
    torch.ops.flce.scale_(doubled.detach(), factor, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with pytest.raises(RuntimeError, match="grad: expected a tensor that does not require grad"):
        torch.ops.flce.scale_(leaf, factor, None)


@pytest.mark.parametrize("argument", ["grad_output", "stats", "scalars", "saved"])
def test_raw_backward_checks_what_it_is_given(device, argument):
    x, w, target = (t.detach() for t in leaves(device))
    arguments = forward_arguments(x, w, target, "logits")
    _, stats, scalars, saved, *_ = torch.ops.flce.forward(*arguments)
    given = {
        "grad_output": torch.ones((), device=device),
        "stats": stats,
        "scalars": scalars,
        "saved": saved,
    }
    for wrong in (given[argument].double(), given[argument][..., None]):
        passed = {**given, argument: wrong}
        operands = (passed["grad_output"], *arguments[:5], *list(passed.values())[1:])
        with pytest.raises(ValueError, match=f"{argument}: expected"):
            torch.ops.flce.backward(*operands, *arguments[5:])


@pytest.mark.parametrize("argument", ["grad_output", "stats", "scalars"])
def test_raw_cross_entropy_backward_checks_what_it_is_given(device, argument):
    logits = torch.randn(TOKENS, VOCAB, device=device)
    target = torch.arange(TOKENS, device=device)
    settings = ("mean", -100, 0.0)
    _, stats, scalars = torch.ops.flce.cross_entropy_forward(logits, target, None, *settings)
    given = {
        "grad_output": torch.ones((), device=device),
        "stats": stats,
        "scalars": scalars,
    }
    given[argument] = given[argument].double()
    operands = (given["grad_output"], logits, target, None, given["stats"], given["scalars"])
    with pytest.raises(ValueError, match=f"{argument}: expected dtype float32"):
        torch.ops.flce.cross_entropy_backward(*operands, *settings)


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_float32_sums_hold_over_many_chunks(device, save):
    """bfloat16 sums lose a rounding a chunk (README); accum_dtype=torch.float32 does not."""
    case = cases.make_case(1024, 64, 512, dtype=torch.bfloat16, device=device, std=2.0)
    truth = cases.chunked_truth(case, 256)["linear_weight"]

    def error(**knobs):
        w = case.linear_weight.clone().requires_grad_()
        loss = flce.linear_cross_entropy(case.input, w, case.target, save=save, **knobs)
        return cases.relative_error(torch.autograd.grad(loss, w)[0], truth)

    whole = error()
    many = error(max_memory=4 * 512 * 4, accum_dtype=torch.float32)
    assert many <= 1.5 * whole
