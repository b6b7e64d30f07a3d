"""A vocabulary sharded over ranks: `VocabParallel`, and what the ranks compare before a call."""

import itertools
import typing

import torch
import torch.distributed as dist

from .. import calls, fakes, operators, torch_private, validate
from ..modes import is_traced
from ..options import CHOICES, DTYPES, defaults
from ..packing import DIVERGENCES, INTEGERS, NUMBERS, Shard
from ..targets import process_group
from . import collectives, inductor

if typing.TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Options that are packed under another name, and those packed as an index.
_NAMED = {"input_is_sharded": "sequence", "partial_grad_input": "reduce_input_grad"}
_NAMED |= {"wide_terms": "reduce_dtype", "accumulates": "accumulate_into"}
_FLAGS = [name for name in INTEGERS if name.startswith(("grad_", "wants_"))]
_VALUES = {**CHOICES, **dict.fromkeys(_FLAGS, (False, True)), "partial_grad_input": (True, False)}
_VALUES["divergence"] = (None, *DIVERGENCES)
_VALUES |= dict.fromkeys(("accum_dtype", "logits_dtype"), (*DTYPES, None))  # None is -1
# What is not compared: a rank's number, class range and group; the seeds of its own classes; the
# layout of the list of integers; rows and valid_bound, of which _rows_of is compared.
_NOT_COMPARED = {
    "ranks",
    "rank",
    "start",
    "vocab",
    "layout",
    "seed",
    "gradient_seed",
    "group",
    "rows",
}
_NOT_COMPARED |= {"vocab_parallel", "valid_bound"}
# Tensors whose shape follows from those of others, or is that of a rank's classes.
_BY_DTYPE = {"linear_weight", "linear_bias", "adapter_weight", "teacher_weight", "teacher_bias"}
_BY_DTYPE |= {"target", "weight", "token_weight", "temperature", "teacher_temperature", "num_items"}


class VocabParallel:
    """Divides the vocabulary of `flce.linear_cross_entropy` among the ranks of a group.

    Every rank passes the rows of linear_weight and linear_bias for its own classes, and the same
    input and target, whose classes count over all ranks; `weight`, a factor for each class, is that
    of all classes. Every rank gets the loss and the outputs of the whole vocabulary, with the same
    bits, and the gradients of its own operands; the gradient of input is summed over the ranks. All
    ranks have to make the same calls with the same options. The ranks' shares may differ in size,
    and one may be empty (shape (0, H)).

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension.
        start, vocab: this rank's first class, and the number of all classes. Both None: all ranks
            have as many classes, in the order of their ranks. start None: the classes are divided
            as torch.chunk and DTensor's Shard(0) do.
        sequence: input is this rank's share of the tokens, (N/T, ...) of T ranks, along its first
            dimension, and so is its gradient; target, of the shape (N, ...), is that of all tokens.
        reduce_input_grad: False leaves the gradient of input unsummed, for callers that sum it
            (as Megatron's copy_to_tensor_model_parallel_region does).
        reduce_dtype: torch.float32 exchanges the ranks' terms of a bfloat16 or float16 gradient of
            input in float32: one rounding instead of two, twice the bytes of that exchange. None:
            in the gradient's dtype. The sum is computed in float32 in both cases.

    Raises:
        TypeError, ValueError: an argument of the wrong type or range, by name.
        RuntimeError: torch.distributed is not initialised.

    >>> shards = flce.VocabParallel(torch.distributed.group.WORLD)  # here of one process
    >>> x, w_shard, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> flce.linear_cross_entropy(x, w_shard, y, vocab_parallel=shards).shape
    torch.Size([])
    """

    start: int | None
    vocab: int | None
    sequence: bool
    reduce_input_grad: bool
    reduce_dtype: torch.dtype | None
    group: str
    ranks: int
    rank: int
    shard: Shard

    def __init__(
        self,
        group: "dist.ProcessGroup | DeviceMesh",
        start: int | None = None,
        vocab: int | None = None,
        sequence: bool = False,
        reduce_input_grad: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        group = process_group("vocab_parallel", group)
        self.sequence = validate.check_flag("sequence", sequence)
        self.reduce_input_grad = validate.check_flag("reduce_input_grad", reduce_input_grad)
        if vocab is not None:
            validate.check_integer("vocab", vocab, 1)
        elif start is not None:
            validate.refuse("vocab", "the number of all classes with start", None)
        if start is not None:
            validate.check_integer("start", start, 0, vocab)
        if sequence and not reduce_input_grad:
            validate.refuse("reduce_input_grad", "True with sequence=True", False)
        if reduce_dtype not in (None, torch.float32):
            validate.refuse("reduce_dtype", "torch.float32 or None", repr(reduce_dtype))
        wide = reduce_dtype is not None
        if wide and not reduce_input_grad:
            validate.refuse("reduce_dtype", "None with reduce_input_grad=False", reduce_dtype)
        self.start, self.vocab, self.reduce_dtype = start, vocab, reduce_dtype
        self.group, self.ranks, self.rank = group.group_name, group.size(), group.rank()
        self.shard = Shard(
            self.group,
            self.ranks,
            self.rank,
            start=-1 if start is None else int(start),
            vocab=-1 if vocab is None else int(vocab),
            input_is_sharded=int(sequence),
            partial_grad_input=int(not reduce_input_grad),
            wide_terms=int(wide),
        )

    def __repr__(self) -> str:
        names = ("start", "vocab", "sequence", "reduce_input_grad", "reduce_dtype")
        shown = "".join(f", {name}={getattr(self, name)}" for name in names)
        return f"VocabParallel(group {self.group!r}, rank {self.rank} of {self.ranks}{shown})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VocabParallel) and self.shard == other.shard

    def __hash__(self) -> int:
        return hash(self.shard)


# ---- before a call ----


class ClassRange(typing.NamedTuple):
    """Of one rank. start, vocab: those of its VocabParallel, or None; rows: of its linear_weight;
    first, classes: its first class, and the number of all; error: why these are unknown, or ""."""

    start: int | None
    vocab: int | None
    rows: int
    first: int = 0
    classes: int = 0
    error: str = ""


def _range_of(call):
    """The ClassRange of this rank."""
    start, vocab = (call.options.value(name) for name in ("start", "vocab"))
    start, vocab = (None if value < 0 else value for value in (start, vocab))
    rows = len(call.linear_weight)
    try:
        description = fakes.described(call, call.options._replace(valid_vocab=None))
    except ValueError as error:
        return ClassRange(start, vocab, rows, error=str(error))
    return ClassRange(start, vocab, rows, description.first_class, description.classes)


def _check_ranges(of_ranks):
    """Refuses class ranges that do not hold every class once. `of_ranks`: ClassRanges."""
    starts = [of_rank.start for of_rank in of_ranks]
    vocabs = [of_rank.vocab for of_rank in of_ranks]
    rows = [of_rank.rows for of_rank in of_ranks]
    if len(set(vocabs)) > 1 or len({start is None for start in starts}) > 1:
        expected = "the same vocab on all ranks, and start on all or on none"
        pairs = zip(starts, vocabs, strict=True)
        shown = (f"start={start}, vocab={vocab}" for start, vocab in pairs)
        validate.refuse("vocab_parallel", expected, "; ".join(shown))
    if vocabs[0] is None and len(set(rows)) > 1:
        expected = "as many rows on all ranks, or vocab= in flce.VocabParallel"
        validate.refuse("linear_weight", expected, rows)
    for of_rank in of_ranks:
        if of_rank.error:
            raise ValueError(of_rank.error)
    ranges = [range(of_rank.first, of_rank.first + of_rank.rows) for of_rank in of_ranks]
    shares = sorted(filter(None, ranges), key=lambda share: share.start)
    classes = of_ranks[0].classes
    if [0, *(share.stop for share in shares)] != [*(share.start for share in shares), classes]:
        expected = f"ranges that hold each of {classes} classes once"
        validate.refuse("vocab_parallel", expected, ranges)


def _described(name, value):
    """What is compared of an argument; a value that is no number or text by its type."""
    if isinstance(value, torch.Tensor):
        return value.dtype if name in _BY_DTYPE else (value.dtype, tuple(value.shape))
    plain = value is None or isinstance(value, (bool, int, float, str, tuple, torch.dtype))
    return value if plain else type(value).__name__


def _of_operator(call):
    """The pairs of a name and what is compared of an operator's arguments."""
    names = (argument.name for argument in calls.operator_of(call)._schema.arguments)
    arguments = dict(zip(names, call.flat(), strict=False))  # a teacher's may be missing
    lists = {"integers": INTEGERS, "numbers": NUMBERS}
    if call.teacher and call.teacher.linear_weight is None:  # logits, of all classes or of a rank's
        logits = arguments.pop("teacher_input")
        yield "teacher_logits", logits[..., :0]
    for name, value in arguments.items():
        if name not in lists:
            yield operators.OPTION_OF.get(name, name), value
            continue
        for item, number in zip(lists[name], value, strict=False):  # the last one is the layout
            values = _VALUES.get(item)
            number = number if values is None else values[int(number)]
            yield _NAMED.get(item, item), number


def _rows_of(call):
    """The rows that an operator computes: a count on CPUs, on GPUs `valid_bound` or None."""
    if call.options.rows != calls.COUNTED:
        return call.options.rows
    ignored = validate.is_equal(call.target, call.options.value("ignore_index"))
    return int((~ignored).sum())


def _common(sharded):
    """{name: values} of what the calls of all ranks have to have in common: every argument of the
    operator, every option that the caller has given, and every argument of the function that calls
    another one, but for those that may differ. A name may stand for a number and for a tensor."""
    call, common = sharded.call, {}
    caller = {"call": calls.operator_of(call).name(), **(sharded.caller or {})}
    for name, value in (*caller.items(), *_of_operator(call)):
        common.setdefault(name, []).append(_described(name, value))
    options = {**defaults(), **sharded.options}
    for name, value in options.items():
        common.setdefault(name, [_described(name, value)])
    common["rows that are not ignored"] = [_rows_of(call)]
    return {name: values for name, values in common.items() if name not in _NOT_COMPARED}


def _check_common(of_ranks):
    """`of_ranks`: _common of each rank."""
    first, *_ = of_ranks
    for rank, values in enumerate(of_ranks):
        for name in first | values:
            pairs = itertools.zip_longest(first.get(name, ()), values.get(name, ()))
            for of_first, of_rank in pairs:
                if of_first != of_rank:
                    got = f"{of_first!r} on rank 0, {of_rank!r} on rank {rank}"
                    validate.refuse(name, "the same on all ranks", got)


def before_call(sharded):
    """What the ranks compare before the operator of a sharding.ShardedCall runs: their class
    ranges, in a group's first call; with FLCE_CHECK=1 in every call, and their options too. A
    traced call compares nothing."""
    if is_traced():
        inductor.order_exchanges()
        return
    call, options = sharded.call, sharded.call.options
    ranks = options.value("ranks")
    group = collectives.group_of(options.group, options.value("rank"), ranks)
    compares = validate.checks_values()
    if group in collectives.compared and not compares:
        return
    # Nor is an object exchanged while a CUDA graph is captured, or with what is fake.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    weight = call.linear_weight
    if dist.get_backend(group) == "fake" or torch_private.detect_fake_mode([weight]) is not None:
        return
    of_rank = _range_of(call), _common(sharded) if compares else {}
    of_ranks = [None] * ranks
    with torch.cuda.device_of(weight):  # NCCL exchanges objects through the current device
        dist.all_gather_object(of_ranks, of_rank, group=group)
    ranges, common = zip(*of_ranks, strict=True)
    _check_ranges(ranges)
    _check_common(common)
    collectives.compared.add(group)
