"""Uses of deferred logits that once gave another result than real ones: each against the same
model without flce.fuse."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch.utils.checkpoint import checkpoint

import flce
from harness import tiny_models
from harness.tiny_models import HIDDEN, IDS, LENGTH, VOCAB

V, H = VOCAB, HIDDEN
TARGET = (IDS * 7 + 3) % V


class Model(tiny_models.Model):
    def __init__(self):
        super().__init__(dtype=torch.float32, scale=0.5)
        self.other_head = torch.nn.Linear(H, V)
        self.extra = torch.nn.Parameter(torch.linspace(-1, 1, V))

    def forward(self, ids):
        return super().forward(ids)[1]


def cross_entropy(logits):
    return F.cross_entropy(logits.flatten(0, -2), TARGET.flatten())


def written_through_a_view(view):
    def use(model):
        logits = model(IDS)
        view(logits).mul_(2)
        return cross_entropy(logits)

    return use


def reentrant_head(model):
    x = model.embedding(IDS)
    return cross_entropy(checkpoint(model.lm_head, x, use_reentrant=True)) + x.square().sum()


def checkpointed(reentrant):
    def use(model):
        def of_rows(x):
            return cross_entropy(model.lm_head(x))

        return checkpoint(of_rows, model.embedding(IDS), use_reentrant=reentrant)

    return use


def second_head_without_gradients(model):
    logits = model(IDS)
    with torch.no_grad():
        more = model.other_head(model.embedding(IDS))
    return cross_entropy(logits + more)


def trained_vector_on_constants(model):
    with torch.no_grad():
        logits = model(IDS)
    return cross_entropy(logits + model.extra)


def vector_written_later(model):
    vector = torch.ones(V).double().cumsum(0)
    logits = model(IDS) + vector
    vector += 100 * torch.eye(V)[3]
    return cross_entropy(logits)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _LikeLiger(torch.autograd.Function):
    """Saves what its backward needs only if the input requires grad."""

    @staticmethod
    def forward(ctx, value):
        if value.requires_grad:
            ctx.save_for_backward(value.detach().softmax(-1))
        return value.detach().logsumexp(-1).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient


def frozen_but_the_bias(model):
    model.requires_grad_(False)
    model.lm_head.bias.requires_grad_(True)
    return _Identity.apply(model(IDS)).log_softmax(-1)[..., 0].sum()


def of_logits(loss_of):
    return lambda model: loss_of(model(IDS))


USES = {
    "alpha of the other": lambda model: cross_entropy(
        torch.add(torch.ones(2, LENGTH, V).double(), model(IDS), alpha=2)
    ),
    "view of a slice": written_through_a_view(lambda z: z[0].view(-1, V)[3]),
    "contiguous slice": written_through_a_view(lambda z: z[0].contiguous()[3]),
    "reshaped slice": written_through_a_view(lambda z: z[:1].reshape(-1, V)[3]),
    "classes of a slice": written_through_a_view(lambda z: z[..., :40].view(-1, 40)[3]),
    "row by a tensor": written_through_a_view(lambda z: z[torch.tensor(1)]),
    "reentrant head": reentrant_head,
    "reentrant head and loss": checkpointed(True),
    "checkpoint of head and loss": checkpointed(False),
    "second head without gradients": second_head_without_gradients,
    "trained vector on constants": trained_vector_on_constants,
    "vector written later": vector_written_later,
    "frozen but the bias": frozen_but_the_bias,
    "custom function": of_logits(_LikeLiger.apply),
    "custom function and a loss": of_logits(
        lambda z: cross_entropy(z) + _Identity.apply(z).square().mean()
    ),
    "viewed as integers": of_logits(
        lambda z: cross_entropy(z) + z.detach().view(torch.int64).sum() * 0
    ),
    "sum with a product": lambda model: cross_entropy(
        model(IDS) + F.linear(model.embedding(IDS), model.other_head.weight)
    ),
    "logsumexp and loss": of_logits(lambda z: cross_entropy(z) + z.logsumexp(-1).mean()),
}


def run(model, use):
    loss = use(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def compare(use, head=("lm_head", "other_head"), change=None, expected_warning=None):
    """Loss and gradients of two equal models of which one is fused; `change`: made to both then."""
    torch.manual_seed(0)
    plain = Model().double()
    fused = copy.deepcopy(plain)
    with flce.fuse(fused, head=list(head), when="always"):
        for model in (plain, fused) if change else ():
            torch.manual_seed(1)
            change(model.lm_head)
        loss, gradients = run(plain, use)
        told = pytest.warns(UserWarning, match=expected_warning) if expected_warning else None
        with told or contextlib.nullcontext():
            got, fused_gradients = run(fused, use)
    torch.testing.assert_close(got, loss)
    assert fused_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (gradient is None) == (fused_gradients[key] is None), key
        if gradient is not None:
            torch.testing.assert_close(fused_gradients[key], gradient)


@pytest.mark.filterwarnings("ignore:flce.fuse", "ignore:None of the inputs")
@pytest.mark.parametrize("name", USES)
def test_equals_real_logits(name):
    compare(USES[name])


def test_a_view_that_torch_refuses():
    model = Model()
    with flce.fuse(model, when="always"):
        logits = model(IDS)[:, :-1]
        assert logits.stride() == (LENGTH * V, V, 1) and not logits.is_contiguous()
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            logits.view(-1, V)


@pytest.mark.parametrize("what", ["bias", "other head"])
def test_logits_of_what_has_changed_are_refused(what):
    model = Model()
    with flce.fuse(model, head=["lm_head", "other_head"], when="always"):
        logits = model(IDS)
        if what == "bias":
            model.lm_head.bias.data = model.lm_head.bias.data.clone()
            with torch.no_grad():
                model.lm_head.bias.add_(1)
        else:
            logits = logits + model.other_head(model.embedding(IDS))
            with torch.no_grad():
                model.other_head.weight.add_(1)
        with pytest.raises(RuntimeError, match="expected the logits to be read before"):
            logits.sum()


@pytest.mark.filterwarnings("ignore:flce.fuse")
@pytest.mark.parametrize("what", ["new weight", "functional call"])
def test_logits_are_of_the_weights_of_their_call(what):
    model, weight = Model(), torch.ones(V, H, requires_grad=True)

    def results():
        if what == "functional call":
            read, logits = (
                torch.func.functional_call(model, {"lm_head.weight": weight}, (IDS,))
                for _ in range(2)
            )
            (gradient,) = torch.autograd.grad(cross_entropy(logits), weight)
            return read.detach() + 0, gradient
        before = model.lm_head.weight
        read, logits = model(IDS), model(IDS)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(V, H))
        (gradient,) = torch.autograd.grad(cross_entropy(logits), before)
        read, model.lm_head.weight = read.detach() + 0, before
        return read, gradient

    expected = results()
    with flce.fuse(model, head="lm_head", when="always") as handle:
        torch.testing.assert_close(results(), expected)
    assert handle.losses


def step(kind, **options):
    return lambda model: getattr(torch.optim, kind)(model.parameters(), 0.1, **options).step()


def step_of_zero3(model):
    """Its optimizers own copies; DeepSpeed marks the weights by ds_id, and writes to them later."""
    model.lm_head.weight.ds_id = 0
    copy = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([copy]).step()


def another_model_steps(model):
    other = copy.deepcopy(model)
    cross_entropy(other(IDS)).backward()
    step("AdamW", fused=True)(other)


def frozen_head_steps(model):
    model.lm_head.requires_grad_(False).zero_grad()
    step("AdamW", fused=True)(model)


def frozen_late_steps(model):
    """Its gradient is there already."""
    model.lm_head.requires_grad_(False)
    step("AdamW", fused=True)(model)


CHANGES = {
    "fused AdamW": step("AdamW", fused=True),
    "fused SGD": step("SGD", fused=True),
    "AdamW": step("AdamW"),
    "compiled step": lambda model: torch.compile(
        torch.optim.AdamW(model.parameters(), 0.1).step, backend="aot_eager"
    )(),
    "step after freezing": frozen_late_steps,
    "ZeRO-3's step": step_of_zero3,
    "bfloat16": lambda model: model.bfloat16(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "data": lambda model: model.lm_head.weight.data.mul_(1.1),
    "other data": lambda model: setattr(model.lm_head.weight, "data", torch.ones(V, H)),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: 2 * value for name, value in model.state_dict().items()}
    ),
}
NO_CHANGES = {
    "none": lambda model: None,
    "moved to its device": lambda model: model.to("cpu").float().eval().zero_grad(),
    "another model's step": another_model_steps,
    "a frozen head's step": frozen_head_steps,
    "the embedding's step": lambda model: torch.optim.SGD(model.embedding.parameters(), 1.0).step(),
    "a second call": lambda model: cross_entropy(model(IDS)).backward(),
}


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)
# Each mode eagerly, and one of them compiled, which takes a hundred times as long.
LATE = [(name, mode, False) for name in (*CHANGES, *NO_CHANGES) for mode in MODES]
LATE += [(name, MODES[i % 3], True) for i, name in enumerate((*CHANGES, *NO_CHANGES))]


@pytest.mark.parametrize("name, mode, compiles", LATE)
def test_logits_read_late(name, mode, compiles):
    """After a change a RuntimeError, whatever has changed the weight; else the values."""
    model = Model()
    expected = model(IDS).detach()

    def loss_and_logits(ids):
        logits = model(ids)
        return cross_entropy(logits), logits

    with flce.fuse(model, when="always", strict=True):
        with mode():
            called = torch.compile(loss_and_logits, backend="aot_eager", fullgraph=True)
            logits = (called if compiles else loss_and_logits)(IDS)[1]
            assert isinstance(logits, torch.Tensor)
        cross_entropy(model(IDS)).backward()
        {**CHANGES, **NO_CHANGES}[name](model)
        if name in CHANGES:
            with pytest.raises(RuntimeError, match="expected the logits to be read before"):
                logits.argmax(-1)
        else:
            torch.testing.assert_close(logits + 0, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_frozen_head_whose_input_is_written_to(compiles):
    """Eager autograd keeps no input of a frozen head, so that this is no error there."""
    model = Model().requires_grad_(False)
    x = torch.randn(5, H)

    def logits_of(x):
        return model.lm_head(x * 1), x

    with flce.fuse(model, when="always"):
        call = torch.compile(logits_of, backend="aot_eager") if compiles else logits_of
        logits = call(x)[0]
        logits._flce.record.sources[0].x.mul_(2)
        with pytest.raises(RuntimeError, match="got hidden states of shape .* written to"):
            logits.sum()
        logits = call(x)[0]
        if not compiles:
            logits._flce.record.sources[0].x.mul_(2)
            with pytest.raises(RuntimeError, match="give the head a copy"):
                F.cross_entropy(logits, TARGET[0, :5])


def test_logits_of_diverged_weights():
    """NaN equals NaN here."""
    model = Model()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with flce.fuse(model, when="always"), torch.no_grad():
        assert model(IDS).isnan().all()


ANEW = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": lambda m: torch.nn.utils.parametrizations.spectral_norm(m.eval()),
    "pruned": lambda m: torch.nn.utils.prune.l1_unstructured(m, "weight", 0.3),
    "weight_norm by hooks": torch.nn.utils.weight_norm,
}


@pytest.mark.parametrize("name", ANEW)
def test_a_weight_made_anew_after_fuse(name):
    """Real logits, with a warning: each use would make the weight again."""
    told = "the head is parametrized|is hooked to"
    compare(of_logits(cross_entropy), change=ANEW[name], expected_warning=told, head=["lm_head"])


def test_a_parametrized_head_is_left_alone():
    model = Model()
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.warns(UserWarning, match="it is parametrized"):
        handle = flce.fuse(model, head="lm_head", when="always")
    assert type(model(IDS)) is torch.Tensor
    handle.remove()


@pytest.mark.filterwarnings("ignore:flce.fuse")
def test_hooks_of_all_modules_see_logits():
    def doubled(module, args, output):
        return output * 2 if isinstance(module, torch.nn.Linear) else None

    def use(model):
        hook = torch.nn.modules.module.register_module_forward_hook(doubled)
        try:
            return cross_entropy(model(IDS))
        finally:
            hook.remove()

    compare(use, head=["lm_head"])


def test_a_hook_between_head_and_loss_does_not_act_on_the_loss():
    model = Model()
    expected = cross_entropy(model(IDS))
    with flce.fuse(model, when="always"):
        logits = model(IDS)
        hook = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        loss = cross_entropy(logits)
        hook.remove()
    torch.testing.assert_close(loss, expected)


def test_a_replaced_forward_is_called():
    model = Model()
    with flce.fuse(model, when="always"):
        model.lm_head.forward = lambda x: x.new_zeros(*x.shape[:-1], V)
        with pytest.warns(UserWarning, match="forward was replaced"):
            assert model(IDS).sum() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_bias_is_scaled_in_float32(dtype):
    """bias / scale is beyond float16's range."""
    torch.manual_seed(0)
    model, bias = Model(), torch.linspace(-400, 400, V).to(dtype)

    def use(model):
        return cross_entropy((model(IDS) / 3 + bias) / 1000)

    expected = use(model)
    with flce.fuse(model, when="always", strict=True):
        torch.testing.assert_close(use(model), expected)


def sizes(z):
    return F.cross_entropy(z.view(-1, z.size(-1)), TARGET.flatten()) * (z.dim() + len(z))


def numbers_of(z):
    count = z.numel() + torch.numel(z) + z.element_size() + z.ndimension() + z.get_device()
    return cross_entropy(z) * count if z.is_floating_point() and not z.is_complex() else None


def comparisons(z):
    finite = (z == z) & ~(z != z) & (z >= -1e9)
    return cross_entropy(torch.where(finite, z, 0.0))


@pytest.mark.filterwarnings("ignore:flce.fuse")
@pytest.mark.parametrize("use", [sizes, numbers_of, comparisons])
def test_compiled(use):

    def compiled(model):
        return torch.compile(lambda ids: use(model(ids)), backend="aot_eager")(IDS)

    compare(compiled, head=["lm_head"])
