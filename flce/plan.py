"""`flce.plan`: what a call would allocate and run, without running it."""

import json
import typing
from dataclasses import dataclass, field

import torch
from typing_extensions import Unpack

from . import calls, packing, plan_words, validate
from . import options as table


class Collective(typing.NamedTuple):
    """One kind of collective of a rank: calls, and what it receives in all of them."""

    kind: str  # "all-gather" or "all-to-all"
    forward: int
    backward: int
    bytes: int  # from the other ranks


@dataclass(frozen=True)
class Plan:
    """The plan for one problem, as csrc/core/plan.c makes it. str() is a summary in words and MiB;
    `text` is the whole of it by its fields' names, `as_dict()` the fields, for programs.

    Sizes are bytes in addition to the inputs; `buffers` maps a buffer's name to its size. Peaks
    count what is alive at the same time: `forward_peak_bytes` the outputs and the workspace of the
    forward, `backward_peak_bytes` what the forward saved, the gradients and the backward's
    workspace, if the graph is not kept. With save="grads", a backward of lse or entropy needs in
    addition the bytes and GEMMs of the backward in a plan with save="stats".
    `blocks`: how gradients are made by blocks of rows and classes under a small max_memory. "none":
    by chunks of all classes. "workspace": by blocks of `block_rows` and `block_classes`. The other
    two use the memory of the weight's gradient until that is written: "dx_first" makes dX by chunks
    of all classes, then the weight's gradient by blocks; "in_dw" makes both by blocks. There the
    blocks of the first `whole_classes` classes are over all rows, and `block_rows` and
    `block_classes` are of those of the other classes. The three numbers are 0 without blocks.
    `sampled_time`: with save="samples" an estimate of the time of the sampled gradients, if every
    row has as many entries as it can, relative to the GEMMs that they replace; else 0.
    `collectives`, with `ranks` > 1: Collectives by name; "input" is of x, "statistics" of the rows,
    "partial_dx" of the ranks' terms of dX, "summed_dx" of their sums.

    >>> small = flce.plan(1024, 64, 1000, device="cpu", dtype=torch.float32)
    >>> small.save, small.buffers["grad_weight"]
    ('logits', 256000)
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
    block_rows: int
    block_classes: int
    blocks: str
    whole_classes: int
    forward_gemms: int
    backward_gemms: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    peak_bytes: int
    sampled_time: float
    buffers: dict[str, int]
    text: str
    ranks: int = 1
    collectives: dict[str, Collective] = field(default_factory=dict)

    def __str__(self) -> str:
        return plan_words.summary(self)

    def as_dict(self) -> dict[str, object]:
        """The fields by name, sizes in bytes, as JSON can hold them."""
        fields = {name: value for name, value in vars(self).items() if name != "text"}
        collectives = {name: one._asdict() for name, one in self.collectives.items()}
        return {**fields, "buffers": dict(self.buffers), "collectives": collectives}


_OPTIONS = table.defaults(table.PlanOptions)
_OF_DIVERGENCE = {name: _OPTIONS[name] for name in _OPTIONS if name in table.OF_DIVERGENCE}


@table.show_options
def plan(
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device | tuple[int, int, int] = "cuda",
    input_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    bias: bool = False,
    probabilities: bool | torch.dtype | None = False,
    valid_bound: int | None = None,
    grad_input: bool = True,
    grad_weight: bool = True,
    ranks: int = 1,
    sequence: bool = False,
    reduce_dtype: torch.dtype | None = None,
    teacher_hidden: int | None = None,
    teacher_logits: int | torch.dtype | None = None,
    **options: Unpack[table.PlanOptions],
) -> Plan:
    """The `Plan` of a call of these sizes: strategy, chunks, number of GEMMs, bytes of each buffer.

    Args:
        tokens, hidden, vocab: N, H, V.
        dtype: of the GEMMs (autocast's, where it is on).
        device: "cpu", "cuda" or a torch.device, which must be present; or a GPU that need not be:
            one of `torch.ops.flce.gpu_names()`, such as "h100", or (compute capability, as 90 for
            9.0, number of multiprocessors, bytes of memory).
        input_dtype, weight_dtype: of the operands as given; None for `dtype`.
        bias: whether there is one; its gradient is then wanted.
        probabilities: the dtype of targets that are probabilities; True for `dtype`.
        valid_bound: the number of rows to compute, or None for all.
        grad_input, grad_weight: whether they are wanted; without them and `bias`: no_grad.
        ranks: the plan is that of one of `ranks` that divide the vocabulary equally, with the
            collectives of a call; tokens and vocab are those of all.
        sequence, reduce_dtype: as in VocabParallel.
        teacher_hidden, teacher_logits: of `linear_divergence`, whatever its divergence: the hidden
            size of a teacher's head; or the dtype of given logits, or K of (ids,
            log-probabilities), where torch's operations on (N, K) are not in the plan.
        **options: those of the Modules, topk, return_lse, return_entropy, return_predictions and
            return_tail_lse, as in `linear_cross_entropy`; accumulate_into is for a .grad that
            exists already, or for a float32 .main_grad. `linear_logprobs(return_topk=K)` is
            `reduction="none", topk=K, return_lse=True`.

    Raises:
        TypeError, ValueError: what the call itself would refuse.

    >>> flce.plan(1024, 64, 1000, device="cpu", dtype=torch.bfloat16, max_memory="1MiB").chunks
    2
    """
    has_teacher = (teacher_hidden, teacher_logits) != (None, None)
    options = table.completed("plan", _OF_DIVERGENCE if has_teacher else _OPTIONS, options)
    device, gpu, index = _device_of(device)
    for name, value, least in (("tokens", tokens, 0), ("hidden", hidden, 1), ("vocab", vocab, 1)):
        validate.check_integer(name, value, least)
    validate.check_integer("ranks", ranks, 1, 1 << 20)
    flags = {"bias": bias, "grad_input": grad_input, "grad_weight": grad_weight}
    for name, value in {**flags, "sequence": sequence}.items():
        validate.check_flag(name, value)
    if reduce_dtype not in (None, torch.float32):
        validate.refuse("reduce_dtype", "torch.float32 or None", repr(reduce_dtype))
    dtypes = {"dtype": dtype, "input_dtype": input_dtype, "weight_dtype": weight_dtype}
    dtypes = {name: dtype if value is None else value for name, value in dtypes.items()}
    codes = {name: packing.code_of(name, value) for name, value in dtypes.items()}
    _check_targets(valid_bound, probabilities)
    teacher = _teacher_of(teacher_hidden, teacher_logits)
    if "classes" in teacher:
        options |= {"reduction": "none", "return_lse": True}
    if ranks > 1:
        wide_terms = int(reduce_dtype is not None)
        options["vocab_parallel"] = packing.Shard(
            "plan", ranks, vocab=vocab, input_is_sharded=int(sequence), wide_terms=wide_terms
        )
    packed, _ = packing.split(options)
    if packed.wanted.tail_lse and not packed.topk:
        validate.refuse("return_tail_lse", "False without topk", True)
    memory = packed.memory(gpu or device)
    added, attribute = -1, grad_weight and packed.accumulate_into
    if attribute and ("classes" in teacher or not teacher):
        added = codes["weight_dtype"]
        # min: float64 has a smaller index than float32, 16-bit dtypes have larger ones.
        added = added if attribute == "grad" else min(added, table.DTYPES.index(torch.float32))
    sizes = {"tokens": tokens, "hidden": hidden, "weight_rows": -(-vocab // ranks)}
    sizes["rows"] = tokens if valid_bound is None else min(valid_bound, tokens)
    sizes |= {"on_cpu": not gpu and device.type == "cpu", "probabilities": bool(probabilities)}
    sizes |= {"input_dtype": codes["input_dtype"], "weight_dtype": codes["weight_dtype"]}
    sizes |= {"bias_dtype": codes["weight_dtype"] if bias else -1, "added_dtype": added, **teacher}
    # `dtype` is passed as autocast's: by it the core takes the GEMMs' dtype from there.
    context = packing.CallContext(
        memory=memory,
        gradients=packing.WantedGradients(grad_input, grad_weight, bias),
        autocast=codes["dtype"],
        accumulates=added >= 0,
        class_gradient="classes" in teacher,
    )
    integers = packed.integers(context)
    options = calls.OperatorOptions(
        packed.valid_vocab, None, packing.replaced(integers, consumes_saved=True), packed.numbers
    )
    return _planned(calls.run_plan(gpu, index, options, sizes))


def _device_of(device):
    """(device, gpu, index). Of a device that is present: the torch.device, "", its index. Else: the
    argument itself, the name or the numbers of a GPU to plan for without its hardware, as text,
    and an index without a meaning."""
    gpu = ",".join(map(str, device)) if isinstance(device, tuple) else str(device)
    kind, _, index = gpu.partition(":")
    index = int(index) if index.isdecimal() else 0
    if index < {"cpu": 1, "cuda": torch.cuda.device_count()}.get(kind, 0):
        return torch.device(device), "", index
    return device, gpu, index


def _check_targets(valid_bound, probabilities):
    if valid_bound is not None:
        validate.check_integer("valid_bound", valid_bound, 0)
        if probabilities:
            expected = "None with probabilities, of which no row is ignored"
            validate.refuse("valid_bound", expected, valid_bound)
    if not isinstance(probabilities, bool) and probabilities not in (None, *table.DTYPES):
        expected = "True, False or a floating-point dtype that targets may have"
        validate.refuse("probabilities", expected, repr(probabilities))


def _planned(outputs):
    """The Plan from a calls.PlanOutputs."""
    fields = json.loads(outputs.fields)
    collectives = fields.pop("collectives").items()
    collectives = {name: Collective(*values) for name, values in collectives}
    return Plan(
        sampled_time=outputs.sampled_time, text=outputs.text, collectives=collectives, **fields
    )


def _teacher_of(hidden, logits):
    """The sizes that a teacher adds."""
    if hidden is not None:
        if logits is not None:
            validate.refuse("teacher_logits", "None with teacher_hidden", repr(logits))
        return {"teacher_hidden": validate.check_integer("teacher_hidden", hidden, 1)}
    if isinstance(logits, torch.dtype):
        return {"teacher_logits": packing.code_of("teacher_logits", logits)}
    if logits is None:
        return {}
    return {"classes": validate.check_integer("teacher_logits", logits, 1)}
