"""DTensor operands of linear_cross_entropy, in four processes over gloo."""

import itertools
import types
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version

import flce
from harness import cases
from harness.meshes import square_mesh, whole_mesh
from harness.processes import on_ranks

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

RANKS, TOKENS, HIDDEN = 4, 12, 8
# Rows of linear_weight on each rank by torch.chunk: 3, 3, 3, 1 and 2, 2, 1, 0.
VOCABS = (10, 5)
OPTIONS = (
    {},
    {"reduction": "none", "label_smoothing": 0.1},
    {"reduction": "sum", "softcap": 5.0, "z_loss": 0.1, "save": "stats"},
    {"save": "grads"},
)


ADAPTER = torch.linspace(-3, 3, 30).double().cos().view(10, 3)


def operands_of(vocab, shape=(TOKENS,), dtype=torch.float64):
    """The whole tensors of a call by name, with a bias and an ignored row."""
    generator = torch.Generator().manual_seed(vocab)
    sizes = {"input": (*shape, HIDDEN), "linear_weight": (vocab, HIDDEN), "linear_bias": (vocab,)}
    made = {n: torch.randn(*s, generator=generator, dtype=dtype) for n, s in sizes.items()}
    made["target"] = torch.randint(vocab, shape, generator=generator)
    made["target"].view(-1)[3] = -100
    return made


def three(vocab=10):
    """(input, linear_weight, target)"""
    whole = operands_of(vocab)
    return whole["input"], whole["linear_weight"], whole["target"]


def leaf(tensor, mesh, placement):
    return distribute_tensor(tensor, mesh, [placement]).requires_grad_(tensor.is_floating_point())


def rows_and_head(mesh):
    """The input as a DTensor on all ranks, and the weight divided by its rows."""
    x, w, _ = three()
    return leaf(x, mesh, Replicate()), leaf(w, mesh, Shard(0))


def assert_close(got, expected, case):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13, msg=lambda m: f"{case}: {m}")


LEARNED = ("input", "linear_weight", "linear_bias", "adapter_input", "adapter_weight")


def check(mesh, whole, placements, frozen=(), function=flce.linear_cross_entropy, **options):
    """A call in which the tensors with `placements` are DTensors against one with whole tensors:
    outputs, and the gradients of the DTensors that are not frozen. `whole`: by name."""
    case = f"V={len(whole['linear_weight'])} {placements} {options}"
    results, leaves = [], []
    for is_sharded in (False, True):
        given = {name: tensor.clone() for name, tensor in whole.items()}
        for name in (name for name in placements if name in whole):
            if is_sharded:
                given[name] = leaf(whole[name], mesh, placements[name])
            given[name].requires_grad_(name in LEARNED and name not in frozen)
        leaves.append({name: value for name, value in given.items() if value.requires_grad})
        call = [given.pop(name) for name in ("input", "linear_weight", "target")]
        made = [one for one in function(*call, **given, **options) if one is not None]
        assert all(type(one) is torch.Tensor for one in made), case
        upstream = [torch.linspace(0.5, 2.0, one.numel()).double().view_as(one) for one in made]
        torch.autograd.backward(made, upstream)
        with torch.no_grad():
            made += [one for one in function(*call, **given, **options) if one is not None]
        results.append(made)
    for got, expected in zip(*reversed(results), strict=True):
        assert_close(got, expected, case)
    for name, one in leaves[0].items():
        part = leaves[1][name]
        assert part.grad.placements == part.placements and part.grad.shape == one.shape, case
        assert_close(part.grad.full_tensor(), one.grad, f"{case}, {name}")


@on_ranks(RANKS)
def test_equals_a_call_with_whole_tensors():
    """Options, and the tensors of a call in every form that is allowed."""
    mesh, every, rows = whole_mesh(), Replicate(), Shard(0)
    divided = {"input": every, "linear_weight": rows, "linear_bias": rows}
    for vocab, tokens, options in itertools.product(VOCABS, (every, rows), OPTIONS):
        check(mesh, operands_of(vocab), {**divided, "input": tokens}, **options, return_lse=True)
        whole = operands_of(vocab)
        whole |= {"adapter_input": whole["input"][:, :3].sin(), "adapter_weight": ADAPTER[:vocab]}
        of_adapter = {"input": tokens, "adapter_input": tokens, "adapter_weight": rows}
        for frozen in ((), ("linear_weight",)):
            more = {"frozen": frozen, "return_entropy": True, "max_memory": 512}
            check(mesh, whole, {**divided, **of_adapter}, **more, **options)
    for vocab, save in itertools.product(VOCABS, ("auto", "logits", "stats")):
        options = {"softcap": 4.0, "temperature": 0.7, "save": save}
        check(mesh, operands_of(vocab), divided, function=flce.linear_logprobs, **options)
    check(square_mesh()["tp"], operands_of(10), divided, return_lse=True)
    for vocab, save, rows_of_chunk in itertools.product((5, 33), cases.SAVES, (1, 3)):
        # torch's: each rank derives the same chunks whatever its share; 9, 9, 9 and 6 rows of 33.
        torchs = {"acc_dtype": None, "acc_policy": "compact", "batch_chunk_size": rows_of_chunk}
        torchs = types.SimpleNamespace(**torchs)
        check(mesh, operands_of(vocab), divided, options=torchs, save=save, return_lse=True)
    vector, sequences = torch.linspace(0.5, 2.0, TOKENS).double(), operands_of(10, (4, 5))
    for more, options in (
        ({"weight": torch.linspace(0.5, 2.0, 10).double()}, {}),
        ({"temperature": vector}, {}),
        ({"token_weight": vector, "num_items": torch.tensor(7.0)}, {}),
        ({"cu_seqlens": torch.tensor([0, 5, TOKENS])}, {"shift": 1}),
    ):
        whole = {**operands_of(10), **more}
        check(mesh, whole, divided, return_lse=True, **options)
        for name in ("target", *more):
            check(mesh, whole, {**divided, name: every}, return_lse=True, **options)
    check(mesh, sequences, {**divided, "input": rows}, shift=1, return_lse=True)


@on_ranks(RANKS)
def test_k_classes_and_logits_of_a_teacher():
    """Replicated DTensors as the ids, their numbers and the rows' factors; a teacher's logits also
    as a head with a sharded weight gives them."""
    mesh, every, (x, w, target) = whole_mesh(), Replicate(), three()
    ids, chances = target.clamp(min=0)[:, None] + torch.arange(3), torch.rand(TOKENS, 3).double()
    factor, items = torch.linspace(0.5, 2.0, TOKENS).double(), torch.tensor(7.0)
    logits, logs = torch.randn(TOKENS, 10).double(), chances.log_softmax(-1)
    ids %= 10

    def chosen(a, b, d):
        return flce.linear_logprobs_at(a, b, d(ids)).sum()

    def sparse(a, b, d):
        named = {"token_weight": d(factor), "num_items": d(items)}
        return flce.linear_cross_entropy(a, b, (d(ids), d(chances)), **named)

    def known(a, b, d):
        pair = d(ids), d(logs)
        return flce.linear_divergence(a, b, teacher_logits=pair, token_weight=d(factor))

    def whole(placement):
        def spread(tensor):
            return distribute_tensor(tensor, mesh, [placement if tensor.dim() else every])

        return spread

    calls = [(call, whole(every)) for call in (chosen, sparse, known)]
    for placement in (every, Shard(1), Shard(-1)):
        calls.append(
            (
                lambda a, b, d: flce.linear_divergence(a, b, teacher_logits=d(logits)),
                whole(placement),
            )
        )
    for call, spread in calls:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        expected = call(*leaves, lambda tensor: tensor)
        grads = torch.autograd.grad(expected, leaves)
        for rows in (every, Shard(0)):
            divided = leaf(x, mesh, rows), leaf(w, mesh, Shard(0))
            made = call(*divided, spread)
            assert_close(made, expected, "K classes")
            for got, true in zip(torch.autograd.grad(made, divided), grads, strict=True):
                assert_close(got.full_tensor(), true, "K classes, a gradient")
    rows, head = rows_and_head(mesh)
    for call, name in ((chosen, "ids"), (sparse, "target"), (known, "teacher_logits")):
        with pytest.raises(ValueError, match=rf"{name}: expected .*Replicate\(\), got .*Shard"):
            call(rows, head, whole(Shard(0)))
    for placement in (Shard(0), Partial()):
        divided = DTensor.from_local(logits, mesh, [placement])
        with pytest.raises(ValueError, match=r"teacher_logits: expected .*or Shard\(dim=1\) on"):
            flce.linear_divergence(rows, head, teacher_logits=divided)


@on_ranks(RANKS)
def test_pending():
    mesh = whole_mesh()
    x, w, target = three()
    expected = x.clone().requires_grad_()
    flce.linear_cross_entropy(expected, w, target).backward()
    divided, head = leaf(x, mesh, Shard(0)), leaf(w, mesh, Shard(0))
    pending = divided.redistribute(placements=[Replicate()], async_op=True)
    flce.linear_cross_entropy(pending, head, target).backward()
    assert_close(divided.grad.full_tensor(), expected.grad, "pending")


@on_ranks(RANKS)
def test_split():
    """The gradient of the input, then that of the weight, which needs no collective."""
    mesh = whole_mesh()
    x, w, target = three()
    whole = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = torch.autograd.grad(flce.linear_cross_entropy(*whole, target), whole)
    for save in ("logits", "stats", "grads"):
        rows, head = rows_and_head(mesh)
        loss = flce.linear_cross_entropy(rows, head, target, save=save)
        of_rows = torch.autograd.grad(loss, rows, retain_graph=True)[0]
        with unittest.mock.patch.object(dist, "all_to_all_single") as exchange:
            of_head = torch.autograd.grad(loss, head)[0]
        assert not exchange.called, save
        for got, want in zip((of_rows, of_head), expected, strict=True):
            assert_close(got.full_tensor(), want, f"split, {save}")


@on_ranks(RANKS)
def test_refusals():
    """Each before any collective, on all ranks alike."""
    mesh, square = whole_mesh(), square_mesh()
    x, w, b, target = operands_of(10).values()
    rows, head = rows_and_head(mesh)
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
    whole = distribute_tensor(target, mesh, [Replicate()])
    with pytest.raises(ValueError, match="linear_weight: expected .* as target is a DTensor"):
        flce.linear_cross_entropy(x, w, whole)
    for name, operands in ("logits", (rows, target)), ("target", (x, whole)):
        with pytest.raises(TypeError, match=f"{name}: expected a plain tensor, as full_tensor"):
            flce.cross_entropy(*operands)
    soft = torch.ones(TOKENS, 10, dtype=x.dtype)
    with pytest.raises(ValueError, match="target: expected class indices with vocab_parallel"):
        flce.linear_cross_entropy(rows, head, soft)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="torch 2.11 cannot trace a DeviceMesh"
)
@on_ranks(RANKS)
def test_compiled():
    (x, w, target), (rows, head) = three(), rows_and_head(whole_mesh())
    expected = F.cross_entropy(x @ w.T, target)
    compiled = torch.compile(flce.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    loss = compiled(rows, head, target)
    loss.backward()
    assert_close(loss, expected, "compiled")
    assert head.grad.placements == (Shard(0),)
