"""What flce.integrations.cce installs against its own call and CCE's torch_compile: 25.1.1, the
newest on the package index, 25.6.4 of its repository, Axolotl's fork. CCE imports Triton, which
needs no GPU for that."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from flce.integrations import cce as ours
from harness import cases
from harness.operands import TOLERANCE, H, N, V, agree, indices, leaf

cut_cross_entropy = pytest.importorskip("cut_cross_entropy", exc_type=ImportError)

PARAMETERS = inspect.signature(cut_cross_entropy.linear_cross_entropy).parameters
with_bias = pytest.mark.skipif("bias" not in PARAMETERS, reason="25.1.1 has no such argument")


@pytest.fixture
def only_flce(monkeypatch):
    """Installed, and what CCE's function calls raises."""

    def fail(*_, **__):
        raise AssertionError("CCE's own loss ran")

    implementations = sys.modules["cut_cross_entropy.linear_cross_entropy"]
    monkeypatch.setattr(implementations, "cce_linear_cross_entropy", fail)
    monkeypatch.setattr(implementations, "torch_compile_linear_cross_entropy", fail)
    with ours.install():
        yield


def operands(device, dtype=torch.float64):
    x, w = (leaf(*s, device=device, dtype=dtype) for s in ((2, N, H), (V, H)))
    return x, w, torch.stack((indices(N, device=device), indices(N, device=device).flip(0)))


def expected_of(x, w, y, *args, **options):
    """What its own call gives, whose numbers test_compat.py checks."""
    return ours.linear_cross_entropy(x, w, y, *args, **options)


# 25.1.1 has neither, and Axolotl's fork no return_lse.
MORE = {"none": True, "bias": "bias" in PARAMETERS, "return_lse": "return_lse" in PARAMETERS}


@cases.pairwise(
    reduction=["mean", "sum", "none"],
    softcap=[None, 3.0],
    shift=[0, False, True, 2],
    more=[name for name, is_taken in MORE.items() if is_taken],
)
def test_function_and_module(device, only_flce, reduction, softcap, shift, more):
    x, w, y = operands(device)
    call = {"reduction": reduction, "softcap": softcap, "shift": shift}
    bias = {"bias": leaf(V, device=device)} if more == "bias" else {}
    if more == "return_lse":
        call["return_lse"] = True
    expected, module = expected_of(x, w, y, **bias, **call), cut_cross_entropy.LinearCrossEntropy
    for made in (
        cut_cross_entropy.linear_cross_entropy(x, w, y, **bias, **call),
        module(**call)(x, w, y, **bias),
    ):
        pairs = zip(made, expected, strict=True) if "return_lse" in call else [(made, expected)]
        for one, other in pairs:
            agree(one, other, (x, w, *bias.values()), retain_graph=True)


def test_positional_arguments_are_the_versions_own(only_flce):
    x, w, y = operands("cpu")
    y = y.masked_fill(y == -100, 1)
    chosen = {"ignore_index": 1, "softcap": 3.0, "reduction": "sum"}
    defaults = {name: parameter.default for name, parameter in list(PARAMETERS.items())[3:]}
    args = [chosen.get(name, default) for name, default in defaults.items()]
    made = cut_cross_entropy.linear_cross_entropy(x, w, y, *args)
    agree(made, expected_of(x, w, y, **chosen), (x, w))
    assert inspect.signature(cut_cross_entropy.linear_cross_entropy).parameters == PARAMETERS


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cce_itself(reduction):
    x, w, y = operands("cpu", torch.float32)
    call = {"reduction": reduction, "shift": True, "impl": "torch_compile", "softcap": 3.0}
    with torch.compiler.set_stance("force_eager"):  # the same operations without a compiler
        theirs = cut_cross_entropy.linear_cross_entropy(x, w, y, **call)
    with ours.install():
        mine = cut_cross_entropy.linear_cross_entropy(x, w, y, **call)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    agree(mine, theirs, (x, w), TOLERANCE[torch.float32])


@with_bias
@pytest.mark.parametrize("num_items", [None, 5])
def test_transformers_patches(monkeypatch, only_flce, num_items):
    """From its own file: the package around it imports models of transformers 4.48."""
    path = Path(cut_cross_entropy.__file__).parent / "transformers" / "utils.py"
    name = "cut_cross_entropy.transformers.utils"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    options = module.PatchOptions("cce", "mean", "auto", False, False, True, True, True)
    x, w, y = operands("cpu")
    made = module.apply_lce(x, w, y, options, num_items_in_batch=num_items)
    reduction = "mean" if num_items is None else "sum"
    expected = expected_of(x, w, y, reduction=reduction, shift=1) / (num_items or 1)
    agree(made, expected, (x, w))


def test_wrong_calls_are_refused_by_cce():
    x, w, y = operands("cpu")
    with ours.install():
        function = cut_cross_entropy.linear_cross_entropy
        with pytest.raises(TypeError, match="multiple values"):
            function(x, w, y, c=w)
        with pytest.raises(TypeError, match="positional arguments"):
            function(*[x] * 20)
        with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
            function(x, w, y, top_k=1)
        for name in {"bias", "return_lse"} - PARAMETERS.keys():  # of another version
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                function(x, w, y, **{name: None})


@pytest.mark.parametrize("name", ["vocab_parallel_options", "zero3_params"])
def test_distributed_weights_are_cces(monkeypatch, name):
    if name not in PARAMETERS:
        pytest.skip("this CCE has no such argument")
    x, w, y = operands("cpu")
    given = [w] if name == "zero3_params" else cut_cross_entropy.VocabParallelOptions(0, V)
    calls = []

    def record(*args, **options):
        calls.append(options[name])
        return (x.sum(), None) if "return_lse" in PARAMETERS else x.sum()

    implementations = sys.modules["cut_cross_entropy.linear_cross_entropy"]
    monkeypatch.setattr(implementations, "cce_linear_cross_entropy", record)
    with ours.install():
        cut_cross_entropy.linear_cross_entropy(x, w, y, **{name: given})
    assert calls == [given]


def test_compile_fullgraph(only_flce):
    x, w, y = operands("cpu", torch.float32)
    module = cut_cross_entropy.LinearCrossEntropy(shift=True)
    agree(torch.compile(module, fullgraph=True, backend="aot_eager")(x, w, y),
          expected_of(x, w, y, shift=1), (x, w),
          TOLERANCE[torch.float32])  # fmt: skip


# ---- install() ----


def test_other_functions_are_refused(monkeypatch):
    def linear_cross_entropy(e, c, targets, top_k=1):
        raise NotImplementedError

    monkeypatch.setattr(cut_cross_entropy, "linear_cross_entropy", linear_cross_entropy)
    with pytest.raises(ImportError, match=rf"got {cut_cross_entropy.__version__} with .*'top_k'"):
        ours.install()
