"""flce.integrations.trl: TRL's trainers with and without it, and its function against TRL's."""

import functools

import pytest
import torch

import flce
from harness.tiny_models import PROMPTS, TRAINING, LogitsMade, recorded, tiny_llama, tiny_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from flce.integrations import trl as ours  # noqa: E402  it imports TRL itself only in install()

ALL = ("log_probs", "entropy", "mean_logits", "is_top1")
V, H, N = 37, 12, 29


@pytest.fixture
def calls(monkeypatch):
    """How often TRL's forward and flce ran."""
    from trl.trainer.utils import _ChunkedLogProbFunction as function

    counts = {"trl": 0, "flce": 0}
    forward, loss = function.forward, flce.linear_cross_entropy

    @functools.wraps(forward)  # install() reads its signature
    def count_trl(*args, **options):
        counts["trl"] += 1
        return forward(*args, **options)

    def count_flce(*args, **options):
        counts["flce"] += 1
        return loss(*args, **options)

    monkeypatch.setattr(function, "forward", staticmethod(count_trl))
    monkeypatch.setattr(flce, "linear_cross_entropy", count_flce)
    return counts


def operands(dtype=torch.float32, bias=True):
    x = torch.randn(N, H, dtype=dtype, requires_grad=True)
    w = torch.randn(V, H, dtype=dtype, requires_grad=True)
    b = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    return x, w, b


def of_function(x, w, b, temperature=0.7, softcap=None, scale=1.0, outputs=ALL):
    from trl.trainer import utils

    y = torch.arange(N) * 5 % V
    y[:9] = (x.detach()[:9].float() @ w.detach().float().T).argmax(-1)  # so that is_top1 is mixed
    args = (x, w, b, y, temperature, 16, softcap, scale)
    return utils._ChunkedLogProbFunction.apply(*args, *(() if outputs is None else (outputs,)))


def applied(x, w, b, **options):
    """What the trainers' function gives, and its gradients for random upstream ones."""
    made = of_function(x, w, b, **options)
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (v * torch.randn(N, generator=generator)).sum()
        for v in made
        if v is not None and v.requires_grad
    )
    leaves = [v for v in (x, w, b) if v is not None and v.requires_grad]
    return made, torch.autograd.grad(total, leaves)


def same(ours, theirs, tolerance):
    (made, gradients), (their_made, their_gradients) = ours, theirs
    for a, b in zip(made, their_made, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
    pairs = [pair for pair in zip(made, their_made, strict=True) if pair[0] is not None]
    pairs += list(zip(gradients, their_gradients, strict=True))
    for a, b in pairs:
        assert a.dtype == b.dtype
        if a.dtype == torch.bool:
            assert torch.equal(a, b)
        else:
            a, b = a.double(), b.double()
            assert (a - b).norm() <= tolerance * b.norm()


OUTPUTS = [
    ("log_probs",),
    ("log_probs", "entropy"),
    ("log_probs", "entropy", "is_top1"),
    ("log_probs", "entropy", "mean_logits"),
    ALL,
]


EQUAL = [{"outputs": outputs, "scale": 1.3, "bias": bias} for outputs in OUTPUTS for bias in (0, 1)]
EQUAL += [{"softcap": 5.0, "scale": 0.5, "outputs": OUTPUTS[1]}, {"autocast": True}]
# As with adapters in the body, whose head is frozen.
EQUAL += [{"frozen": 0, "bias": False}, {"frozen": 1, "bias": False}]


@pytest.mark.parametrize("options", EQUAL, ids=str)
def test_outputs_and_gradients_equal_trls(calls, options):
    options = dict(options)
    args = operands(bias=options.pop("bias", True))
    narrow = options.pop("autocast", False)
    if "frozen" in options:
        args[options.pop("frozen")].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        theirs = applied(*args, **options)
        with ours.install() as handle:
            mine = applied(*args, **options)
    same(mine, theirs, 2**-6 if narrow else 1e-5)
    assert calls == {"trl": 1, "flce": 1} and handle.calls == {"flce": 1}
    if "is_top1" in options.get("outputs", ALL):
        assert 0 < mine[0][4].sum() < N


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16(calls, weight_dtype):
    x, w, b = operands()
    truth = applied(*(v.detach().bfloat16().float().requires_grad_() for v in (x, w, b)))
    args = x.detach().bfloat16().requires_grad_(), w.detach().to(weight_dtype).requires_grad_()
    args += (b.detach().to(weight_dtype).requires_grad_(),)
    theirs = applied(*args)
    with ours.install():
        mine = applied(*args)
    for index in range(3):  # of x, w, b: TRL's own distance from float32 is the measure
        exact = truth[1][index]
        error, their_error = ((g[1][index].float() - exact).norm() for g in (mine, theirs))
        assert error <= 1.5 * their_error
        assert mine[1][index].dtype == theirs[1][index].dtype
    assert calls["flce"] == 1


def test_the_weights_gradient_is_summed_in_float32(monkeypatch):
    """Over chunks, as TRL does: a sum in bfloat16 doubles the error here."""
    from trl.trainer import utils

    rows = 512
    x, w = (torch.randn(size, H).bfloat16().requires_grad_() for size in (rows, V))
    upstream, y = torch.randn(rows), torch.randint(V, (rows,))

    def gradient(x, w):
        made = utils._ChunkedLogProbFunction.apply(x, w, None, y, 1.0, V, None, 1.0, ("log_probs",))
        return torch.autograd.grad((made[0] * upstream).sum(), w)[0].float()

    exact = gradient(*(v.detach().float().requires_grad_() for v in (x, w)))
    with ours.install():
        errors = []
        for limit in ("64MiB", f"{8 * V * 2}"):  # one chunk, chunks of 8 rows
            monkeypatch.setenv("FLCE_MAX_MEMORY", limit)
            errors.append((gradient(x, w) - exact).norm())
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("softcap, outputs", [(None, ALL), (5.0, OUTPUTS[2])])
def test_compile_fullgraph(softcap, outputs):
    """With a softcap too the compiled entropy has its gradient."""
    from trl.trainer import utils

    x, w, _ = operands(bias=False)
    y = torch.arange(N)

    def loss(x, w):
        made = utils._ChunkedLogProbFunction.apply(x, w, None, y, 0.7, 16, softcap, 1.0, outputs)
        return sum(value.sum() for value in made if value is not None)

    with ours.install(entropy="differentiable"):
        expected = torch.autograd.grad(loss(x, w), (x, w))
    with ours.install():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        made = torch.autograd.grad(compiled(x, w), (x, w))
    torch.testing.assert_close(made, expected)


def test_compile_with_a_detached_entropy():
    x, w, _ = operands(bias=False)

    def outputs(x, w):
        return of_function(x, w, None, outputs=OUTPUTS[1])[:2]

    with ours.install(entropy="detached"):
        torch._dynamo.reset()
        expected = outputs(x, w)
        made = torch.compile(outputs, backend="aot_eager")(x, w)
    torch.testing.assert_close(made, expected)
    assert not made[1].requires_grad
    pairs = [torch.autograd.grad(logprobs.sum(), (x, w)) for logprobs in (made[0], expected[0])]
    torch.testing.assert_close(*pairs)


SFT = {"softcap": 5.0, "outputs": OUTPUTS[2]}  # of a model with a softcap
ENTROPIES = [
    (None, {"outputs": OUTPUTS[2]}, True),
    (None, {"softcap": 5.0, "outputs": OUTPUTS[1]}, True),
    (None, SFT, "detached"),
    ("differentiable", SFT, True),
    ("detached", {"outputs": OUTPUTS[1]}, "detached"),
    ("detached", {"outputs": OUTPUTS[0]}, False),
]


@pytest.mark.parametrize("entropy, options, returned", ENTROPIES)
def test_which_entropies_are_detached(monkeypatch, entropy, options, returned):
    args, loss, seen = operands(), flce.linear_cross_entropy, []

    def record(*operands, **given):
        seen.append(given["return_entropy"])
        return loss(*operands, **given)

    monkeypatch.setattr(flce, "linear_cross_entropy", record)
    with ours.install(entropy=entropy):
        made = of_function(*args, **options)
        assert seen == [returned]
        if made[1] is None:
            return
        assert made[1].requires_grad
        if returned is True:
            made[1].sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r'install\(entropy="differentiable"\)'):
                (made[0] + 0.01 * made[1]).sum().backward()


def test_a_detached_entropy_leaves_the_rest_equal():
    args, upstream = operands(), torch.randn(N)
    theirs = of_function(*args, **SFT)
    expected = torch.autograd.grad((theirs[0] * upstream).sum(), args)
    with ours.install():
        mine = of_function(*args, **SFT)
    assert mine[1].requires_grad and not mine[1].detach().requires_grad
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad((mine[0] * upstream).sum(), args), expected)


def test_unknown_entropies_are_refused():
    with pytest.raises(ValueError, match="entropy: expected one of .* got 'on'"):
        ours.install(entropy="on")


@pytest.mark.parametrize("limit", [None, f"{8 * 64 * 4}"])
def test_no_tensor_of_all_logits(monkeypatch, limit):
    """But what flce keeps where it fits the memory: with 8 rows of logits at most, nothing."""
    from trl.trainer import utils

    if limit:
        monkeypatch.setenv("FLCE_MAX_MEMORY", limit)
    x, w = (torch.randn(size, H, requires_grad=True) for size in (N, 64))
    y = torch.arange(N)

    def step(function):
        with LogitsMade(N, 64) as made:
            logprobs, entropy, *_ = function(x, w, None, y, 0.7, 16, None, 1.0, ALL)
            (logprobs - 0.1 * entropy).sum().backward()
        return [name for name, _ in made.found]

    def eager(x, w, *_):
        logprobs = (x @ w.T).log_softmax(-1)
        return logprobs.gather(1, y[:, None]), -(logprobs.exp() * logprobs).sum(-1)

    assert len(step(eager)) > 3
    with ours.install():
        assert step(utils._ChunkedLogProbFunction.apply) == (
            [] if limit else ["flce.forward.default"]
        )


def test_no_rows_stay_in_the_graph():
    x, w, _ = operands(bias=False)
    with ours.install():
        from trl.trainer import utils

        made = utils._ChunkedLogProbFunction.apply(
            x[:0], w, None, torch.empty(0, dtype=torch.int64), 1.0, 16, outputs=ALL
        )
    made[0].sum().backward()
    assert [v.shape for v in made if v is not None] == [(0,)] * 4
    assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize(
    "options", [{"outputs": (*ALL, "log_sum_sq_probs")}, {"softcap": 5.0}, {"outputs": None}]
)
def test_the_rest_is_trls(calls, options):
    args = operands()
    theirs = applied(*args, **options)
    with ours.install():
        same(applied(*args, **options), theirs, 0.0)
    assert calls == {"trl": 2, "flce": 0}


def test_a_weight_of_zero3_is_trls(calls):
    x, w, b = operands()
    w.ds_id = 0
    with ours.install():
        applied(x, w, b)
    assert calls == {"trl": 1, "flce": 0}


# ---- Trainers ----


def reward(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]


ANSWERS = [{"prompt": p, "completion": p[::-1], "label": i % 2 == 0} for i, p in enumerate(PROMPTS)]
PAIRS = [{"prompt": p, "chosen": p[::-1], "rejected": p[:2]} for p in PROMPTS]
ALONE = [{"prompt": p} for p in PROMPTS]
DRAWN = {"num_generations": 2, "max_completion_length": 6, "beta": 0.04}
TRAINERS = {  # rows, options of the configuration
    "SFT": ([{k: row[k] for k in ("prompt", "completion")} for row in ANSWERS], {}),
    "DPO": (PAIRS, {"beta": 0.5}),
    "KTO": (ANSWERS, {"beta": 0.5}),
    "GRPO": (ALONE, {**DRAWN, "temperature": 0.9, "entropy_coef": 0.1}),
    "RLOO": (ALONE, DRAWN),
}


def three_steps(name, directory):
    torch.manual_seed(0)
    arguments = {**TRAINING, "output_dir": str(directory), "logging_steps": 1, "bf16": False}
    arguments |= {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.5}
    # On disk, because DPO, KTO, GRPO and RLOO load the reference model by its name.
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    model = type(model).from_pretrained(directory / "model")
    rows, own = TRAINERS[name]
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        args=getattr(trl, f"{name}Config")(**own, **arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **({"reward_funcs": reward} if rows is ALONE else {}),
    )
    return recorded(trainer)


@pytest.mark.parametrize("name", TRAINERS)
def test_three_steps(calls, name, tmp_path):
    logs, gradients = three_steps(name, tmp_path)
    assert calls["flce"] == 0
    theirs = dict(calls)
    with ours.install():
        our_logs, our_gradients = three_steps(name, tmp_path)
    assert calls["trl"] == theirs["trl"] > 0  # none more
    assert calls["flce"] == theirs["trl"]
    assert len(logs) == len(our_logs) == 3 and len(gradients) == len(our_gradients) == 3
    for log, our_log in zip(logs, our_logs, strict=True):
        assert log.keys() == our_log.keys() and "loss" in log
        for key in log.keys() - {"step_time"}:
            if not key.endswith("runtime"):
                assert our_log[key] == pytest.approx(log[key], rel=2e-4, abs=1e-6), key
    for step, our_step in zip(gradients, our_gradients, strict=True):
        assert step.keys() == our_step.keys()
        for key, gradient in step.items():
            assert (our_step[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, key
        assert any(gradient.norm() > 0 for gradient in step.values())


# ---- install() ----


def test_other_functions_are_refused(monkeypatch):
    from trl.trainer import utils

    class Other:
        @staticmethod
        def forward(ctx, hidden, weight, support_ids):
            raise NotImplementedError

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(ImportError, match=r"with \('hidden', 'weight', 'support_ids'\)"):
        ours.install()
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(ImportError, match="with no such function"):
        ours.install()
