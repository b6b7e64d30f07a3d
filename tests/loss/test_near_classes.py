"""Gradients of K classes of each row where they are differences of nearly equal numbers, p_k - q_k:
drawn calls of targets (ids, probabilities), linear_logprobs_at, linear_loss, the top classes and
divergences from a teacher of K classes, in every dtype, with the student's logits 1e-3 to 1 from
the teacher's, and from 0.5 to 1e-13 of the student's probability outside of the K classes.

The operands are exact: x is the identity, so the logits are the columns of W. A gradient's error is
then that of its own rounding, for each element, and float32's of p. FLCE_DRAWS sets how many calls
of each function and dtype there are; FLCE_DRAW=SEED runs one."""

import math
import os
import random

import pytest
import torch

import flce
from flce.packing import DIVERGENCES

DRAWS = int(os.environ.get("FLCE_DRAWS", "60"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
EPS |= {torch.float16: 2.0**-11}
FORMS = [
    "sparse",
    "at",
    "at_tail",
    "loss_at",
    "loss_at_tail",
    "top",
    "top_tail",
    *DIVERGENCES,
]


class Near:
    """A drawn call: `loss` of flce from (x, w), and its definition on final logits in float64."""

    def __init__(self, form, dtype, seed, device):
        self.random = random.Random(f"{form} {dtype} {seed}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        self.form, self.dtype, self.device = form, dtype, device
        pick = self.random.choice
        self.rows, self.vocab = pick([5, 16, 64]), pick([7, 40, 200, 900])
        if form.startswith("top"):
            self.vocab = min(self.vocab, 200)
        self.count = min(pick([1, 2, 8, 32]), self.vocab - 1)
        self.distance = 10.0 ** self.random.uniform(-3.0, 0.0)
        self.away = self.random.uniform(0.0, 30.0)
        self.divergence_tail = pick(["class", "renormalize"])
        self.map = {}
        if self.random.random() < 0.3:
            self.map["temperature"] = pick([0.7, 1.5])
        self.is_top = form.startswith("top")
        if self.random.random() < 0.2 and not self.is_top:
            self.map["softcap"] = 40.0
        self.options = {"save": pick(["auto", "logits", "stats"]), **self.map}
        if form.startswith("loss_at"):
            self.options = {"rows": pick([1, 4, 100]), **self.map}
        self.operands()
        self.teacher()

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def operands(self):
        ids = torch.rand(self.rows, self.vocab, generator=self.generator).argsort(-1)
        self.ids = ids[:, : self.count]
        logits = 2.0 * self.normal(self.rows, self.vocab) - self.away
        logits.scatter_add_(1, self.ids, torch.full(self.ids.shape, self.away).double())
        if self.is_top:  # no two are equal, in bfloat16 either
            order = torch.rand(self.rows, self.vocab, generator=self.generator).argsort(-1)
            logits = self.random.choice([1.0 / 16.0, 0.25, 1.0]) * order.double()
        self.x = torch.eye(self.rows, dtype=self.dtype, device=self.device)
        self.w = logits.T.to(self.dtype).to(self.device).contiguous()
        if not self.is_top and self.random.random() < 0.3:
            self.ids = self.ids.masked_fill(torch.rand(self.ids.shape) < 0.2, -100)
        self.ids = self.ids.to(self.device)

    def final_logits(self, x, w):
        return flce.reference.final_logits(x @ w.T, None, **self.map)

    def teacher(self):
        """log q of the ids and of the others (..., K + 1), near the student's."""
        z = self.final_logits(self.x.double(), self.w.double())
        near = z + self.distance * self.normal(self.rows, self.vocab).to(self.device)
        log_q = near.log_softmax(-1).gather(-1, self.ids.clamp(min=0))
        # Without a probability left for the other classes the reverse KL would be infinite.
        self.log_q = (log_q - 1e-4).float()
        self.absent = self.ids == -100
        if self.form == "sparse":
            q = self.log_q.exp().masked_fill(self.absent, 0.0)
            self.q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        self.upstream = self.normal(self.rows, self.count + 1).to(self.device)

    def noise(self):
        """A bound of the rounding of float32 (float64) in each dz: relative to the probabilities of
        the class among all, among the ids, and among the others."""
        z = self.final_logits(self.x.double(), self.w.double())
        stat = self.unit()
        own = self.is_own(z, z.topk(self.count, dim=-1).indices if self.is_top else self.ids)
        parts = z, z.masked_fill(~own, -math.inf), z.masked_fill(own, -math.inf)
        probabilities = sum(part.softmax(-1).nan_to_num() for part in parts)
        return 16.0 * stat * (1.0 + z.abs().amax(-1, keepdim=True)) * probabilities

    def unit(self):
        """The rounding of the dtype in which sums are computed."""
        return 2.0**-53 if self.dtype == torch.float64 else 2.0**-24

    def is_own(self, z, ids):
        """The mask (rows, V) of the ids."""
        own = torch.zeros_like(z).scatter_add_(-1, ids.clamp(min=0), (ids >= 0).double())
        return own > 0

    def definition(self, x, w):
        z = self.final_logits(x, w)
        lse, ids = z.logsumexp(-1, keepdim=True), self.ids
        if self.is_top:
            ids = z.detach().topk(self.count, dim=-1).indices
        log_p = z.gather(-1, ids.clamp(min=0)) - lse
        others = z.masked_fill(self.is_own(z, ids), -math.inf).logsumexp(-1, keepdim=True)
        log_p = log_p.masked_fill(ids < 0, 0.0)
        return self.composed(log_p, others - lse)

    def composed(self, log_p, tail):
        """The loss from log p of the ids (..., K) and of all others (..., 1), in any dtype."""
        form, wide = self.form, log_p.dtype
        if form == "sparse":
            return -(self.q.to(wide) * log_p).sum()
        both = torch.cat((log_p, tail), -1)
        if self.is_top or form.removesuffix("_tail") in ("at", "loss_at"):
            q = self.nearby_weights(form).to(wide)
            return -(q * both[:, : q.shape[-1]]).sum()
        return self.divergence(log_p, tail)

    def nearby_weights(self, form):
        """Weights whose gradient is q - p: those of a cross entropy of the K classes."""
        z = self.final_logits(self.x.double(), self.w.double())
        if self.is_top:
            ids = z.topk(self.count, dim=-1).indices
        else:
            ids = self.ids
        p = z.softmax(-1)
        q = p.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        rest = p.masked_fill(self.is_own(z, ids), 0.0).sum(-1, keepdim=True)
        q = torch.cat((q, rest), -1) * (1.0 + self.distance * self.upstream)
        q = q / q.sum(-1, keepdim=True)
        return (q if form.endswith("tail") else q[:, :-1]).float()

    def divergence(self, log_p, tail):
        log_q = self.log_q.double().masked_fill(self.absent, -math.inf)
        if self.divergence_tail == "class":
            rest = torch.log1p(-log_q.exp().sum(-1, keepdim=True).clamp(max=1.0))
            log_q = torch.cat((log_q, rest), -1)
            log_p = torch.cat((log_p.masked_fill(self.absent, -math.inf), tail), -1)
        else:
            log_p = log_p.masked_fill(self.absent, -math.inf)
        ignored = self.absent.all(-1)
        log_p, log_q = log_p[~ignored], log_q[~ignored]
        if self.divergence_tail != "class":
            log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
        used = ~(log_p.isneginf() | log_q.isneginf())
        log_p, log_q = (one.masked_fill(~used, -1e3) for one in (log_p, log_q))
        kl = lambda a, b: (a.exp() * (a - b)).masked_fill(~used, 0.0).sum()  # noqa: E731
        log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
        return {
            "forward_kl": lambda: kl(log_q, log_p),
            "reverse_kl": lambda: kl(log_p, log_q),
            "jsd": lambda: 0.5 * (kl(log_q, log_m) + kl(log_p, log_m)),
        }[self.form]()

    def loss(self, x, w):
        form, options, q = self.form, self.options, None
        if form == "sparse":
            target = self.ids, self.q
            return flce.linear_cross_entropy(x, w, target, reduction="sum", **options)
        if form in DIVERGENCES:
            options = {"divergence": form, "tail": self.divergence_tail, **options}
            teacher = self.ids, self.log_q
            return flce.linear_divergence(x, w, teacher_logits=teacher, reduction="sum", **options)
        q = self.nearby_weights(form)
        q = q.double() if self.dtype == torch.float64 else q
        if form.startswith("loss_at"):
            fn = lambda log_p, entropy, rows: -(q[rows] * log_p).sum()  # noqa: E731
            return flce.linear_loss(x, w, self.ids, fn, tail=form == "loss_at_tail", **options)
        if form in ("at", "at_tail"):
            log_p = flce.linear_logprobs_at(x, w, self.ids, tail=form == "at_tail", **options)
            return -(q * log_p).sum()
        tail, target = form == "top_tail", torch.zeros_like(self.ids[:, 0])
        options = {"entropy": None, "return_topk": self.count, "tail": tail, **options}
        *_, top = flce.linear_logprobs(x, w, target, **options)
        log_p = torch.cat((top.logprobs, top.tail.unsqueeze(-1)), -1) if tail else top.logprobs
        return -(q * log_p).sum()


def gradients(function, near, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (near.x, near.w)]
    loss = function(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def check(near, seed):
    value, dx, dw = gradients(near.loss, near, near.dtype)
    truth, true_dx, true_dw = gradients(near.definition, near, torch.float64)
    name = f"{near.form} {near.dtype} seed {seed}, rows {near.rows}, V {near.vocab}"
    name += f", K {near.count}, distance {near.distance:.1e}, {near.options}"
    own, noise = EPS[near.dtype], near.noise().T
    # The fused kernel's E has the exponents of bfloat16 from 2^-64 of the target's probability on.
    tiny = 2.0**-24 if near.dtype == torch.float16 else 2.0**-50 * (near.dtype != torch.float64)
    # Two roundings: of E or dz, and of dW.
    bound = 2.1 * own * true_dw.abs() + noise + tiny
    error = (dw.double() - true_dw).abs()
    assert not (~(error <= bound)).any(), f"{name}: dW {(error / bound).max():.2f} of its bound"
    # dX's GEMM adds V products in float32 (float64), in any order.
    sums = math.sqrt(near.vocab) * near.unit() * (true_dw.abs().T @ near.w.double().abs())
    bound = (bound.T @ near.w.double().abs()) + 2.0 * own * true_dx.abs() + sums
    error = (dx.double() - true_dx).abs()
    assert not (~(error <= bound)).any(), f"{name}: dX {(error / bound).max():.2f} of its bound"
    most = 8.0 * noise.sum() + 1e-12
    assert abs(value - truth) <= most, f"{name}: {value}, {truth}"


def seeds():
    return [int(os.environ["FLCE_DRAW"])] if "FLCE_DRAW" in os.environ else range(DRAWS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_near_classes(device, form, dtype):
    for seed in seeds():
        check(Near(form, dtype, seed, device), seed)
