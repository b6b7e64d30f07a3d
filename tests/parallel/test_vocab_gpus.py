"""The vocabulary sharded over two, four and eight GPUs, through NCCL and by copy engines, against
one GPU; and by copy engines over processes on one GPU. One group runs all cases."""

import functools
import itertools
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flce
from flce.distributed import collectives
from harness.blocks import check_on_ranks
from harness.divergences import KINDS
from harness.gpu import captured
from harness.processes import run_on_ranks
from harness.vocab_exchanges import Preempted, interrupting
from harness.vocab_functions import compare_all, compare_in_16_bits, ends_with
from harness.vocab_ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SAMPLED = {"gradient": "sampled", "gradient_eps": 2**-12}
SMALL = {"save": "grads", "max_memory": "512KiB"}
# tokens, hidden, vocab, dtype, options, among them VocabParallel's reduce_dtype, and the factor of
# the mean entropy in what is differentiated
CASES = {
    "fused": (1024, 512, 9000, torch.bfloat16, {}),
    "fused, skipping rows": (16384, 256, 17000, torch.bfloat16, {"ignored": 0.3}),
    "float32 terms": (1024, 512, 9000, torch.bfloat16, {"reduce_dtype": torch.float32}),
    "float32 terms, ragged": (777, 256, 5003, torch.float16, {"reduce_dtype": torch.float32}),
    "ragged vocabulary": (777, 256, 5003, torch.bfloat16, {}),
    "padded hidden size": (777, 100, 5003, torch.bfloat16, {}),
    "bias": (1024, 512, 9000, torch.bfloat16, {"bias": True}),
    "logits": (1024, 512, 9000, torch.bfloat16, {"save": "logits"}),
    "stats": (1024, 512, 9000, torch.bfloat16, {"save": "stats"}),
    "chunks": (2048, 512, 9000, torch.bfloat16, {"max_memory": "4MiB"}),
    "without blocks": (777, 256, 5003, torch.bfloat16, {**SMALL, "max_memory": "32KiB"}),
    "blocks": (1024, 512, 9000, torch.bfloat16, SMALL),
    "blocks, later": (1024, 512, 9000, torch.bfloat16, {**SMALL, "save": "stats"}),
    "blocks, ragged": (777, 256, 5003, torch.bfloat16, {**SMALL, "bias": True}),
    "blocks, float16": (777, 256, 5003, torch.float16, {**SMALL, "softcap": 10.0}),
    "blocks, smoothing": (1024, 512, 9000, torch.bfloat16, {**SMALL, "label_smoothing": 0.1}),
    "blocks, wide": (1024, 512, 9000, torch.bfloat16, {**SMALL, "reduce_dtype": torch.float32}),
    "blocks, class weights": (1024, 512, 9000, torch.bfloat16, {**SMALL, "weights": True}),
    "smoothing": (1024, 512, 9000, torch.bfloat16, {"label_smoothing": 0.1}),
    "smoothing, bias": (1024, 512, 9000, torch.bfloat16, {"label_smoothing": 0.1, "bias": True}),
    "softcap": (1024, 512, 9000, torch.bfloat16, {"softcap": 10.0}),
    "negative scale": (1024, 512, 9000, torch.bfloat16, {"logit_scale": -0.7}),
    "z-loss": (1024, 512, 9000, torch.bfloat16, {"z_loss": 1e-2}),
    "class weights": (1024, 512, 9000, torch.bfloat16, {"weights": True}),
    "valid vocabulary": (1024, 512, 9000, torch.bfloat16, {"valid_vocab": 4000}),
    "float32": (512, 256, 3001, torch.float32, {}),
    "float64": (128, 64, 501, torch.float64, {"label_smoothing": 0.1}),
    "float16": (1024, 512, 9000, torch.float16, {}),
    "float16, logits": (1024, 512, 9000, torch.float16, {"save": "logits", "softcap": 10.0}),
    "no rows left": (256, 256, 4000, torch.bfloat16, {"ignored": 1.0}),
    "none": (1024, 512, 9000, torch.bfloat16, {"reduction": "none"}),
    "sampled": (1024, 512, 9000, torch.bfloat16, SAMPLED),
    "sampled entropy": (1024, 512, 9000, torch.bfloat16, {**SAMPLED, "entropy": 0.1}),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 4e-3}


def draw(tokens, hidden, vocab, dtype, options):
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*size, scale=1.0):
        made = torch.randn(*size, device="cuda", generator=generator, dtype=torch.float64) * scale
        return made.to(dtype)

    options = dict(options)
    x, w = normal(tokens, hidden), normal(vocab, hidden, scale=2 * hidden**-0.5)
    b = normal(vocab) if options.pop("bias", False) else None
    limit = options.get("valid_vocab", vocab)
    y = torch.randint(limit, (tokens,), device="cuda", generator=generator)
    ignored = int(options.pop("ignored", 0) * tokens)
    y[torch.randperm(tokens, device="cuda", generator=generator)[:ignored]] = -100
    if options.pop("weights", False):
        options["weight"] = torch.rand(vocab, device="cuda", generator=generator) + 0.5
    return x, w, b, y, options


def run(x, w, b, y, options, entropy=0.0, **returns):
    """The outputs, and the gradients of x, w and b of the loss and of `entropy` times the mean
    entropy."""
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, w, b)]
    made = flce.linear_cross_entropy(
        leaves[0], leaves[1], y, linear_bias=leaves[2], **options, **returns
    )
    loss = made.loss if returns else made
    loss = loss + entropy * made.entropy.mean() if entropy else loss
    weights = torch.linspace(0.5, 1.5, loss.numel(), device="cuda", dtype=loss.dtype)
    loss.backward(weights.reshape(loss.shape))
    return made, [None if one is None else one.grad for one in leaves]


def off(value, true):
    """The relative error; 0 of an empty tensor."""
    value, true = value.double(), true.double()
    size = true.norm().item()
    return ((value - true).norm().item()) / (size if size > 0 else 1.0)


def classes_of(vocab):
    """The slice of this rank's classes."""
    rank, share = dist.get_rank(), -(-vocab // dist.get_world_size())
    return slice(rank * share, min((rank + 1) * share, vocab))


def check_plan(name):
    """That a case of blocks has them, and that without blocks does not."""
    if "blocks" in name:
        tokens, hidden, vocab, dtype, options = CASES[name]
        chosen = {**options, "dtype": dtype, "device": "cuda"}
        chosen.pop("weights", None)
        plan = flce.plan(tokens, hidden, vocab, ranks=dist.get_world_size(), **chosen)
        assert (plan.block_classes > 0) == name.startswith("blocks"), plan


def check_case(name):
    check_plan(name)
    tokens, hidden, vocab, dtype, given = CASES[name]
    given = dict(given)
    terms, entropy = given.pop("reduce_dtype", None), given.pop("entropy", 0.0)
    x, w, b, y, options = draw(tokens, hidden, vocab, dtype, given)
    mine = classes_of(vocab)
    vp = flce.VocabParallel(dist.group.WORLD, vocab=vocab, reduce_dtype=terms)
    local = {**options, "vocab_parallel": vp}
    returns = {"return_lse": True, "return_predictions": True}
    if given.get("gradient") != "sampled" or entropy:
        returns["return_entropy"] = True
    exact = {**options, "gradient": "exact"}
    one, expected = run(x, w, b, y, exact, entropy, **returns)
    bias = None if b is None else b[mine]
    two, grads = run(x, w[mine], bias, y, local, entropy, **returns)
    again, same = run(x, w[mine], bias, y, local, entropy, **returns)
    bound = TOLERANCE[dtype]
    if given.get("gradient") == "sampled":
        bound = 0.05  # nearly all classes are drawn, but with float rounding of their weights
    assert off(two.loss, one.loss) < 1e-5, (two.loss, one.loss)
    assert off(two.lse, one.lse) < 1e-5
    if two.entropy is not None:
        assert off(two.entropy, one.entropy) < 1e-4
    assert (two.predictions == one.predictions).double().mean() > 0.995
    for which, (got, true) in enumerate(zip(grads, expected, strict=True)):
        if got is None:
            continue
        true = true if which == 0 else true[mine]
        assert off(got, true) < bound, (which, off(got, true))
        if given.get("gradient") != "sampled":
            assert torch.equal(got, same[which]), f"gradient {which} differs between two runs"
    assert torch.equal(two.loss, again.loss)
    bits = torch.cat([two.loss.reshape(-1), two.lse, two.predictions.to(two.lse.dtype)])
    all_bits = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(all_bits, bits)
    assert all(torch.equal(all_bits[0], other) for other in all_bits), "the ranks' outputs differ"


def check_sequence():
    rows, mine = classes_of(1024), classes_of(9000)
    for dtype, given in itertools.product(
        (torch.bfloat16, torch.float16),
        ({}, {"save": "logits"}, {"save": "stats"}, {"max_memory": "1MiB"},
         {"max_memory": "1MiB", "save": "stats"}),
    ):  # fmt: skip
        x, w, b, y, options = draw(1024, 512, 9000, dtype, given)
        _, expected = run(x, w, b, y, options)
        options["vocab_parallel"] = flce.VocabParallel(dist.group.WORLD, vocab=9000, sequence=True)
        _, grads = run(x[rows], w[mine], None, y, options)
        assert off(grads[0], expected[0][rows]) < TOLERANCE[dtype]
        assert off(grads[1], expected[1][mine]) < TOLERANCE[dtype]


def check_minus_infinity():
    """Logits of -inf on all ranks but the first; options select each kernel of the forward."""
    mine, returns = classes_of(2000), {"return_lse": True, "return_predictions": True}
    for dtype, save, options in itertools.product(
        TOLERANCE, ("auto", "logits", "stats"), ({}, {"softcap": 10.0}, {"temperature": 0.5})
    ):
        x, w, b, y, options = draw(512, 256, 2000, dtype, {"bias": True, "save": save, **options})
        b = b.to(torch.float64 if dtype == torch.float64 else torch.float32)
        # A softcap leaves no logit at -inf, and these classes count like others.
        b[2000 // dist.get_world_size() :] = -torch.inf
        y %= 2000 // dist.get_world_size()
        one, expected = run(x, w, b, y, options, **returns)
        vp = flce.VocabParallel(dist.group.WORLD, vocab=2000)
        options["vocab_parallel"] = vp
        two, grads = run(x, w[mine], b[mine], y, options, **returns)
        setting = f"{dtype} {save} {options}"
        assert off(two.loss, one.loss) < 1e-5, (setting, two.loss, one.loss)
        assert off(two.lse, one.lse) < 1e-5, setting
        assert (two.predictions == one.predictions).double().mean() > 0.995, setting
        for got, true in zip(grads, (expected[0], *(e[mine] for e in expected[1:])), strict=True):
            assert off(got, true) < TOLERANCE[dtype], setting


def check_ranks_with_few_classes(count):
    """Each rank in turn has none or one of the classes, in every function; in float64."""
    own = Ranks()
    for rank in range(own.ranks):
        compare_all(own, ends_with(rank, own.ranks, count), "cuda")
    assert not own.failures, "\n".join(own.failures)


def check_functions(dtype):
    """The same in 16 bits, of sizes for which Hopper has kernels of its own."""
    own = Ranks()
    compare_in_16_bits(own, dtype, "cuda", 320, 256, 5003)
    assert not own.failures, "\n".join(own.failures)


def check_blocks():
    """Drawn calls of every function in blocks of FLCE_BLOCKS."""
    check_on_ranks(dist.get_world_size(), range(10), "cuda")


def check_divergences():
    """In 16 bits, of ragged shards, each rank in turn without a class, and of even ones."""
    ranks, rank, vocab = dist.get_world_size(), dist.get_rank(), 9001
    ragged = [5000 * one // (ranks - 1) for one in range(ranks - 1)] + [vocab]
    divided = [[*ragged[: at + 1], *ragged[at:]] for at in range(ranks)]
    divided.append([vocab * one // ranks for one in range(ranks + 1)])
    for dtype, kind in itertools.product((torch.bfloat16, torch.float16), KINDS):
        x, w, *_ = draw(1000, 256, vocab, dtype, {})
        x_t, w_t, *_ = draw(1000, 128, vocab, dtype, {})
        one, dx, dw = run_divergence(x, w, x_t, w_t, divergence=kind)
        for starts in divided:
            own = slice(starts[rank], starts[rank + 1])
            vp = flce.VocabParallel(dist.group.WORLD, vocab=vocab, start=own.start)
            options = {"divergence": kind, "vocab_parallel": vp}
            made = run_divergence(x, w[own], x_t, w_t[own], **options)
            setting = f"{dtype} {kind} {starts}"
            assert off(made[0], one) < 1e-4, (setting, made[0], one)
            assert off(made[1], dx) < TOLERANCE[dtype], (setting, off(made[1], dx))
            assert off(made[2], dw[own]) < TOLERANCE[dtype], (setting, off(made[2], dw[own]))


def run_divergence(x, w, x_t, w_t, **options):
    """The divergence, and its gradients of x and w."""
    leaves = [one.clone().requires_grad_() for one in (x, w)]
    loss = flce.linear_divergence(*leaves, x_t, w_t, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def check_graph(sequence):
    x, w, _, y, _ = draw(1024, 512, 9000, torch.bfloat16, {})
    vp = flce.VocabParallel(dist.group.WORLD, vocab=9000, sequence=sequence)
    x = x[classes_of(1024)].clone() if sequence else x
    x, w = x.requires_grad_(), w[classes_of(9000)].clone().requires_grad_()

    def step():
        loss = flce.linear_cross_entropy(x, w, y, vocab_parallel=vp)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    graph, made = captured(step)
    for _ in range(3):
        with torch.no_grad():
            x.mul_(0.9)
            w.mul_(1.1)
        graph.replay()
        for got, true in zip(made, step(), strict=True):
            assert torch.equal(got, true)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3000, 64)
        self.body = nn.Linear(64, 64)
        self.head = flce.LinearCrossEntropyHead(64, 3000, bias=False)

    def forward(self, ids, labels):
        return self.head(torch.relu(self.body(self.embedding(ids))), labels)


def check_fsdp():
    """FSDP2 over half of the ranks, the vocabulary over pairs: 100 steps of SGD as on one GPU."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    groups = dist.get_world_size() // 2
    mesh = dist.init_device_mesh("cuda", (groups, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    with torch.device("cuda"):
        model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tp"], {"head": flce.VocabParallelHead()})
    for module in (model.head, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, whole)]
    losses = []
    for _ in range(100):
        ids = torch.randint(3000, (groups, 128), device="cuda")
        labels, own = (7 * ids) % 3000, mesh["dp"].get_local_rank()
        pair = model(ids[own], labels[own]), whole(ids.flatten(), labels.flatten())
        for loss, optimizer in zip(pair, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = pair[0].detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses.append(torch.stack([mean / groups, pair[1].detach()]))
    sharded, single = torch.stack(losses).unbind(1)
    assert off(sharded, single) < 1e-4
    assert single[-1] < single[0]


def check_interrupts():
    """On all ranks: nothing writes to tensors made after it, and the next step is right."""
    x, w, _, y, _ = draw(1024, 512, 9000, torch.bfloat16, {})
    w = w[classes_of(9000)]
    vp = flce.VocabParallel(dist.group.WORLD, vocab=9000)
    places = 0
    for save, name in itertools.product(("grads", "stats"), ("_group", "_works")):
        options = {"vocab_parallel": vp, "save": save}
        loss, expected = run(x, w, None, y, options)
        for at in itertools.count():
            torch.cuda.synchronize()
            if dist.get_rank() > 0:
                torch.cuda._sleep(10**8)
            try:
                with interrupting(name, at):
                    run(x, w, None, y, options)
                break
            except Preempted:
                places += 1
            # All memory that the call has freed.
            free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            made = [torch.full((2 << 20,), 7, dtype=torch.uint8, device="cuda")]
            made += [torch.full_like(made[0], 7) for _ in range(free // len(made[0]))]
            dist.barrier()
            torch.cuda.synchronize()
            assert all((one == 7).all() for one in made), (save, name, at)
            del made
            again, grads = run(x, w, None, y, options)
            assert torch.equal(again, loss), (save, name, at)
            for got, true in zip(grads[:2], expected[:2], strict=True):
                assert torch.equal(got, true), (save, name, at)
    assert places >= 4


def share_one_gpu():
    """NCCL refuses processes on one GPU: the group is gloo's, whose barrier takes no device."""
    barrier = dist.barrier
    dist.barrier = lambda group=None, **ignored: barrier(group)
    collectives._can_share = lambda group: True


def check_all(transport):
    checks = {name: functools.partial(check_case, name) for name in CASES}
    checks |= {"sequence": check_sequence, "minus infinity": check_minus_infinity}
    for count in (0, 1):
        check = functools.partial(check_ranks_with_few_classes, count)
        checks[f"ranks with {count} classes"] = check
    for dtype in (torch.bfloat16, torch.float16):
        checks[f"functions, {dtype}"] = functools.partial(check_functions, dtype)
    checks |= {"blocks of FLCE_BLOCKS": check_blocks}
    checks |= {"divergences": check_divergences}
    for sequence in (False, True):
        checks[f"graph, sequence={sequence}"] = functools.partial(check_graph, sequence)
    checks |= {"interrupts": check_interrupts}
    if transport == "one GPU":
        share_one_gpu()
        torch.cuda.set_device(0)
    else:
        checks["fsdp"] = check_fsdp
        torch.cuda.set_device(dist.get_rank())
    failures = []
    for name, check in checks.items():
        try:
            check()
            error = ""
        except Exception:
            error = traceback.format_exc()
        failed = torch.tensor([bool(error)], device="cuda", dtype=torch.int32)
        dist.all_reduce(failed)
        failures += [f"{name}\n{error}"] if failed.item() else []
    shares = any(shared.possible for shared in collectives._shared.values())
    assert not failures, "\n".join(failures)
    assert shares == (transport != "nccl"), f"the GPUs share memory: {shares}"


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [*itertools.product((2, 4, 8), ("nccl", "copy engines")), (2, "one GPU"), (4, "one GPU")],
)
def test_all_cases(ranks, transport):
    if transport != "one GPU" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    # In fresh processes, because of their environment and of what share_one_gpu changes.
    backend = "gloo" if transport == "one GPU" else "nccl"
    variables = {"NCCL_NVLS_ENABLE": "0", "FLCE_PEERS": "0" if transport == "nccl" else "1"}
    if transport == "one GPU":
        variables["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    settings = {"fresh": True, "backend": backend, "variables": variables}
    run_on_ranks(ranks, check_all, **settings, transport=transport)
