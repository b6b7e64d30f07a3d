"""DTensor operands of linear_cross_entropy, in four processes over gloo."""

import contextlib
import functools
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import same_bits
from packaging.version import Version
from processes import on_ranks

import flce

RANKS, TOKENS, HIDDEN = 4, 12, 8
# Rows of linear_weight on each rank by torch.chunk: 3, 3, 3, 1 and 2, 2, 1, 0.
VOCABS = (10, 5)
OPTIONS = (
    {},
    {"reduction": "none", "label_smoothing": 0.1},
    {"reduction": "sum", "softcap": 5.0, "z_loss": 0.1, "save": "stats"},
    {"save": "grads"},
)


def whole_mesh():
    return dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


def square_mesh():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def operands_of(vocab, dtype=torch.float64, shape=(TOKENS,)):
    generator = torch.Generator().manual_seed(vocab)

    def made(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=dtype)

    target = torch.randint(vocab, shape, generator=generator)
    target.view(-1)[3] = -100
    return made(*shape, HIDDEN), made(vocab, HIDDEN), made(vocab), target


def leaf(tensor, mesh, placement):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, [placement]).requires_grad_()


def assert_close(got, expected, case):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13, msg=lambda m: f"{case}: {m}")


def check(mesh, vocab, tokens, options, shape=(TOKENS,), with_bias=True):
    """A call with DTensors against one with the whole operands."""
    from torch.distributed.tensor import DTensor, Shard

    case = f"V={vocab} {tokens} {options}"
    x, w, b, target = operands_of(vocab, shape=shape)
    whole = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    bias = {"linear_bias": whole[2]} if with_bias else {}
    output = flce.linear_cross_entropy(*whole[:2], target, return_lse=True, **bias, **options)
    upstream = torch.linspace(0.5, 2.0, output.loss.numel(), dtype=x.dtype)
    upstream = upstream.view_as(output.loss)
    output.loss.backward(upstream)
    parts = leaf(x, mesh, tokens), leaf(w, mesh, Shard(0)), leaf(b, mesh, Shard(0))
    bias = {"linear_bias": parts[2]} if with_bias else {}
    got = flce.linear_cross_entropy(*parts[:2], target, return_lse=True, **bias, **options)
    assert type(got.loss) is type(got.lse) is torch.Tensor, case
    assert_close(got.loss, output.loss, case)
    assert_close(got.lse, output.lse, case)
    got.loss.backward(upstream)
    for part, full in zip(parts, whole, strict=True):
        if full.grad is None:
            assert part.grad is None, case
            continue
        assert isinstance(part.grad, DTensor) and part.grad.placements == part.placements, case
        assert part.grad.shape == full.shape, case
        assert_close(part.grad.full_tensor(), full.grad, case)


@on_ranks(RANKS)
def test_options():
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    for vocab in VOCABS:
        for tokens in (Replicate(), Shard(0)):
            for options in OPTIONS:
                check(mesh, vocab, tokens, options)
    check(mesh, 10, Shard(0), {"shift": 1}, shape=(4, 5), with_bias=False)
    check(square_mesh()["tp"], 10, Replicate(), {})


@on_ranks(RANKS)
def test_vectors():
    """Class weights and targets in every form that is allowed, no_grad, linear_logprobs."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    weight = torch.linspace(0.5, 2.0, 10, dtype=x.dtype)
    expected = flce.linear_cross_entropy(x, w, target, weight=weight)
    rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
    whole = distribute_tensor(target, mesh, [Replicate()])
    for given in (weight, distribute_tensor(weight, mesh, [Replicate()])):
        for labels in (target, whole):
            loss = flce.linear_cross_entropy(rows, head, labels, weight=given)
            assert_close(loss, expected, "class weights")
    replicate = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Replicate()])
    per_row = torch.linspace(0.5, 2.0, TOKENS, dtype=x.dtype)
    bounds = torch.tensor([0, 5, TOKENS])
    for options in (
        {"temperature": per_row},
        {"token_weight": per_row, "num_items": torch.tensor(7.0)},
        {"shift": 1, "cu_seqlens": bounds},
    ):
        expected = flce.linear_cross_entropy(x, w, target, **options)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                given = {**options, name: replicate(value)}
                loss = flce.linear_cross_entropy(rows, head, target, **given)
                assert_close(loss, expected, name)
    with torch.no_grad():
        plain = flce.linear_cross_entropy(x, w, target)
        assert_close(flce.linear_cross_entropy(rows, head, target), plain, "no_grad")
        logprobs, entropy = flce.linear_logprobs(rows, head, target)
        for got, want in zip((logprobs, entropy), flce.linear_logprobs(x, w, target), strict=True):
            assert_close(got, want, "linear_logprobs")


@on_ranks(RANKS)
def test_torch_options():
    """torch's options=, from which each rank derives the same chunks whatever its share."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(33)  # 9, 9, 9 and 6 rows, whose logits take 128 and 64 bytes
    expected = flce.linear_cross_entropy(x, w, target)
    options = types.SimpleNamespace(acc_dtype=None, acc_policy="compact", batch_chunk_size=2)
    rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
    loss = flce.linear_cross_entropy(rows, head, target, options=options, save="grads")
    assert_close(loss, expected, "options")
    loss.backward()


@on_ranks(RANKS)
def test_pending():
    """An input whose gathering has not been waited for."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    expected = x.clone().requires_grad_()
    flce.linear_cross_entropy(expected, w, target).backward()
    divided, head = leaf(x, mesh, Shard(0)), leaf(w, mesh, Shard(0))
    pending = divided.redistribute(placements=[Replicate()], async_op=True)
    flce.linear_cross_entropy(pending, head, target).backward()
    assert_close(divided.grad.full_tensor(), expected.grad, "pending")


@on_ranks(RANKS)
def test_split():
    """The gradient of the input, then that of the weight, which needs no collective."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    whole = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = torch.autograd.grad(flce.linear_cross_entropy(*whole, target), whole)
    for save in ("logits", "stats", "grads"):
        rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
        loss = flce.linear_cross_entropy(rows, head, target, save=save)
        of_rows = torch.autograd.grad(loss, rows, retain_graph=True)[0]
        with monitored(dist) as calls:
            of_head = torch.autograd.grad(loss, head)[0]
        assert not calls, save
        for got, want in zip((of_rows, of_head), expected, strict=True):
            assert_close(got.full_tensor(), want, f"split, {save}")


@contextlib.contextmanager
def monitored(module):
    """A list of the exchanges that begin in the block."""
    calls, exchange = [], module.all_to_all_single

    def counted(*args, **options):
        calls.append(args)
        return exchange(*args, **options)

    module.all_to_all_single = counted
    try:
        yield calls
    finally:
        module.all_to_all_single = exchange


@on_ranks(RANKS)
def test_adapter():
    """A low-rank term whose weight is divided as linear_weight."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    low, up = torch.randn(TOKENS, 3, dtype=x.dtype), torch.randn(10, 3, dtype=x.dtype)
    for tensor in (low, up):
        dist.broadcast(tensor, 0)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, low, up)]
    options = {"adapter_input": inputs[1], "adapter_weight": inputs[2]}
    flce.linear_cross_entropy(inputs[0], w, target, **options).backward()
    parts = leaf(x, mesh, Replicate()), leaf(low, mesh, Replicate()), leaf(up, mesh, Shard(0))
    options = {"adapter_input": parts[1], "adapter_weight": parts[2]}
    head = leaf(w, mesh, Shard(0)).requires_grad_(False)
    flce.linear_cross_entropy(parts[0], head, target, **options).backward()
    for part, full in zip(parts, inputs, strict=True):
        assert_close(part.grad.full_tensor(), full.grad, "adapter")


@on_ranks(RANKS)
def test_refusals():
    """Each before any collective, on all ranks alike."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, square = whole_mesh(), square_mesh()
    x, w, b, target = operands_of(10)
    rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
    bias = leaf(b, mesh, Shard(0))
    both = distribute_tensor(w, square, [Shard(0), Shard(0)])
    other = square["tp"]
    vp = flce.VocabParallel(mesh, vocab=10)
    partial = DTensor.from_local(x, mesh, [Partial()])
    every = "register_fsdp_forward_method.*to_local"
    replicated, elsewhere = leaf(w, mesh, Replicate()), leaf(x, other, Replicate())
    columns, odd = leaf(x, mesh, Shard(1)), leaf(x[:9], mesh, Shard(0))
    vector = leaf(x[0], mesh, Shard(0))
    wide = distribute_tensor(x, square, [Replicate()] * 2)
    cap = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()])  # 12 on 4 ranks
    for operands, options, message in (
        ((x, head), {}, f"linear_weight: expected a plain .*LinearCrossEntropyHead.*{every}"),
        ((x, both), {}, f"linear_weight: expected a plain .*{every}"),
        ((wide, both), {}, f"linear_weight: expected .* a mesh of one dimension.*{every}"),
        ((rows, w), {}, "linear_weight: expected a DTensor .* as input is a DTensor, got a plain"),
        ((rows, replicated), {}, r"linear_weight: expected .*Shard\(dim=0\) on .*got .*Replicate"),
        ((partial, head), {}, r"input: expected .*Replicate\(\) or Shard\(dim=0\).*got .*Partial"),
        ((columns, head), {}, r"input: expected .*Shard\(dim=0\).*got .*Shard\(dim=1\)"),
        ((odd, head), {}, r"input: expected a first dimension that 4 ranks share.*\(9, 8\)"),
        ((vector, head), {}, r"input: expected a first dimension that 4 ranks share.*\(8,\)"),
        ((elsewhere, head), {}, "input: expected .* that of linear_weight, got"),
        ((rows, head), {"vocab_parallel": vp}, "vocab_parallel: expected None with .*input"),
        ((x, head), {"vocab_parallel": vp}, "vocab_parallel: expected None with .*linear_weight"),
        ((rows, head), {"linear_bias": b}, "linear_bias: expected a DTensor .* got a plain"),
        ((x, w), {"linear_bias": bias}, "linear_weight: expected .* as linear_bias is a DTensor"),
        ((rows, head), {"accumulate_into": "grad"}, "accumulate_into: expected a plain tensor as"),
        ((x, w), {"softcap": cap}, "linear_weight: expected .* as softcap is a DTensor"),
        ((rows, head), {"softcap": cap}, r"softcap: expected .*Replicate\(\).*got .*Partial"),
        ((rows, head), {"token_weight": columns}, r"token_weight: expected .*Replicate\(\).*Shard"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            labels = target[: operands[0].shape[0]]
            flce.linear_cross_entropy(*operands, labels, **options)
    with pytest.raises(ValueError, match="linear_weight: expected .* as target is a DTensor"):
        flce.linear_cross_entropy(x, w, distribute_tensor(target, mesh, [Replicate()]))
    soft = torch.ones(TOKENS, 10, dtype=x.dtype)
    with pytest.raises(ValueError, match="target: expected class indices with vocab_parallel"):
        flce.linear_cross_entropy(rows, head, soft)


@on_ranks(RANKS)
def test_modules():
    """vocab_parallel as an option of the Modules, with class weights."""
    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    weight = torch.linspace(0.5, 2.0, 10, dtype=x.dtype)
    expected = flce.linear_cross_entropy(x, w, target, weight=weight)
    first, end = min(3 * mesh.get_local_rank(), 10), min(3 * mesh.get_local_rank() + 3, 10)
    vp = flce.VocabParallel(mesh, vocab=10)
    options = {"dtype": x.dtype, "vocab_parallel": vp, "valid_vocab": 10}
    size = HIDDEN, end - first
    head = flce.LinearCrossEntropyHead(*size, bias=False, class_weight=weight, **options)
    loss = flce.LinearCrossEntropyLoss(*size, weight=weight, **options)
    for module, linear in ((head, head), (loss, loss.linear)):
        linear.weight.data.copy_(w[first:end])
        assert module.vocab_parallel == vp and repr(vp) in repr(module)
        assert_close(module(x, target), expected, type(module).__name__)
    with pytest.raises(ValueError, match=r"class_weight: expected shape \(10,\), a factor"):
        flce.LinearCrossEntropyHead(HIDDEN, end - first, class_weight=weight[:5], **options)
    with pytest.raises(ValueError, match="valid_vocab: expected an int from 1 to 10"):
        flce.LinearCrossEntropyHead(HIDDEN, end - first, **{**options, "valid_vocab": 11})
    with pytest.raises(TypeError, match="vocab_parallel: expected a flce.VocabParallel"):
        flce.LinearCrossEntropyHead(HIDDEN, 10, vocab_parallel=mesh)


@on_ranks(RANKS)
def test_bits():
    """Two runs are equal, and all ranks have the same loss."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(10, torch.float32)
    runs = []
    for _ in range(2):
        rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
        loss = flce.linear_cross_entropy(rows, head, target)
        loss.backward()
        grads = {"dX": rows.grad.to_local(), "dW": head.grad.to_local()}
        runs.append({"loss": loss.detach(), **grads})
    assert same_bits(*runs)
    losses = [torch.empty(()) for _ in range(RANKS)]
    dist.all_gather(losses, runs[0]["loss"])
    assert len({loss.item() for loss in losses}) == 1


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="torch 2.11 cannot trace a DeviceMesh"
)
@on_ranks(RANKS)
def test_compiled():
    from torch.distributed.tensor import Replicate, Shard

    mesh = whole_mesh()
    x, w, _, target = operands_of(10)
    expected = F.cross_entropy(x @ w.T, target)
    compiled = torch.compile(flce.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    rows, head = leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))
    loss = compiled(rows, head, target)
    loss.backward()
    assert_close(loss, expected, "compiled")
    assert head.grad.placements == (Shard(0),)
