#!/usr/bin/env python3
"""A training step of transformers' own models with each loss: time, tokens a second, peak memory.

Random weights and tokens, bfloat16, SGD, one sequence of --tokens tokens. Contestants run one
after another, each in its own rounds: a model's weights are most of the memory. `plain` is the
model's own loss, `flce` calls flce.linear_cross_entropy with the decoder's hidden states,
`sampled` does so with gradient="sampled".

    python benchmarks/models.py llama-1b gemma-270m --contestants plain flce sampled
    python benchmarks/models.py llama-1b --tokens 32768 --checkpointing --json new.json
"""

import argparse
import gc
import json
import pathlib
import statistics
import time

import measure
import torch

import flce

# Sizes of published configurations; qwen-8b with 4 of its 36 layers, so that the head counts.
CONFIGS = {
    "llama-1b": (
        "LlamaConfig",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
        | {"vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "gemma-270m": (
        "Gemma3TextConfig",
        {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
        | {"vocab_size": 262144, "tie_word_embeddings": True},
    ),
    "qwen-8b": (
        "Qwen3Config",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"vocab_size": 151936, "tie_word_embeddings": False},
    ),
}


def make_model(name, options):
    import transformers

    kind, sizes = CONFIGS[name]
    config = getattr(transformers, kind)(max_position_embeddings=2 * options.tokens, **sizes)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model.train()


# ---- contestants: model -> function of the tokens that gives the loss ----


def plain(model):
    return lambda ids: model(input_ids=ids, labels=ids).loss


def by_hand(model, **settings):
    def loss_of(ids):
        hidden = model.base_model(input_ids=ids).last_hidden_state
        weight = model.get_output_embeddings().weight
        return flce.linear_cross_entropy(hidden, weight, ids, shift=1, **settings)

    return loss_of


def sampled(model):
    return by_hand(model, gradient="sampled")


CONTESTANTS = {"plain": plain, "flce": by_hand, "sampled": sampled}


# ---- measurement ----


def step_times(loss_of, optimizer, options, vocab):
    """Seconds of each timed step, the last loss, and the peak of the device's memory."""
    times = []
    cuda = options.device == "cuda"
    for step in range(options.warmup + options.rounds):
        ids = torch.randint(vocab, (1, options.tokens), device=options.device)
        if cuda and step == options.warmup:
            torch.cuda.reset_peak_memory_stats()
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return times[options.warmup :], loss.item(), peak


def bench(name, contestant, options):
    """One row; a contestant that runs out of memory gets none of the figures."""
    row = {"model": name, "contestant": contestant, "tokens": options.tokens}
    row["checkpointing"] = options.checkpointing
    model = make_model(name, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss_of = CONTESTANTS[contestant](model)
    try:
        times, loss, peak = step_times(loss_of, optimizer, options, model.config.vocab_size)
    except torch.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    median = statistics.median(times)
    figures = {"ms": 1e3 * median, "fastest_ms": 1e3 * min(times), "peak_bytes": peak}
    return row | figures | {"tokens_per_s": options.tokens / median, "loss": loss}


def line(row):
    text = f"{row['model']:11} {row['contestant']:9} {row['tokens']:6} tokens"
    if "failed" in row:
        return f"{text}  {row['failed']}"
    return (
        f"{text} {row['ms']:8.1f} ms {row['tokens_per_s']:8.0f} tokens/s "
        f"{row['peak_bytes'] / 1e9:6.2f} GB  loss {row['loss']:.4f}"
    )


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("models", nargs="+", choices=CONFIGS, metavar="MODEL")
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--checkpointing", action="store_true", help="of the decoder's layers")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def main():
    options = parse_options()
    facts = measure.machine(options.device)
    print(measure.described(facts))
    rows = []
    for name in options.models:
        for contestant in options.contestants:
            rows.append(bench(name, contestant, options))
            print(line(rows[-1]), flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
