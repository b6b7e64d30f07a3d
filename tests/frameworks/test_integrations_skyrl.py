"""flce.integrations.skyrl against the torch backend of SkyRL's fused head, on one and two ranks."""

import importlib
import sys

import pytest
import torch
import torch.distributed as dist

from flce.integrations import skyrl as ours
from harness.processes import run_on_ranks
from harness.tiny_models import LogitsMade

if sys.version_info < (3, 12):  # pydantic refuses the TypedDict of skyrl.tinker.types
    pytest.skip("SkyRL 0.3 is imported by Python 3.12 and later", allow_module_level=True)
pytest.importorskip("skyrl")
pytest.importorskip("megatron.core")

B, S, H, V = 2, 11, 6, 64
TEMPERATURE = 0.7


def theirs():
    return importlib.import_module(ours._MODULE)


def operands(dtype=torch.float32):
    """Hidden states and tokens of all ranks, this rank's classes, upstream gradients."""
    hidden, weight = (torch.randn(*size).to(dtype) for size in ((B, S, H), (V, H)))
    share = V // dist.get_world_size()
    bounds = dist.get_rank() * share, (dist.get_rank() + 1) * share
    tokens, upstream = torch.randint(V, (B, S)), torch.randn(B, S - 1)
    shard = weight[slice(*bounds)].clone()
    return hidden.requires_grad_(), shard.requires_grad_(), tokens, bounds, upstream


def logprobs_of(hidden, shard, tokens, bounds, chunk_size=4, **options):
    """What a worker calls, with both layouts: padded, packed."""
    group, (count, length, _) = dist.group.WORLD, hidden.shape
    options |= {"chunk_size": chunk_size, "temperature": TEMPERATURE}
    made = theirs().from_parallel_hidden_to_logprobs(
        hidden, shard, tokens, *bounds, group, cp_group=None, **options
    )
    rows, ends = (hidden.reshape(1, -1, H), shard, tokens.reshape(1, -1)), torch.arange(count + 1)
    packed = theirs().from_parallel_hidden_to_logprobs_packed_sequences(
        *rows, ends * length, length, *bounds, group, **options
    )
    return made, packed


def entropy_of(hidden, shard):
    function = theirs()._fused_vocab_parallel_entropy_from_hidden
    with torch.no_grad():
        return function(hidden, shard, dist.group.WORLD, 4, TEMPERATURE)


def values_and_gradients(hidden, shard, tokens, bounds, upstream):
    made = logprobs_of(hidden, shard, tokens, bounds)
    total = sum((value * upstream).sum() for value in made)
    return (*made, *torch.autograd.grad(total, (hidden, shard)), entropy_of(hidden, shard))


def equal_to_skyrl():
    given = operands()
    expected = values_and_gradients(*given)
    with ours.install() as handle:
        made = values_and_gradients(*given)
    assert handle.calls == {"flce": 3}
    for value, right in zip(made, expected, strict=True):
        assert value.dtype == right.dtype and value.requires_grad == right.requires_grad
        torch.testing.assert_close(value, right, rtol=2e-5, atol=2e-5)
    whole = made[2].clone()
    dist.all_reduce(whole)
    if dist.get_world_size() > 1:  # a term, as SkyRL's
        assert (made[2] - whole).norm() > 0.1 * whole.norm()


def narrow():
    """bfloat16, and hidden states in float32 with a bfloat16 weight: SkyRL's own distance from
    float32 is the measure."""
    hidden, shard, *rest = operands(torch.bfloat16)
    wide = (value.detach().float().requires_grad_() for value in (hidden, shard))
    exact = values_and_gradients(*wide, *rest)
    for first in (hidden, hidden.detach().float().requires_grad_()):
        expected = values_and_gradients(first, shard, *rest)
        with ours.install():
            made = values_and_gradients(first, shard, *rest)
        for value, right, truth in zip(made, expected, exact, strict=True):
            assert value.dtype == right.dtype
            error, their_error = ((v.float() - truth).norm() for v in (value, right))
            assert error <= 1.5 * their_error + 1e-6 * truth.norm()


def sums_in_float32():
    """The weight's gradient, over chunks, as SkyRL: a sum in bfloat16 doubles the error here."""
    hidden, tokens = torch.randn(1, 512, H).bfloat16(), torch.randint(V, (1, 512))
    weight, upstream = torch.randn(V, H).bfloat16().requires_grad_(), torch.randn(1, 511)

    def gradient(weight):
        made, _ = logprobs_of(hidden, weight, tokens, (0, V))
        return torch.autograd.grad((made * upstream).sum(), weight)[0].float()

    exact, errors = gradient(weight.detach().float().requires_grad_()), []
    with pytest.MonkeyPatch.context() as patch, ours.install():
        for limit in ("64MiB", f"{8 * V * 2}"):  # one chunk, chunks of 8 rows
            patch.setenv("FLCE_MAX_MEMORY", limit)
            errors.append((gradient(weight) - exact).norm())
    assert errors[1] <= 1.2 * errors[0]


def without_a_graph():
    hidden, shard, tokens, bounds, _ = operands()
    with ours.install():
        made = logprobs_of(hidden, shard, tokens, bounds)
        for value, right in zip(
            logprobs_of(hidden, shard, tokens, bounds, inference_only=True), made, strict=True
        ):
            assert not value.requires_grad and right.requires_grad
            assert torch.equal(value, right)
        assert not entropy_of(hidden, shard).requires_grad


def no_tensor_of_all_logits():
    hidden, shard, tokens, bounds, _ = operands()
    with pytest.MonkeyPatch.context() as patch, ours.install():
        patch.setenv("FLCE_MAX_MEMORY", f"{4 * V * 4}")  # 4 rows of logits
        with LogitsMade(B * S, V) as made:
            sum(value.sum() for value in logprobs_of(hidden, shard, tokens, bounds)).backward()
            entropy_of(hidden, shard)
        assert not made.found
    with LogitsMade(B * S, V) as made:  # SkyRL's, in one chunk
        logprobs_of(hidden, shard, tokens, bounds, chunk_size=None)
    assert made.found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [equal_to_skyrl, narrow])
def test_against_skyrl(case, ranks):
    run_on_ranks(ranks, case)


@pytest.mark.parametrize("case", [sums_in_float32, without_a_graph, no_tensor_of_all_logits])
def test_on_one_rank(case):
    run_on_ranks(1, case)


# ---- install() ----


def test_workers_call_flce():
    """The entropy is imported by name: the worker's module has a binding of its own."""
    module, name = theirs(), "_fused_vocab_parallel_entropy_from_hidden"
    original = getattr(module, name)
    worker = type(sys)("worker")
    setattr(worker, name, original)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "worker", worker)
        with ours.install():
            assert getattr(worker, name) is getattr(module, name) is not original
        assert getattr(worker, name) is getattr(module, name) is original


def test_other_functions_are_refused(monkeypatch):
    def function(backend, hidden, weight, target, softcap):
        raise NotImplementedError

    monkeypatch.setattr(theirs(), "_fused_lm_head_logprob_apply", function)
    with pytest.raises(ImportError, match=r"got 0\.3.* with .*'softcap'"):
        ours.install()
