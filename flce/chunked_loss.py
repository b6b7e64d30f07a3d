"""flce.linear_loss: any loss of log-probabilities, computed with its gradients a chunk of rows at a
time."""

import contextlib
import math
import typing
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Never, Unpack, overload

from . import calls, class_losses, composite, fakes, functional, mistakes, torch_private, validate
from .accumulate import Accumulator
from .autograd import ScaledGradients
from .logprobs import check_logprobs, logprobs_of
from .modes import autocast_code
from .options import Entropy, LinearLossOptions, check_names, defaults, show_options
from .packing import GRADIENTS, WIDE_SUM_CHUNKS, all_classes, code_of, gemm_dtype, split
from .plan import plan
from .targets import check_offsets, shifted_target
from .validate import refuse

_KNOWN = defaults(LinearLossOptions)
_Values = typing.TypeVar("_Values")
# Operands that may require grad, in the order of the gradients; the last two belong to an adapter.
_OPERANDS = ("input", "linear_weight", "linear_bias", "adapter_input", "adapter_weight")
_ROW_OPERANDS = ("input", "adapter_input")
# The options on which the number of rows of a chunk depends (flce.plan).
_OPTIONS_OF_CHUNK_ROWS = ("max_memory", "valid_vocab", "accum_dtype", "logits_dtype")


@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, None, slice], Tensor],
    *,
    rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    entropy: None = None,
    tail: bool = False,
    **options: Unpack[LinearLossOptions],
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, None, slice], tuple[Tensor, _Values]],
    *,
    rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    entropy: None = None,
    tail: bool = False,
    **options: Unpack[LinearLossOptions],
) -> tuple[Tensor, _Values]: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor, slice], Tensor],
    *,
    rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    entropy: Entropy,
    tail: bool = False,
    **options: Unpack[LinearLossOptions],
) -> Tensor: ...
@overload
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor, slice], tuple[Tensor, _Values]],
    *,
    rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    entropy: Entropy,
    tail: bool = False,
    **options: Unpack[LinearLossOptions],
) -> tuple[Tensor, _Values]: ...
@show_options
def linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss_fn: Callable[..., object],
    *others: Never,
    rows: int | None = None,
    cu_seqlens: Tensor | None = None,
    entropy: Entropy | None = None,
    tail: bool = False,
    **options: Unpack[LinearLossOptions],
) -> object:
    """Any loss of the log-probabilities, in three GEMMs and with the logits of one chunk of rows.

    The gradient of ``loss_fn(logprobs, entropy, rows)`` is taken chunk by chunk in the forward; the
    backward multiplies it by grad_output. The N rows are those of (...), flattened.

    Args:
        input, linear_weight: as in `linear_logprobs`.
        target: class indices (...) as in `linear_logprobs`, or (..., K) as in `linear_logprobs_at`,
            without entropy and shift.
        loss_fn: gets logprobs and entropy of a chunk, each of shape (rows of the chunk,), or
            logprobs (rows of the chunk, K), with `tail` (rows of the chunk, K + 1), float32
            (float64 for float64 operands), and `rows`, the slice of the N rows that they are of.
            Returns the chunk's contribution to the loss, a scalar tensor, or a tuple of it and
            values (a tensor, a number, or a dict, list or tuple of these). Both are summed over
            the chunks, 16-bit tensors in float32.
        rows: the most rows of a chunk. None: those of a chunk of `linear_cross_entropy`, which
            follow from max_memory (docs/memory.md).
        cu_seqlens: offsets of sequences in the N rows, int32 or int64, shape (sequences + 1,), read
            with a synchronisation. A chunk has whole sequences then, and more than `rows` rows
            where one is longer; rows of no sequence are in no chunk. They bound `shift` too.
        entropy: as in `linear_logprobs`; with None loss_fn gets None.
        tail: as in `linear_logprobs_at`: a column of log-probabilities for all other classes.
        **options: those of `linear_logprobs` except save and valid_bound, and accumulate_into.
            accum_dtype: as in `linear_cross_entropy`, of the chunks here; with float16 always
            float32.

    Returns:
        The sum of the contributions, shape (), or (sum, values) if loss_fn returns values. Without
        a row loss_fn is not called, and the sum is 0.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; a loss_fn that returns no scalar, or whose
            gradient reaches a tensor other than the logprobs and the entropy of its chunk.

    >>> x, W, y = torch.randn(5, 8), torch.randn(16, 8), torch.arange(5)
    >>> advantage = torch.randn(5)
    >>> loss = flce.linear_loss(x, W, y, lambda p, entropy, rows: -(p * advantage[rows]).sum())
    >>> torch.testing.assert_close(loss, -(flce.linear_logprobs(x, W, y)[0] * advantage).sum())
    """
    if others:
        operands = *functional.OF_LINEAR, "loss_fn"
        mistakes.refuse_positional("linear_loss", operands, others, functional.A_BIAS)
    check_names("linear_loss", _KNOWN, options)
    # It runs a function of the caller's, and a backward within the forward.
    function, outputs = validate.untraced(_linear_loss), _Outputs(entropy, tail)
    return function(input, linear_weight, target, loss_fn, rows, cu_seqlens, outputs, options)


class _Outputs(typing.NamedTuple):
    """The arguments `entropy` and `tail` of linear_loss, which select what loss_fn receives."""

    entropy: str | None
    tail: bool


def _linear_loss(input, linear_weight, target, loss_fn, rows, cu_seqlens, outputs, options):
    options = {**_KNOWN, **options}
    operands = {"input": input, "linear_weight": linear_weight}
    others = {name: options.pop(name) for name in _OPERANDS[2:]}
    operands |= {name: tensor for name, tensor in others.items() if tensor is not None}
    try:
        classes = _check_arguments(operands, target, loss_fn, cu_seqlens, outputs, options)
    except (TypeError, ValueError) as error:
        mistakes.add_remedy(error, {**operands, "target": target})
        raise
    packed, _ = split(options)
    shift, bounds = options.pop("shift"), None
    if shift:
        target = shifted_target(target, shift, cu_seqlens, packed.ignore_index)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens)
        bounds = cu_seqlens.tolist()
    tokens = math.prod(input.shape[:-1])
    dtype = gemm_dtype(autocast_code(input.device), input.dtype, linear_weight.dtype)
    rows = _rows_of_chunk(rows, tokens, operands, dtype, options)
    parts = list(_parts(tokens, rows, bounds))
    del options["max_memory"]
    chunks = _Chunks(
        operands, target.reshape(tokens, *classes), outputs, dtype, options, len(parts)
    )
    sums = None
    for part in parts:
        sums = _with_chunk(sums, chunks.add(loss_fn, part))
    total, *values = sums or chunks.without_rows()
    total = chunks.differentiable(total) if chunks.has_gradient else total
    return (total, *values) if values else total


def _check_arguments(operands, target, loss_fn, cu_seqlens, outputs, options):
    """Checks what can be checked before the first chunk, whose call checks the rest. Returns (K,)
    for a target (..., K), else ()."""
    _check_kinds(operands, target, loss_fn, cu_seqlens, outputs, options)
    input, weight = operands["input"], operands["linear_weight"]
    fakes.check_operands(input, weight, operands.get("linear_bias"))
    for name, tensor in operands.items():
        code_of(name, tensor.dtype)
    packed, _ = split(options)
    if packed.ranks <= 1:  # else the ranks compare their shares before one of them refuses its own
        composite.check_options(options, len(weight), hidden=weight.shape[1])
    classes = target.shape[input.dim() - 1 :]
    validate.check_shape("target", target, (*input.shape[:-1], *classes[:1]))
    if classes:
        class_losses.check_ids("target", target)
    for name, value in {"entropy": outputs.entropy, "shift": options["shift"]}.items():
        if classes and value:
            refuse(name, f"{_KNOWN.get(name)} with a target (..., K)", repr(value))
    if outputs.tail and not classes:
        refuse("tail", "False without a target (..., K)", outputs.tail)
    if packed.shard.input_is_sharded:
        refuse("vocab_parallel", "sequence=False: a chunk has rows of all ranks", "sequence=True")
    return classes


def _check_kinds(operands, target, loss_fn, cu_seqlens, outputs, options):
    """Checks what the arguments are: tensors, plain ones, a function, flags; and that no transform
    is active."""
    arguments = {"target": target, **operands}
    for name, tensor in arguments.items():
        validate.check_tensor(name, tensor)
    arguments |= {name: options[name] for name in ("temperature", "gradient_seed")}
    arguments["cu_seqlens"] = cu_seqlens
    for name, value in arguments.items():
        if validate.is_dtensor(value):
            refuse(name, "a plain tensor; vocab_parallel divides the classes", "a DTensor")
    check_logprobs(target, outputs.entropy)
    validate.check_flag("tail", outputs.tail)
    if not callable(loss_fn):
        refuse("loss_fn", "a function", type(loss_fn).__name__, TypeError)
    if takes := mistakes.other_parameters(loss_fn, 3):
        refuse("loss_fn", "a function of (logprobs, entropy, rows)", f"one of {takes}", TypeError)
    validate.refuse_transforms(*arguments.values())
    if validate.function_transforms_are_on():
        validate.refuse_vmap()


def _rows_of_chunk(rows, tokens, operands, dtype, options):
    """`rows`, or those of a chunk of linear_cross_entropy: the same on all ranks of a group."""
    if rows is not None:
        return validate.check_integer("rows", rows, 1)
    input, weight = operands["input"], operands["linear_weight"]
    vocab, ranks = all_classes(options["vocab_parallel"], len(weight))
    if vocab < 1:  # of one rank; the first call refuses it on all
        return 1
    call = {name: options[name] for name in _OPTIONS_OF_CHUNK_ROWS}
    call |= {"dtype": dtype, "device": input.device, "ranks": ranks}
    return max(plan(tokens, input.shape[-1], vocab, save="grads", **call).chunk_rows, 1)


def _with_chunk(sums, values):
    """The sums over the chunks so far, None before the first one, with what the next chunk adds:
    `values`, [loss] or [loss, values]."""
    try:
        if sums is None:  # 0 +: new tensors, as loss_fn may write to its own; True counts as 1
            return torch_private.tree_map(lambda value: 0 + _widened(value), values)
        return torch_private.tree_map(_add_values, sums, values)
    except (TypeError, ValueError) as error:
        expected = "values that can be added, of one structure and of the same shapes in all chunks"
        refuse("loss_fn", expected, error)


def _widened(value):
    """A tensor in float32 at least: a 16-bit sum would lose chunks."""
    narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 2
    return value.float() if narrow else value


def _add_values(first, second):
    shapes = [tuple(getattr(value, "shape", ())) for value in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"shapes {shapes[0]} and {shapes[1]}")
    return first + _widened(second)


def _parts(tokens, rows, bounds):
    """Slices of at most `rows` rows; with `bounds` of whole sequences, of which one may be
    longer."""
    if bounds is None:
        bounds = [*range(0, tokens, rows), tokens]
    elif len(bounds) < 2 or bounds[0] < 0 or bounds[-1] > tokens or bounds != sorted(bounds):
        refuse("cu_seqlens", f"at least two ascending offsets from 0 to {tokens}", bounds)
    begin = end = bounds[0]
    for bound in bounds[1:]:
        if bound - begin > rows and end > begin:
            yield slice(begin, end)
            begin = end
        end = bound
    if end > begin:
        yield slice(begin, end)


def _check_graph(value, leaves):
    """Refuses a loss whose gradient would reach other tensors than those `leaves`: it would be
    lost, because the gradient of a chunk is computed at once."""
    nodes, seen = [torch.autograd.graph.get_gradient_edge(value).node], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None and all(leaf is not tensor for tensor in leaves):
            expected = "a loss whose gradient reaches only the logprobs and entropy of its chunk"
            got = f"one that reaches another leaf, of shape {tuple(leaf.shape)}; detach it"
            refuse("loss_fn", expected, got)
        nodes += [following for following, _ in node.next_functions if following is not None]


class _Sum:
    """The sum over the chunks of the gradients of `leaf`, an operand of all rows, in `dtype`.

    `gemm_accumulates`: the dW GEMM of each chunk adds to the `attribute` of `leaf`, "grad" or
    "main_grad", which is the value of accumulate_into of its call.
    """

    def __init__(self, leaf, dtype, gemm_accumulates):
        self.leaf, self.dtype, self.total = leaf, dtype, None
        self.attribute = None
        if gemm_accumulates:
            self.attribute = "grad" if dtype == leaf.dtype else "main_grad"
        if self.attribute == "main_grad":
            leaf.main_grad = torch.zeros_like(leaf, dtype=dtype)

    def add(self):
        """Adds what the backward of a chunk has made."""
        grad = self.leaf.grad
        if self.attribute is not None or grad is None:
            return
        self.leaf.grad = None
        self.total = grad.to(self.dtype) if self.total is None else self.total.add_(grad)

    def value(self):
        total = getattr(self.leaf, self.attribute) if self.attribute else self.total
        return torch.zeros_like(self.leaf) if total is None else total


class _Chunks:
    """The operands of a call of `count` chunks, cut off their graphs, and their gradients, to which
    a chunk adds."""

    def __init__(self, operands, target, outputs, dtype, options, count):
        self.operands, self.outputs, self.options = operands, outputs, options
        tracks, weight = torch.is_grad_enabled(), operands["linear_weight"]
        self.has_gradient = False  # whether the loss of a chunk had one
        self.needs = {name for name in operands if tracks and operands[name].requires_grad}
        attribute, trains = options.pop("accumulate_into"), "linear_weight" in self.needs
        self.accumulator = Accumulator(weight, attribute) if attribute and trains else None
        # float16 cannot hold gradients that are not yet multiplied by grad_output, a GradScaler's
        # factor: a chunk makes float32 ones.
        self.is_half, self.autocast = dtype == torch.float16, contextlib.nullcontext()
        if self.is_half:
            self.autocast = torch.autocast(weight.device.type, dtype)
        self.rows, self.whole = {"target": target}, {}  # for each row, for all rows
        self._cut_operands(operands["input"].shape[:-1], count)
        self._set_options(operands["input"])

    def _cut_operands(self, shape, count):
        """`shape`: of the rows, as the caller has them."""
        widens, self.sums = self._widens_sums(count), {}
        has_adapter = not self.operands.keys().isdisjoint(_OPERANDS[3:])
        if self.is_half and self.needs and has_adapter:
            got = "one with float16, whose gradients would underflow before the backward"
            refuse("adapter_weight", "None, or operands of bfloat16 or float32", got)
        for name, tensor in self.operands.items():
            leaf = tensor.detach().contiguous()  # so that its gradient is
            if name in _ROW_OPERANDS:
                validate.check_shape(name, tensor, (*shape, *tensor.shape[-1:]))
                leaf = leaf.reshape(len(self.rows["target"]), tensor.shape[-1])
                self.rows[name] = leaf.float() if self.is_half else leaf
                continue
            if name == "linear_bias" and leaf.dtype.itemsize == 2:
                leaf = leaf.float()  # its sum over chunks
            self.whole[name] = leaf.requires_grad_(name in self.needs)
            if name in self.needs:
                dtype = torch.float32 if widens and leaf.dtype.itemsize == 2 else leaf.dtype
                gemm_accumulates = name == "linear_weight" and not has_adapter
                self.sums[name] = _Sum(leaf, dtype, gemm_accumulates)
        self.grads = {n: torch.zeros_like(self.rows[n]) for n in _ROW_OPERANDS if n in self.needs}

    def _widens_sums(self, count):
        """Whether 16-bit gradients of weights are summed in float32 over the chunks."""
        added = self.accumulator.dtype() if self.accumulator else None
        if self.is_half or added == torch.float32:
            return True
        dtype = self.options["accum_dtype"]
        return count >= WIDE_SUM_CHUNKS if dtype is None else dtype.itemsize > 2

    def _set_options(self, input):
        """Makes the options of a chunk's call from those of the caller's call."""
        options, weight = self.options, self.sums.get("linear_weight")
        if weight is not None and weight.attribute is not None:
            options["accumulate_into"] = weight.attribute
        if self.needs and options["gradient"] == "exact":
            options["save"] = "logits"
        temperature = options["temperature"]
        if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
            validate.check_shape("temperature", temperature, self.operands["input"].shape[:-1])
            self.rows["temperature"] = temperature.reshape(-1)
        if options["gradient_seed"] is not None or options["gradient"] == "sampled":
            # One draw for all chunks: a row's number in it is that among all rows.
            options["gradient_seed"] = validate.seed_tensor(options["gradient_seed"], input.device)

    def _logprobs(self, part):
        """((log-probabilities, entropy), {name: these rows of a tensor of self.rows}) of the rows
        `part`."""
        rows = {name: tensor[part] for name, tensor in self.rows.items()}
        for name in self.grads:
            rows[name].requires_grad_()
        options = {**self.options, **self.whole, **rows}
        operands = [options.pop(name) for name in ("input", "linear_weight", "target")]
        call = functional.part_from(part.start)
        with self.autocast, torch.set_grad_enabled(bool(self.needs)):
            if operands[2].dim() == 2:
                of_classes = call, *operands, options, self.outputs.tail
                return (class_losses.logprobs_at(*of_classes), None), rows
            entropy = self.outputs.entropy
            return logprobs_of(*operands, entropy, 0, options, call=call), rows

    def without_rows(self):
        """[loss] where there is no row: runs a call of zero rows, so that its checks happen."""
        (logprobs, _), _ = self._logprobs(slice(0, 0))
        self.has_gradient = bool(self.needs)
        return [logprobs.detach().sum()]

    def add(self, loss_fn, part):
        """The list of the loss and the values of the rows `part`; adds to the gradients."""
        outputs, rows = self._logprobs(part)
        cut = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in outputs]
        returned = self._call_loss_fn(loss_fn, cut, part)
        loss, *values = returned if isinstance(returned, tuple) and returned else (returned,)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or len(values) > 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(returned).__name__
            refuse("loss_fn", "a scalar tensor, or a tuple of it and values", got, TypeError)
        if loss.requires_grad:
            leaves = [t for t in cut if t is not None and t.requires_grad]
            _check_graph(loss, leaves)
            self._add_gradients(loss, leaves, outputs, rows, part)
        # In the dtype of the log-probabilities at least: a 16-bit sum would lose chunks.
        loss = loss.to(torch.promote_types(loss.dtype, cut[0].dtype)).reshape(())
        return torch_private.tree_map_only(torch.Tensor, torch.Tensor.detach, [loss, *values])

    def _call_loss_fn(self, loss_fn, outputs, part):
        """What loss_fn returns. An error of None where it takes entropy is explained."""
        has_entropy = all(output is not None for output in outputs)
        try:
            return loss_fn(*outputs, part)
        except (TypeError, AttributeError) as error:
            if has_entropy or "NoneType" not in str(error):
                raise
            expected = (
                'no use of None, as its entropy is without entropy="differentiable", "detached"'
            )
            refuse("loss_fn", expected, f"{type(error).__name__}: {error}", TypeError)

    def _add_gradients(self, loss, leaves, outputs, rows, part):
        self.has_gradient = True
        upstream = torch.autograd.grad(loss, leaves, allow_unused=True)
        # The last output, the entropy, may need no gradient: it has no leaf then.
        pairs = zip(outputs, upstream, strict=False)
        pairs = [(output, grad) for output, grad in pairs if grad is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
        for name, grad in self.grads.items():
            grad[part] = rows[name].grad
        for sum_of_chunks in self.sums.values():
            sum_of_chunks.add()

    def _gradient(self, name):
        if name in self.grads:
            return self.grads[name].view(self.operands[name].shape)
        return self.sums[name].value() if name in self.sums else None

    def differentiable(self, total):
        """`total`, whose backward multiplies the gradients by grad_output. A ScaledGradients has
        three operands, input, weight and bias, so an adapter's two take a second one: "" stands for
        its missing bias, and its loss is 0 where the first one has the total."""
        total, parts = total.detach(), []
        of_adapter = (*_OPERANDS[3:], "")
        for names, accumulator in ((_OPERANDS[:3], self.accumulator), (of_adapter, None)):
            if not self.needs.isdisjoint(names):
                value = torch.zeros_like(total) if parts else total
                gradients = dict(zip(GRADIENTS, map(self._gradient, names), strict=True))
                outputs = calls.ForwardOutputs(value, **gradients)
                operands = map(self.operands.get, names)
                parts.append(ScaledGradients.apply(*operands, outputs, None, True, accumulator))
        return sum(parts[1:], parts[0])
