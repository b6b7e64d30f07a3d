"""LLaMA-Factory's Liger kernel runs flce where flce.integrations.liger is installed."""

import pytest
import torch
from tiny_models import built

from flce.integrations import liger as ours

pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
name = "llamafactory.v1.plugins.model_plugins.kernels.liger_kernel_ops"
LigerKernel = pytest.importorskip(name, exc_type=ImportError).LigerKernel


def test_liger_kernel(monkeypatch):
    plain, patched = (built("Qwen3ForCausalLM", vocab_size=19) for _ in range(2))
    monkeypatch.setattr(LigerKernel, "check_deps", lambda: True)  # it wants a GPU
    LigerKernel.apply(model=patched, use_kernels=["fused_linear_cross_entropy"])
    ids = torch.arange(24).view(2, 12) % 19
    with ours.install():
        made = patched.train()(input_ids=ids, labels=ids)
    expected = plain(input_ids=ids, labels=ids)
    assert made.logits is None
    torch.testing.assert_close(made.loss, expected.loss)
    made.loss.backward()
    expected.loss.backward()
    for (name, a), b in zip(patched.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
