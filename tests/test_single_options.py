"""Each option by itself, compared with an equivalent formulation.

test_properties.py tests combinations against flce.reference; test_outputs.py tests the outputs.
"""

import functools
import math

import cases
import pytest
import torch
import torch.nn.functional as F

import flce

TOKENS, VOCAB = 30, 41
SAVES = pytest.mark.parametrize("save", cases.SAVES)


# ---- definitions: each gives what changes in a call, and the loss that it stands for ----


def probabilities(device, x, w, y, dtype=torch.float64, smoothing=0.0, columns=VOCAB):
    """Of any dtype; columns after the first valid_vocab are not read."""
    t = torch.randn(TOKENS, VOCAB, generator=cases.generator(3)).softmax(-1).to(device, dtype)
    t[:, columns:] = math.nan
    weight = cases.per_row(device, VOCAB)
    call = {"target": t, "weight": weight, "label_smoothing": smoothing, "valid_vocab": columns}
    own = {"weight": weight[:columns], "label_smoothing": smoothing}
    return call, F.cross_entropy(F.linear(x, w[:columns]), t[:, :columns].double(), **own)


def one_hot(device, x, w, y):
    return {"target": F.one_hot(y, VOCAB).double()}, F.cross_entropy(F.linear(x, w), y)


def documents(device, x, w, y, k=1, dtype=torch.int64, batched=False):
    """One document is empty, one has a single token, and the rows after the last belong to none."""
    bounds = [0, 9, 9, 10, 22, 27]
    y[12] = -100
    logits = F.linear(x, w)
    expected = sum(
        F.cross_entropy(logits[begin : end - k], y[begin + k : end], reduction="sum")
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        if end - begin > k
    )
    call = {"shift": k, "cu_seqlens": torch.tensor(bounds, dtype=dtype, device=device)}
    if batched:
        call |= {"input": x.unsqueeze(0), "target": y.unsqueeze(0)}
    return {**call, "reduction": "sum"}, expected


def options_of_rows_with_a_shift(device, x, w, y):
    """token_weight and temperature belong to the input's rows."""
    x, y = x.unflatten(0, (3, -1)), y.unflatten(0, (3, -1))
    factors, temperature = (cases.per_row(device, *y.shape, low=low) for low in (0.5, 1.0))
    logits = F.linear(x, w) / temperature.unsqueeze(-1)
    rows = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
    call = {"input": x, "target": y, "token_weight": factors, "temperature": temperature}
    expected = (rows * factors[:, :-1].flatten()).sum()
    return {**call, "shift": 1, "reduction": "sum"}, expected


def token_weight(device, x, w, y, dtype=torch.float64):
    """Negative weights too, as in policy gradients; they do not change the mean's denominator."""
    y[::5] = -100
    factors = torch.randint(-2, 3, (TOKENS,), generator=cases.generator(4)).to(device, dtype)
    with torch.no_grad():
        x[::5] = math.nan
    if dtype.is_floating_point:
        factors[::5] = math.nan
    kept = y != -100
    logits = F.linear(x[kept], w)
    rows = F.cross_entropy(logits, y[kept], reduction="none") + 0.1 * logits.logsumexp(-1).square()
    call = {"token_weight": factors, "z_loss": 0.1}
    return call, (rows * factors[kept].double()).sum() / kept.sum()


def num_items(device, x, w, y, given=12.5):
    """The denominator of the z-loss too, whatever the class weights and the ignored rows."""
    y[::3] = -100
    weight, logits = cases.per_row(device, VOCAB), F.linear(x, w)
    squares = (logits.logsumexp(-1).square() * (y != -100)).sum()
    total = F.cross_entropy(logits, y, weight=weight, reduction="sum") + 0.3 * squares
    return {"weight": weight, "z_loss": 0.3, "num_items": given}, total / float(given)


def z_loss_without_class_weights(device, x, w, y):
    """The z-loss is averaged over the number of valid rows, the loss over their class weights."""
    weight, logits = cases.per_row(device, VOCAB), F.linear(x, w)
    z_loss = 0.3 * logits.logsumexp(-1).square().mean()
    return {"weight": weight, "z_loss": 0.3}, F.cross_entropy(logits, y, weight=weight) + z_loss


def scales_in_their_order(device, x, w, y):
    logits = 2.5 * torch.tanh(-1.5 * F.linear(x, w) / 2.5) / 0.7
    return {"softcap": 2.5, "logit_scale": -1.5, "temperature": 0.7}, F.cross_entropy(logits, y)


def temperature_of_each_token(device, x, w, y):
    temperature = cases.per_row(device, TOKENS, low=0.1, high=5.0)
    y[:6], y[13], temperature[:6] = -100, -100, math.nan
    kept = y != -100
    logits = F.linear(x[kept], w) / temperature[kept].unsqueeze(-1)
    return {"temperature": temperature}, F.cross_entropy(logits, y[kept])


DEFINITIONS = {
    "probabilities": (probabilities, {}),
    "probabilities, float32": (probabilities, {"dtype": torch.float32, "smoothing": 0.2}),
    "probabilities, bfloat16": (probabilities, {"dtype": torch.bfloat16, "smoothing": 0.2}),
    "probabilities, padding": (probabilities, {"columns": 20}),
    "one-hot": (one_hot, {}),
    "documents": (documents, {}),
    "documents, int32": (documents, {"k": 3, "dtype": torch.int32}),
    "documents, batched": (documents, {"k": 3, "batched": True}),
    "rows with a shift": (options_of_rows_with_a_shift, {}),
    "token weight": (token_weight, {}),
    "token weight, bfloat16": (token_weight, {"dtype": torch.bfloat16}),
    "token weight, bool": (token_weight, {"dtype": torch.bool}),
    "token weight, int32": (token_weight, {"dtype": torch.int32}),
    "num_items": (num_items, {}),
    "num_items, 0-d": (num_items, {"given": torch.tensor(50)}),
    "z-loss": (z_loss_without_class_weights, {}),
    "scales": (scales_in_their_order, {}),
    "temperatures": (temperature_of_each_token, {}),
}


@SAVES
@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions(device, save, name):
    """By flce and by the reference, which the other tests compare with."""
    define, settings = DEFINITIONS[name]
    for function, options in (
        (flce.linear_cross_entropy, {"save": save}),
        (flce.reference.linear_cross_entropy, {}),
    ):
        x, w, y = cases.leaves(device, TOKENS)
        call, expected = define(device, x, w, y, **settings)
        ours = function(**{"input": x, "linear_weight": w, "target": y, **call, **options})
        cases.assert_same(ours, expected, (x, w))


# ---- shifts ----


def test_shift_keeps_the_shape_of_the_target(device):
    """Row outputs are at the input's position; the last k are empty."""
    x, w, y = cases.leaves(device, 2, 5)
    names = ("return_lse", "return_entropy", "return_predictions", "return_z_loss")
    options = {"reduction": "none", "z_loss": 0.1, **dict.fromkeys(names, True)}
    made = flce.linear_cross_entropy(x, w, y, shift=2, **options)._asdict()
    plain = flce.linear_cross_entropy(x[:, :-2], w, y[:, 2:], **options)._asdict()
    for name in ("loss", "lse", "entropy", "predictions", "z_loss"):
        assert made[name].shape == y.shape
        torch.testing.assert_close(made[name][:, :-2], plain[name], rtol=1e-12, atol=0.0)
        assert (made[name][:, -2:] == (-1 if name == "predictions" else 0)).all(), name


def test_shift_of_int32_targets_with_a_wide_ignore_index(device):
    """ignore_index marks the sequence ends, although no int32 holds it."""
    x, w = torch.randn(2, 6, 8, device=device), torch.randn(11, 8, device=device)
    y = torch.randint(11, (2, 6), device=device, dtype=torch.int32)
    made = flce.linear_cross_entropy(x, w, y, shift=1, ignore_index=2**40)
    assert torch.equal(made, flce.linear_cross_entropy(x, w, y.long(), shift=1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_weights_of_zero_is_torchs(device, smoothing):
    """NaN, as in F.cross_entropy: there are valid rows, but the denominator is 0. Of no row: 0."""
    x, w, y = cases.leaves(device, 4)
    options = {"weight": torch.zeros(VOCAB, device=device).double(), "label_smoothing": smoothing}
    assert F.cross_entropy(F.linear(x, w), y, **options).isnan()
    assert flce.linear_cross_entropy(x, w, y, **options).isnan()
    assert flce.linear_cross_entropy(x, w, torch.full_like(y, -100), **options) == 0


# ---- scalars ----


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "0-d"])
def test_scalars_may_be_tensors(device, make):
    """0-d tensors, as in torch's own functions; the results are bitwise equal."""
    x, w, y = cases.leaves(device, TOKENS)
    values = {"temperature": 0.5, "softcap": 8.0, "logit_scale": 0.25, "z_loss": 0.125}
    ours = flce.linear_cross_entropy(x, w, y, **{name: make(v) for name, v in values.items()})
    assert torch.equal(ours, flce.linear_cross_entropy(x, w, y, **values))


def test_a_temperature_that_is_not_read(device):
    """A 0-d tensor on a GPU, or without values, becomes each row's."""
    x, w, y = cases.leaves(device, TOKENS)
    half = torch.tensor(0.5, device=device)
    for save in cases.SAVES:
        ours = flce.linear_cross_entropy(x, w, y, temperature=half, save=save)
        expected = flce.linear_cross_entropy(x, w, y, temperature=0.5, save=save)
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0.0)
    x, w, y, half = (t.to("meta") for t in (x, w, y, half))
    ours = flce.linear_cross_entropy(x, w, y, temperature=half, reduction="none")
    assert ours.shape == y.shape and ours.is_meta


# ---- ignored rows are skipped ----


def mostly_ignored(device, tokens, share=0.6, dtype=torch.float64):
    """A batch whose fraction `share` is ignored, with NaN there; and the valid rows."""
    x, w, y = cases.leaves(device, tokens, dtype=dtype)
    order = torch.randperm(tokens, generator=cases.generator(5)).to(device)
    ignored = order[: int(share * tokens)]
    kept = order[len(ignored) :].sort().values
    with torch.no_grad():
        x[ignored] = math.nan
    y[ignored] = -100
    return (x, w, y), kept


@pytest.mark.parametrize("save", ["grads", "stats"])
def test_ignored_rows_cost_no_products(device, save):
    """As many chunks as a batch of the valid rows alone; the CPU always counts them."""
    (x, w, y), kept = mostly_ignored(device, 100)
    alone = x.detach()[kept].clone().requires_grad_()
    knobs = {"save": save, "max_memory": 10 * (VOCAB + 3) * 8}
    bound = "count" if device == "cuda" else None

    def gemms(rows, target, bound=None):
        def step():
            loss = flce.linear_cross_entropy(rows, w, target, valid_bound=bound, **knobs)
            torch.autograd.grad(loss, (rows, w))

        return cases.gemms_of(step)

    few = gemms(alone, y[kept])
    assert gemms(x, y, bound) == few
    # Without ignored rows there are more GEMMs, so the count can distinguish.
    assert gemms(x.detach().nan_to_num().requires_grad_(), torch.zeros_like(y)) >= 2 * few


def test_memory_follows_the_valid_rows(device):
    """save="grads" holds one chunk of logits, of valid rows only."""
    # On CUDA so many rows that the GEMMs' scratch, which does not depend on them, is comparatively
    # small.
    tokens, copies = (20_000, 200) if device == "cuda" else (400, 25)
    (x, w, y), kept = mostly_ignored(device, tokens, dtype=torch.float32)
    weight = w.detach().repeat(copies, 1).requires_grad_()
    bound = "count" if device == "cuda" else None

    def peak(target):
        def step():
            loss = flce.linear_cross_entropy(x, weight, target, save="grads", valid_bound=bound)
            return torch.autograd.grad(loss, (x, weight))

        step()
        return cases.peak_bytes(step, device)

    some = peak(y)
    with torch.no_grad():
        x.nan_to_num_()
    assert some <= 0.5 * peak(torch.zeros_like(y))


def test_more_valid_rows_than_the_bound_are_refused_on_the_cpu():
    (x, w, y), kept = mostly_ignored("cpu", TOKENS)
    with pytest.raises(
        ValueError, match=f"valid_bound: expected at least {len(kept)}.* got {len(kept) - 1}"
    ):
        flce.linear_cross_entropy(x, w, y, valid_bound=len(kept) - 1)


@SAVES
def test_more_valid_rows_than_the_bound_are_nan_on_cuda(cuda, save):
    """Rows are never dropped silently."""
    (x, w, y), kept = mostly_ignored(cuda, TOKENS)
    for bound in (len(kept) - 1, 0):
        options = {"valid_bound": bound, "save": save, "return_accuracy": True}
        made = flce.linear_cross_entropy(x, w, y, **options)
        dx, dw = torch.autograd.grad(made.loss, (x, w))
        assert made.loss.isnan() and made.accuracy.isnan()
        assert dw.isnan().all() and (bound == 0 or dx[kept].isnan().all())


# ---- the reference itself ----


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", ["classes", "probabilities"])
def test_the_reference_is_cross_entropy(device, reduction, smoothing, targets):
    """Where F.cross_entropy has the option, the mean included."""
    x, w, y = cases.leaves(device, TOKENS)
    y[::4] = -100
    if targets == "probabilities":
        y = torch.rand(TOKENS, VOCAB, device=device, dtype=torch.float64)
    options = {
        "weight": cases.per_row(device, VOCAB),
        "reduction": reduction,
        "label_smoothing": smoothing,
    }
    ours = flce.reference.linear_cross_entropy(x, w, y, **options)
    cases.assert_same(ours, F.cross_entropy(F.linear(x, w), y, **options), (x, w))


def test_reading_a_cpu_count_for_a_gpu(cuda):
    """num_items from a data loader is a CPU tensor; it must not make the call synchronise."""
    (x, w, y), _ = mostly_ignored(cuda, TOKENS)
    x = x.detach().nan_to_num()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = flce.linear_cross_entropy(x, w, y, num_items=torch.tensor(7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = flce.reference.linear_cross_entropy(x, w, y, num_items=7)
    assert cases.relative_error(loss.detach(), truth.detach().double()) <= 1e-6


def with_a_weightless_class(device, rows):
    """A case, and class weights that are 0 for class 5, the target of `rows`."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = cases.make_case(8, 1024, 33, dtype=dtype, device=device, bias=True)
    weight = torch.ones(33, device=device)
    weight[5], case.target[rows] = 0.0, 5
    return case, weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("save", cases.SAVES)
def test_weight_zero_hides_an_infinite_logit(device, save, smoothing):
    """As a target and in smoothing; the truth has a logit so low that p is 0."""
    case, weight = with_a_weightless_class(device, slice(3))
    fused = functools.partial(flce.linear_cross_entropy, save=save)
    results = []
    for function, kind, low in (
        (fused, case.dtype, -math.inf),
        (flce.reference.linear_cross_entropy, torch.float64, -1e5),
    ):
        x, w, b = (
            tensor.detach().to(kind).requires_grad_()
            for tensor in (case.input, case.linear_weight, case.options["linear_bias"])
        )
        bias = b.masked_fill(torch.arange(33, device=device) == 5, low)
        options = {"linear_bias": bias, "weight": weight.to(kind), "label_smoothing": smoothing}
        loss = function(x, w, case.target, **options)
        general = function(x, w, case.target, return_entropy=True, **options).loss
        assert cases.relative_error(general.detach(), loss.detach().double()) <= 1e-6
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, w, b))))
    (loss, *gradients), (true_loss, *truths) = results
    assert cases.relative_error(loss, true_loss) <= 1e-5
    for made, true in zip(gradients, truths, strict=True):
        assert cases.relative_error(made, true) <= (1e-5 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weight_zero_hides_no_other_logit(device, bad):
    """A row with a NaN or +inf is NaN, whatever the weight of its target's class."""
    case, weight = with_a_weightless_class(device, 3)
    x = case.input.detach().clone()
    x[3, 0] = bad
    loss = flce.linear_cross_entropy(
        x, case.linear_weight, case.target, weight=weight, reduction="none"
    )
    assert loss.isnan().nonzero().flatten().tolist() == [3]
