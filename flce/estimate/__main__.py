"""`python -m flce.estimate`: would flce help, and how? Needs no GPU."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import estimate, gpu_names, read_model
from .memory import OPTIMIZERS, Training
from .model import Model, model_of_sizes
from .report import record, text

_SIZES = ("layers", "heads", "kv_heads", "head_dim", "intermediate")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _optimizer(argument: str) -> str | float:
    try:
        return argument if argument in OPTIMIZERS else float(argument)
    except ValueError:
        expected = f"{', '.join(OPTIMIZERS)} or bytes of a parameter"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {argument!r}") from None


def _count(argument: str) -> int:
    """A number of tokens: 8192, 8_192, 8,192, 8k, 1.5k, 1m."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([km]?)", re.sub("[_,]", "", argument.lower()))
    count = float(match[1]) * {"": 1, "k": 1024, "m": 1 << 20}[match[2]] if match else 0.5
    if count != int(count):
        raise argparse.ArgumentTypeError(f"expected a number such as 8192 or 8k, got {argument!r}")
    return int(count)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m flce.estimate", description=__doc__)
    add = arguments.add_argument
    add(
        "--model",
        metavar="PATH",
        help="a config.json of transformers, its folder, or a name such as Llama-3.2-1B or "
        "Qwen/Qwen3-8B (flce.estimate.hub_names())",
    )
    add("--hidden", type=int, help="without --model: the hidden size")
    add("--vocab", type=int, help="without --model: the vocabulary")
    for name in _SIZES:
        add(f"--{name.replace('_', '-')}", type=int, help="in place of the model's")
    add(
        "--tokens",
        type=_count,
        required=True,
        help="of a step, in all sequences: 8192, 8k or 1m, in units of 1024",
    )
    add("--sequences", type=int, default=1, help="into which the tokens are divided")
    add(
        "--gpu",
        default="h100",
        help=f"{', '.join(gpu_names())}, or CAPABILITY,MULTIPROCESSORS,BYTES[,TFLOP/S,TB/S], such "
        "as 90,132,85899345920,989,3.35 (dense bfloat16)",
    )
    add("--dtype", choices=_DTYPES, default="bfloat16", help="of parameters and computation")
    add(
        "--optimizer",
        type=_optimizer,
        default="adamw",
        help=f"{', '.join(OPTIMIZERS)}, or bytes of state for each parameter",
    )
    add("--checkpointing", action="store_true", help="of the activations of each layer")
    add("--flash", action="store_true", help="attention by flash-attn, else SDPA")
    add(
        "--lora",
        type=int,
        nargs="?",
        const=16,
        default=0,
        metavar="RANK",
        help="adapters of this rank (16) are trained, and nothing else",
    )
    add(
        "--fsdp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share parameters, gradients and optimizer; tokens are those of one rank",
    )
    add("--max-memory", help="as in flce.linear_cross_entropy")
    add("--json", action="store_true", help="an object of JSON: bytes and seconds")
    return arguments


def _model(options: argparse.Namespace) -> Model:
    sizes: dict[str, Any] = {name: getattr(options, name) for name in _SIZES}
    if options.model:
        return read_model(options.model, hidden=options.hidden, vocab=options.vocab, **sizes)
    for name in ("hidden", "vocab"):
        if getattr(options, name) is None:
            raise ValueError(f"{name}: expected --model, or --hidden and --vocab, got neither")
    layers = sizes.pop("layers") or 0
    return model_of_sizes(options.hidden, options.vocab, layers, **sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        training = Training(
            dtype=_DTYPES[options.dtype],
            optimizer=options.optimizer,
            checkpointing=options.checkpointing,
            sequences=options.sequences,
            flash=options.flash,
            lora=options.lora,
            fsdp=options.fsdp,
        )
        result = estimate(
            _model(options),
            options.tokens,
            gpu=options.gpu,
            training=training,
            max_memory=options.max_memory,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f"flce.estimate: {error}", file=sys.stderr)
        return 2
    width = shutil.get_terminal_size((100, 24)).columns
    print(json.dumps(record(result), indent=1) if options.json else text(result, width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
