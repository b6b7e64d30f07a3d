"""Of test_compat.py and test_compat_torch.py: small operands, and comparison with a definition."""

import torch

from harness import cases

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
    cases.assert_same(ours, theirs, leaves, tolerance, retain_graph)


def make(kind, device, batch=(N,)):
    x = leaf(*batch, H, device=device)
    w = leaf(V, H, device=device)
    b = leaf(V, device=device)
    if kind == "indices":
        return x, w, b, indices(*batch, device=device)
    logits = torch.randn(*batch, V, dtype=torch.float64, device=device)
    return x, w, b, logits.softmax(len(batch))
