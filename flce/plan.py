"""`flce.plan`: what a call would allocate and run, without running it."""

import itertools
import re
import typing
from dataclasses import dataclass, field

import torch

from . import autograd, parallel, strategy, validate
from ._C import getenv
from .options import DTYPES, GRADIENTS, RETURNS, Wanted, completed, defaults, show_options
from .signature import linear_signature, linear_values


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
    workspace. With save="grads", a backward of lse or entropy needs those of "stats" too.
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

# Elements of a matrix, so that the bytes of a dozen such float64 matrices fit into int64.
_MOST_ELEMENTS = 1 << 54


def _check_ranks(ranks, sequence, tokens):
    validate.check_integer("ranks", ranks, 1, 1 << 20)
    if validate.check_flag("sequence", sequence) and tokens % ranks != 0:
        validate.refuse("tokens", f"a multiple of {ranks} ranks with sequence=True", tokens)


def _plan_of(text):
    """The Plan that the operator has written as text."""
    fields = dict(re.findall(r"(\w+)=(\S+)", text))
    fields = {key: int(value) if value.isdigit() else value for key, value in fields.items()}
    fields["sampled_time"] = float(fields["sampled_time"])
    buffers = {name: int(size) for name, size in re.findall(r"^  (\w+)\s+(\d+) bytes", text, re.M)}
    row = r"^  (\w+) (all-\S+)\s+(\d+) forward\s+(\d+) backward\s+(\d+) bytes"
    collectives = {
        name: Collective(kind, *map(int, counts))
        for name, kind, *counts in re.findall(row, text, re.M)
    }
    return Plan(**fields, buffers=buffers, text=text, collectives=collectives)


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
    wide = parallel.is_wide(reduce_dtype)
    validate.check_integer("shift", options["shift"], 0)
    for name in sorted(given.keys() & {"bias", *GRADIENTS, *RETURNS}):
        validate.check_flag(name, given[name])
    input_dtype, weight_dtype = input_dtype or dtype, weight_dtype or dtype
    for name in ("dtype", "input_dtype", "weight_dtype"):
        validate.check_float(name, given[name] or dtype)
    if valid_bound is not None:
        validate.check_integer("valid_bound", valid_bound, 0)
        if probabilities:
            expected = "None with probabilities, of which no row is ignored"
            validate.refuse("valid_bound", expected, valid_bound)
    probabilities = dtype if probabilities is True else probabilities
    if probabilities and probabilities not in DTYPES:
        expected = "True, False or a floating-point dtype that targets may have"
        validate.refuse("probabilities", expected, repr(probabilities))
    target_shape = (tokens, vocab) if probabilities else (tokens,)
    # The metadata of such a call; the GEMMs' dtype is that of autocast whether or not it is on.
    environment_memory = getenv("FLCE_MAX_MEMORY") if options["max_memory"] is None else None
    own_tokens, rows, divided = tokens, vocab, None
    if ranks > 1:
        own_tokens, rows = tokens // ranks if sequence else tokens, -(-vocab // ranks)
        divided = parallel.VocabShard("plan", ranks, 0, None, vocab, sequence, True, wide).text()
    call = linear_signature(
        (True, False, dtype, False, environment_memory),
        Wanted(lse=return_lse, entropy=return_entropy, predictions=return_predictions),
        (
            (input_dtype, device, (own_tokens, hidden), grad_input),
            (weight_dtype, device, (rows, hidden), grad_weight),
            (weight_dtype, device, (rows,), True) if bias else None,
        ),
        ((probabilities or torch.int64, device, target_shape, False), None, None, None),
        0,
        *linear_values({**options, "vocab_parallel": divided}),
    )
    own = options["accumulate_into"] == "grad"
    added = weight_dtype if own else strategy.stat_dtype(weight_dtype)
    sizes = tokens, hidden, rows, device.type, device.index or 0
    bias_dtype, added_dtype = weight_dtype if bias else None, added if call.accumulates else None
    dtypes = input_dtype, weight_dtype, bias_dtype, added_dtype
    _, arguments = call.resolved(tokens if valid_bound is None else min(valid_bound, tokens))
    operator = torch.ops.flce.plan.default
    text = autograd.run(operator, *sizes, *dtypes, bool(probabilities), *arguments)
    return _plan_of(text)


show_options(plan, _OPTIONS)
