"""Tables of predicted steps (predict.py), printed by `scale.py --predict`.

`table` is of T ranks that all divide the vocabulary; `meshes` of T ranks of which TP divide it and
T / TP groups divide the tokens, with the best TP, chunks, save and sequence.
"""

import itertools
import json
import math
from dataclasses import asdict

from predict import ELEMENT, H200, HIERARCHICAL, NCCL, ceil_div, gather_seconds, make_plan, predict

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SAVES = ("grads", "logits", "stats")
BUDGET = 1 << 30  # bytes of a chunk's E: the default max_memory


def chunk_counts(tokens, share):
    """As many chunks as fit the default budget, and up to four times as many."""
    fewest = max(1, ceil_div(tokens * share * ELEMENT, BUDGET))
    return sorted({*range(fewest, 2 * fewest + 1), 4 * fewest})


def best(tokens, hidden, vocab, ranks, machine=H200, transport=None, saves=SAVES, sequences=None):
    """The fastest Prediction over save, chunks and sequence."""
    found = []
    counts = chunk_counts(tokens, ceil_div(vocab, ranks))
    sequences = (False, True) if sequences is None else sequences
    for save, chunks, sequence in itertools.product(saves, counts, sequences):
        if save == "logits" and chunks > 1:  # one chunk, which has to fit
            continue
        if sequence and (ranks == 1 or tokens % ranks > 0):
            continue
        plan = make_plan(tokens, hidden, vocab, ranks, save, chunks, sequence)
        found.append(predict(plan, hidden, vocab, machine, transport))
    return min(found, key=lambda one: one.step)


def table(shape, machine=H200, ranks=RANKS, transport=None):
    """Rows of T ranks that all divide the vocabulary, with save="grads" and the best chunks; the
    first one is of one GPU. `efficiency`: against that one."""
    rows = []
    for count in (1, *ranks):
        size = shape.tokens, shape.hidden, shape.vocab, count
        one = best(*size, machine, transport, saves=("grads",), sequences=(False,))
        alone = rows[0]["step"] if rows else one.step
        figures = {"step": one.step, "ratio": one.ratio, "efficiency": alone / one.step / count}
        rows.append({**asdict(one), **figures})
    return rows


# ---- meshes of two dimensions ----


def data_parallel(machine, hidden, vocab, ranks, groups):
    """(bytes, seconds) for W gathered before the head and dW reduce-scattered after it, each once,
    in bfloat16, among the `groups` ranks that hold the same classes."""
    if groups == 1:
        return 0, 0.0
    share = ceil_div(vocab, ranks) * hidden * ELEMENT
    received = 2 * share * (groups - 1) / groups
    members = max(machine.host // ranks, 1)
    if groups <= members:
        return received, 2 * gather_seconds(machine, NCCL, groups, received / 2, groups)
    return received, 2 * gather_seconds(machine, NCCL, groups, received / 2, members)


def mesh(shape, total, tp, machine=H200, transport=None):
    """A row of `total` ranks, tp of which divide the vocabulary; shape.tokens are those of all.
    `exposed_step`: with the exchange of W and dW, which the layers below the head may hide."""
    groups = total // tp
    if shape.tokens % groups > 0:
        return None
    tokens = shape.tokens // groups
    one = best(tokens, shape.hidden, shape.vocab, tp, machine, transport)
    received, seconds = data_parallel(machine, shape.hidden, shape.vocab, tp, groups)
    spread = machine.sigma * (math.sqrt(2 * math.log(total)) - math.sqrt(2 * math.log(tp)))
    # The slowest of all ranks, not only of a group.
    extra_jitter = spread * (one.products + one.passes)
    return {
        **asdict(one),
        "ranks": total,
        "tp": tp,
        "tokens": tokens,
        "jitter": one.jitter + extra_jitter,
        "step": one.step + extra_jitter,
        "ratio": one.ratio,
        "dp_bytes": received,
        "dp_seconds": seconds,
        "exposed_step": one.step + extra_jitter + seconds,
    }


def meshes(shape, machine=H200, ranks=RANKS, tokens_of=None, key="step", transport=None):
    """The best mesh for each number of ranks, by `key`. tokens_of(T): tokens of all ranks, those of
    the shape if None. `efficiency`: against the time that one GPU takes for a token of the shape.
    """
    alone = best(*shape[:3], 1, machine).step / shape.tokens
    rows = []
    for total in ranks:
        given = shape._replace(tokens=tokens_of(total)) if tokens_of else shape
        divisors = [1 << power for power in range(total.bit_length())]
        found = [mesh(given, total, tp, machine, transport) for tp in divisors]
        row = min((one for one in found if one), key=lambda one: one[key])
        row["efficiency"] = alone * given.tokens / total / row[key]
        rows.append(row)
    return rows


# ---- report ----


def ms(seconds):
    return f"{1e3 * seconds:9.3f}"


def table_lines(rows, hierarchical):
    """`hierarchical`: the same ranks by HIERARCHICAL, beyond a host."""
    times = ("products", "passes", "exchange", "exposed", "jitter", "step")
    yield " ".join(f"{name:>9}" for name in ("ranks", "chunks", *times)) + "  effic.   ratio  by"
    for row, other in zip(rows, hierarchical, strict=True):
        text = f"{row['ranks']:9d} {row['chunks']:9d} "
        text += " ".join(ms(row[name]) for name in times)
        text += f" {row['efficiency']:6.1%} {row['ratio']:6.3f}x  {row['transport']}"
        if row["transport"] == NCCL.name:
            text += f"; hierarchical and hidden {ms(other['step']).strip()} ms,"
            text += f" {other['efficiency']:.1%}, {other['ratio']:.3f}x"
        yield text


def mesh_lines(rows, key):
    columns = ("ranks", "tokens", "TP", "chunks", "step", "DP MB", "DP ms", "with DP")
    yield " ".join(f"{name:>9}" for name in columns) + "  effic.  save"
    for row in rows:
        text = f"{row['ranks']:9d} {row['tokens']:9d} {row['tp']:9d} {row['chunks']:9d} "
        text += f"{ms(row['step'])} {row['dp_bytes'] / 1e6:9.0f} {ms(row['dp_seconds'])} "
        text += f"{ms(row['exposed_step'])} {row['efficiency']:6.1%}  {row['save']}"
        yield text + (" sequence" if row["sequence"] else "")


def report(shapes, path=None, machine=H200):
    """Prints the tables of [(name, Shape)]; with `path`, also a record."""
    if any(shape.bias or shape.dtype for _, shape in shapes):
        raise SystemExit("--predict: expected shapes in bfloat16 without a bias")
    record = {"machine": asdict(machine), "shapes": []}
    for name, shape in shapes:
        sizes = f"{shape.tokens} x {shape.hidden} x {shape.vocab}"
        rows, hierarchical = table(shape, machine), table(shape, machine, transport=HIERARCHICAL)
        print(f"\n{name}: {sizes}, vocabulary over all ranks, ms")
        print(*table_lines(rows, hierarchical), sep="\n")
        entry = {"name": name, **shape._asdict(), "vocabulary": rows, "hierarchical": hierarchical}

        def growing(total, tokens=shape.tokens):
            return max(tokens * total // machine.host, tokens)

        for label, tokens_of in (("fixed tokens", None), ("tokens grow beyond 8 ranks", growing)):
            for key in ("step", "exposed_step"):
                found = meshes(shape, machine, RANKS, tokens_of, key)
                hides = "hidden" if key == "step" else "exposed"
                print(f"\n{name}: best mesh, {label}, W's and dW's exchange {hides}, ms")
                print(*mesh_lines(found, key), sep="\n")
                entry[f"{label}, {hides}"] = found
        record["shapes"].append(entry)
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")
