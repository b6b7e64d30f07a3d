"""flce.integrations.verl against verl's own torch loss, on the CPU, where its Triton kernel does
not run: what stands for that one is compared with an eager loss."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from flce.integrations import verl as ours
from harness.operands import H, N, V, agree, leaf
from harness.processes import run_on_ranks
from harness.tiny_models import LogitsMade

torch_functional = pytest.importorskip("verl.utils.experimental.torch_functional")
kernel = pytest.importorskip("verl.utils.kernel.linear_cross_entropy")


def operands(dtype=torch.float32, shape=(2, N)):
    x, w = (leaf(*size, device="cpu", dtype=dtype) for size in ((*shape, H), (V, H)))
    return x, w, torch.randint(V, shape)


def ppo(x, w, y, backend="torch"):
    """(log-probabilities, entropy) and the gradients of a policy's loss of both."""
    module = torch_functional.FusedLinearForPPO(chunk_size=16, impl_backend=backend)
    made = module(x, w, y, 0.7)
    ratio = torch.linspace(-1, 1, y.numel()).view(y.shape)
    total = (made[0] * ratio).sum() - 0.3 * made[1].float().sum()
    return (*made, *torch.autograd.grad(total, (x, w)))


@pytest.fixture
def only_flce(monkeypatch):
    for function in (torch_functional.FusedLinearForPPOFunction, kernel.LinearCrossEntropy):

        @functools.wraps(function.forward)  # install() reads its signature
        def fail(*_, **__):
            raise AssertionError("verl's own loss ran")

        monkeypatch.setattr(function, "forward", staticmethod(fail))


@pytest.mark.parametrize("shape", [(N,), (2, N)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module(dtype, shape, request):
    x, w, y = operands(dtype, shape)
    exact = ppo(x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), y)
    theirs = ppo(x, w, y)
    with ours.install():
        request.getfixturevalue("only_flce")
        mine = ppo(x, w, y)
    for a, b, truth in zip(mine, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, their_error = ((v.double() - truth).norm() for v in (a, b))
        assert error <= 1.5 * their_error + 1e-6 * truth.norm()


def test_module_under_autocast(request):
    x, w, y = operands()
    module = torch_functional.FusedLinearForPPO()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        theirs = module(x, w, y)
        with ours.install():
            request.getfixturevalue("only_flce")
            mine = torch_functional.FusedLinearForPPO()(x, w, y)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_both_backends_are_served(only_flce):
    x, w, y = operands()
    with ours.install():
        for a, b in zip(ppo(x, w, y), ppo(x, w, y, "liger"), strict=True):
            assert torch.equal(a, b)


def test_kernel(only_flce):
    x, w, y = operands(torch.float64)
    with ours.install():
        made = kernel.linear_cross_entropy(x, w, y, 0.7, "none")
        assert [(v.dtype, v.shape) for v in made] == [(torch.float32, (2 * N,))] * 2
        log_p = (F.linear(x, w) / 0.7).log_softmax(-1).flatten(0, 1)
        agree(made[0].double(), log_p.gather(1, y.view(-1, 1)).squeeze(1), (x, w), 1e-6)
        _, entropy = kernel.linear_cross_entropy(x, w, y, 0.7, "NONE")
        log_p = (F.linear(x, w) / 0.7).log_softmax(-1).flatten(0, 1)
        agree(entropy.double(), -(log_p.exp() * log_p).sum(-1), (x, w), 1e-6)


def tensor_parallel():
    """As Megatron's workers call it: hidden states (S, 1, H), labels (1, S), a rank's classes."""
    rank, ranks, classes = dist.get_rank(), dist.get_world_size(), 12
    x, w = (leaf(*size, device="cpu") for size in ((N, 1, H), (classes, H)))
    y, upstream = torch.randint(classes, (1, N)), torch.randn(2, N)
    log_p = (F.linear(x[:, 0], w) / 0.7).log_softmax(-1)
    expected = log_p.gather(1, y.view(-1, 1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    expected = torch.stack(expected)
    for_x, for_w = torch.autograd.grad((expected * upstream).sum(), (x, w))
    part = slice(rank * classes // ranks, (rank + 1) * classes // ranks)
    shard = w.detach()[part].requires_grad_()
    with ours.install() as handle:
        made = kernel.linear_cross_entropy(x, shard, y, 0.7, "none", dist.group.WORLD)
        made = torch.stack(made).double()
        term, of_shard = torch.autograd.grad((made * upstream).sum(), (x, shard))
    assert handle.calls == {"flce": 1}
    assert ranks == 1 or (term - for_x).norm() > 0.1 * for_x.norm()
    dist.all_reduce(term)  # as the backward of Megatron's gather
    for value, right in ((made, expected), (term, for_x), (of_shard, for_w[part])):
        torch.testing.assert_close(value, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel(ranks):
    run_on_ranks(ranks, tensor_parallel)


def test_other_reductions_are_verls(only_flce):
    x, w, y = operands()
    with ours.install(), pytest.raises(AssertionError, match="verl's own loss ran"):
        kernel.linear_cross_entropy(x, w, y, 1.0, "sum", None)


def test_no_tensor_of_all_logits(monkeypatch):
    monkeypatch.setenv("FLCE_MAX_MEMORY", f"{8 * 64 * 4}")  # 8 rows of logits
    x, w = leaf(2, N, H, device="cpu"), leaf(64, H, device="cpu")
    y = torch.randint(64, (2, N))
    with ours.install(), LogitsMade(2 * N, 64) as made:
        ppo(x, w, y)
        log_probs, entropy = kernel.linear_cross_entropy(x, w, y, 0.7, "none")
        (log_probs - entropy).sum().backward()
    assert not made.found
    with LogitsMade(2 * N, 64) as made:
        F.linear(x, w)
    assert made.found


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_verls_forwards(only_flce, backend):
    """The forwards that verl puts into transformers' models."""
    from verl.models.transformers import dense_common

    from harness.tiny_models import tiny_llama

    model = tiny_llama()
    ids = torch.arange(24).view(2, 12) % 19
    forward = getattr(dense_common, f"forward_with_{backend}_backend")
    with ours.install():
        made = forward(model, input_ids=ids, return_dict=True, temperature=0.7)
    log_p = (model(ids).logits / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
    torch.testing.assert_close(made.log_probs.view(2, 12), expected)
    torch.testing.assert_close(made.entropy.view(2, 12), -(log_p.exp() * log_p).sum(-1))


# ---- install() ----


def test_other_functions_are_refused(monkeypatch):
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0, softcap=None):
        raise NotImplementedError

    monkeypatch.setattr(torch_functional.FusedLinearForPPO, "forward", forward)
    with pytest.raises(ImportError, match=r"FusedLinearForPPO takes .*got 0.* with .*'softcap'"):
        ours.install()
