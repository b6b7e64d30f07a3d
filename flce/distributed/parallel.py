"""A vocabulary sharded over ranks: `VocabParallel`, and what the ranks compare before a call."""

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from .. import composite, fakes, validate
from .._C import getenv
from ..options import CHOICES, DTYPES, INTEGERS, NUMBERS, value_of
from ..targets import process_group
from . import collectives, inductor

_OPERANDS = ("linear_weight", "target", "linear_bias", "weight", "token_weight", "temperature")
# Options that are packed under another name, those packed as an index, and those that may differ
# between ranks.
_NAMED = {"input_is_sharded": "sequence", "partial_grad_input": "reduce_input_grad"}
_NAMED |= {"wide_terms": "reduce_dtype", "accumulates": "accumulate_into"}
_FLAGS = [name for name in INTEGERS if name.startswith(("grad_", "wants_"))]
_VALUES = {**CHOICES, **dict.fromkeys(_FLAGS, (False, True)), "partial_grad_input": (True, False)}
_VALUES |= dict.fromkeys(("accum_dtype", "logits_dtype"), (*DTYPES, None))  # None is -1
_OF_RANK = ("ranks", "rank", "start", "vocab")


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

    def __init__(
        self,
        group,
        start=None,
        vocab=None,
        sequence=False,
        reduce_input_grad=True,
        reduce_dtype=None,
    ):
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
        # As the operators take it: the group's name and the integers of options.SHARD.
        values = self.ranks, self.rank, start, vocab, sequence, not reduce_input_grad, wide
        integers = (str(-1 if value is None else int(value)) for value in values)
        self.text = "|".join((self.group, *integers))

    def __repr__(self):
        names = ("start", "vocab", "sequence", "reduce_input_grad", "reduce_dtype")
        shown = "".join(f", {name}={getattr(self, name)}" for name in names)
        return f"VocabParallel(group {self.group!r}, rank {self.rank} of {self.ranks}{shown})"

    def __eq__(self, other):
        return isinstance(other, VocabParallel) and self.text == other.text

    def __hash__(self):
        return hash(self.text)


# ---- before a call ----


def _range_of(operands, integers, numbers):
    """(start, vocab, rows, first class, number of all classes, error) of this rank."""
    own = [value_of(integers, name) for name in ("start", "vocab")]
    own = *(None if value < 0 else value for value in own), len(operands[1])
    try:
        found = fakes.described(*operands[:4], (None, None, integers, numbers, None))
    except ValueError as error:
        return *own, 0, 0, str(error)
    return *own, found.first_class, found.classes, ""


def _check_ranges(given):
    """Refuses class ranges that do not hold every class once. `given`: _range_of each rank."""
    starts, vocabs, rows, firsts, (classes, *_), errors = zip(*given, strict=True)
    if len(set(vocabs)) > 1 or len({start is None for start in starts}) > 1:
        expected = "the same vocab on all ranks, and start on all or on none"
        shown = (f"start={start}, vocab={vocab}" for start, vocab, *_ in given)
        validate.refuse("vocab_parallel", expected, "; ".join(shown))
    if vocabs[0] is None and len(set(rows)) > 1:
        expected = "as many rows on all ranks, or vocab= in flce.VocabParallel"
        validate.refuse("linear_weight", expected, list(rows))
    for error in filter(None, errors):
        raise ValueError(error)
    ranges = [range(first, first + n) for first, n in zip(firsts, rows, strict=True)]
    held = sorted(filter(None, ranges), key=lambda one: one.start)
    if [0, *(one.stop for one in held)] != [*(one.start for one in held), classes]:
        expected = f"ranges that hold each of {classes} classes once"
        validate.refuse("vocab_parallel", expected, ranges)


def _common_options(operands, lists):
    """Pairs of a name and a value: what the calls of all ranks have to have in common."""
    input, *others = operands
    valid_vocab, rows, integers, numbers, _ = lists
    pairs = [("input", (input.dtype, tuple(input.shape)))]
    pairs += zip(_OPERANDS, (getattr(one, "dtype", None) for one in others), strict=True)
    for name, value in zip(INTEGERS, integers, strict=False):  # the last integer is the layout
        if name not in _OF_RANK:
            value = _VALUES[name][value] if name in _VALUES else value
            pairs.append((_NAMED.get(name, name), value))
    pairs += zip(NUMBERS, numbers, strict=True)
    if rows == composite.COUNTED:
        rows = int((operands[2] != value_of(integers, "ignore_index")).sum())
    return [*pairs, ("valid_vocab", valid_vocab), ("rows that are not ignored", rows)]


def before_call(operands, lists, traced):
    """What the ranks compare before the operator runs: their class ranges, in a group's first
    call; with FLCE_CHECK=1 in every call, and their options too. A traced call compares nothing."""
    if traced:
        inductor.order_exchanges()
        return
    *_, integers, numbers, name = lists
    ranks = value_of(integers, "ranks")
    group = collectives.group_of(name, value_of(integers, "rank"), ranks)
    compares = getenv("FLCE_CHECK") not in (None, "", "0")
    if group in collectives.compared and not compares:
        return
    # Nor is an object exchanged while a CUDA graph is captured, or with what is fake.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    if dist.get_backend(group) == "fake" or detect_fake_mode(operands[1:2]) is not None:
        return
    options = _common_options(operands, lists) if compares else ()
    own, given = (_range_of(operands, integers, numbers), options), [None] * ranks
    with torch.cuda.device_of(operands[1]):  # NCCL exchanges objects through the current device
        dist.all_gather_object(given, own, group=group)
    ranges, options = zip(*given, strict=True)
    _check_ranges(ranges)
    for rank, pairs in enumerate(options):
        for (name, first), (_, value) in zip(options[0], pairs, strict=False):
            if value != first:
                got = f"{first!r} on rank 0, {value!r} on rank {rank}"
                validate.refuse(name, "the same on all ranks", got)
    collectives.compared.add(group)
