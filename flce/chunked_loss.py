"""flce.linear_loss: any loss of log-probabilities, computed with its gradients a chunk of rows at a
time."""

import contextlib
import sys

import torch
from torch.utils import _pytree

from . import validate
from .accumulate import Accumulator
from .autograd import LinearCrossEntropy
from .composite import autocast_dtype
from .functional import ENTROPIES, OF_LOGPROBS, linear_cross_entropy
from .options import (
    LinearCrossEntropyOutput,
    all_classes,
    check_names,
    show_options,
    split,
)
from .plan import plan
from .targets import check_offsets, shifted_target
from .validate import refuse

_NOT_OF_CHUNKS = ("cu_seqlens", "valid_bound", "save")
_KNOWN = {name: value for name, value in OF_LOGPROBS.items() if name not in _NOT_OF_CHUNKS}
_KNOWN["accumulate_into"] = None
# Operands that may require grad, in the order of the gradients; the last two belong to an adapter.
_OPERANDS = ("input", "linear_weight", "linear_bias", "adapter_input", "adapter_weight")
_OF_ROWS = ("input", "adapter_input")


def linear_loss(
    input, linear_weight, target, loss_fn, *, rows=None, cu_seqlens=None, entropy=None, **options
):
    """Any loss of the log-probabilities, in three GEMMs and with the logits of one chunk of rows.

    ``loss_fn(logprobs, entropy, rows)`` is called for each chunk, and its gradient is taken at
    once: the forward computes the gradients, and the backward multiplies them by grad_output. The
    N rows are those of (...), flattened.

    Args:
        input, linear_weight, target: as in `linear_logprobs`.
        loss_fn: gets logprobs and entropy of a chunk, each of shape (rows of the chunk,), float32
            (float64 for float64 operands), and `rows`, the slice of the N rows that they are of.
            Returns the chunk's contribution to the loss, a scalar tensor, or a tuple of it and
            values (a tensor, a number, or a dict, list or tuple of these), which are summed over
            the chunks.
        rows: the most rows of a chunk. None: those of a chunk of `linear_cross_entropy`, which
            follow from max_memory (docs/memory.md).
        cu_seqlens: offsets of sequences in the N rows, int32 or int64, shape (sequences + 1,). A
            chunk has whole sequences then, and more than `rows` rows where a sequence is longer.
            Rows of no sequence are in no chunk. Reading the offsets synchronises with the device.
            They bound `shift` too.
        entropy: as in `linear_logprobs`; with None loss_fn gets None.
        **options: those of `linear_logprobs` except save and valid_bound, and accumulate_into.

    Returns:
        The sum of the contributions, shape (), or (sum, values) if loss_fn returns values. Without
        a row loss_fn is not called, and the sum is 0.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; a loss_fn that returns no scalar, or whose
            gradient reaches a tensor other than the logprobs and the entropy of its chunk.
    """
    check_names("linear_loss", _KNOWN, options)
    function = _linear_loss
    if "torch._dynamo" in sys.modules:  # a caller's function, and gradients within the forward
        function = torch._disable_dynamo(function)
    return function(input, linear_weight, target, loss_fn, rows, cu_seqlens, entropy, options)


def _linear_loss(input, linear_weight, target, loss_fn, rows, cu_seqlens, entropy, options):
    options = {**_KNOWN, **options}
    operands = {"input": input, "linear_weight": linear_weight}
    operands |= {name: options.pop(name) for name in _OPERANDS[2:]}
    for name, tensor in {"target": target, **operands}.items():
        if tensor is not None:
            validate.check_tensor(name, tensor)
            if validate.is_dtensor(tensor):
                refuse(name, "a plain tensor; vocab_parallel divides the classes", "a DTensor")
    if target.is_floating_point():
        refuse("target", "class indices of dtype torch.int64 or torch.int32", target.dtype)
    if entropy not in tuple(ENTROPIES):
        refuse("entropy", f"one of {tuple(ENTROPIES)}", repr(entropy))
    validate.refuse_transforms(target, *operands.values())
    if validate.function_transforms_are_on():
        validate.refuse_vmap()
    validate.check_shape("target", target, input.shape[:-1])
    if (added := operands["adapter_input"]) is not None:
        validate.check_shape("adapter_input", added, (*target.shape, *added.shape[-1:]))
    temperature = options["temperature"]
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        validate.check_shape("temperature", temperature, target.shape)
    packed, _ = split(options)
    if packed.sequence:
        refuse("vocab_parallel", "sequence=False: a chunk has rows of all ranks", "sequence=True")
    shift, bounds = options.pop("shift"), None
    if shift:
        target = shifted_target(target, shift, cu_seqlens, packed.ignore_index)
    if cu_seqlens is not None:
        check_offsets(cu_seqlens)
        bounds = cu_seqlens.tolist()
    if rows is None:
        rows = _default_rows(input, linear_weight, options)
    validate.check_integer("rows", rows, 1)
    if options["gradient_seed"] is not None:
        options["gradient_seed"] = validate.seed_tensor(options["gradient_seed"], input)
    chunks = _Chunks(operands, target.reshape(-1), entropy, options)
    sums = None
    for part in _parts(target.numel(), rows, bounds):
        sums = _added(sums, chunks.add(loss_fn, part))
    if sums is None:  # no row
        sums = [input.new_zeros((), dtype=torch.promote_types(input.dtype, torch.float32))]
    total, *values = sums
    total = chunks.differentiable(total)
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


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def _gemm_dtype(input, linear_weight):
    if torch.float64 in (input.dtype, linear_weight.dtype):  # autocast casts neither then
        return torch.float64
    return autocast_dtype(input.device.type) or input.dtype


def _default_rows(input, linear_weight, options):
    """The rows of a chunk of a scalar loss; the same on all ranks of a group."""
    classes, ranks = all_classes(options["vocab_parallel"], len(linear_weight))
    tokens = input.numel() // max(input.shape[-1], 1)
    dtype = _gemm_dtype(input, linear_weight)
    call = {"ranks": ranks, "max_memory": options["max_memory"], "save": "grads"}
    made = plan(tokens, input.shape[-1], classes, dtype=dtype, device=input.device, **call)
    return max(made.chunk_rows, 1)


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
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None and all(leaf is not tensor for tensor in given):
            expected = "a loss whose gradient reaches only the logprobs and entropy of its chunk"
            got = (
                f"one that reaches another tensor that requires grad, of shape {tuple(leaf.shape)}"
            )
            refuse("loss_fn", expected, f"{got}; detach it")
        nodes += [following for following, _ in node.next_functions]


class _Chunks:
    """The operands of a call, cut off their graphs, and their gradients, to which a chunk adds."""

    def __init__(self, operands, target, entropy, options):
        self.operands, self.target, self.entropy = operands, target, ENTROPIES[entropy]
        self.options = {"reduction": "none", "return_entropy": self.entropy, **options}
        del self.options["max_memory"]
        attribute, weight = self.options.pop("accumulate_into"), operands["linear_weight"]
        given = [tensor for tensor in operands.values() if tensor is not None]
        self.needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        accumulates = attribute and self.needs and weight.requires_grad
        self.accumulator = Accumulator(weight, attribute) if accumulates else None
        if self.needs and self.options["gradient"] == "exact":
            self.options["save"] = "logits"
        # What float16 cannot hold before it is multiplied by grad_output, a GradScaler's factor.
        self.wide = _gemm_dtype(operands["input"], weight) == torch.float16
        self.leaves = {name: self._leaf(name, tensor) for name, tensor in operands.items()}
        self.grads = {name: torch.zeros_like(self.leaves[name]) for name in self._of_rows()}
        leaf = self.leaves["linear_weight"]
        plain = operands["adapter_input"] is None and operands["adapter_weight"] is None
        self.has_gradient = None  # whether the loss of a chunk had one
        if self.wide and self.needs and not plain:
            got = "one with float16, whose gradients would underflow before the backward"
            refuse("adapter_weight", "None, or operands of bfloat16 or float32", got)
        if leaf.requires_grad and plain:
            self.options["accumulate_into"] = "main_grad" if self.wide else "grad"
            if self.wide:
                leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)

    def _of_rows(self):
        """Names of the operands with rows that get a gradient."""
        given = ((name, self.operands[name]) for name in _OF_ROWS)
        return [
            name
            for name, tensor in given
            if self.needs and tensor is not None and tensor.requires_grad
        ]

    def _leaf(self, name, tensor):
        if tensor is None:
            return None
        leaf = tensor.detach().contiguous()  # so that its gradient is
        if name in _OF_ROWS:
            leaf = leaf.reshape(self.target.numel(), tensor.shape[-1])
            return leaf.float() if self.wide else leaf
        if name == "linear_bias" and leaf.dtype.itemsize == 2:
            leaf = leaf.float()  # its sum over chunks
        return leaf.requires_grad_(self.needs and tensor.requires_grad)

    def _output(self, part):
        """linear_cross_entropy of the rows `part`, and the leaves of these rows by name."""
        options, rows = dict(self.options), {}
        for name in _OF_ROWS:
            if self.leaves[name] is not None:
                rows[name] = self.leaves[name][part].detach().requires_grad_(name in self.grads)
        temperature = options["temperature"]
        if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
            options["temperature"] = temperature.reshape(-1)[part]
        if options["gradient_seed"] is not None:
            options["gradient_seed"] = options["gradient_seed"] + part.start
        options |= {name: rows.get(name, self.leaves[name]) for name in _OPERANDS[2:]}
        weight, device = self.leaves["linear_weight"], self.target.device.type
        with torch.set_grad_enabled(self.needs):
            with torch.autocast(device, torch.float16) if self.wide else contextlib.nullcontext():
                made = linear_cross_entropy(rows["input"], weight, self.target[part], **options)
        return (made if self.entropy else LinearCrossEntropyOutput(made)), rows

    def add(self, loss_fn, part):
        """The loss of the rows `part`, and the list of its values; adds to the gradients."""
        output, rows = self._output(part)
        logprobs = (-output.loss).detach().requires_grad_(self.needs)
        entropy = output.entropy
        if entropy is not None:
            entropy = entropy.detach().requires_grad_(self.needs and self.entropy is True)
        with torch.set_grad_enabled(self.needs):
            made = loss_fn(logprobs, entropy, part)
        loss, *values = made if isinstance(made, tuple) else (made,)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or len(values) > 1:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(made).__name__
            refuse("loss_fn", "a scalar tensor, or a tuple of it and values", got, TypeError)
        self.has_gradient = bool(self.has_gradient) or loss.requires_grad
        if loss.requires_grad and self.needs:
            given = [t for t in (logprobs, entropy) if t is not None and t.requires_grad]
            _check_graph(loss, given)
            upstream = torch.autograd.grad(loss, given, allow_unused=True)
            upstream = (None if upstream[0] is None else -upstream[0], *upstream[1:])
            pairs = zip((output.loss, output.entropy), upstream, strict=False)
            pairs = [(tensor, grad) for tensor, grad in pairs if grad is not None]
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            for name, grad in self.grads.items():
                grad[part] = rows[name].grad
        # In the dtype of the log-probabilities at least: a 16-bit sum would lose chunks.
        loss = loss.to(torch.promote_types(loss.dtype, logprobs.dtype)).reshape(())
        return _pytree.tree_map(_detached, [loss, *values])

    def _gradient(self, name):
        given, leaf = self.operands[name], self.leaves[name]
        if given is None or not (self.needs and given.requires_grad):
            return None
        if name in self.grads:
            return self.grads[name].view(given.shape)
        made = getattr(leaf, "main_grad", leaf.grad)
        return torch.zeros_like(leaf) if made is None else made

    def differentiable(self, total):
        """`total`, whose backward multiplies the gradients by grad_output."""
        if not self.needs or self.has_gradient is False:
            return total
        made = {name: self._gradient(name) for name in _OPERANDS}
        integers, constants = split({})[0].integers_with(), (None,) * 5
        for names in (_OPERANDS[:3], (*_OPERANDS[3:], "")):
            if all(made.get(name) is None for name in names):
                continue
            value = total.detach() if names[0] == "input" else torch.zeros_like(total)
            outputs = [value, *(None,) * 4, *map(made.get, names), None, None]
            accumulator = self.accumulator if names[0] == "input" else None
            lists = None, None, integers
            rest = outputs, 1, lists, constants, accumulator, None
            (value,) = LinearCrossEntropy.apply(*map(self.operands.get, names), *rest)
            total = value if names[0] == "input" else total + value
        return total


show_options(linear_loss, _KNOWN)
