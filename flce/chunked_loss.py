"""flce.linear_loss: any loss of log-probabilities, computed with its gradients a chunk of rows at a
time."""

import contextlib
import math

import torch
from torch.utils import _pytree

from . import composite, functional, validate
from .accumulate import Accumulator
from .autograd import LinearCrossEntropy
from .options import all_classes, check_names, gemm_dtype, show_options, split
from .plan import plan
from .targets import check_offsets, shifted_target
from .validate import refuse

_KNOWN = {**functional.OF_LOGPROBS, "accumulate_into": None}
for _name in ("cu_seqlens", "valid_bound", "save"):
    del _KNOWN[_name]
# Operands that may require grad, in the order of the gradients; the last two belong to an adapter.
_OPERANDS = ("input", "linear_weight", "linear_bias", "adapter_input", "adapter_weight")
_OF_ROWS = ("input", "adapter_input")


def linear_loss(
    input, linear_weight, target, loss_fn, *, rows=None, cu_seqlens=None, entropy=None, **options
):
    """Any loss of the log-probabilities, in three GEMMs and with the logits of one chunk of rows.

    The gradient of ``loss_fn(logprobs, entropy, rows)`` is taken chunk by chunk in the forward; the
    backward multiplies it by grad_output. The N rows are those of (...), flattened.

    Args:
        input, linear_weight: as in `linear_logprobs`.
        target: class indices (...) as in `linear_logprobs`, or (..., K) as in `linear_logprobs_at`,
            without entropy and shift.
        loss_fn: gets logprobs and entropy of a chunk, each of shape (rows of the chunk,), or
            logprobs (rows of the chunk, K), float32 (float64 for float64 operands), and `rows`, the
            slice of the N rows that they are of.
            Returns the chunk's contribution to the loss, a scalar tensor, or a tuple of it and
            values (a tensor, a number, or a dict, list or tuple of these), which are summed over
            the chunks.
        rows: the most rows of a chunk. None: those of a chunk of `linear_cross_entropy`, which
            follow from max_memory (docs/memory.md).
        cu_seqlens: offsets of sequences in the N rows, int32 or int64, shape (sequences + 1,), read
            with a synchronisation. A chunk has whole sequences then, and more than `rows` rows
            where one is longer; rows of no sequence are in no chunk. They bound `shift` too.
        entropy: as in `linear_logprobs`; with None loss_fn gets None.
        **options: those of `linear_logprobs` except save and valid_bound, and accumulate_into.

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
    check_names("linear_loss", _KNOWN, options)
    # It runs a function of the caller's, and a backward within the forward.
    function = validate.untraced(_linear_loss)
    return function(input, linear_weight, target, loss_fn, rows, cu_seqlens, entropy, options)


def _linear_loss(input, linear_weight, target, loss_fn, rows, cu_seqlens, entropy, options):
    options = {**_KNOWN, **options}
    operands = {"input": input, "linear_weight": linear_weight}
    others = {name: options.pop(name) for name in _OPERANDS[2:]}
    operands |= {name: tensor for name, tensor in others.items() if tensor is not None}
    for name, tensor in {"target": target, **operands}.items():
        validate.check_tensor(name, tensor)
        if validate.is_dtensor(tensor):
            refuse(name, "a plain tensor; vocab_parallel divides the classes", "a DTensor")
    functional.check_logprobs(target, entropy)
    validate.refuse_transforms(target, *operands.values())
    if validate.function_transforms_are_on():
        validate.refuse_vmap()
    tokens, classes = math.prod(input.shape[:-1]), target.shape[input.dim() - 1 :]  # (K,) or ()
    validate.check_shape("target", target, (*input.shape[:-1], *classes[:1]))
    for name, given in {"entropy": entropy, "shift": options["shift"]}.items():
        if classes and given:
            refuse(name, f"{_KNOWN.get(name)} with a target (..., K)", repr(given))
    packed, _ = split(options)
    if packed.sequence:
        refuse("vocab_parallel", "sequence=False: a chunk has rows of all ranks", "sequence=True")
    shift, bounds = options.pop("shift"), None
    if shift:
        target = shifted_target(target, shift, cu_seqlens, packed.ignore_index)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens)
        bounds = cu_seqlens.tolist()
    autocast = composite.autocast_code(input)
    dtype = gemm_dtype(autocast, input.dtype, linear_weight.dtype)
    call = {"max_memory": options.pop("max_memory"), "dtype": dtype, "device": input.device}
    if rows is None:  # the same on all ranks of a group
        vocab, call["ranks"] = all_classes(options["vocab_parallel"], len(linear_weight))
        made = plan(tokens, input.shape[-1], vocab, save="grads", **call)
        rows = max(made.chunk_rows, 1)
    validate.check_integer("rows", rows, 1)
    chunks = _Chunks(operands, target.reshape(tokens, *classes), entropy, dtype, options)
    sums = None
    for part in _parts(tokens, rows, bounds):
        sums = _added(sums, chunks.add(loss_fn, part))
    if sums is None:  # no row
        sums = [input.new_zeros((), dtype=torch.promote_types(input.dtype, torch.float32))]
        chunks.has_gradient = bool(chunks.needs)
    total, *values = sums
    total = chunks.differentiable(total) if chunks.has_gradient else total
    return (total, *values) if values else total


def _added(sums, made):
    """The sums of the chunks so far and of `made`, the [loss] or [loss, values] of the next one."""
    try:
        if sums is None:  # 0 +: new tensors, as loss_fn may write to its own; True counts as 1
            return _pytree.tree_map(lambda value: 0 + value, made)
        return _pytree.tree_map(_sum, sums, made)
    except (TypeError, ValueError) as error:
        expected = "values that can be added, of one structure and of the same shapes in all chunks"
        refuse("loss_fn", expected, error)


def _sum(first, second):
    shapes = [tuple(getattr(value, "shape", ())) for value in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"shapes {shapes[0]} and {shapes[1]}")
    return first + second


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


def _check_graph(value, given):
    """Refuses a loss whose gradient would reach other tensors than those `given`: it would be
    lost, because the gradient of a chunk is computed at once."""
    nodes, seen = [torch.autograd.graph.get_gradient_edge(value).node], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None and all(leaf is not tensor for tensor in given):
            expected = "a loss whose gradient reaches only the logprobs and entropy of its chunk"
            got = f"one that reaches another leaf, of shape {tuple(leaf.shape)}; detach it"
            refuse("loss_fn", expected, got)
        nodes += [following for following, _ in node.next_functions if following is not None]


class _Chunks:
    """The operands of a call, cut off their graphs, and their gradients, to which a chunk adds."""

    def __init__(self, operands, target, entropy, dtype, options):
        self.operands, self.entropy, self.options = operands, entropy, options
        tracks, weight = torch.is_grad_enabled(), operands["linear_weight"]
        self.has_gradient = False  # whether the loss of a chunk had one
        self.needs = {name for name in operands if tracks and operands[name].requires_grad}
        has_adapter = not operands.keys().isdisjoint(_OPERANDS[3:])
        attribute, trains = options.pop("accumulate_into"), "linear_weight" in self.needs
        self.accumulator = Accumulator(weight, attribute) if attribute and trains else None
        # float16 cannot hold gradients that are not yet multiplied by grad_output, a GradScaler's
        # factor: a chunk makes float32 ones.
        wide, device = dtype == torch.float16, weight.device.type
        self.autocast = torch.autocast(device, dtype) if wide else contextlib.nullcontext()
        if wide and self.needs and has_adapter:
            got = "one with float16, whose gradients would underflow before the backward"
            refuse("adapter_weight", "None, or operands of bfloat16 or float32", got)
        self.rows, self.whole = {"target": target}, {}  # for each row, for all rows
        shape = operands["input"].shape[:-1]
        for name, tensor in operands.items():
            leaf = tensor.detach().contiguous()  # so that its gradient is
            if name in _OF_ROWS:
                validate.check_shape(name, tensor, (*shape, *tensor.shape[-1:]))
                leaf = leaf.reshape(len(target), tensor.shape[-1])
                self.rows[name] = leaf.float() if wide else leaf
                continue
            if name == "linear_bias" and leaf.dtype.itemsize == 2:
                leaf = leaf.float()  # its sum over chunks
            self.whole[name] = leaf.requires_grad_(name in self.needs)
        self.grads = {n: torch.zeros_like(self.rows[n]) for n in _OF_ROWS if n in self.needs}
        if trains and not has_adapter:
            options["accumulate_into"] = "main_grad" if wide else "grad"
            if wide:
                leaf = self.whole["linear_weight"]
                leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)
        if self.needs and options["gradient"] == "exact":
            options["save"] = "logits"
        temperature = options["temperature"]
        if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
            validate.check_shape("temperature", temperature, shape)
            self.rows["temperature"] = temperature.reshape(-1)
        if options["gradient_seed"] is not None:
            seed = validate.seed_tensor(options["gradient_seed"], operands["input"])
            options["gradient_seed"] = seed

    def _logprobs(self, part):
        """The log-probabilities and the entropy of the rows `part`, and what has these rows."""
        rows = {name: tensor[part] for name, tensor in self.rows.items()}
        for name in self.grads:
            rows[name].requires_grad_()
        options = {**self.options, **self.whole, **rows}
        if (seed := options["gradient_seed"]) is not None:
            options["gradient_seed"] = seed + part.start
        operands = [options.pop(name) for name in ("input", "linear_weight", "target")]
        with self.autocast:
            if operands[2].dim() == 2:
                return (functional.logprobs_at_of(*operands, options), None), rows
            return functional.logprobs_of(*operands, self.entropy, 0, options), rows

    def add(self, loss_fn, part):
        """The list of the loss and the values of the rows `part`; adds to the gradients."""
        with torch.set_grad_enabled(bool(self.needs)):
            outputs, rows = self._logprobs(part)
            cut = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in outputs]
            made = loss_fn(*cut, part)
        loss, *values = made if isinstance(made, tuple) else (made,)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or len(values) > 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(made).__name__
            refuse("loss_fn", "a scalar tensor, or a tuple of it and values", got, TypeError)
        if loss.requires_grad and self.needs:
            self.has_gradient = True
            leaves = [t for t in cut if t is not None and t.requires_grad]
            _check_graph(loss, leaves)
            upstream = torch.autograd.grad(loss, leaves, allow_unused=True)
            pairs = zip(outputs, upstream, strict=False)  # the last one's entropy may be a constant
            pairs = [(output, grad) for output, grad in pairs if grad is not None]
            torch.autograd.backward(*zip(*pairs, strict=True))
            for name, grad in self.grads.items():
                grad[part] = rows[name].grad
        # In the dtype of the log-probabilities at least: a 16-bit sum would lose chunks.
        loss = loss.to(torch.promote_types(loss.dtype, cut[0].dtype)).reshape(())
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, [loss, *values])

    def _gradient(self, name):
        if name not in self.needs:
            return None
        if name in self.grads:
            return self.grads[name].view(self.operands[name].shape)
        leaf = self.whole[name]
        made = getattr(leaf, "main_grad", leaf.grad)
        return torch.zeros_like(leaf) if made is None else made

    def differentiable(self, total):
        """`total`, whose backward multiplies the gradients by grad_output."""
        total, parts = total.detach(), []
        lists, constants = (None, None, split({})[0].integers_with()), (None,) * 5
        for names, accumulator in ((_OPERANDS[:3], self.accumulator), ((*_OPERANDS[3:], ""), None)):
            if not self.needs.isdisjoint(names):
                value = torch.zeros_like(total) if parts else total
                outputs = [value, *(None,) * 4, *map(self._gradient, names), None, None]
                rest = outputs, 1, lists, constants, accumulator, None
                parts += LinearCrossEntropy.apply(*map(self.operands.get, names), *rest)
        return sum(parts[1:], parts[0])


show_options(linear_loss, _KNOWN)
