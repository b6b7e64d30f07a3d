"""A vocabulary sharded over ranks: `VocabParallel`."""

import functools
import typing

import torch
from torch._guards import detect_fake_mode

from . import validate


class VocabShard(typing.NamedTuple):
    """What a call needs of VocabParallel; `text()` is how the operators take it. group: the name of
    the process group. start, vocab: None if all ranks have as many rows of W."""

    group: str
    ranks: int
    rank: int
    start: int | None
    vocab: int | None
    sequence: bool
    reduce_input_grad: bool
    wide: bool  # reduce_dtype=torch.float32

    def text(self):
        """A string; `shard_of` is the inverse."""
        texts = ("-" if number is None else str(int(number)) for number in self[1:])
        return "|".join((self.group, *texts))

    def class_range(self, rows):
        """(this rank's first class, number of all classes) for `rows` rows of W on this rank."""
        if self.vocab is None:
            if rows == 0:
                expected = "at least one row, or vocab= in flce.VocabParallel"
                validate.refuse("linear_weight", expected, rows)
            return self.rank * rows, self.ranks * rows
        start = self.start
        if start is None:
            share = -(-self.vocab // self.ranks)  # as torch.chunk and DTensor divide
            start = min(self.rank * share, self.vocab)
            expected = min(share, self.vocab - start)
            if rows != expected:
                of = f"rows on rank {self.rank} of {self.ranks}, for {self.vocab} classes"
                validate.refuse("linear_weight", f"{expected} {of}", rows)
        if start + rows > self.vocab:
            validate.refuse(
                "linear_weight", f"at most {self.vocab - start} rows from class {start} on", rows
            )
        return start, self.vocab

    def fits(self, rows):
        """Whether `class_range` takes `rows`."""
        try:
            self.class_range(rows)
        except ValueError:
            return False
        return True


def check_ranges(shard, given):
    """Refuses class ranges that do not hold every class once. `given`: of each rank, the start and
    vocab of its VocabShard, and its rows of W."""
    rows = [rank_rows for _, _, rank_rows in given]
    forms = {(start is None, vocab) for start, vocab, _ in given}
    if len(forms) > 1:
        expected = "the same vocab on all ranks, and start on all or on none"
        shown = [f"start={start}, vocab={vocab}" for start, vocab, _ in given]
        validate.refuse("vocab_parallel", expected, "; ".join(shown))
    if shard.vocab is None and len(set(rows)) > 1:
        expected = "as many rows on all ranks, or vocab= in flce.VocabParallel"
        validate.refuse("linear_weight", expected, rows)
    ranges, end = [], 0
    for rank, (start, _, rank_rows) in enumerate(given):
        first, classes = shard._replace(rank=rank, start=start).class_range(rank_rows)
        ranges.append(range(first, first + rank_rows))
    for held in sorted(filter(None, ranges), key=lambda held: held.start):
        end = held.stop if held.start == end else -1
    if end != classes:
        expected = f"ranges that hold each of {classes} classes once"
        validate.refuse("vocab_parallel", expected, ranges)


def check_options(given):
    """Refuses options that differ between ranks. `given`: of each rank, its pairs of a name and a
    value, or None if they are not compared."""
    for rank, pairs in enumerate(given):
        for (name, first), (_, value) in zip(given[0] or (), pairs or (), strict=False):
            if value != first:
                got = f"{first!r} on rank 0, {value!r} on rank {rank}"
                validate.refuse(name, "the same on all ranks", got)


def shard_of(text):
    """The VocabShard of a text; None for None."""
    if text is None:
        return None
    if not isinstance(text, str):
        validate.refuse("vocab_parallel", "a flce.VocabParallel or None", repr(text), TypeError)
    return _parsed(text)


@functools.lru_cache(maxsize=64)
def _parsed(text):
    try:
        group, *numbers = text.rsplit("|", 7)
        ranks, rank, start, vocab, *flags = (None if item == "-" else int(item) for item in numbers)
        return VocabShard(group, ranks, rank, start, vocab, *map(bool, flags))
    except (TypeError, ValueError):
        validate.refuse("vocab_parallel", "the text of a flce.VocabParallel", repr(text))


class VocabParallel:
    """Divides the vocabulary of `flce.linear_cross_entropy` among the ranks of a group.

    Every rank passes the rows of linear_weight and linear_bias for its own classes, and the same
    input and target, whose classes count over all ranks; `weight`, a factor for each class, is
    sharded as linear_weight or whole. Every rank gets the loss and the outputs of the whole
    vocabulary, with the same bits, and the gradients of its own operands; the gradient of input is
    summed over the ranks. All ranks have to make the same calls with the same options. The ranks'
    shares may differ in size, and one may be empty (shape (0, H)).

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
        import torch.distributed as dist

        group = process_group("vocab_parallel", group)
        validate.check_flag("sequence", sequence)
        validate.check_flag("reduce_input_grad", reduce_input_grad)
        if vocab is not None:
            validate.check_integer("vocab", vocab, 1)
        if start is not None:
            if vocab is None:
                validate.refuse("vocab", "the number of all classes with start", None)
            validate.check_integer("start", start, 0, vocab)
        if sequence and not reduce_input_grad:
            validate.refuse("reduce_input_grad", "True with sequence=True", False)
        wide = is_wide(reduce_dtype)
        if wide and not reduce_input_grad:
            validate.refuse("reduce_dtype", "None with reduce_input_grad=False", reduce_dtype)
        numbers = (dist.get_world_size(group), dist.get_rank(group), start, vocab)
        self.text = VocabShard(group.group_name, *numbers, sequence, reduce_input_grad, wide).text()

    def __repr__(self):
        group, ranks, rank, *rest, wide = shard_of(self.text)
        names = ("start", "vocab", "sequence", "reduce_input_grad", "reduce_dtype")
        rest = zip(names, (*rest, torch.float32 if wide else None), strict=True)
        shown = "".join(f", {name}={value}" for name, value in rest)
        return f"VocabParallel(group {group!r}, rank {rank} of {ranks}{shown})"

    def __eq__(self, other):
        return isinstance(other, VocabParallel) and self.text == other.text

    def __hash__(self):
        return hash(self.text)


def is_wide(reduce_dtype):
    """Whether the terms of dX are exchanged in float32; refuses other dtypes."""
    if reduce_dtype is not None and reduce_dtype is not torch.float32:
        validate.refuse("reduce_dtype", "torch.float32 or None", repr(reduce_dtype))
    return reduce_dtype is not None


def process_group(caller, group):
    """The ProcessGroup of a group or of a DeviceMesh, to which this rank belongs."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        expected = "torch.distributed initialised: call init_process_group first"
        raise RuntimeError(f"{caller}: expected {expected}")
    if not isinstance(group, dist.ProcessGroup) and hasattr(group, "mesh_dim_names"):
        mesh = group
        if mesh.ndim != 1:
            validate.refuse("group", "a DeviceMesh of one dimension", f"{mesh.ndim} dimensions")
        if mesh.get_coordinate() is None:
            validate.refuse("group", "a DeviceMesh that this rank belongs to", mesh)
        group = mesh.get_group()
        # The mesh's tensor of ranks cannot be read while shapes are traced.
        if not torch.compiler.is_compiling() and detect_fake_mode() is None:
            ranks, expected = mesh.mesh.tolist(), dist.get_process_group_ranks(group)
            if ranks != expected:
                validate.refuse("group", f"a DeviceMesh with the ranks {expected}", ranks)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        validate.refuse("group", "a group that this rank belongs to", "new_group of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        expected = "a ProcessGroup or a DeviceMesh"
        validate.refuse("group", expected, type(group).__name__, TypeError)
    if dist.get_rank(group) < 0:
        validate.refuse("group", "a group that this rank belongs to", group.group_name)
    return group


def text_of(vocab_parallel):
    """The text of a VocabParallel, as the operators take it."""
    return getattr(vocab_parallel, "text", vocab_parallel)


def share_of(vocab_parallel, linear_weight):
    """V / ranks rounded up: equal on all ranks. None without vocab_parallel."""
    if vocab_parallel is None:
        return None
    shard = shard_of(text_of(vocab_parallel))
    return -(-shard.class_range(linear_weight.shape[0])[1] // shard.ranks)


def class_weight_of_rank(weight, shard, rows):
    """Checks `weight`, of shape (rows,) or (classes,). Returns (weights, whether they are those of
    this rank's `rows` classes), which the ranks then have to exchange."""
    if weight is None:
        return None, False
    validate.check_tensor("weight", weight)
    validate.check_constant("weight", weight, "class weights that do")
    start, classes = shard.class_range(rows)
    if weight.shape == (classes,):
        # With start= a rank may hold all classes, and its shape does not tell a whole vector from
        # a shard: then all ranks exchange, whatever they were given. One class in all is such a
        # case without start= too.
        if shard.start is None and classes > 1:
            return weight, False
        weight = weight[start : start + rows]
    validate.check_shape("weight", weight, (rows,), f" for this rank's classes, or ({classes},)")
    return weight, True


def whole_class_weight(weight, shard, rows):
    """The class weights of all ranks from those of their own classes. Sums of one number and zeros
    are exact in any order."""
    from torch.distributed import _functional_collectives as functional

    start, classes = shard.class_range(rows)
    whole = weight.new_zeros(classes)
    whole[start : start + rows] = weight.detach()
    return functional.wait_tensor(functional.all_reduce(whole, "sum", shard.group))
