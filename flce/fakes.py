"""The inner operators' fake (meta) implementations, and their FLOP counts. The core says which
outputs a call has (`describe`), but for comparisons with its rows: their number may be symbolic."""

import collections
import math

import torch
from torch.utils.flop_counter import register_flop_formula

from . import torch_private
from .operators import SCALARS, STATS, inner, library, lists_of, run_plain, variants
from .options import CHOICES, DTYPES, GRADIENTS, INTEGERS, code_of, replaced, value_of
from .validate import (
    check_same_device,
    check_shape,
    check_vector,
    is_equal,
    refuse,
    refuse_vmap,
)

# What csrc/binding/plan.cpp: describe says of a call. few, some and many are the strategies up to
# few_rows rows, up to some_rows and of more; a dtype is its index in DTYPES, or -1 for int32.
_FIELDS = "few few_rows some some_rows many keeps_statistics saved_dtype saved_pitch"
_FIELDS += " grad_input_dtype grad_weight_dtype grad_bias_dtype stat_dtype first_class classes"
_FIELDS += " candidates"
Described = collections.namedtuple("Described", _FIELDS)


def describe_sizes(valid_vocab, integers, numbers, **sizes):
    """The Described of `sizes` and dtypes, by their names in the operator's schema; checks the
    options. No dispatch mode sees it, because it has no tensors and symbolic sizes become
    numbers."""
    valid_vocab = None if valid_vocab is None else int(valid_vocab)
    sizes = {name: int(size) for name, size in sizes.items()}
    with torch_private.no_dispatch():
        return Described(
            *run_plain(inner.describe.default, valid_vocab, integers, numbers, **sizes)
        )


def described(input, linear_weight, target, linear_bias, lists, **sizes):
    """The Described of a call; no result depends on the number of its rows, which may be
    symbolic. `sizes`: those of describe_sizes that do not follow from the tensors."""
    valid_vocab, _, *packed, _ = lists
    return describe_sizes(
        valid_vocab,
        *packed,
        on_cpu=input.device.type == "cpu",
        hidden=input.shape[-1],
        weight_rows=linear_weight.shape[0],
        input_dtype=code_of("input", input.dtype),
        weight_dtype=code_of("linear_weight", linear_weight.dtype),
        bias_dtype=-1 if linear_bias is None else code_of("linear_bias", linear_bias.dtype),
        probabilities=target.is_floating_point(),
        **sizes,
    )


def with_strategy(input, linear_weight, target, linear_bias, lists):
    """`lists` with the strategy in place of "auto"."""
    valid_vocab, rows, integers, numbers, group = lists
    if CHOICES["save"][value_of(integers, "save")] != "auto":
        return lists
    found = described(input, linear_weight, target, linear_bias, lists)
    kept, save = _kept_rows(target, rows), found.many
    for strategy, limit in ((found.some, found.some_rows), (found.few, found.few_rows)):
        if strategy != save and _is_at_most(kept, limit):
            save = strategy
    return valid_vocab, rows, replaced(integers, save=save), numbers, group


def _is_at_most(rows, limit):
    """torch.export needs one strategy for all sizes of a dynamic shape."""
    if isinstance(rows, int) or not torch.compiler.is_exporting():
        return rows <= limit
    return torch.fx.experimental.symbolic_shapes.statically_known_true(rows <= limit)


def rows_shape(target):
    """The shape of the rows: of class targets, or of probabilities without the classes."""
    return target.shape[:-1] if target.is_floating_point() else target.shape


def _kept_rows(target, rows):
    """The rows that there is memory for; `rows`: the operators' argument."""
    return math.prod(rows_shape(target)) if rows is None or rows < 0 else rows


def _fake_loss(target, integers, dtype, keeps_statistics):
    """The fake loss, stats, scalars and predictions."""
    shape = rows_shape(target)
    stats = scalars = predictions = None
    if keeps_statistics:
        stats = target.new_empty((STATS, math.prod(shape)), dtype=dtype)
        scalars = target.new_empty((SCALARS,), dtype=dtype)
    if value_of(integers, "wants_predictions"):
        predictions = target.new_empty(shape, dtype=torch.int64)
    reduced = CHOICES["reduction"][value_of(integers, "reduction")] != "none"
    return target.new_empty(() if reduced else shape, dtype=dtype), stats, scalars, predictions


def _fake_gradients(input, linear_weight, linear_bias, integers, found):
    columns = input.shape[-1] - value_of(integers, "frozen_hidden")
    shapes = input.shape, (linear_weight.shape[0], columns), linear_weight.shape[:1]
    dtypes = found.grad_input_dtype, found.grad_weight_dtype, found.grad_bias_dtype
    return tuple(
        input.new_empty(shape, dtype=DTYPES[dtype]) if value_of(integers, name) else None
        for name, shape, dtype in zip(GRADIENTS, shapes, dtypes, strict=True)
    )


def _check_call(input, linear_weight, target, linear_bias, integers, *vectors):
    """The shape of the rows of all ranks, after the checks of a call's tensors."""
    check_operands(input, linear_weight, linear_bias)
    ranks, vocab = (value_of(integers, name) for name in ("ranks", "vocab"))
    shape, scatters = input.shape[:-1], value_of(integers, "input_is_sharded")
    shape = (shape[0] * ranks, *shape[1:]) if scatters and shape else shape
    classes = vocab if ranks and vocab >= 0 else max(ranks, 1) * linear_weight.shape[0]
    _check_loss_tensors("input", input, shape, classes, target, *vectors)
    return shape


def _checked_lists(rest):
    """lists_of, with as many integers as their names."""
    lists = lists_of(rest)
    if len(lists[2]) != len(INTEGERS) + 1:
        refuse("integers", f"{len(INTEGERS) + 1} values", len(lists[2]))
    return lists


def _fake_forward(
    input, linear_weight, target, linear_bias,
    weight, token_weight, token_temperature, num_items, seed, classes, *rest,
):  # fmt: skip
    operands, lists = (input, linear_weight, target, linear_bias), _checked_lists(rest)
    of_loss = weight, token_weight, token_temperature, num_items
    shape = _check_call(*operands, lists[2], *of_loss)
    lists = with_strategy(*operands, lists)
    found = described(*operands, lists)
    dtype = DTYPES[found.stat_dtype]
    made = _fake_loss(target, lists[2], dtype, found.keeps_statistics)
    top = logits = None
    if found.candidates:
        top = target.new_empty((*rows_shape(target), found.candidates), dtype=torch.int64)
    classes = top if classes is None else classes
    if classes is not None:
        check_shape("classes", classes, (*shape, *classes.shape[-1:]))
        check_same_device("classes", classes, "input", input)
        logits = classes.new_empty(classes.shape, dtype=dtype)
    save, saved, grads = CHOICES["save"][found.many], None, (None,) * 3
    if save in ("logits", "samples"):
        dtype = torch.int32 if found.saved_dtype < 0 else DTYPES[found.saved_dtype]
        saved = input.new_empty((_kept_rows(target, lists[1]), found.saved_pitch), dtype=dtype)
    if save == "grads":
        grads = _fake_gradients(input, linear_weight, linear_bias, lists[2], found)
    return *made, saved, *grads, logits, top


def check_operands(input, linear_weight, linear_bias=None):
    """As csrc/binding/call.cpp, which cannot compare symbolic sizes."""
    if input.dim() < 1:
        refuse("input", "at least one dimension", "a 0-d tensor")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        expected = f"(V, {input.shape[-1]}) for input of shape {tuple(input.shape)}"
        refuse("linear_weight", f"shape {expected}", tuple(linear_weight.shape))
    check_same_device("linear_weight", linear_weight, "input", input)
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, linear_weight.shape[:1])
        check_same_device("linear_bias", linear_bias, "input", input)


def _check_loss_tensors(name, first, shape, classes, target, *vectors):
    """The same of the others. `name`, `first`: of the rows' tensor; `shape`, `classes`: of all
    rows; `vectors`: weight, token_weight, temperature, num_items."""
    floating = target.is_floating_point()
    if target.dtype not in (*DTYPES, torch.int64, torch.int32):
        expected = "class indices of dtype torch.int64 or torch.int32, or probabilities of a "
        refuse("target", f"{expected}floating dtype", target.dtype, TypeError)
    names = "target", "weight", "token_weight", "temperature", "num_items"
    shapes = (*shape, classes) if floating else shape, (classes,), shape, shape, ()
    for option, tensor, expected in zip(names, (target, *vectors), shapes, strict=True):
        if tensor is not None:
            if option == "weight":
                code_of(option, tensor.dtype)
            check_vector(option, tensor, expected, name, first)


def _fake_backward(_, stats, classes, input, linear_weight, target, linear_bias, *rest):
    lists = lists_of(rest[8:])
    check_operands(input, linear_weight, linear_bias)
    found = described(input, linear_weight, target, linear_bias, lists)
    return _fake_gradients(input, linear_weight, linear_bias, lists[2], found)


def _fake_divergence(
    input, linear_weight, target, linear_bias, token_weight, token_temperature, num_items, seed,
    teacher_input, teacher_weight, teacher_bias, teacher_temperature, teacher, *rest,
):  # fmt: skip
    valid_vocab, rows, integers, numbers, group = _checked_lists(rest)
    operands = input, linear_weight, target, linear_bias
    shape = _check_call(*operands, integers, None, token_weight, token_temperature, num_items)
    gives_logits = teacher_weight is None
    first = "teacher_logits" if gives_logits else "teacher_input"
    named = {first: teacher_input, "teacher_weight": teacher_weight, "teacher_bias": teacher_bias}
    named["teacher_temperature"] = teacher_temperature
    for name, tensor in named.items():
        if tensor is not None:
            check_same_device(name, tensor, "input", input)
    leading = shape if gives_logits else input.shape[:-1]
    check_shape(first, teacher_input, (*leading, *teacher_input.shape[-1:]))
    save = "grads" if any(value_of(integers, name) for name in GRADIENTS) else "nothing"
    integers = replaced(integers, save=CHOICES["save"].index(save))
    lists = valid_vocab, rows, integers, numbers, group
    found = described(*operands, lists, teacher_hidden=1)  # no size depends on the teacher's
    dtype, keeps = DTYPES[found.stat_dtype], found.keeps_statistics
    loss, _, scalars, _ = _fake_loss(target, integers, dtype, keeps)
    return loss, scalars, *_fake_gradients(*operands[:2], linear_bias, integers, found)


def _fake_cross_entropy_forward(logits, target, *rest):
    if logits.dim() < 1:
        refuse("logits", "at least one dimension", "a 0-d tensor")
    vocab, code = logits.shape[-1], code_of("logits", logits.dtype)
    if vocab < 1:
        refuse("logits", "at least one class", f"shape {tuple(logits.shape)}")
    _check_loss_tensors("logits", logits, logits.shape[:-1], vocab, target, *rest[:4])
    named = {"weight_rows": vocab, "input_dtype": code, "weight_dtype": code}
    describe_sizes(None, *rest[4:6], **named, probabilities=target.is_floating_point())
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return _fake_loss(target, rest[4], dtype, True)


_FAKES = {
    "forward": _fake_forward,
    "divergence": _fake_divergence,
    "backward": _fake_backward,
    "backward_into": lambda grad_weight_into, *args: _fake_backward(*args)[::2],
    "scale_": lambda *args: None,
    "scaled": lambda grad, grad_output, scalars, dtype: torch.empty_like(grad, dtype=dtype),
    "cross_entropy_forward": _fake_cross_entropy_forward,
    "cross_entropy_backward": lambda _, grad_stats, logits, *rest: logits.new_empty(logits.shape),
}

for _name, _fake in _FAKES.items():
    for _op in variants(_name):
        torch.library.register_fake(_op, _fake, lib=library)
        for _key in ("FuncTorchBatched", "Batched"):  # Batched: is_grads_batched, vectorize=True
            library.impl(_op, refuse_vmap, _key)


# ---- FLOPs, for torch.utils.flop_counter ----


def _gemm_flops(input, linear_weight, target, lists, gemms, entries=None):
    """FLOPs of GEMMs over the rows that are computed and all classes, or `entries` of each row."""
    valid_vocab, rows, integers, _, _ = lists
    classes = entries or min(valid_vocab or len(linear_weight), len(linear_weight))
    rows = _kept_rows(target, rows)
    if target.is_cpu and not target.is_floating_point() and not torch_private.is_fake(target):
        rows = int((~is_equal(target, value_of(integers, "ignore_index"))).sum())
    return 2 * gemms * rows * input.shape[-1] * classes


@register_flop_formula([inner.forward, inner.graph_forward], get_raw=True)
def _forward_flops(input, linear_weight, target, *rest, out_val=None, **_):
    made = sum(grad is not None for grad in out_val[5:7])  # with save="grads"
    return _gemm_flops(input, linear_weight, target, lists_of(rest[7:]), 1 + made)


@register_flop_formula([inner.divergence, inner.graph_divergence], get_raw=True)
def _divergence_flops(input, linear_weight, target, *rest, out_val=None, **_):
    made = sum(grad is not None for grad in out_val[2:4])
    (teacher, weight), lists = rest[5:7], lists_of(rest[10:])
    entries = math.ceil(1 / lists[3][-1]) if value_of(lists[2], "gradient") else None
    counts = (input, 1, None), (input, made, entries), (teacher, weight is not None, None)
    return sum(_gemm_flops(x, linear_weight, target, lists, *count) for x, *count in counts)


@register_flop_formula([inner.backward, inner.graph_backward], get_raw=True)
def _backward_flops(_, stats, classes, input, linear_weight, target, *rest, **named):
    lists = _, _, integers, numbers, _ = lists_of(rest[9:])
    save = CHOICES["save"][value_of(integers, "save")]
    gemms = sum(value_of(integers, name) for name in GRADIENTS[:2]) + (save == "stats")
    entries = math.ceil(1 / numbers[-1]) if save == "samples" else None
    return _gemm_flops(input, linear_weight, target, lists, gemms, entries)


@register_flop_formula(inner.backward_into, get_raw=True)
def _backward_into_flops(grad_weight_into, *args, **named):
    return _backward_flops(*args, **named)
