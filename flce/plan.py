"""`flce.plan`: what a call would allocate and run, without running it."""

import itertools
import typing
from dataclasses import dataclass, field

import torch

from . import operators, validate
from .options import (
    CHOICES,
    DTYPES,
    GRADIENTS,
    RETURNS,
    completed,
    defaults,
    replaced,
    show_options,
    split,
)


class Collective(typing.NamedTuple):
    """One kind of collective of a rank: calls, and what it receives in all of them."""

    kind: str  # "all-gather" or "all-to-all"
    forward: int
    backward: int
    bytes: int  # from the other ranks


@dataclass(frozen=True)
class Plan:
    """The plan for one problem, as csrc/core/plan.c makes it; str() formats it as a table.

    Sizes are bytes in addition to the inputs; `buffers` maps a buffer's name to its size. Peaks
    count what is alive at the same time: `forward_peak_bytes` the outputs and the workspace of the
    forward, `backward_peak_bytes` what the forward saved, the gradients and the backward's
    workspace, if the graph is not kept. With save="grads", a backward of lse or entropy needs those
    of "stats" too.
    `sampled_time`: with save="samples" an estimate of the time of the sampled gradients, if every
    row has as many entries as it can, relative to the GEMMs that they replace; else 0.
    `collectives`, with `ranks` > 1: Collectives by name; "input" is of x, "statistics" of the rows,
    "input_terms" of the ranks' terms of dX, "summed_input" of the sums of these.
    """

    save: str
    form: str
    kernel: str
    dtype: str
    logits_dtype: str
    accum_dtype: str
    rows: int
    chunk_rows: int
    chunks: int
    backward_chunk_rows: int
    backward_chunks: int
    forward_gemms: int
    backward_gemms: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    peak_bytes: int
    sampled_time: float
    buffers: dict
    text: str
    ranks: int = 1
    collectives: dict = field(default_factory=dict)

    def __str__(self):
        return self.text


_OPTIONS = defaults("of_module")
del _OPTIONS["vocab_parallel"]  # ranks and sequence say it without a group

_FORMS = ("exp", "dz")  # enum flce_form
# Elements of a matrix, so that the bytes of a dozen such float64 matrices fit into int64.
_MOST_ELEMENTS = 1 << 54


def _check_ranks(ranks, sequence, tokens):
    validate.check_integer("ranks", ranks, 1, 1 << 20)
    if validate.check_flag("sequence", sequence) and tokens % ranks != 0:
        validate.refuse("tokens", f"a multiple of {ranks} ranks with sequence=True", tokens)


def _check_problem(device, tokens, hidden, vocab):
    sizes = {"tokens": (tokens, 0), "hidden": (hidden, 1), "vocab": (vocab, 1)}
    sizes = {name: int(validate.check_integer(name, *given)) for name, given in sizes.items()}
    for first, second in itertools.combinations(sizes, 2):
        if sizes[first] * sizes[second] > _MOST_ELEMENTS:
            got = f"{sizes[first]} and {sizes[second]}"
            validate.refuse(f"{first}, {second}", "a product of at most 2^54", got)
    if device.type not in ("cpu", "cuda"):
        validate.refuse("device", "a CPU or CUDA device", device)
    present = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= present:
        validate.refuse("device", "one that is present", device)


def plan(
    tokens,
    hidden,
    vocab,
    *,
    dtype=torch.bfloat16,
    device="cuda",
    input_dtype=None,
    weight_dtype=None,
    bias=False,
    probabilities=False,
    valid_bound=None,
    return_lse=False,
    return_entropy=False,
    return_predictions=False,
    grad_input=True,
    grad_weight=True,
    ranks=1,
    sequence=False,
    reduce_dtype=None,
    **options,
):
    """The `Plan` of a call of these sizes: strategy, chunks, number of GEMMs, bytes of each buffer.

    Args:
        tokens, hidden, vocab: N, H, V.
        dtype: of the GEMMs (autocast's, where it is on).
        device: "cpu", "cuda" or a torch.device; a CUDA device must be present.
        input_dtype, weight_dtype: of the operands as given; None for `dtype`.
        bias: whether there is one; its gradient is then wanted.
        probabilities: the dtype of targets that are probabilities; True for `dtype`.
        valid_bound: the number of rows to compute, or None for all.
        return_lse, return_entropy, return_predictions: as in `linear_cross_entropy`.
        grad_input, grad_weight: whether they are wanted; without them and `bias`: no_grad.
        ranks: the plan is that of one of `ranks` that divide the vocabulary equally, with the
            collectives of a call; tokens and vocab are those of all.
        sequence, reduce_dtype: as in VocabParallel.
        **options: those of the Modules, as in `linear_cross_entropy`; accumulate_into is for a
            .grad that exists already, or for a float32 .main_grad.

    Raises:
        TypeError, ValueError: what the call itself would refuse.
    """
    given, options = locals(), completed("plan", _OPTIONS, options)
    device = torch.device(device)
    _check_problem(device, tokens, hidden, vocab)
    _check_ranks(ranks, sequence, tokens)
    if reduce_dtype not in (None, torch.float32):
        validate.refuse("reduce_dtype", "torch.float32 or None", repr(reduce_dtype))
    for name in sorted(given.keys() & {"bias", *GRADIENTS}):
        validate.check_flag(name, given[name])
    input_dtype, weight_dtype = input_dtype or dtype, weight_dtype or dtype
    named = zip(
        ("dtype", "input_dtype", "weight_dtype"), (dtype, input_dtype, weight_dtype), strict=True
    )
    for name, one in named:
        if one not in DTYPES:
            validate.refuse(name, "float64, float32, bfloat16 or float16", repr(one), TypeError)
    if valid_bound is not None:
        validate.check_integer("valid_bound", valid_bound, 0)
        if probabilities:
            expected = "None with probabilities, of which no row is ignored"
            validate.refuse("valid_bound", expected, valid_bound)
    probabilities = dtype if probabilities is True else probabilities
    if probabilities and probabilities not in DTYPES:
        expected = "True, False or a floating-point dtype that targets may have"
        validate.refuse("probabilities", expected, repr(probabilities))
    rows = vocab if ranks == 1 else -(-vocab // ranks)
    if ranks > 1:
        flags = int(sequence), 0, int(reduce_dtype is not None)
        options["vocab_parallel"] = "|".join(map(str, ("plan", ranks, 0, -1, vocab, *flags)))
    packed, _ = split({**options, **{name: given[name] for name in RETURNS if name in given}})
    attribute = options["accumulate_into"]
    accumulates = attribute is not None and grad_weight
    # The GEMMs' dtype is that of autocast whether or not it is on.
    names = ("max_memory", "kept_memory", "saves_memory")
    of_call = dict(zip(names, packed.memory(device), strict=True)) | {"accumulates": accumulates}
    of_call |= {"autocast": DTYPES.index(dtype), "grad_bias": bias}
    of_call |= {"grad_input": grad_input, "grad_weight": grad_weight}
    integers = replaced(packed.integers_with(**of_call), consumes_saved=True)
    computed = tokens if valid_bound is None else min(valid_bound, tokens)
    wide = torch.float64 if weight_dtype == torch.float64 else torch.float32
    added = None if not accumulates else weight_dtype if attribute == "grad" else wide
    dtypes = input_dtype, weight_dtype, weight_dtype if bias else None, added
    codes = [-1 if one is None else DTYPES.index(one) for one in dtypes]
    sizes = device.type == "cpu", tokens, hidden, rows, computed, *codes, bool(probabilities)
    operands = [int(value) for value in sizes]  # in the order of options.OPERANDS
    lists = operands, packed.valid_vocab, integers, packed.numbers
    return _plan_of(*operators.run_plain(torch.ops.flce.plan.default, device.index or 0, *lists))


def _plan_of(values, sampled_time, text):
    """The Plan of the operator's values, in the order of flce_plan_names (plan_text.c)."""
    fields, buffers, kinds = (part.split() for part in torch.ops.flce.plan_names().split("/"))
    kinds = list(zip(kinds[::2], kinds[1::2], strict=True))
    found = dict(zip(fields, values, strict=False))
    sizes = values[len(fields) :][: len(buffers)]
    counts = values[len(fields) + len(buffers) :]
    collectives = {
        name: Collective(kind, *counts[3 * i : 3 * i + 3])
        for i, (name, kind) in enumerate(kinds)
        if any(counts[3 * i : 3 * i + 2])
    }
    shown = {"save": CHOICES["save"][found.pop("save")], "form": _FORMS[found.pop("form")]}
    shown["kernel"] = "fused" if found.pop("fuses_rows") else "gemm"
    for name, own in (("dtype", "dtype"), ("z_dtype", "logits_dtype"), ("accum_dtype",) * 2):
        shown[own] = str(DTYPES[found.pop(name)]).removeprefix("torch.")
    buffers = {name: size for name, size in zip(buffers, sizes, strict=True) if size}
    return Plan(
        **shown, **found, sampled_time=sampled_time, buffers=buffers, text=text,
        collectives=collectives,
    )  # fmt: skip


show_options(plan, _OPTIONS)
