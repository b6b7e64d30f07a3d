"""flce.integrations.liger: what it installs gives what its own calls give, which
test_compat.py compares with Liger itself. Liger imports Triton, which needs no GPU for that."""

import functools
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F

from flce.integrations import liger as ours
from harness import cases
from harness.operands import TOLERANCE, H, N, V, agree, indices, leaf
from harness.tiny_models import built, tiny_llama

liger_kernel = pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)

ops = sys.modules["liger_kernel.ops"]
FUNCTION = "LigerFusedLinearCrossEntropyFunction"
SCALED = "LigerFusedLinearScaledCrossEntropyFunction"
with_scaled = pytest.mark.skipif(not hasattr(ops, SCALED), reason="Liger before 0.8.2")


@pytest.fixture
def installed():
    with ours.install():
        yield


@pytest.fixture
def only_flce(installed):
    """Installed, and what it replaces raises."""

    def fail(*_, **__):
        raise AssertionError("Liger's own loss ran")

    with pytest.MonkeyPatch.context() as patch:
        for name in (FUNCTION, SCALED):
            if hasattr(ops, name):
                patch.setattr(getattr(ops, name).flce_original, "apply", fail)
        yield


def operands(device, dtype=torch.float64):
    x, w, b = (leaf(*s, device=device, dtype=dtype) for s in ((N, H), (V, H), (V,)))
    return x, w, b, indices(N, device=device)


def functional():
    return sys.modules["liger_kernel.transformers.functional"]


@cases.pairwise(
    reduction=["mean", "sum", "none"], softcap=[None, 3.0], smoothing=[0.0, 0.1], z=[0.0, 0.02]
)
def test_function_and_module(device, only_flce, reduction, softcap, smoothing, z):
    """They give what its own calls give, whose numbers test_compat.py checks."""
    x, w, b, y = operands(device)
    call = {"reduction": reduction, "softcap": softcap, "return_predicted_tokens": True}
    call |= {"label_smoothing": smoothing, "lse_square_scale": z}
    expected = ours.liger_fused_linear_cross_entropy(x, w, y, b, **call)
    module = liger_kernel.LigerFusedLinearCrossEntropyLoss(**call)
    of_function = functional().liger_fused_linear_cross_entropy(x, w, y, b, **call)
    for output in (of_function, module(w, x, y, b)):
        assert type(output) is functional().CrossEntropyOutput
        agree(output.loss, expected.loss, (x, w, b), retain_graph=True)
        assert torch.equal(output.predicted_tokens, expected.predicted_tokens)
        assert output.token_accuracy is None


@pytest.mark.parametrize("num_items", [None, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_models(device, only_flce, num_items, softcap):
    from liger_kernel.transformers import apply_liger_kernel_to_gemma2, apply_liger_kernel_to_llama

    apply, make = apply_liger_kernel_to_llama, tiny_llama
    if softcap is not None:
        sizes = {"vocab_size": 19, "final_logit_softcapping": softcap}
        make = functools.partial(built, "Gemma2ForCausalLM", attn_implementation="eager", **sizes)
        apply = apply_liger_kernel_to_gemma2
    plain, patched = make().to(device), make().to(device)
    parts = dict.fromkeys(("rope", "rms_norm", "cross_entropy"), False)
    parts["geglu" if softcap else "swiglu"] = False
    apply(fused_linear_cross_entropy=True, model=patched, **parts)
    ids = torch.arange(24, device=device).view(2, 12) % 19
    labels = ids.masked_fill(ids % 5 == 0, -100)
    given = {"input_ids": ids, "labels": labels, "num_items_in_batch": num_items}
    made, logits = assert_equal(patched, plain, given, return_token_accuracy=True)
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum() / (labels[:, 1:] >= 0).sum()
    torch.testing.assert_close(made.token_accuracy, right)


def assert_equal(patched, plain, given, **options):
    """Loss and gradients of a model with Liger's forward; -> its output, the plain one's logits."""
    made, expected = patched.train()(**given, **options), plain.train()(**given)
    assert made.logits is None
    torch.testing.assert_close(made.loss, expected.loss, rtol=1e-5, atol=0)
    made.loss.backward()
    expected.loss.backward()
    for (name, a), b in zip(patched.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)
    return made, expected.logits


@with_scaled
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_cross_entropy(device, dtype, entropy):
    x, w, _, y = operands(device, dtype)

    def run(x, w):
        made = getattr(ops, SCALED).apply(x, w, y, 0.7, -100, 1, entropy)
        made = made if entropy else (made,)
        total = sum((v * torch.linspace(0.5, 1, N, device=device)).sum() for v in made)
        return (*made, *torch.autograd.grad(total, (x, w)))

    try:
        exact = run(x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
        theirs = run(x, w)
    except ImportError as error:  # on Hopper it asks for the CuTe DSL
        pytest.skip(str(error))
    # On the CPU flce's bfloat16 GEMM writes bfloat16 logits.
    rounding = 2.0**-8 if dtype == torch.bfloat16 and device == "cpu" else 1e-6
    with ours.install():
        mine = run(x, w)
    for a, b, truth in zip(mine, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, their_error = ((v.double() - truth).norm() for v in (a, b))
        assert error <= 1.5 * their_error + rounding * truth.norm()


@with_scaled
def test_more_log_probabilities_are_ligers(installed):
    if (
        "selected_token_ids"
        not in inspect.signature(getattr(ops, SCALED).flce_original.apply).parameters
    ):
        pytest.skip("Liger before 0.8.5")
    x, w, _, y = operands("cpu", torch.float32)
    made = getattr(ops, SCALED).apply(x, w, y, selected_token_ids=torch.tensor([3, 1]))
    selected = F.linear(x, w).log_softmax(-1)[:, [3, 1]].masked_fill((y == -100)[:, None], 0.0)
    torch.testing.assert_close(made[1], selected)


def test_a_kernel_by_name_is_ligers(installed, monkeypatch):
    x, w, _, y = operands("cpu", torch.float32)
    calls = []
    function = getattr(ops, FUNCTION)
    monkeypatch.setattr(function.flce_original, "apply", lambda *args: calls.append(args))
    chosen = (x, w, y, *[None] * 12, "triton", None, 1)
    function.apply(*chosen)
    assert calls == [chosen]


def test_compile_fullgraph(only_flce):
    x, w, b, y = operands("cpu", torch.float32)
    module = liger_kernel.LigerFusedLinearCrossEntropyLoss()
    agree(torch.compile(module, fullgraph=True, backend="aot_eager")(w, x, y, b),
          F.cross_entropy(F.linear(x, w, b), y), (x, w, b), TOLERANCE[torch.float32])  # fmt: skip


# ---- install() ----


KNOWN = list(inspect.signature(ours.LigerFusedLinearCrossEntropyFunction.apply).parameters)


@pytest.mark.parametrize(
    "names",
    [
        [*KNOWN[:3], "group", *KNOWN[3:]],
        [*KNOWN, "group"],
        KNOWN[:14],  # 0.7, which returns three values
    ],
    ids=["between", "after", "fewer"],
)
def test_other_functions_are_refused(monkeypatch, names):
    class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
        def forward(self):
            raise NotImplementedError

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, positional) for name in ("ctx", *names)]
    other = LigerFusedLinearCrossEntropyFunction
    other.forward.__signature__ = inspect.Signature(parameters)
    monkeypatch.setattr(ops, FUNCTION, other)
    with pytest.raises(
        ImportError, match=rf"at least up to .* got \d+\.\d+.* with .*'{names[-1]}'\)"
    ):
        ours.install()


def test_parameters_are_ligers():
    theirs = tuple(inspect.signature(getattr(ops, FUNCTION).forward).parameters)[1:]
    known = tuple(KNOWN)
    assert known[14:] == ("return_predicted_tokens", "ce_impl", "ce_mode", "chunk_mem_const")
    assert theirs == known[: len(theirs)] and len(theirs) >= 15


# ---- what calls Liger's functions ----


def test_llamafactorys_kernel(monkeypatch, installed):
    name = "llamafactory.v1.plugins.model_plugins.kernels.liger_kernel_ops"
    kernel = pytest.importorskip(name, exc_type=ImportError).LigerKernel
    plain, patched = (built("Qwen3ForCausalLM", vocab_size=19) for _ in range(2))
    monkeypatch.setattr(kernel, "check_deps", lambda: True)  # it wants a GPU
    kernel.apply(model=patched, use_kernels=["fused_linear_cross_entropy"])
    ids = torch.arange(24).view(2, 12) % 19
    assert_equal(patched, plain, {"input_ids": ids, "labels": ids})


PLUGIN = "flce.integrations.axolotl.FlcePlugin"


@pytest.fixture
def plugin(monkeypatch):
    """Axolotl's manager with flce's plugin, and whether (Liger's, CCE's) loss is flce's."""
    base = pytest.importorskip("axolotl.integrations.base", exc_type=ImportError)
    cce = pytest.importorskip("cut_cross_entropy", exc_type=ImportError)
    monkeypatch.setattr(base.PluginManager, "_instance", None)
    manager = base.PluginManager.get_instance()
    manager.register(PLUGIN)

    def served():
        functions = getattr(ops, FUNCTION), cce.linear_cross_entropy
        return tuple(hasattr(function, "flce_original") for function in functions)

    yield manager, served
    manager.post_train_unload(None)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"liger_fused_linear_cross_entropy": True}, (True, False)),
        ({"cut_cross_entropy": True, "liger_fused_linear_cross_entropy": False}, (False, True)),
        ({}, None),
    ],
)
def test_axolotls_configured_loss_is_served_until_the_end(plugin, flags, expected):
    from axolotl.utils.dict import DictDefault

    manager, served = plugin
    cfg = DictDefault({"plugins": [PLUGIN], **flags})
    if expected is None:
        with pytest.raises(ValueError, match="expected FlcePlugin with one of liger_fused"):
            manager.pre_model_load(cfg)
    else:
        manager.pre_model_load(cfg)
        assert served() == expected
        manager.post_train_unload(cfg)
    assert served() == (False, False)
