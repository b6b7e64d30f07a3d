"""What the tests of flce.integrations train: a tiny model and a tokenizer, without a download.

Imports transformers when it is used; a test that does so has asked for it.
"""

import torch

PROMPTS = ["abcd", "bca", "cabab", "dd", "ab", "bbad", "cdcd", "da"]


def tiny_tokenizer():
    """A letter is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama(**options):
    """A LlamaForCausalLM of two layers with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": 19,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            **options,
        }
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def recorded(trainer):
    """Trains; returns what each step logged, and each step's gradients by name."""
    from transformers import TrainerCallback

    gradients = []

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            gradients.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )

    trainer.add_callback(Record())
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], gradients
