"""The small problem of the tests of a sharded vocabulary, and its teacher."""

import math

import torch

from harness import cases

TOKENS, HIDDEN, VOCAB = 22, 24, 41  # 22 rows on 4 ranks: blocks of dX with padding
UNEVEN = (3, 3, 29, VOCAB)  # the second rank has no class
ROW = 16 * 8  # bytes of a row of logits of ceil(41 / 4) classes in float64, with its padding
MAPS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "negative": {"logit_scale": -1.5, "temperature": 0.7},
    "rows": {"softcap": 5.0, "logit_scale": 0.5, "temperature": "rows"},
}


def per_row(seed, tokens=TOKENS):
    return 0.5 + torch.rand(tokens, generator=cases.generator(seed))


def class_weights(vocab=VOCAB):
    """Every dtype holds them exactly; one is 0."""
    return torch.randint(1, 9, (vocab,), generator=cases.generator(1)).double().div_(4)


def make(dtype=torch.float64, *, std=2.0, vocab=VOCAB, tokens=TOKENS, maps="plain", **options):
    """A case with a bias. Options that are tensors may be given as True; ignored: every how many
    rows are, with the ignore_index."""
    made = cases.make_case(tokens, HIDDEN, vocab, dtype=dtype, std=std, bias=True, seed=3)
    options = {**MAPS[maps], **options}
    if not options.pop("bias", True):
        del made.options["linear_bias"]
    if options.get("temperature") == "rows":
        options["temperature"] = per_row(6, tokens).to(dtype)
    tensors = {"weight": class_weights(vocab), "token_weight": per_row(5, tokens) - 0.7}
    for name, value in tensors.items():
        if options.pop(name, False):
            options[name] = value.to(dtype)
    if options.get("valid_vocab") is not None:
        made.target.clamp_(max=options["valid_vocab"] - 1)
        made.linear_weight[options["valid_vocab"] :] = math.nan  # never read
    every, index = options.pop("ignored", 0), options.get("ignore_index", -100)
    return (cases.ignore_some(made, index, every) if every else made).with_options(**options)


def named_of(case):
    bias = case.options["linear_bias"]
    return {"input": case.input, "linear_weight": case.linear_weight, "linear_bias": bias}


def teacher_of(dtype):
    """The operands of a teacher of another hidden size."""
    case = cases.make_case(TOKENS, HIDDEN // 2, VOCAB, dtype=dtype, std=2.0, bias=True, seed=9)
    return {f"teacher_{name.removeprefix('linear_')}": t for name, t in named_of(case).items()}
