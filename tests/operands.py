"""Of test_compat.py and test_compat_torch.py: small operands, and comparison with a definition."""

import torch

N, H, V = 13, 6, 9
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def leaf(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()


def indices(*shape, device, ignored=True, classes=V):
    target = torch.randint(classes, shape, device=device)
    if ignored and target.dim():
        target.view(-1)[::4] = -100
    return target


def agree(ours, theirs, leaves, tolerance=TOLERANCE[torch.float64], retain_graph=False):
    """Checks that losses are equal, and gradients for one random upstream gradient."""
    assert ours.shape == theirs.shape
    wide = theirs.double()
    assert (ours.double() - wide).abs().max() <= tolerance * (1 + wide.abs().max())
    upstream = torch.rand_like(wide) + 0.5
    got, expected = (
        torch.autograd.grad(side, leaves, upstream.to(side.dtype), retain_graph=retain_graph)
        for side in (ours, theirs)
    )
    for mine, truth in zip(got, expected, strict=True):
        error = (mine.double() - truth.double()).abs().max()
        assert error <= tolerance * (1 + truth.double().abs().max())


def make(kind, device, batch=(N,)):
    x = leaf(*batch, H, device=device)
    w = leaf(V, H, device=device)
    b = leaf(V, device=device)
    if kind == "indices":
        return x, w, b, indices(*batch, device=device)
    logits = torch.randn(*batch, V, dtype=torch.float64, device=device)
    return x, w, b, logits.softmax(len(batch))
