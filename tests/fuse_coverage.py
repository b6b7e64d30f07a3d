"""Writes docs/fuse-coverage.md: which causal language models of transformers flce.fuse serves.

    python tests/fuse_coverage.py [--write] [class ...]

Builds each class small with random weights in float32 and compares loss, gradients, logits and
generate with and without fuse. Exit status 1 if a result is wrong, fewer than 150 classes are
built, or fewer than 97 % of these fuse.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import transformers

import flce
from harness.tiny_models import TEXT_VOCAB as VOCAB
from harness.tiny_models import VARIANTS, Comparison, causal_classes, tiny_model

BATCH, LENGTH = 2, 64
LOSS_BAR, GRADIENT_BAR, LOGITS_BAR = 2e-6, 1e-4, 1e-5
# Without these, flce keeps logits on the CPU if they fit: 2 x 64 x 1000 do.
OPTIONS = {"save": "stats", "max_memory": "128KiB"}


def build(name, module):
    """A model that runs with labels, or the first variant's error."""
    first = None
    ids = torch.randint(5, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    for variant in range(len(VARIANTS)):
        try:
            model = tiny_model(name, module, variant)
            loss = model(input_ids=ids, labels=ids).loss
            if loss is None:
                raise ValueError("no loss from labels")
            loss.backward()
            return model, {"input_ids": ids, "labels": ids}
        except Exception as error:  # whatever a configuration is refused with
            first = first or error
    raise first


def generates_alike(model, ids):
    model.eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    try:
        expected = model.generate(ids[:, :8], **settings)
    except Exception:
        return None  # the model itself does not generate from token ids alone
    with flce.fuse(model, strict=True):
        return torch.equal(model.generate(ids[:, :8], **settings), expected)


def row(name, module):
    """(state, text, numbers): not built, refused (by fuse), wrong, fused, falls back."""
    try:
        model, inputs = build(name, module)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:90]}", ""
    try:
        found = Comparison(model, inputs, BATCH * (LENGTH - 1), VOCAB, **OPTIONS)
        alike = generates_alike(model, inputs["input_ids"])
    except ValueError as error:
        return "refused", str(error), ""
    numbers = f"{found.loss_error:.1e}, {found.gradient_error:.1e}, {found.logits_error:.1e}"
    right = found.loss_error <= LOSS_BAR and found.gradient_error <= GRADIENT_BAR
    right = right and found.logits_error <= LOGITS_BAR and alike is not False
    if not right:
        return "wrong", f"generate alike: {alike}", numbers
    if found.is_fused and not found.made:
        return "fused", "; ".join(found.losses), numbers
    reasons = list(found.fallbacks) or [f"{op} made {shape}" for op, shape in found.made]
    return "falls back", "; ".join(reasons), numbers


def table(rows):
    counts = {state: sum(r[1] == state for r in rows) for state in {r[1] for r in rows}}
    built = len(rows) - counts.get("not built", 0) - counts.get("refused", 0)
    fused, wrong = counts.get("fused", 0), counts.get("wrong", 0)
    share = 100 * fused / max(built, 1)
    lines = [
        "# Causal language models of transformers that `flce.fuse` serves",
        "",
        f"Written by `python tests/fuse_coverage.py --write` with transformers "
        f"{transformers.__version__}, torch {torch.__version__}: {len(rows)} classes, {built} "
        f"built small, {fused} fused ({share:.1f} %), {wrong} wrong. "
        f"Float32 on the CPU, {BATCH} x {LENGTH} tokens, {VOCAB} classes. Fused: no tensor of all "
        "logits' size in a training step. Errors are relative, of loss, worst gradient and logits. "
        "Not built: this script's small configuration does not suit the class; fuse may.",
        "",
        "| class | | steps between head and loss, or why not | errors |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {state} | {text} | {numbers} |" for name, state, text, numbers in rows]
    return "\n".join(lines) + "\n", built, share, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="docs/fuse-coverage.md")
    parser.add_argument("classes", nargs="*")
    arguments = parser.parse_args()
    if arguments.write and arguments.classes:
        parser.error("--write: expected no class names, which would leave the others out")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name, module in sorted(causal_classes().items()):
        if arguments.classes and name not in arguments.classes:
            continue
        rows.append((name, *row(name, module)))
        print(*rows[-1], sep=" | ", flush=True)
    text, built, share, wrong = table(rows)
    if arguments.write:
        (Path(__file__).parents[1] / "docs" / "fuse-coverage.md").write_text(text)
    print(f"{built} built, {share:.1f} % fused, {wrong} wrong")
    whole = not arguments.classes
    return int(wrong > 0 or (whole and (built < 150 or share < 97)))


if __name__ == "__main__":
    sys.exit(main())
