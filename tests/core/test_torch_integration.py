"""flce together with other parts of torch: copies, pickles, parametrization, tied weights,
hooks, export, inference, and the transforms that it refuses. See also test_autograd.py and
test_library.py."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import flce
from harness import cases

TOKENS, HIDDEN, VOCAB = 24, 16, 40
SETTINGS = {
    "reduction": "sum",
    "ignore_index": -1,
    "label_smoothing": 0.1,
    "softcap": 5.0,
    "logit_scale": 0.5,
    "temperature": 1.3,
    "max_memory": "1MiB",
}


def make_loss(device, **options):
    weight = torch.rand(VOCAB, device=device, dtype=torch.float64)
    factory = {"device": device, "dtype": torch.float64}
    return flce.LinearCrossEntropyLoss(
        HIDDEN, VOCAB, bias=True, weight=weight, **factory, **options
    )


def make_head(device, **options):
    weight = torch.rand(VOCAB, device=device, dtype=torch.float64)
    factory = {"device": device, "dtype": torch.float64}
    return flce.LinearCrossEntropyHead(HIDDEN, VOCAB, class_weight=weight, **factory, **options)


MAKERS = pytest.mark.parametrize("make", [make_loss, make_head])


@pytest.fixture
def batch(device):
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.float64)
    y = torch.randint(VOCAB, (TOKENS,), device=device)
    y[::5] = -1
    return x, y


def class_weight(module):
    head = isinstance(module, flce.LinearCrossEntropyHead)
    return module.class_weight if head else module.weight


def linear(module):
    return module if isinstance(module, nn.Linear) else module.linear


def eager(module, x, y):
    layer = linear(module)
    options = {name: getattr(module, name) for name in SETTINGS if name != "max_memory"}
    options |= {"linear_bias": layer.bias, "weight": class_weight(module)}
    return flce.reference.linear_cross_entropy(x, layer.weight, y, **options)


def close(value, truth, tolerance=1e-11):
    return bool((value - truth).abs().max() <= tolerance * (1 + truth.abs().max()))


# ---- copies ----


@MAKERS
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "state_dict"])
def test_a_copy_is_the_module(device, make, way, batch):
    module = make(device, **SETTINGS)
    if way == "deepcopy":
        twin = copy.deepcopy(module)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module if way == "torch.save" else module.state_dict(), file)
        file.seek(0)
        twin = torch.load(file, weights_only=way == "state_dict")
    if way == "state_dict":
        state, twin = twin, make(device, **SETTINGS)
        twin.load_state_dict(state)
        if make is make_head:  # its class weights are not in the state_dict
            twin.class_weight = module.class_weight.clone()
    expected = module(*batch)
    assert close(expected, eager(module, *batch))
    assert torch.equal(twin(*batch), expected)
    assert repr(twin) == repr(module)
    plain = {name for name, value in vars(module).items() if isinstance(value, (str, float, int))}
    assert plain >= set(SETTINGS)
    assert all(getattr(twin, name) == getattr(module, name) for name in plain)
    with torch.no_grad():
        linear(twin).weight.zero_()
    assert torch.equal(module(*batch), expected)
    twin(*batch).backward()
    assert linear(module).weight.grad is None
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half(batch[0].bfloat16(), batch[1]).dtype == torch.float32


def test_the_loss_module_is_torchs(device):
    loss = flce.LinearCrossEntropyLoss(HIDDEN, VOCAB, bias=True, device=device)
    assert isinstance(loss.linear, nn.Linear) and str(VOCAB) in repr(loss)
    assert {name for name, _ in loss.named_parameters()} == {"linear.weight", "linear.bias"}
    if hasattr(nn, "LinearCrossEntropyLoss"):
        theirs = nn.LinearCrossEntropyLoss(HIDDEN, VOCAB, bias=True)
        assert theirs.state_dict().keys() == loss.state_dict().keys()


def test_the_head_loads_what_a_linear_saved(device, batch):
    """And the other way round: a model's checkpoint does not depend on which head it had."""
    factory = {"device": device, "dtype": torch.float64}
    plain = nn.Linear(HIDDEN, VOCAB, **factory)
    head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, ignore_index=-1, **factory)
    head.load_state_dict(plain.state_dict())
    x, y = batch
    assert torch.equal(head(x), plain(x))
    assert close(head(x, y), F.cross_entropy(plain(x), y, ignore_index=-1))
    nn.Linear(HIDDEN, VOCAB, **factory).load_state_dict(head.state_dict())
    assert head.state_dict().keys() == plain.state_dict().keys()


# ---- weights computed by other code ----


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight):
        return weight * self.mask


@MAKERS
def test_parametrized_weight(device, make, batch):
    module = make(device, **SETTINGS)
    mask = (torch.rand(VOCAB, HIDDEN, device=device) < 0.7).double()
    parametrize.register_parametrization(linear(module), "weight", Masked(mask))
    original = linear(module).parametrizations.weight.original
    loss = module(*batch)
    truth = eager(module, *batch)
    assert close(loss, truth)
    got, expected = torch.autograd.grad(loss, original), torch.autograd.grad(truth, original)
    assert close(got[0], expected[0])
    assert (got[0][mask == 0] == 0).all()
    with parametrize.cached():
        assert torch.equal(module(*batch), loss)
    parametrize.remove_parametrizations(linear(module), "weight")
    assert torch.equal(module(*batch), loss)


class Tied(nn.Module):
    """An embedding, a layer, and a head with the embedding's weight."""

    def __init__(self, device, save="auto"):
        super().__init__()
        factory = {"device": device, "dtype": torch.float64}
        self.embedding = nn.Embedding(VOCAB, HIDDEN, **factory)
        self.body = nn.Linear(HIDDEN, HIDDEN, **factory)
        self.head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, bias=False, save=save, **factory)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels=None):
        return self.head(torch.tanh(self.body(self.embedding(tokens))), labels)


@pytest.mark.parametrize("save", ["auto", *cases.SAVES])
def test_tied_embedding(device, save):
    """The sum over both uses; save="grads" may overwrite only its own memory."""
    model = Tied(device, save)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight
    assert len(list(model.parameters())) == 3
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    for step in range(4):
        tokens = torch.randint(VOCAB, (3, 8), device=device)
        labels = tokens.roll(-1, dims=1)
        labels[:, -1] = -100
        model(tokens, labels).backward()
        F.cross_entropy(twin(tokens).flatten(0, 1), labels.flatten()).backward()
        assert close(model.embedding.weight.grad, twin.embedding.weight.grad)
        if step % 2 == 0:
            continue  # the gradients of two micro-batches add up
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Adam's first steps divide a gradient by its size, which amplifies rounding errors of tiny
        # ones.
        assert close(model.embedding.weight, twin.embedding.weight, 1e-6)


# ---- export, hooks ----


@pytest.mark.parametrize("most", [64, None])
def test_export_of_a_dynamic_batch(device, most, monkeypatch):
    """save="auto" does not limit the sizes, where logits exceed max_memory either."""
    monkeypatch.setenv("FLCE_MAX_MEMORY", "64KiB")  # the logits of 9 batches
    head = flce.LinearCrossEntropyHead(4, 100, bias=False, device=device)
    x, y = torch.randn(2, 16, 4, device=device), torch.randint(100, (2, 16), device=device)
    batch = torch.export.Dim("batch", min=1, max=most)
    shapes = {"input": {0: batch}, "labels": {0: batch}}
    program = torch.export.export(head, (x, y), dynamic_shapes=shapes).module()
    rows = torch.arange(20, device=device) % 2
    assert torch.allclose(program(x, y), head(x, y))
    assert torch.allclose(program(x[rows], y[rows]), head(x[rows], y[rows]))


@MAKERS
@pytest.mark.parametrize("temperature", [torch.tensor(2.0), torch.tensor([1.0, 2.0])])
def test_repr_with_a_tensor_as_an_option(make, temperature):
    module = make("cpu")
    module.temperature = temperature
    assert f"temperature={temperature!r}" in repr(module)
    module.temperature = 1.0
    assert "temperature" not in repr(module)


def test_hooks_see_a_named_output(device, batch):
    """Not a plain tuple, and gradients of two fields; options of one call reach the loss."""
    x, y = batch[0].requires_grad_(), batch[1]
    head = make_head(device, **SETTINGS)
    seen = []
    head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    head.register_full_backward_hook(lambda module, inward, outward: seen.append(outward))
    output = head(x, y, return_lse=True, return_accuracy=True, return_predictions=True)
    assert isinstance(output, flce.LinearCrossEntropyOutput)
    (2.0 * output.loss + output.lse.sum()).backward()
    assert seen[0] is flce.LinearCrossEntropyOutput
    loss, lse, *others = seen[1]
    assert loss == 2.0 and torch.equal(lse, torch.ones_like(output.lse))
    assert others == [None] * 7
    mapped = torch.utils._pytree.tree_map(lambda value: value, output)
    assert isinstance(mapped, flce.LinearCrossEntropyOutput)


# ---- grad modes ----


def test_tensors_made_in_inference_mode(device, batch):
    """They may be used outside inference mode, as hidden states that need no gradient."""
    head = make_head(device, **SETTINGS)
    with torch.inference_mode():
        hidden = batch[0] * 1.0
    with torch.no_grad():
        assert torch.equal(head(hidden, batch[1]), head(*batch))


# ---- what is refused ----


# All public functions of flce.
REFUSED = {
    "outputs": lambda x, w, y, _: flce.linear_cross_entropy(x, w, y, return_lse=True).loss,
    "lse": lambda x, w, y, _: flce.linear_cross_entropy(x, w, y, return_lse=True).lse.sum(),
    "rows": lambda x, w, y, _: flce.linear_cross_entropy(x, w, y, reduction="none").sum(),
    "logprobs": lambda x, w, y, _: flce.linear_logprobs(x, w, y)[0].sum(),
    "entropy": lambda x, w, y, _: flce.linear_logprobs(x, w, y)[1].sum(),
    "logits": lambda x, w, y, _: flce.cross_entropy(x @ w.T, y),
    "head": lambda x, w, y, head: head(x, y),
}


@pytest.fixture(params=REFUSED)
def refused(request, device):
    x, w, y = cases.leaves(device, TOKENS, hidden=HIDDEN, vocab=VOCAB)
    head = flce.LinearCrossEntropyHead(HIDDEN, VOCAB, device=device, dtype=x.dtype)
    return lambda x: REFUSED[request.param](x, w.detach(), y, head), x.detach()


def differentiate_forward(function, x):
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "vmap": lambda function, x: torch.func.vmap(function)(torch.stack([x, x])),
    "vjp": lambda function, x: torch.func.vjp(function, x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
    "dual": differentiate_forward,
}


@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian", "jacfwd", *TRANSFORMS])
def test_transforms_say_what_to_use(refused, transform):
    message = "vmap is not supported; use the lead" if transform == "vmap" else "not supported; use"
    apply = TRANSFORMS.get(transform, lambda f, x: getattr(torch.func, transform)(f)(x))
    with pytest.raises(RuntimeError, match=f"flce: .*{message}"):
        apply(*refused)


@pytest.mark.parametrize(
    "name",
    ["linear_bias", "weight", "token_weight", "temperature", "num_items", "softcap", "target"],
)
def test_no_tangent_is_dropped(device, name):
    """Forward-mode AD of any argument is refused."""
    sizes = {"linear_bias": (5,), "weight": (5,), "num_items": (), "softcap": (), "target": (4, 5)}
    x, w = torch.randn(4, 8, device=device), torch.randn(5, 8, device=device)
    given = torch.rand(sizes.get(name, (4,)), device=device) + 0.5
    call = {"target": torch.arange(4, device=device)}
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        call[name] = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
        flce.linear_cross_entropy(x, w, **call)


def test_create_graph_says_what_to_use(refused):
    """Refused at the first backward: in a second one the gradient would be a constant."""
    function, x = refused
    x = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="double backward .*use"):
        torch.autograd.grad(function(x), x, create_graph=True)
    (grad,) = torch.autograd.grad(function(x), x)
    assert not grad.requires_grad


# ---- Modules of an earlier version ----


@MAKERS
def test_modules_without_the_newer_options(device, make, batch):
    """A Module as unpickled from an earlier version: newer attributes are missing."""
    x, y = batch
    module = make(device, ignore_index=-1)
    expected = module(x, y)
    for name in ("softcap", "logit_scale", "temperature", "z_loss", "shift", "valid_vocab"):
        del module.__dict__[name]
    assert torch.equal(module(x, y), expected)
    assert "ignore_index=-1" in repr(module)


# ---- tracing, counting and other kinds of tensors ----


def test_make_fx_of_real_tensors(batch_of_floats):
    """The valid rows are counted when the graph runs, not when it is traced."""
    x, w, y = batch_of_floats

    def step(x, w, y):
        return torch.autograd.grad(flce.linear_cross_entropy(x, w, y, ignore_index=-1), (x, w))

    traced = torch.fx.experimental.proxy_tensor.make_fx(step)(x, w, y)
    for target in (y, y.roll(1), torch.full_like(y, -1)):
        made, expected = traced(x, w, target), step(x, w, target)
        assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.fixture
def batch_of_floats(device, batch):
    x, y = batch
    return x.float().requires_grad_(), torch.randn(VOCAB, HIDDEN, device=device).requires_grad_(), y


def test_an_upstream_gradient_without_memory(batch_of_floats):
    x, w, y = batch_of_floats
    for save in ("logits", "stats"):
        loss = flce.linear_cross_entropy(x, w, y, ignore_index=-1, reduction="none", save=save)
        zero = torch._efficientzerotensor(TOKENS, device=x.device)
        assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, w), zero))


@pytest.mark.parametrize("save", ["logits", "grads", "stats", "samples"])
@pytest.mark.parametrize("trained", ["both", "input", "weight"])
def test_flops(batch_of_floats, save, trained):
    """Those of the GEMMs that run, over the rows that are not ignored on the CPU."""
    x, w, y = batch_of_floats
    leaves = [x] * (trained != "weight") + [w] * (trained != "input")
    options = {"gradient": "sampled"} if save == "samples" else {"save": save}
    x.requires_grad_(trained != "weight")
    w.requires_grad_(trained != "input")
    rows = int((y != -1).sum()) if x.is_cpu else TOKENS
    gemm = 2 * rows * HIDDEN * VOCAB
    with FlopCounterMode(display=False) as counter:
        loss = flce.linear_cross_entropy(x, w, y, ignore_index=-1, **options)
        forward = counter.get_total_flops()
        torch.autograd.grad(loss, leaves)
    gradient = 2 * rows * HIDDEN * 64 if save == "samples" else gemm
    assert forward == gemm + len(leaves) * gemm * (save == "grads")
    backward = len(leaves) * gradient + gemm * (save == "stats")
    assert counter.get_total_flops() == forward + backward * (save != "grads")


class Quantised(torch.Tensor):
    """A subclass that has rules for few operators, as quantised weights are."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"no rule for {function}")


def test_a_subclass_without_rules_is_named():
    call = {"input": torch.ones(6, HIDDEN), "target": torch.arange(6)}
    with pytest.raises(TypeError, match="^linear_weight: .*Quantised"):
        flce.linear_cross_entropy(**call, linear_weight=Quantised(torch.ones(VOCAB, HIDDEN)))


def test_jit_trace_is_refused():
    x, w = torch.ones(6, HIDDEN), torch.ones(VOCAB, HIDDEN)
    with pytest.raises(RuntimeError, match="torch.jit.trace is not supported; use"):
        torch.jit.trace(flce.linear_cross_entropy, (x, w, torch.arange(6)))


@pytest.mark.parametrize(("traced", "run"), [(7, 5000), (5000, 7)])
def test_a_symbolic_graph_keeps_its_strategy(traced, run):
    """Whatever the number of rows is: its backward reads the outputs that it was traced with."""

    def drawn(rows):
        generator = torch.Generator().manual_seed(rows)
        target = torch.randint(11, (rows,), generator=generator)
        shapes = (rows, 8), (11, 8)
        return *(torch.randn(shape, generator=generator) for shape in shapes), target

    def gradients(x, w, target):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        output = flce.linear_cross_entropy(x, w, target, max_memory="64KiB", return_lse=True)
        return output.loss, *torch.autograd.grad(output.loss + output.lse.sum(), (x, w))

    graph = make_fx(gradients, tracing_mode="symbolic")(*drawn(traced))
    for got, expected in zip(graph(*drawn(run)), gradients(*drawn(run)), strict=True):
        torch.testing.assert_close(got, expected)
