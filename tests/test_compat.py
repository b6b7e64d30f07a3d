"""Other implementations' calls: by their documented meaning in plain torch, and against themselves
where they are installed. liger-kernel runs on a GPU, or on the CPU with TRITON_INTERPRET=1."""

import importlib
import inspect
import os
import types

import cases
import pytest
import torch
import torch.nn.functional as F

import flce
from flce.compat import cce, liger
from flce.compat import torch as compat_torch
from flce.kdim import k_dimensional

N, H, V = 13, 6, 9
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
HAS_TORCHS = hasattr(F, "linear_cross_entropy")
needs_torchs = pytest.mark.skipif(not HAS_TORCHS, reason="torch has no linear_cross_entropy")


def leaf(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()


def indices(*shape, device, ignored=True, classes=V):
    target = torch.randint(classes, shape, device=device)
    if ignored and target.dim():
        target.view(-1)[::4] = -100
    return target


def agree(ours, theirs, leaves, tolerance=TOLERANCE[torch.float64]):
    """Equal losses, and equal gradients for one random upstream gradient; returns nothing."""
    assert ours.shape == theirs.shape
    wide = theirs.double()
    assert (ours.double() - wide).abs().max() <= tolerance * (1 + wide.abs().max())
    upstream = torch.rand_like(wide) + 0.5
    got = torch.autograd.grad(ours, leaves, upstream.to(ours.dtype))
    expected = torch.autograd.grad(theirs, leaves, upstream.to(theirs.dtype))
    for mine, truth in zip(got, expected, strict=True):
        error = (mine.double() - truth.double()).abs().max()
        assert error <= tolerance * (1 + truth.double().abs().max())


# ---- weights of more than two dimensions (flce.kdim) and torch's own call ----


def eager(x, w, target, *, linear_bias=None, ignore_index=None, options=None, **kwargs):
    """torch's definition: linear, logits to (N, C, d1, ..., dK), cross_entropy."""
    classes = w.shape[:-1]
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(x, w.reshape(-1, w.shape[-1]), bias).reshape(*x.shape[:-1], *classes)
    ignore_index = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, ignore_index=ignore_index, **kwargs)


def torchs(*args, **kwargs):
    return F.linear_cross_entropy(*args, **kwargs) if HAS_TORCHS else eager(*args, **kwargs)


def make(kind, places, device, batch=(N,)):
    x = leaf(*batch, H, device=device)
    w = leaf(V, *places, H, device=device)
    b = leaf(V, *places, device=device)
    if kind == "indices":
        return x, w, b, indices(*batch, *places, device=device)
    logits = torch.randn(*batch, V, *places, dtype=torch.float64, device=device)
    return x, w, b, logits.softmax(len(batch))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("places", [(), (1,), (3,), (2, 3)])
def test_torchs_function(device, places, kind, reduction, weighted, smoothing):
    x, w, b, target = make(kind, places, device)
    weight = torch.rand(V, dtype=torch.float64, device=device) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    for bias in (None, b):
        leaves = (x, w) if bias is None else (x, w, b)
        ours = compat_torch.linear_cross_entropy(x, w, target, linear_bias=bias, **options)
        theirs = torchs(x, w, target, linear_bias=bias, **options)
        agree(ours, theirs, leaves)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_torchs_function_of_one_row(device, kind, reduction):
    x, w, b, target = make(kind, (), device, batch=())
    ours = compat_torch.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
    agree(ours, torchs(x, w, target, linear_bias=b, reduction=reduction), (x, w, b))


@pytest.mark.parametrize("places", [(), (3,)])
def test_all_ignored_is_zero(device, places):
    """torch: NaN. The gradients are zeros in both."""
    x, w, _, target = make("indices", places, device)
    loss = compat_torch.linear_cross_entropy(x, w, torch.full_like(target, -100))
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (x, w)))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("places", [(), (3,)])
def test_weights_that_sum_to_zero_are_nan(device, places, z_loss):
    """0/0 as in torch, whatever the layout; over no valid place it is 0 all the same."""
    x, w, _, target = make("indices", places, device)
    options = {"weight": torch.zeros(V, dtype=torch.float64, device=device), "z_loss": z_loss}
    assert flce.linear_cross_entropy(x, w, target, **options).isnan()
    assert flce.linear_cross_entropy(x, w, torch.full_like(target, -100), **options) == 0


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_at_each_position(device, reduction, kind, weighted, z_loss):
    """Per-place temperature and token_weight, softcap and z-loss, which under mean has a
    denominator of its own, that class weights do not enter."""
    x, w, b, target = make(kind, (2, 3), device)
    shape = (N, 2, 3)
    weight = torch.rand(V, dtype=torch.float64, device=device) + 0.1 if weighted else None
    temperature = torch.rand(shape, dtype=torch.float64, device=device) + 0.5
    token_weight = torch.rand(shape, dtype=torch.float64, device=device)
    ours = k_dimensional(
        flce.linear_cross_entropy,
        x,
        w,
        target,
        linear_bias=b,
        weight=weight,
        reduction=reduction,
        softcap=4.0,
        z_loss=z_loss,
        temperature=temperature,
        token_weight=token_weight,
    )
    logits = torch.einsum("nh,cdeh->ncde", x, w) + b
    logits = 4.0 * torch.tanh(logits / 4.0) / temperature.unsqueeze(1)
    rows = token_weight * F.cross_entropy(logits, target, weight=weight, reduction="none")
    valid = torch.ones_like(token_weight) if kind == "probabilities" else (target != -100).double()
    extra = z_loss * token_weight * valid * logits.logsumexp(1).square()
    if reduction == "mean":
        factors = valid
        if weighted and kind == "indices":
            factors = weight[target.clamp(min=0)] * valid
        theirs = rows.sum() / factors.sum() + extra.sum() / valid.sum()
    else:
        theirs = rows + extra if reduction == "none" else (rows + extra).sum()
    agree(ours, theirs, (x, w, b))


@pytest.mark.parametrize("budget", [None, 2 * 80])
@pytest.mark.parametrize("save", cases.SAVES)
def test_each_strategy_at_each_position(device, save, budget):
    """Whole and in chunks of two rows; the options of a call reach every position's."""
    x, w, b, target = make("indices", (2, 3), device)
    knobs = {"linear_bias": b, "save": save, "max_memory": budget, "valid_bound": N}
    ours = flce.linear_cross_entropy(x, w, target, **knobs)
    agree(ours, eager(x, w, target, linear_bias=b), (x, w, b))


def test_a_0d_tensor_is_a_number_at_each_position(device):
    x, w, _, target = make("indices", (3,), device)
    call = {"temperature": torch.tensor(2.0), "softcap": torch.tensor(3.0)}
    ours = flce.linear_cross_entropy(x, w, target.to(torch.int32), **call)
    logits = 3.0 * torch.tanh(torch.einsum("nh,cdh->ncd", x, w) / 3.0) / 2.0
    agree(ours, F.cross_entropy(logits, target), (x, w))


@pytest.mark.parametrize("num_items", [5, 5.0, "tensor"])
def test_num_items_of_positions(device, num_items):
    x, w, _, target = make("indices", (3,), device)
    items = torch.tensor(5, device=device) if num_items == "tensor" else num_items
    ours = k_dimensional(flce.linear_cross_entropy, x, w, target, num_items=items)
    agree(ours, eager(x, w, target, reduction="sum") / 5, (x, w))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_position(device, reduction):
    x, w, _, target = make("indices", (2, 0), device)
    loss = k_dimensional(flce.linear_cross_entropy, x, w, target, reduction=reduction)
    assert loss.shape == ((N, 2, 0) if reduction == "none" else ())
    assert loss.sum() == 0
    for grad in torch.autograd.grad(loss.sum(), (x, w)):
        assert (grad == 0).all()


def test_positions_do_not_wait_for_the_device(cuda):
    x, w, b, target = make("indices", (3,), cuda)
    weight = torch.rand(V, dtype=torch.float64, device=cuda)
    k_dimensional(flce.linear_cross_entropy, x, w, target, linear_bias=b, weight=weight).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = k_dimensional(
            flce.linear_cross_entropy, x, w, target, linear_bias=b, weight=weight, z_loss=0.1
        )
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shift": 1}, "shift"),
        ({"cu_seqlens": torch.tensor([0, N])}, "cu_seqlens"),
        *(({f"return_{name}": True}, f"return_{name}") for name in ("lse", "entropy", "accuracy")),
        *(({f"return_{name}": True}, f"return_{name}") for name in ("predictions", "z_loss")),
        ({"temperature": torch.ones(N)}, "temperature"),
        ({"token_weight": torch.ones(N, 4)}, "token_weight"),
        ({"linear_bias": torch.ones(V)}, "linear_bias"),
        ({"input": torch.ones(2, N, H)}, "input"),
        ({"input": torch.ones(H)}, "input"),
        ({"linear_weight": torch.ones(V, 3, H + 1)}, "linear_weight"),
        ({"target": torch.ones(N, dtype=torch.int64)}, "target"),
        ({"target": torch.ones(N, 3, V)}, "target"),
    ],
)
def test_positions_refuse(change, named):
    call = {
        "input": torch.ones(N, H),
        "linear_weight": torch.ones(V, 3, H),
        "target": torch.ones(N, 3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        k_dimensional(flce.linear_cross_entropy, **{**call, **change})


def test_the_public_function_takes_positions(device):
    x, w, b, target = make("indices", (3,), device)
    ours = flce.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none")
    agree(ours, eager(x, w, target, linear_bias=b, reduction="none"), (x, w, b))


def compiled_calls(x, w, y):
    """One of each shim and of the positions, as functions of x and w."""
    rows, places = y.flatten(), y.flatten().unsqueeze(1).expand(-1, 2)
    weight = torch.rand(V, dtype=x.dtype, device=x.device)
    return {
        "torch": lambda x, w: compat_torch.linear_cross_entropy(x.flatten(0, 1), w, rows),
        "cce": lambda x, w: cce.linear_cross_entropy(x, w, y, shift=1, return_lse=True)[0],
        "liger": lambda x, w: liger.LigerFusedLinearCrossEntropyLoss(
            ce_weight=weight, lse_square_scale=0.1, use_token_scaling=True
        )(w, x.flatten(0, 1), rows),
        "positions": lambda x, w: flce.linear_cross_entropy(
            x.flatten(0, 1), torch.stack([w, 2 * w], 1), places, weight=weight, z_loss=0.1
        ),
    }


@pytest.mark.parametrize("name", ["torch", "cce", "liger", "positions"])
def test_compile_fullgraph(device, name):
    torch._dynamo.reset()
    x, w, _, y = make("indices", (), device, batch=(2, 5))
    function = compiled_calls(x, w, y)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    agree(compiled(x, w), function(x, w), (x, w))


def fields(acc_dtype=None, acc_policy="auto", batch_chunk_size=None):
    return types.SimpleNamespace(
        acc_dtype=acc_dtype, acc_policy=acc_policy, batch_chunk_size=batch_chunk_size
    )


def test_knobs():
    weight = torch.empty(10, 4, dtype=torch.bfloat16)
    assert compat_torch.knobs(None, weight) == {}
    assert compat_torch.knobs(fields(), weight) == {}
    made = compat_torch.knobs(fields(torch.float32, "accurate", 8), weight)
    assert made == {"accum_dtype": torch.float32, "max_memory": 8 * 48}  # rows of whole 16 bytes
    assert compat_torch.knobs(fields(torch.float32, "compact"), weight) == {}
    made = compat_torch.knobs(fields(batch_chunk_size=3), weight.double())
    assert made == {"max_memory": 3 * 80}
    with pytest.raises(TypeError, match="^options: expected"):
        compat_torch.knobs({"batch_chunk_size": 3}, weight)
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="^options: expected a positive int"):
            compat_torch.knobs(fields(batch_chunk_size=wrong), weight)


@needs_torchs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_options(device, reduction):
    """Both of torch's paths, and flce's own `options`, give the same numbers."""
    x, w, b, target = make("indices", (), device)
    for options in (
        torch.nn.LinearCrossEntropyOptions(),
        torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=4),
        torch.nn.LinearCrossEntropyOptions(acc_policy="accurate", acc_dtype=torch.float64),
    ):
        call = {"linear_bias": b, "reduction": reduction, "options": options}
        theirs = torchs(x, w, target, **call)
        ours = compat_torch.linear_cross_entropy(x, w, target, **call)
        agree(ours, theirs, (x, w, b))
        theirs = torchs(x, w, target, **call)
        agree(flce.linear_cross_entropy(x, w, target, **call), theirs, (x, w, b))


@needs_torchs
def test_torchs_signatures():
    def shape_of(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    ours, theirs = compat_torch.linear_cross_entropy, F.linear_cross_entropy
    assert shape_of(ours) == shape_of(theirs)
    theirs = torch.nn.LinearCrossEntropyLoss
    assert shape_of(compat_torch.LinearCrossEntropyLoss) == shape_of(theirs)


@needs_torchs
@pytest.mark.parametrize("places", [(), (2, 3)])
def test_torchs_module(device, places):
    """The same state_dict, and from it the same loss."""
    weight = torch.rand(V, device=device, dtype=torch.float64)
    call = {"out_features": places, "bias": True, "weight": weight, "label_smoothing": 0.1}
    place = {"device": device, "dtype": torch.float64}
    theirs = torch.nn.LinearCrossEntropyLoss(H, V, **call, **place)
    ours = compat_torch.LinearCrossEntropyLoss(H, V, **call, **place)
    ours.load_state_dict(theirs.state_dict())
    x, target = leaf(N, H, device=device), indices(N, *places, device=device)
    one, two = ours(x, target), theirs(x, target)
    assert abs(one - two) <= 1e-12 * two
    one.backward()
    two.backward()
    for mine, truth in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, truth.grad, rtol=1e-11)
    assert "out_features" in repr(ours)


def test_torchs_refusals():
    x, w, _, target = make("probabilities", (), "cpu")
    with pytest.raises(ValueError, match="^ignore_index: expected None"):
        compat_torch.linear_cross_entropy(x, w, target, ignore_index=-100)
    with pytest.raises(ValueError, match="^weight: expected"):
        compat_torch.LinearCrossEntropyLoss(H, V, weight=torch.ones(V + 1))
    with pytest.raises(ValueError, match="^label_smoothing: expected"):
        compat_torch.LinearCrossEntropyLoss(H, V, label_smoothing=1.5)


# ---- Liger ----


def liger_truth(
    x, w, y, b=None, *, ce_weight=None, z=0.0, smoothing=0.0, softcap=None, scale=False
):
    """Each token's (cross entropy, z-loss), its class weight, and predictions: Liger's docs."""
    logits = F.linear(x, w, b).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = y != -100
    rows = F.cross_entropy(logits, y, weight=ce_weight, reduction="none", label_smoothing=smoothing)
    extra = z * logits.logsumexp(-1).square() * valid
    if scale:
        probability = logits.softmax(-1).gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1).detach()
        rows, extra = rows * probability, extra * probability
    factors = valid.double() if ce_weight is None else ce_weight[y.clamp(min=0)] * valid
    predictions = logits.argmax(-1).masked_fill(~valid, -1)
    return rows, extra, factors, predictions


LIGER_CASES = [
    {},
    {"smoothing": 0.1},
    {"softcap": 3.0},
    {"z": 0.02},
    {"ce_weight": True, "z": 0.02},
    {"ce_weight": True, "smoothing": 0.2, "softcap": 5.0, "z": 0.01},
]


def liger_call(case, device, dtype=torch.float64):
    """(truth's keywords, Liger's keywords) of a case."""
    truth, call = dict(case), {}
    if "ce_weight" in case:
        truth["ce_weight"] = call["ce_weight"] = torch.rand(V, dtype=dtype, device=device) + 0.1
    names = {"z": "lse_square_scale", "smoothing": "label_smoothing", "softcap": "softcap"}
    call.update({theirs: case[ours] for ours, theirs in names.items() if ours in case})
    return truth, call


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LIGER_CASES, ids=str)
def test_liger_means_what_it_says(device, case, reduction, scale):
    x, w, b, y = make("indices", (), device)
    truth, call = liger_call(case, device)
    rows, extra, factors, predictions = liger_truth(x, w, y, b, scale=scale, **truth)
    valid = y != -100
    right = (predictions == y).double() * valid
    if reduction == "mean":
        extra = extra.sum() / valid.sum()
        theirs, right = rows.sum() / factors.sum() + extra, right.sum() / valid.sum()
    elif reduction == "sum":
        extra = extra.sum()
        theirs, right = rows.sum() + extra, right.sum() / valid.sum()
    else:
        theirs = rows + extra
    call = {**call, "reduction": reduction, "use_token_scaling": scale}
    module = liger.LigerFusedLinearCrossEntropyLoss(**call)
    agree(module(w, x, y, b), theirs, (x, w, b))

    asked = dict.fromkeys(
        ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True
    )
    output = liger.liger_fused_linear_cross_entropy(x, w, y, b, **call, **asked)
    rows, extra2, factors, _ = liger_truth(x, w, y, b, scale=scale, **truth)
    assert torch.allclose(output.loss, theirs.detach(), rtol=1e-11)
    assert torch.allclose(output.z_loss, extra.detach(), rtol=1e-11)
    assert output.z_loss.shape == extra.shape and not output.z_loss.requires_grad
    assert torch.allclose(output.token_accuracy.double(), right, rtol=1e-6)
    assert torch.equal(output.predicted_tokens, predictions)
    output.loss.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_liger_returns_only_what_was_asked(device, reduction):
    x, w, _, y = make("indices", (), device)
    names = {
        "return_z_loss": "z_loss",
        "return_token_accuracy": "token_accuracy",
        "return_predicted_tokens": "predicted_tokens",
    }
    for asked, field in names.items():
        output = liger.liger_fused_linear_cross_entropy(
            x, w, y, reduction=reduction, **{asked: True}
        )
        assert isinstance(output, liger.CrossEntropyOutput)
        for name in names.values():
            assert (getattr(output, name) is not None) == (name == field)


def test_ligers_function_takes_its_arguments_by_position(device):
    x, w, b, y = make("indices", (), device)
    weight = torch.rand(V, dtype=torch.float64, device=device)
    args = (x, w, y, b, weight, -100, 0.01, 0.1, "sum", 4.0, True, torch.float64, False, True, True)
    output = liger.liger_fused_linear_cross_entropy(*args)
    made = liger.LigerFusedLinearCrossEntropyFunction.apply(*args)
    fields = (output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens)
    for mine, theirs in zip(made, fields, strict=True):
        assert torch.equal(mine, theirs)
    assert len(liger.LigerFusedLinearCrossEntropyFunction.apply(*args, None, None, 1)) == 4
    assert liger.LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[1:] == (None, None, None)
    with pytest.raises(ValueError, match="^ce_impl: expected None"):
        liger.LigerFusedLinearCrossEntropyFunction.apply(*args, "cutedsl")


def test_ligers_refusals(device):
    for name, wrong in (("reduction", "batchmean"), ("label_smoothing", 2.0), ("softcap", 0.0)):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            liger.LigerFusedLinearCrossEntropyLoss(**{name: wrong})
    x, w, _, y = make("indices", (), device)
    with pytest.raises(ValueError, match="^chunk_mem_const: expected"):
        liger.liger_fused_linear_cross_entropy(x, w, y, chunk_mem_const=0)


def test_liger_without_valid_tokens(device):
    x, w, _, y = make("indices", (), device)
    for scaled in (False, True):
        output = liger.liger_fused_linear_cross_entropy(
            x,
            w,
            torch.full_like(y, -100),
            return_token_accuracy=True,
            return_predicted_tokens=True,
            use_token_scaling=scaled,
        )
        assert output.loss == 0 and output.token_accuracy == 0
        assert (output.predicted_tokens == -1).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(output.loss, (x, w)))


def peer(name):
    return pytest.importorskip(name, exc_type=ImportError)


def runs_on(device):
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels run on a GPU or with TRITON_INTERPRET=1")


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LIGER_CASES, ids=str)
def test_liger_itself(device, case, reduction, scale):
    theirs = peer("liger_kernel.transformers.functional")
    runs_on(device)
    if device == "cpu" and case.keys() & {"softcap", "ce_weight"}:
        pytest.skip("Triton's interpreter cannot run the kernel's casts of scalars")
    x, w, b = (leaf(*s, device=device, dtype=torch.float32) for s in ((N, H), (V, H), (V,)))
    y = indices(N, device=device)
    _, call = liger_call(case, device, torch.float32)
    asked = dict.fromkeys(
        ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True
    )
    call = {**call, **asked, "reduction": reduction, "use_token_scaling": scale}
    one = liger.liger_fused_linear_cross_entropy(x, w, y, b, **call)
    two = theirs.liger_fused_linear_cross_entropy(x, w, y, b, **call)
    # One upstream gradient: Liger's backward overwrites what it saved.
    agree(one.loss, two.loss, (x, w, b), TOLERANCE[torch.float32])
    for name in ("z_loss", "token_accuracy", "predicted_tokens"):
        mine, other = getattr(one, name), getattr(two, name)
        assert mine.shape == other.shape, name
        assert mine.dtype == other.dtype, name
        assert torch.allclose(mine.double(), other.double(), rtol=1e-5, atol=1e-6), name


def test_ligers_signatures():
    functional = peer("liger_kernel.transformers.functional")
    modules = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    ops = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")

    def defaults(function, skipped=()):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.name not in skipped]

    later = ("chunk_mem_const", "ce_impl", "ce_mode")  # not in every 0.8
    name = "liger_fused_linear_cross_entropy"
    assert defaults(getattr(liger, name), later) == defaults(getattr(functional, name), later)
    name = "LigerFusedLinearCrossEntropyLoss"
    assert defaults(getattr(liger, name)) == defaults(getattr(modules, name))
    forward = getattr(modules, name).forward
    assert defaults(getattr(liger, name).forward) == defaults(forward)
    name = "LigerFusedLinearCrossEntropyFunction"
    theirs = defaults(getattr(ops, name).forward, ("ctx", *later))
    assert defaults(getattr(liger, name).apply, later) == theirs


# ---- CCE ----


def cce_truth(e, c, y, bias=None, *, softcap=None, shift=0):
    """Each token's (loss, lse) with the shift as CCE documents it, 0 where ignored."""
    if shift:
        e, y = e[..., :-shift, :], y[..., shift:]
    logits = F.linear(e, c, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return rows.reshape(y.shape), logits.logsumexp(-1) * (y != -100), y != -100


@pytest.mark.parametrize("shift", [0, 1, 2, False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [(5,), (3, 5), (2, 2, 5)])
def test_cce_means_what_it_says(device, batch, reduction, softcap, shift):
    e, c, bias, y = make("indices", (), device, batch=batch)
    options = {"softcap": softcap, "shift": shift}
    rows, lse, valid = cce_truth(e, c, y, bias, **{**options, "shift": int(shift)})
    theirs = rows if reduction == "none" else rows.sum()
    theirs = theirs / valid.sum() if reduction == "mean" else theirs
    loss = cce.linear_cross_entropy(e, c, y, bias, reduction=reduction, **options)
    agree(loss, theirs, (e, c, bias))
    module = cce.LinearCrossEntropy(reduction=reduction, return_lse=True, **options)
    loss, got = module(e, c, y, bias)
    assert got.shape == lse.shape
    rows, lse, _ = cce_truth(e, c, y, bias, **{**options, "shift": int(shift)})
    weights = torch.rand_like(lse)
    both = rows.sum() if reduction != "mean" else rows.sum() / valid.sum()
    agree(loss.sum() + (weights * got).sum(), both + (weights * lse).sum(), (e, c, bias))


def test_cce_without_valid_tokens(device):
    """CCE gives NaN here."""
    e, c, _, y = make("indices", (), device, batch=(2, 5))
    loss = cce.linear_cross_entropy(e, c, torch.full_like(y, -100), shift=1)
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (e, c)))


def test_cces_impls(device):
    e, c, _, y = make("indices", (), device, batch=(2, 5))
    plain = cce.linear_cross_entropy(e, c, y)
    for impl in (*cce.IMPLS, types.SimpleNamespace(name="CCE_EXACT")):
        assert torch.equal(cce.linear_cross_entropy(e, c, y, impl=impl), plain)
    half = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in (e, c)]
    for impl in ("cce", "cce_kahan_full_c"):
        loss = cce.linear_cross_entropy(*half, y, impl=impl, accum_c_fp32=True, accum_e_fp32=True)
        assert loss.dtype == torch.float32
        assert torch.autograd.grad(loss, half)[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"impl": "cce_full"}, "impl"),
        ({"impl": 3}, "impl"),
        ({"shift": 5}, "shift"),
        ({"shift": -1}, "shift"),
        ({"vocab_parallel_options": object()}, "vocab_parallel_options"),
        ({"filter_eps": "high"}, "filter_eps"),
    ],
)
def test_cces_refusals(change, named):
    e, c, _, y = make("indices", (), "cpu", batch=(2, 5))
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        cce.linear_cross_entropy(e, c, y, **change)
    with pytest.raises(TypeError, match="^shift: expected"):
        cce.linear_cross_entropy(e, c, y, shift=1.0)


@pytest.mark.parametrize("shift", [0, 2, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cce_itself(device, reduction, shift):
    theirs = peer("cut_cross_entropy")
    impl = "torch_compile" if device == "cpu" else "cce_exact"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((2, 16, 32), (128, 32), (128,))
    e, c, bias = (leaf(*shape, device=device, dtype=dtype) for shape in shapes)
    y = indices(2, 16, device=device, classes=128)
    call = {"reduction": reduction, "shift": shift, "return_lse": True, "impl": impl}
    one, two = (f.linear_cross_entropy(e, c, y, bias, **call) for f in (cce, theirs))
    tolerance = TOLERANCE[torch.float32] if device == "cpu" else 2e-2
    agree(one[0], two[0], (e, c, bias), tolerance)
    assert one[1].shape == two[1].shape
    assert torch.allclose(one[1], two[1].to(one[1].dtype), rtol=tolerance, atol=tolerance)


def test_cces_signatures():
    theirs = peer("cut_cross_entropy")

    def defaults(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    def without_impl(pairs):
        return [pair for pair in pairs if pair[0] != "impl"]

    for name in ("linear_cross_entropy", "LinearCrossEntropy"):
        ours, other = defaults(getattr(cce, name)), defaults(getattr(theirs, name))
        assert without_impl(ours) == without_impl(other)
        assert [pair[0] for pair in ours] == [pair[0] for pair in other]
    names = {member.name.lower() for member in theirs.LinearCrossEntropyImpl}
    assert names == set(cce.IMPLS)
