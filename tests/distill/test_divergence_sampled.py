"""flce.linear_divergence with gradient="sampled"."""

import pytest
import torch

import flce
from harness import cases
from harness.divergences import KINDS


def sampled_case(device, kind, dtype=torch.float32, **changed):
    """Leaves and options of a call whose student and teacher are far in some rows."""
    case = cases.make_case(40, 16, 130, dtype=dtype, device=device, bias=True)
    weight = case.linear_weight.detach() + 0.2
    weight[::3] *= 1.5
    given = {"teacher_input": case.input.detach() * 0.7, "teacher_weight": weight}
    given |= {"divergence": kind, "beta": 0.3, "target": case.target, "softcap": 20.0, **changed}
    given["target"][::4] = -100
    leaves = {"input": case.input, "linear_weight": case.linear_weight}
    leaves["linear_bias"] = case.options["linear_bias"]
    return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}, given


def gradients_of(leaves, options, **more):
    loss = flce.linear_divergence(**leaves, **options, **more)
    upstream = torch.linspace(0.5, 2.0, loss.numel(), device=loss.device).view(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, list(leaves.values()), upstream)


@pytest.mark.parametrize("hard_weight", [0.0, 0.4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_gradients_are_unbiased(device, kind, reduction, hard_weight):
    """The mean of many draws, in a random direction, is within 5 of its standard deviations."""
    given = {"reduction": reduction, "hard_weight": hard_weight, "max_memory": 9 << 10}
    leaves, options = sampled_case(device, kind, **given)
    loss, exact = gradients_of(leaves, options)
    ways = [torch.randn_like(grad) for grad in exact]
    drawn, number = torch.empty(3, 300), 300
    for seed in range(number):
        how = {"gradient": "sampled", "gradient_eps": 0.25, "gradient_seed": seed}
        same, grads = gradients_of(leaves, options, **how)
        assert torch.equal(loss, same)
        assert all(grad.isfinite().all() for grad in grads)
        drawn[:, seed] = torch.stack([(g * way).sum() for g, way in zip(grads, ways, strict=True)])
    truth = torch.stack([(g * way).sum() for g, way in zip(exact, ways, strict=True)]).cpu()
    deviation = drawn.std(dim=1)
    assert (deviation > 0.02 * truth.abs()).all()
    assert ((drawn.mean(dim=1) - truth).abs() <= 5 * deviation / number**0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_gradients_with_a_small_eps(device, kind, dtype):
    """No class is off by more than eps times the bound of its row, so a fine draw is near."""
    leaves, options = sampled_case(device, kind, dtype)
    _, exact = gradients_of(leaves, options)
    how = {"gradient": "sampled", "gradient_eps": 2**-12, "gradient_seed": 3}
    first, second = (gradients_of(leaves, options, **how)[1] for _ in range(2))
    for made, again, grad in zip(first, second, exact, strict=True):
        assert torch.equal(made, again) and made.dtype == grad.dtype
        assert (made - grad).float().norm() <= 0.05 * grad.float().norm()
    options["target"] = torch.full_like(options["target"], -100)
    assert not any(grad.any() for grad in gradients_of(leaves, options, **how)[1])


def test_a_student_that_is_its_teacher_gets_no_sampled_gradient(device):
    leaves, options = sampled_case(device, "reverse_kl", teacher_softcap=20.0)
    options |= {"teacher_input": leaves["input"], "teacher_weight": leaves["linear_weight"]}
    options["teacher_bias"] = leaves["linear_bias"].detach()
    loss, grads = gradients_of(leaves, options, gradient="sampled")
    assert loss <= 1e-6 and all(grad.isfinite().all() for grad in grads)
    assert max(grad.abs().max() for grad in grads) <= 1e-4
