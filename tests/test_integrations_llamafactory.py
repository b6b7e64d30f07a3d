"""LLaMA-Factory's Liger kernel runs flce where flce.integrations.liger is installed."""

import pytest
import torch

from flce.integrations import liger as ours

pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
name = "llamafactory.v1.plugins.model_plugins.kernels.liger_kernel_ops"
LigerKernel = pytest.importorskip(name, exc_type=ImportError).LigerKernel


def test_liger_kernel(monkeypatch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    plain, patched = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    patched.load_state_dict(plain.state_dict())
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
