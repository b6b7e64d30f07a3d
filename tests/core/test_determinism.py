"""Bits that do not depend on where or when a call runs: the rows of docs/determinism.md whose tests
do not lie in a file about the same."""

import hashlib

import pytest
import torch

import flce
from harness import cases
from harness.processes import run_on_ranks

OPTIONS = {
    **{save: {"save": save, "reduction": "sum"} for save in cases.SAVES},
    "chunks": {"save": "stats", "max_memory": 20 * 301 * 4},
    "sampled": {"gradient": "sampled", "gradient_seed": 5},
}


def digest_of(device, dtype, options):
    case = cases.make_case(83, 40, 301, dtype=dtype, device=device, std=3.0, bias=True)
    case = cases.ignore_some(case)
    if "gradient_seed" in options:
        seed = torch.tensor(options["gradient_seed"], device=device)
        options = {**options, "gradient_seed": seed}
    made = cases.outcome(flce.linear_cross_entropy, case, **options)
    parts = [tensor.cpu().reshape(-1).view(torch.uint8).numpy() for tensor in made.values()]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def digests_of(device):
    return {
        (name, dtype): digest_of(device, dtype, options)
        for name, options in OPTIONS.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        if (name, dtype) != ("sampled", torch.float64)
    }


def compare_processes(device, expected):
    assert digests_of(device) == expected


@pytest.mark.usefixtures("one_thread")
def test_processes(device):
    """Three processes of one machine give the same bits: this one, and two that are forks."""
    run_on_ranks(2, compare_processes, device=device, expected=digests_of(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_row_passes_do_not_depend_on_the_number_of_threads(dtype):
    """Of given logits, on the CPU: no GEMM of torch is in the call, whose bits may depend on it."""
    logits = torch.randn(64, 3000).to(dtype).requires_grad_()
    target = torch.randint(3000, (64,))

    def bits(threads):
        torch.set_num_threads(threads)
        made = flce.cross_entropy(logits, target, label_smoothing=0.1, return_entropy=True)
        return made.loss, made.entropy, torch.autograd.grad(made.loss, logits)[0]

    before = torch.get_num_threads()
    try:
        one, *others = (bits(threads) for threads in (1, 2, 3))
    finally:
        torch.set_num_threads(before)
    for other in others:
        assert all(map(torch.equal, one, other))
