#!/usr/bin/env python3
"""A training step of transformers' own models with each loss: time, tokens a second, peak memory.

Random weights and tokens, bfloat16, SGD, --tokens tokens in --sequences sequences. Contestants run
one after another, each in its own rounds: a model's weights are most of the memory. `plain` is the
model's own loss, `compile` the same under torch.compile, `liger` the model with Liger's fused loss
alone, `fuse` the model under flce.fuse, `256MiB` the same with max_memory="256MiB", `both` under
flce.fuse and torch.compile, `sampled` under flce.fuse with sampled gradients; `flce` calls
flce.linear_cross_entropy with the decoder's hidden states.

--fit GB: also the longest sequence whose step stays within GB of memory, extrapolated from two
lengths, and run if it is at most twice --tokens.

    python benchmarks/models.py llama-1b gemma-270m --contestants plain fuse sampled
    python benchmarks/models.py llama-1b --tokens 32768 --checkpointing --fit 80 --json new.json
"""

import argparse
import gc
import inspect
import json
import pathlib
import statistics
import time

import measure
import torch

import flce

GRAIN = 2048  # tokens: the longest sequence is found to a multiple of it

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
    config = getattr(transformers, kind)(max_position_embeddings=1 << 20, **sizes)
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


def compiled(model):
    torch.compiler.reset()
    return plain(torch.compile(model))


def liger(model):
    """Liger's fused loss without its other kernels."""
    import liger_kernel.transformers as patches

    patch = getattr(patches, f"apply_liger_kernel_to_{model.config.model_type}")
    names = [name for name in inspect.signature(patch).parameters if name != "model"]
    patch(model=model, **{name: name == "fused_linear_cross_entropy" for name in names})
    return plain(model)


def fused(model, **options):
    flce.fuse(model, strict=True, **options)
    return plain(model)


def sampled(model):
    return fused(model, gradient="sampled")


def small(model):
    return fused(model, max_memory="256MiB")


def both(model):
    flce.fuse(model, strict=True)
    return compiled(model)


def by_hand(model):
    def loss_of(ids):
        hidden = model.base_model(input_ids=ids).last_hidden_state
        return flce.linear_cross_entropy(hidden, model.get_output_embeddings().weight, ids, shift=1)

    return loss_of


CONTESTANTS = {
    "plain": plain,
    "compile": compiled,
    "liger": liger,
    "flce": by_hand,
    "fuse": fused,
    "256MiB": small,
    "both": both,
    "sampled": sampled,
}


# ---- measurement ----


def make_steps(name, contestant, options):
    """A function of a number of tokens that runs one step and returns (seconds, loss)."""
    model = make_model(name, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss_of = CONTESTANTS[contestant](model)
    synchronise = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def step(tokens):
        shape = (options.sequences, tokens // options.sequences)
        ids = torch.randint(model.config.vocab_size, shape, device=options.device)
        synchronise()
        begin = time.perf_counter()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronise()
        return time.perf_counter() - begin, loss.item()

    return step


def peak_of(step, tokens):
    """The peak of the device's memory in a step; 0 on the CPU, inf if there is too little."""
    if not torch.cuda.is_available():
        step(tokens)
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step(tokens)
    except torch.OutOfMemoryError:
        return float("inf")
    return torch.cuda.max_memory_allocated()


def longest(step, limit, tokens):
    """(the most tokens, a multiple of GRAIN, whose step has a peak of at most `limit` bytes,
    whether such a step was run): by a line through two peaks. A step of more than twice `tokens`
    is not run, because attention's time grows with the square."""
    short, long = (peak_of(step, count) for count in (tokens // 2, tokens))
    slope = 2 * (long - short) / tokens
    count = int((limit - long) / slope + tokens) // GRAIN * GRAIN
    if count > 2 * tokens:
        return count, False
    while count > 0 and peak_of(step, count) > limit:
        count -= GRAIN
    return count, True


def bench(name, contestant, options):
    """One row; a contestant that runs out of memory has no figures."""
    row = {"model": name, "contestant": contestant, "tokens": options.tokens}
    row |= {"sequences": options.sequences, "checkpointing": options.checkpointing}
    try:
        step = make_steps(name, contestant, options)
        for _ in range(options.warmup):
            step(options.tokens)
        row["peak_bytes"] = peak_of(step, options.tokens)
        taken = [step(options.tokens) for _ in range(options.rounds)]
    except torch.OutOfMemoryError:
        return row | {"failed": "out of memory"}
    times = [seconds for seconds, _ in taken]
    median = statistics.median(times)
    row |= {"ms": 1e3 * median, "fastest_ms": 1e3 * min(times), "loss": taken[-1][1]}
    row["tokens_per_s"] = options.tokens / median
    if options.fit and options.device == "cuda":
        row["longest"], row["ran_longest"] = longest(step, 1e9 * options.fit, options.tokens)
    return row


def line(row):
    text = f"{row['model']:11} {row['contestant']:9} {row['tokens']:6} tokens"
    if "failed" in row:
        return f"{text}  {row['failed']}"
    return (
        f"{text} {row['ms']:8.1f} ms {row['tokens_per_s']:8.0f} tokens/s "
        f"{row['peak_bytes'] / 1e9:6.2f} GB  loss {row['loss']:.4f}"
        + (f"  at most {row['longest']} tokens" if "longest" in row else "")
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
    parser.add_argument("--sequences", type=int, default=1, help="of --tokens / --sequences tokens")
    parser.add_argument("--checkpointing", action="store_true", help="of the decoder's layers")
    parser.add_argument("--fit", type=float, metavar="GB", help="the longest sequence within GB")
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
