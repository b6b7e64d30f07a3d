"""The interfaces of other implementations, compared with their documented meaning in plain
torch, and with the implementations themselves if they are installed. liger-kernel runs on a
GPU, or on the CPU with TRITON_INTERPRET=1."""

import dataclasses
import importlib
import inspect
import itertools
import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import flce
from flce import reference
from flce.integrations import cce, liger
from harness import cases
from harness.operands import TOLERANCE, H, N, V, agree, indices, leaf, make

# ---- Liger ----


def liger_truth(x, w, y, b, *, reduction, scale, **options):
    """(loss, z-loss, accuracy, predictions) after Liger's documentation."""
    options |= {"linear_bias": b, "reduction": reduction}
    if scale:
        log_p, _ = reference.linear_logprobs(x, w, y, linear_bias=b, softcap=options.get("softcap"))
        options["token_weight"] = log_p.detach().exp()
    asked = dict.fromkeys(("return_z_loss", "return_accuracy", "return_predictions"), True)
    made = reference.linear_cross_entropy(x, w, y, **options, **asked)
    right = made.accuracy if reduction != "none" else (made.predictions == y).double()
    return made.loss, made.z_loss, right, made.predictions


# The fields of a result by what asks for them.
FIELDS = {"return_z_loss": "z_loss", "return_token_accuracy": "token_accuracy"}
FIELDS |= {"return_predicted_tokens": "predicted_tokens"}
ASKED = dict.fromkeys(FIELDS, True)

LIGER_CASES = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 0.02},
    {"weight": True, "z_loss": 0.02},
    {"weight": True, "label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.01},
]


def liger_call(case, device, dtype=torch.float64):
    """(options of liger_truth, the same by Liger's names) of a case."""
    truth = dict(case)
    if "weight" in case:
        truth["weight"] = torch.rand(V, dtype=dtype, device=device) + 0.1
    names = {"z_loss": "lse_square_scale", "weight": "ce_weight"}
    return truth, {names.get(name, name): value for name, value in truth.items()}


@cases.pairwise(case=LIGER_CASES, reduction=["mean", "sum", "none"], scale=[False, True])
def test_liger_means_what_it_says(device, case, reduction, scale):
    x, w, b, y = make("indices", device)
    truth, call = liger_call(case, device)
    call = {**call, "reduction": reduction, "use_token_scaling": scale}
    module = liger.LigerFusedLinearCrossEntropyLoss(**call)
    theirs, extra, right, predictions = liger_truth(
        x, w, y, b, reduction=reduction, scale=scale, **truth
    )
    agree(module(w, x, y, b), theirs, (x, w, b), retain_graph=True)
    output = liger.liger_fused_linear_cross_entropy(x, w, y, b, **call, **ASKED)
    agree(output.loss, theirs, (x, w, b))
    assert torch.allclose(output.z_loss, extra, rtol=1e-11)
    assert output.z_loss.shape == extra.shape and not output.z_loss.requires_grad
    assert torch.allclose(output.token_accuracy.double(), right, rtol=1e-6)
    assert torch.equal(output.predicted_tokens, predictions)
    for asked, field in FIELDS.items():
        output = liger.liger_fused_linear_cross_entropy(x, w, y, b, **call, **{asked: True})
        assert isinstance(output, liger.CrossEntropyOutput)
        for name in FIELDS.values():
            assert (getattr(output, name) is not None) == (name == field)


@pytest.mark.parametrize("scaled", [False, True])
def test_liger_without_valid_tokens(device, scaled):
    x, w, _, y = make("indices", device)
    asked = {**ASKED, "return_z_loss": False, "use_token_scaling": scaled}
    output = liger.liger_fused_linear_cross_entropy(x, w, torch.full_like(y, -100), **asked)
    assert output.loss == 0 and output.token_accuracy == 0
    assert (output.predicted_tokens == -1).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(output.loss, (x, w)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({name: wrong}, ValueError) for name, wrong in (
            ("reduction", "batchmean"), ("label_smoothing", 2.0), ("softcap", 0.0),
            ("chunk_mem_const", 0), ("accum_dtype", torch.int32),
            ("accum_dtype", torch.complex64),
            ("accum_dtype", torch.float64),  # there is no such sum of float32 operands
        )),
        *(({"bias": wrong}, TypeError) for wrong in (
            torch.ones(V, dtype=torch.float64), torch.ones(V).int(), [0.0],
        )),
    ],
    ids=str,
)  # fmt: skip
def test_ligers_refusals(device, options, error):
    x, w = (leaf(*shape, device=device, dtype=torch.float32) for shape in ((N, H), (V, H)))
    ((name, wrong),) = options.items()
    if isinstance(wrong, torch.Tensor):
        options = {name: wrong.to(device)}
    message = {"bias": "^linear_bias: expected"}.get(name, f"^{name}: expected")
    with pytest.raises(error, match=message) as caught:
        liger.liger_fused_linear_cross_entropy(x, w, indices(N, device=device), **options)
    assert name != "accum_dtype" or str(caught.value).endswith(f"got {wrong}")
    if name in ("reduction", "label_smoothing", "softcap"):
        with pytest.raises(error, match=message):
            liger.LigerFusedLinearCrossEntropyLoss(**options)


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        ((1, 2), {}, "target"),
        ((1, 2, 3), {"batch": 1}, "'batch'"),
        ((1, 2, 3), {"input": 1}, "multiple values for argument 'input'"),
        ((1,) * 17, {}, "too many positional"),
        ((1, 2), {"batch": 1}, "target|batch"),
    ],
)
def test_wrong_calls_are_type_errors(args, given, message):
    """As those of a plain Python function, though the signature is a table."""
    with pytest.raises(TypeError, match=message):
        liger.liger_fused_linear_cross_entropy(*args, **given)


def test_ligers_function_takes_its_arguments_by_position(device):
    x, w, b, y = make("indices", device)
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


def peer(name):
    return pytest.importorskip(name, exc_type=ImportError)


def newer_cce():
    """CCE with the arguments that flce.integrations.cce takes; version 25.1.1 has fewer."""
    theirs = peer("cut_cross_entropy")
    if "return_lse" not in inspect.signature(theirs.linear_cross_entropy).parameters:
        pytest.skip("this cut_cross_entropy has no return_lse")
    return theirs


def runs_on(device):
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels run on a GPU or with TRITON_INTERPRET=1")


@cases.pairwise(case=LIGER_CASES, reduction=["mean", "sum", "none"], scale=[False, True])
def test_liger_itself(device, case, reduction, scale):
    theirs = peer("liger_kernel.transformers.functional")
    runs_on(device)
    if device == "cpu" and case.keys() & {"softcap", "weight"}:
        pytest.skip("Triton's interpreter cannot run the kernel's casts of scalars")
    x, w, b = (leaf(*s, device=device, dtype=torch.float32) for s in ((N, H), (V, H), (V,)))
    y = indices(N, device=device)
    _, call = liger_call(case, device, torch.float32)
    call = {**call, **ASKED, "reduction": reduction, "use_token_scaling": scale}
    one, two = (f.liger_fused_linear_cross_entropy(x, w, y, b, **call) for f in (liger, theirs))
    # One upstream gradient: Liger's backward overwrites what it saved.
    agree(one.loss, two.loss, (x, w, b), TOLERANCE[torch.float32])
    for name in FIELDS.values():
        mine, other = getattr(one, name), getattr(two, name)
        assert mine.shape == other.shape and mine.dtype == other.dtype, name
        assert torch.allclose(mine.double(), other.double(), rtol=1e-5, atol=1e-6), name


def test_ligers_signatures():
    functional = peer("liger_kernel.transformers.functional")
    modules = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    ops = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")

    def defaults(function, skipped=()):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.name not in skipped]

    later = ("chunk_mem_const", "ce_impl", "ce_mode")  # parameters that not every 0.8 has
    name = "liger_fused_linear_cross_entropy"
    assert defaults(getattr(liger, name), later) == defaults(getattr(functional, name), later)
    name = "LigerFusedLinearCrossEntropyLoss"
    assert defaults(getattr(liger, name)) == defaults(getattr(modules, name))
    forward = getattr(modules, name).forward
    assert defaults(getattr(liger, name).forward) == defaults(forward)
    name = "LigerFusedLinearCrossEntropyFunction"
    theirs = defaults(getattr(ops, name).forward, ("ctx", *later))
    assert defaults(getattr(liger, name).apply, later) == theirs


LIGERS_FUNCTIONAL = "liger_kernel.transformers.functional"


@pytest.fixture
def ligers_functional(monkeypatch):
    """A fake of Liger's module in sys.modules, with its own class for the result of a call."""
    module = types.ModuleType(LIGERS_FUNCTIONAL)
    fields = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
    module.CrossEntropyOutput = dataclasses.make_dataclass(
        "CrossEntropyOutput", [(name, object, None) for name in fields]
    )
    monkeypatch.setitem(sys.modules, LIGERS_FUNCTIONAL, module)
    return module


def test_ligers_own_output_where_it_is_imported(device, ligers_functional):
    """Liger's models treat anything but an instance of their class as the loss itself."""
    x, w, b, y = make("indices", device)
    asked = {"return_token_accuracy": True, "return_predicted_tokens": True}
    module = liger.LigerFusedLinearCrossEntropyLoss(**asked)
    for output in (liger.liger_fused_linear_cross_entropy(x, w, y, b, **asked), module(w, x, y, b)):
        assert type(output) is ligers_functional.CrossEntropyOutput
        assert isinstance(output, liger.CrossEntropyOutput)
        assert not isinstance(output, type("Narrower", (liger.CrossEntropyOutput,), {}))
        assert output.z_loss is None and output.token_accuracy.dim() == 0
        assert output.predicted_tokens.dtype == torch.int64
        agree(output.loss, F.cross_entropy(F.linear(x, w, b), y), (x, w, b))
    loss = liger.liger_fused_linear_cross_entropy(x, w, y, b)
    assert isinstance(loss, torch.Tensor) and not isinstance(loss, liger.CrossEntropyOutput)


@pytest.mark.parametrize("loaded", ["not", "without the class"])
def test_our_output_where_liger_has_none(device, ligers_functional, monkeypatch, loaded):
    """Also with an older Liger, or one that is being imported; and nothing imports it."""
    if loaded == "not":
        monkeypatch.delitem(sys.modules, LIGERS_FUNCTIONAL)
    else:
        del ligers_functional.CrossEntropyOutput
    before = set(sys.modules)
    x, w, _, y = make("indices", device)
    output = liger.liger_fused_linear_cross_entropy(x, w, y, return_z_loss=True)
    assert type(output) is liger.CrossEntropyOutput
    assert not any(name.startswith("liger_kernel") for name in set(sys.modules) - before)


def test_compile_fullgraph_with_ligers_output(device, ligers_functional):
    x, w, b, y = make("indices", device)

    def call(x, w, b):
        output = liger.liger_fused_linear_cross_entropy(x, w, y, b, return_token_accuracy=True)
        return output if isinstance(output, liger.CrossEntropyOutput) else None

    output = torch.compile(call, fullgraph=True, backend="aot_eager")(x, w, b)
    assert type(output) is ligers_functional.CrossEntropyOutput
    agree(output.loss, call(x, w, b).loss, (x, w, b))


# Operands, Liger's accum_dtype, flce's for it: float32 for 16 bits where it is another one.
SUMS = [
    (dtype, asked, dtype if asked == dtype or dtype.itemsize > 2 else torch.float32)
    for dtype, asked in itertools.product(cases.DTYPES, cases.DTYPES)
    if (dtype, asked) != (torch.float32, torch.float64)  # refused
]
SUMS += [(dtype, None, None) for dtype in cases.DTYPES]


def weight_gradient(dtype, device, function, **options):
    """dW of a head summed over many chunks: FLCE_MAX_MEMORY holds 16 rows of logits."""
    torch.manual_seed(0)
    x = torch.randn(512, 16, device=device).to(dtype)
    w = torch.randn(256, 16, device=device).to(dtype).requires_grad_()
    y = torch.randint(256, (512,), device=device)
    return torch.autograd.grad(function(x, w, y, **options), w)[0]


@pytest.mark.parametrize(("operands", "asked", "summed"), SUMS, ids=str)
def test_ligers_accum_dtype(device, monkeypatch, operands, asked, summed):
    monkeypatch.setenv("FLCE_MAX_MEMORY", f"{16 * 256 * (8 if operands == torch.float64 else 4)}")
    call = liger.liger_fused_linear_cross_entropy
    ours = weight_gradient(operands, device, call, accum_dtype=asked)
    expected = weight_gradient(operands, device, flce.linear_cross_entropy, accum_dtype=summed)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("asked", [torch.float64, torch.bfloat16, torch.float16])
def test_ligers_accum_dtype_under_autocast(device, asked):
    """Under autocast the operands are bfloat16, whatever dtype the tensors have."""
    call = liger.liger_fused_linear_cross_entropy
    with torch.autocast(device, torch.bfloat16):
        ours = weight_gradient(torch.float32, device, call, accum_dtype=asked)
        plain = weight_gradient(torch.float32, device, call)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, plain)


@cases.pairwise(
    wide=[torch.float64, torch.float32],
    narrow=[torch.float32, torch.bfloat16, torch.float16],
    scale=[False, True],
)
def test_liger_promotes_a_narrower_bias(device, wide, narrow, scale):
    x, w = (leaf(*shape, device=device, dtype=wide) for shape in ((N, H), (V, H)))
    b = leaf(V, device=device, dtype=narrow)
    y = indices(N, device=device)
    module = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum", use_token_scaling=scale)

    def truth():
        rows = F.cross_entropy(F.linear(x, w, b.to(wide)), y, reduction="none")
        return (rows * rows.detach().neg().exp() if scale else rows).sum()

    agree(module(w, x, y, b), truth(), (x, w), TOLERANCE[wide])
    got, expected = (
        torch.autograd.grad(3.0 * loss, b)[0] for loss in (module(w, x, y, b), truth())
    )
    assert got.dtype == narrow
    # Each number is rounded once to the bias's dtype, up or down.
    assert torch.allclose(got.double(), expected.double(), rtol=torch.finfo(narrow).eps, atol=1e-6)


def test_liger_promotes_one_16_bit_bias_beside_another(device):
    x, w = (leaf(*shape, device=device, dtype=torch.bfloat16) for shape in ((N, H), (V, H)))
    b, y = leaf(V, device=device, dtype=torch.float16), indices(N, device=device)
    ours = liger.liger_fused_linear_cross_entropy(x, w, y, b)
    assert torch.equal(ours, flce.linear_cross_entropy(x, w, y, linear_bias=b.float()))
    assert torch.autograd.grad(ours, b)[0].dtype == torch.float16


# ---- CCE ----


def cce_truth(e, c, y, bias=None, *, softcap=None, shift=0):
    """Each token's (loss, lse) with the shift that CCE documents, 0 where ignored."""
    options = {"linear_bias": bias, "softcap": softcap, "reduction": "none", "return_lse": True}
    if shift:
        e, y = e[..., :-shift, :], y[..., shift:]
    made = reference.linear_cross_entropy(e, c, y, **options)
    return made.loss, made.lse, y != -100


@cases.pairwise(
    batch=[(5,), (3, 5), (2, 2, 5)],
    reduction=["mean", "sum", "none"],
    softcap=[None, 3.0],
    shift=[0, 1, 2, False, True],
)
def test_cce_means_what_it_says(device, batch, reduction, softcap, shift):
    e, c, bias, y = make("indices", device, batch=batch)
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
    """flce: 0. CCE gives NaN here."""
    e, c, _, y = make("indices", device, batch=(2, 5))
    loss = cce.linear_cross_entropy(e, c, torch.full_like(y, -100), shift=1)
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (e, c)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cce_of_a_single_token(device, reduction):
    e, c, _, y = make("indices", device, batch=())
    loss, lse = cce.linear_cross_entropy(e, c, y, reduction=reduction, return_lse=True)
    rows, expected, _ = cce_truth(e, c, y)
    agree(loss + 3 * lse, rows + 3 * expected, (e, c))


def test_cces_impls(device):
    e, c, _, y = make("indices", device, batch=(2, 5))
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
    e, c, _, y = make("indices", "cpu", batch=(2, 5))
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        cce.linear_cross_entropy(e, c, y, **change)
    with pytest.raises(TypeError, match="^shift: expected"):
        cce.linear_cross_entropy(e, c, y, shift=1.0)


@pytest.mark.parametrize("shift", [0, 2, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cce_itself(device, reduction, shift):
    theirs = newer_cce()
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
    theirs = newer_cce()

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
