"""harness.sampled_reference itself: its random numbers, mean, variance, entries and sums."""

import math

import pytest
import torch

from flce import reference
from harness import cases, sampled_reference
from harness.sampled_case import SEEDS

ROUNDING = 2.0**-24  # of a share q in fixed point, for each class
COPIES = 256  # of rows, each of which has its own draw: one call for as many seeds
OF_ROWS = ("temperature", "token_weight")

KNOWN_ANSWERS = [  # kat_vectors of Random123: key, counter, output
    ((0,) * 2, (0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(key, counter, output):
    words = [torch.tensor(word) for word in counter]
    assert tuple(int(word) for word in sampled_reference.philox(key, words)) == output


def test_a_seed_is_the_key_and_a_row_the_counter():
    for seed in (0, -1, 0x299F31D0A4093822):
        key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        offsets = sampled_reference.offsets_of_rows(5, seed, "cpu", 23)
        expected = [
            sampled_reference.philox(key, (torch.tensor(i), 0, 0, 0))[0] >> 9 for i in range(5)
        ]
        assert offsets.tolist() == [int(word) for word in expected]
    offsets = sampled_reference.offsets_of_rows(1 << 16, 3, "cpu", 23).double() / 2**23
    assert 0.0 <= offsets.min() and offsets.max() < 1.0
    assert abs(offsets.mean() - 0.5) <= 4.5 * math.sqrt(1 / 12 / len(offsets))


def no_row(z):
    return torch.zeros(z.shape[:-1], dtype=torch.bool)


def scales_of(options):
    names = ("softcap", "logit_scale", "temperature")
    return {name: options[name] for name in names if name in options}


def shares(z, softcap=None, logit_scale=1.0, **scales):
    """p, times the softcap's slope."""
    scales |= {"softcap": softcap, "logit_scale": logit_scale}
    p = reference.final_logits(z, no_row(z), **scales).softmax(-1)
    return p if softcap is None else p * (1.0 - torch.tanh(logit_scale * z / softcap).square())


REFERENCE_OPTIONS = {
    "plain": {},
    "all": {
        "softcap": 4.0,
        "logit_scale": -1.5,
        "temperature": torch.tensor([0.7, 1.0, 1.9, 1.3]).double(),
        "z_loss": 0.05,
        "label_smoothing": 0.1,
        "weight": torch.linspace(0.5, 2.0, 23).double(),
        "token_weight": torch.tensor([1.0, -0.5, 2.0, 1.5]).double(),
    },
}


@pytest.mark.parametrize("options", list(REFERENCE_OPTIONS))
def test_mean_and_variance_over_draws(options):
    """The exact gradient, and at most eps p (1 - p) times the row's factor squared."""
    options, eps = REFERENCE_OPTIONS[options], 2.0**-3
    z = 2.0 * torch.randn(4, 23, generator=cases.generator(1), dtype=torch.float64)
    target = torch.tensor([0, 22, 5, 9])
    rows = {name: options[name].repeat(COPIES) for name in OF_ROWS if name in options}
    many = z.repeat(COPIES, 1).requires_grad_(), target.repeat(COPIES)

    def gradients(**sampling):
        options_of = {**options, **rows, **sampling}
        function = (sampled_reference if sampling else reference).cross_entropy
        loss = function(*many, reduction="sum", **options_of)
        grad = torch.autograd.grad(loss, many[0])[0]
        return loss.detach(), grad.unflatten(0, (COPIES, 4))

    loss, exact = gradients()
    exact, made = exact[0], []
    for seed in range(SEEDS // COPIES):
        value, grads = gradients(sampling=(eps, seed))
        assert torch.equal(value, loss)
        made.append(grads)
    made = torch.cat(made)
    share = shares(z, **scales_of(options))
    added = made.var(dim=0, correction=0)
    largest = (made - exact).abs().amax(dim=0)
    at_target = torch.zeros_like(z, dtype=torch.bool).scatter(-1, target[:, None], True)
    kept = at_target | (share >= eps)
    assert (largest[kept] <= 1e-12).all()
    factor = factors(z, target, options)
    error = (made.mean(dim=0) - exact).abs()
    q = share / eps
    deviation = factor * eps * (q * (1.0 - q)).clamp(min=0.0).sqrt()
    rounding = factor * eps * ROUNDING
    assert (error <= 4.5 * deviation / math.sqrt(SEEDS) + rounding)[~kept].all()
    # The standard error of an estimated variance, with the fourth moment of a Bernoulli variable.
    spread = (q * (1 - q) * (1 - 2 * q).square()).clamp(min=0.0).sqrt() / math.sqrt(SEEDS)
    bound = eps * share * (1.0 - share) + 4.5 * eps**2 * spread + eps**2 * ROUNDING
    assert (added <= factor.square() * bound)[~kept].all()
    assert (added[~kept] > 0.0).double().mean() > 0.9


def factors(z, target, options):
    """|d loss / d lse| times |d l / d z| without the softcap, of each row, (N, 1)."""
    lse = torch.logsumexp(reference.final_logits(z, no_row(z), **scales_of(options)), dim=-1)
    factor = 1.0 + 2.0 * options.get("z_loss", 0.0) * lse
    if "weight" in options:
        weight, s = options["weight"], options["label_smoothing"]
        factor = factor - 1.0 + (1.0 - s) * weight[target] + s * weight.mean()
    factor = factor * options.get("token_weight", 1.0) * options.get("logit_scale", 1.0)
    factor = factor / options.get("temperature", 1.0)
    return factor.abs().unsqueeze(-1)


@pytest.mark.parametrize("eps", [1.0, 0.3, 2**-2, 2**-4, 2**-6, 2**-8])
@pytest.mark.parametrize("std", [0.0, 1.0, 4.0, 30.0])
def test_entries_of_a_row_and_their_sum(eps, std):
    """Few, and a common shift of a row's logits has nearly the exact gradient, in every draw."""
    z = std * torch.randn(512, 300, generator=cases.generator(2), dtype=torch.float64)
    target = torch.randint(300, (512,), generator=cases.generator(3))
    made = sampled_reference.sampled_derivative(z, target, no_row(z), {}, eps, 11)
    others = made.scatter(-1, target[:, None], 0.0)
    assert ((others != 0).sum(dim=-1) <= math.ceil(1 / eps) + 1).all()
    assert ((others == 0) | (others >= eps)).all()
    slack = eps * (1.0 + 300 * ROUNDING) + 1e-12
    assert ((made.sum(dim=-1) - 1.0).abs() <= slack).all()
    at_target = target[:, None]
    assert torch.equal(made.gather(-1, at_target), z.softmax(-1).gather(-1, at_target))
