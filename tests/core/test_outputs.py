"""Each output by itself, their gradients together, and several options under torch.compile."""

import math

import pytest
import torch
import torch.nn.functional as F

import flce
from harness import cases

TOKENS, VOCAB = 30, 41


# ---- outputs ----


def test_outputs_are_named_and_typed(device):
    x, w, y = cases.leaves(device, 4, 5, dtype=torch.bfloat16)
    y[0, 1] = -100
    names = ("lse", "entropy", "accuracy", "predictions", "z_loss")
    token_weight = torch.ones(4, 5, device=device)
    token_weight[0, 1] = math.nan  # of the ignored row
    options = {"token_weight": token_weight, "z_loss": 1e-3}
    made = flce.linear_cross_entropy(x, w, y, **options, **{f"return_{n}": True for n in names})
    assert isinstance(made, flce.LinearCrossEntropyOutput) and made.loss > made.z_loss > 0
    assert made.class_logits is None and made.classes is None
    names += ("tail_lse",)
    made = flce.linear_cross_entropy(
        x, w, y, topk=3, **options, **{f"return_{n}": True for n in names}
    )
    kinds = [torch.float32] * 4 + [torch.int64, *[torch.float32] * 3, torch.int64]
    assert [t.dtype for t in made] == kinds
    shapes = [(), (4, 5), (4, 5), (), (4, 5), (), (4, 5), (4, 5, 3), (4, 5, 3)]
    assert [t.shape for t in made] == shapes
    assert made.tail_lse[0, 1] == 0 and (made.tail_lse < made.lse)[1:].all()
    assert made.lse[0, 1] == 0 and made.entropy[0, 1] == 0 and made.predictions[0, 1] == -1
    assert [t.requires_grad for t in made] == [True] * 3 + [False] * 3 + [True, True, False]


def test_accuracy_and_predictions(device):
    """Compared with argmax; of equal maxima the lowest class counts."""
    x, w, y = cases.leaves(device, TOKENS)
    with torch.no_grad():
        w[5], w[20], w[VOCAB - 1] = w[20], w[20], w[20]
        x[:10] = 3.0 * w[20]
    y[:6], y[6], y[7:9] = 5, 20, -100
    made = flce.linear_cross_entropy(x, w, y, return_accuracy=True, return_predictions=True)
    expected = F.linear(x, w).argmax(-1)
    assert (expected[:10] == 5).all()
    expected[7:9] = -1
    assert torch.equal(made.predictions, expected)
    valid = y != -100
    assert made.accuracy == (expected == y)[valid].double().mean()


def test_outputs_cost_no_product(device):
    """One GEMM for the loss and all outputs, two in the backward of several."""
    x, w, y = cases.leaves(device, TOKENS)
    names = ("lse", "entropy", "accuracy", "predictions", "z_loss")
    options = {"save": "logits", **{f"return_{name}": True for name in names}}
    assert cases.gemms_of(lambda: flce.linear_cross_entropy(x, w, y, **options)) == 1
    made = flce.linear_cross_entropy(x, w, y, **options)
    total = made.loss + made.lse.square().sum() - 0.1 * made.entropy.sum()
    assert cases.gemms_of(lambda: torch.autograd.grad(total, (x, w))) == 2


@pytest.mark.parametrize("output", ["lse", "entropy"])
def test_grads_makes_them_again_for_other_outputs(device, output):
    """Three more GEMMs then, none if only the loss is differentiated."""
    x, w, y = cases.leaves(device, TOKENS)
    made = flce.linear_cross_entropy(x, w, y, save="grads", return_lse=True, return_entropy=True)
    both = made.loss + getattr(made, output).sum()
    assert cases.gemms_of(lambda: torch.autograd.grad(both, (x, w), retain_graph=True)) == 3
    assert cases.gemms_of(lambda: torch.autograd.grad(made.loss, (x, w), retain_graph=True)) == 0

    def eager():
        z = F.linear(x, w)
        entropy = torch.distributions.Categorical(logits=z).entropy()
        return F.cross_entropy(z, y), {"lse": z.logsumexp(-1), "entropy": entropy}[output].sum()

    cases.assert_same(made.loss, eager()[0], (x, w), retain_graph=True)
    cases.assert_same(both, sum(eager()), (x, w))


# ---- compile ----


@pytest.mark.parametrize("save", ["logits", "grads", "stats"])
def test_compile_of_several_options(device, save):
    x, w, y = cases.leaves(device, 3, 8, dtype=torch.float32)
    y[0, 3] = -100
    temperature = cases.per_row(device, 3, 8).float()
    options = {"temperature": temperature, "softcap": 3.0, "logit_scale": 0.75, "num_items": 11}
    options |= {"label_smoothing": 0.1, "z_loss": 0.05, "shift": 1, "valid_vocab": VOCAB - 2}
    y.clamp_(max=VOCAB - 3)

    def call(x, w):
        made = flce.linear_cross_entropy(
            x, w, y, save=save, return_lse=True, return_accuracy=True, **options
        )
        return made.loss + made.lse.sum(), made.accuracy

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        loss, accuracy = function(x, w)
        results.append([loss, accuracy, *torch.autograd.grad(loss, (x, w))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("save", ["logits", "stats"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entropy_of_a_row_whose_target_is_impossible(device, save, dtype):
    """The target's logit is -inf: it adds nothing to the entropy, nor to the entropy's gradient."""
    x, w, y = cases.leaves(device, 6, dtype=dtype)
    bias = torch.zeros(VOCAB, device=device, dtype=dtype)
    bias[y[:3]] = -math.inf
    logprobs, entropy = flce.linear_logprobs(x, w, y, linear_bias=bias, save=save)
    assert (logprobs[:3] == -math.inf).all() and logprobs[3:].isfinite().any()
    grads = torch.autograd.grad(entropy.sum(), (x, w))
    kept = [j for j in range(VOCAB) if bias[j] == 0]
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    p = (wide[0] @ wide[1][kept].T).softmax(-1)
    truths = torch.autograd.grad(-(p * p.log()).sum(), wide)
    for grad, truth in zip(grads, truths, strict=True):
        bar = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert cases.relative_error(grad, truth) <= bar
