"""The inner operators' fake (meta) implementations, and their FLOP counts. The core says which
outputs a call has (`describe`); the number of rows, which may be symbolic, is compared here with
the limits that the core gives."""

import collections
import math

import torch
from torch.utils.flop_counter import register_flop_formula

from . import calls, torch_private
from .operators import SCALARS, STATS, inner, library, run_plain, variants
from .options import CHOICES, DTYPES
from .packing import GRADIENTS, INTEGERS, NUMBERS, code_of
from .validate import (
    check_same_device,
    check_shape,
    check_vector,
    is_equal,
    refuse,
    refuse_vmap,
)

# What csrc/binding/plan.cpp: describe says of a call. Strategies by the number of rows
# (flce_strategies in csrc/flce.h): of at most one_chunk_rows, of at most rows_to_keep, of any other
# number. A dtype is its index in DTYPES, or -1 for int32.
_FIELDS = "save_of_one_chunk one_chunk_rows save_of_rows_to_keep rows_to_keep save_beyond"
_FIELDS += " keeps_statistics saved_dtype saved_pitch"
_FIELDS += " grad_input_dtype grad_weight_dtype grad_bias_dtype stat_dtype first_class classes"
_FIELDS += " candidates"
CallDescription = collections.namedtuple("CallDescription", _FIELDS)


def describe_sizes(valid_vocab, integers, numbers, **sizes):
    """The description of `sizes` and dtypes, by their names in the operator's schema; checks the
    options. No dispatch mode sees it, because it has no tensors and symbolic sizes become
    numbers."""
    valid_vocab = None if valid_vocab is None else int(valid_vocab)
    sizes = {name: int(size) for name, size in sizes.items()}
    with torch_private.no_dispatch():
        return CallDescription(
            *run_plain(inner.describe.default, valid_vocab, integers, numbers, **sizes)
        )


def described(operands, options, **sizes):
    """The description of a call. No result depends on the number of its rows, which may be
    symbolic. operands: a record with input, linear_weight, target and linear_bias; options: its
    calls.OperatorOptions; sizes: those of describe_sizes that do not follow from the tensors."""
    input, linear_weight, bias = operands.input, operands.linear_weight, operands.linear_bias
    return describe_sizes(
        options.valid_vocab,
        options.integers,
        options.numbers,
        on_cpu=input.device.type == "cpu",
        hidden=input.shape[-1],
        weight_rows=linear_weight.shape[0],
        input_dtype=code_of("input", input.dtype),
        weight_dtype=code_of("linear_weight", linear_weight.dtype),
        bias_dtype=-1 if bias is None else code_of("linear_bias", bias.dtype),
        probabilities=operands.target.is_floating_point(),
        **sizes,
    )


def with_strategy(call):
    """The options of a calls.ForwardCall, with the strategy for its number of rows in place of
    "auto"."""
    if call.options.choice("save") != "auto":
        return call.options
    description = described(call, call.options)
    rows, save = _rows_in_memory(call.target, call.options.rows), description.save_beyond
    for strategy, limit in (
        (description.save_of_rows_to_keep, description.rows_to_keep),
        (description.save_of_one_chunk, description.one_chunk_rows),
    ):
        # No guard on a symbolic number of rows where it would change nothing.
        if strategy != save and _is_at_most(rows, limit):
            save = strategy
    return call.options.replaced(save=save)


def _is_at_most(rows, limit):
    """torch.export needs one strategy for all sizes of a dynamic shape."""
    if isinstance(rows, int) or not torch.compiler.is_exporting():
        return rows <= limit
    return torch.fx.experimental.symbolic_shapes.statically_known_true(rows <= limit)


def rows_shape(target):
    """The shape of the rows: of class targets, or of probabilities without the classes."""
    return target.shape[:-1] if target.is_floating_point() else target.shape


def _rows_in_memory(target, rows):
    """The number of rows that there is memory for: all, also where they are counted when the
    operator runs. `rows`: the operator's argument."""
    return math.prod(rows_shape(target)) if rows is None or rows < 0 else rows


def _fake_loss(target, options, dtype, keeps_statistics):
    """The fake loss, stats, scalars and predictions, by name. options: calls.OperatorOptions."""
    shape = rows_shape(target)
    stats = scalars = predictions = None
    if keeps_statistics:
        stats = target.new_empty((STATS, math.prod(shape)), dtype=dtype)
        scalars = target.new_empty((SCALARS,), dtype=dtype)
    if options.value("wants_predictions"):
        predictions = target.new_empty(shape, dtype=torch.int64)
    reduced = options.choice("reduction") != "none"
    loss = target.new_empty(() if reduced else shape, dtype=dtype)
    return {"loss": loss, "stats": stats, "scalars": scalars, "predictions": predictions}


def _fake_gradients(operands, options, description):
    """The calls.Gradients; operands: as of described."""
    input, linear_weight = operands.input, operands.linear_weight
    columns = input.shape[-1] - options.value("frozen_hidden")
    shapes = input.shape, (linear_weight.shape[0], columns), linear_weight.shape[:1]
    dtypes = (
        description.grad_input_dtype,
        description.grad_weight_dtype,
        description.grad_bias_dtype,
    )
    return calls.Gradients(
        *(
            input.new_empty(shape, dtype=DTYPES[dtype]) if options.value(name) else None
            for name, shape, dtype in zip(GRADIENTS, shapes, dtypes, strict=True)
        )
    )


def _check_call(call):
    """The shape of the rows of all ranks, after the checks of the tensors of a calls.ForwardCall
    but the teacher's."""
    input, linear_weight, options = call.input, call.linear_weight, call.options
    check_operands(input, linear_weight, call.linear_bias)
    if len(options.integers) != len(INTEGERS) + 1:  # the layout is the last one
        refuse("integers", f"{len(INTEGERS) + 1} values", len(options.integers))
    ranks, vocab = options.value("ranks"), options.value("vocab")
    shape, scatters = input.shape[:-1], options.value("input_is_sharded")
    shape = (shape[0] * ranks, *shape[1:]) if scatters and shape else shape
    classes = vocab if ranks and vocab >= 0 else max(ranks, 1) * linear_weight.shape[0]
    vectors = call.weight, call.token_weight, call.token_temperature, call.num_items
    _check_loss_tensors("input", input, shape, classes, call.target, *vectors)
    return shape


def _check_teacher(call, shape):
    """`shape`: of the rows of all ranks."""
    teacher = call.teacher
    gives_logits = teacher.linear_weight is None
    first = "teacher_logits" if gives_logits else "teacher_input"
    named = {first: teacher.input, "teacher_weight": teacher.linear_weight}
    named |= {"teacher_bias": teacher.linear_bias, "teacher_temperature": teacher.temperature}
    for name, tensor in named.items():
        if tensor is not None:
            check_same_device(name, tensor, "input", call.input)
    leading = shape if gives_logits else call.input.shape[:-1]
    check_shape(first, teacher.input, (*leading, *teacher.input.shape[-1:]))


def _fake_forward(call):
    shape = _check_call(call)
    if call.teacher:
        _check_teacher(call, shape)
    options, target, classes = with_strategy(call), call.target, call.classes
    description = described(call, options)
    dtype = DTYPES[description.stat_dtype]
    loss_outputs = _fake_loss(target, options, dtype, description.keeps_statistics)
    top = logits = saved = None
    if description.candidates:
        top = target.new_empty((*rows_shape(target), description.candidates), dtype=torch.int64)
    classes = top if classes is None else classes
    if classes is not None:
        check_shape("classes", classes, (*shape, *classes.shape[-1:]))
        check_same_device("classes", classes, "input", call.input)
        logits = classes.new_empty(classes.shape, dtype=dtype)
    # The options have no "auto" any more, so that the strategy is the same for any number of rows.
    save, gradients = CHOICES["save"][description.save_beyond], calls.Gradients(None, None, None)
    if save in ("logits", "samples"):
        dtype = torch.int32 if description.saved_dtype < 0 else DTYPES[description.saved_dtype]
        saved = call.input.new_empty(
            (_rows_in_memory(target, options.rows), description.saved_pitch), dtype=dtype
        )
    if save == "grads":
        gradients = _fake_gradients(call, options, description)
    of_outputs = {**gradients._asdict(), "saved": saved, "class_logits": logits, "top_classes": top}
    return calls.ForwardOutputs(**loss_outputs, **of_outputs)


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
    """As check_operands, for the target and the other tensors of a loss. `first`: input or logits,
    `name` its name; `shape`: of the rows of all ranks; `classes`: the number of all classes;
    `vectors`: weight, token_weight, temperature, num_items."""
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


def _fake_backward(call):
    operands = call.forward
    check_operands(operands.input, operands.linear_weight, operands.linear_bias)
    return _fake_gradients(operands, call.options, described(operands, call.options))


def _fake_backward_into(grad_weight_into, *args):
    gradients = _fake_backward(calls.read(calls.BackwardCall, args))
    return gradients.grad_input, gradients.grad_bias


def _fake_cross_entropy_forward(call):
    logits, target = call.logits, call.target
    if logits.dim() < 1:
        refuse("logits", "at least one dimension", "a 0-d tensor")
    vocab, code = logits.shape[-1], code_of("logits", logits.dtype)
    if vocab < 1:
        refuse("logits", "at least one class", f"shape {tuple(logits.shape)}")
    vectors = call.weight, call.token_weight, call.token_temperature, call.num_items
    _check_loss_tensors("logits", logits, logits.shape[:-1], vocab, target, *vectors)
    sizes = {"weight_rows": vocab, "input_dtype": code, "weight_dtype": code}
    sizes["probabilities"] = target.is_floating_point()
    describe_sizes(None, call.integers, call.numbers, **sizes)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    options = calls.OperatorOptions(None, None, call.integers, call.numbers)
    return calls.LogitsOutputs(**_fake_loss(target, options, dtype, True))


def _fake_logits_backward(call):
    logits = call.forward.logits
    return logits.new_empty(logits.shape)


def _of_record(kind, fake):
    """The fake implementation of an operator by one that takes its call as a record."""
    return lambda *args: fake(calls.read(kind, args))


_FAKES = {
    "forward": _of_record(calls.ForwardCall, _fake_forward),
    "backward": _of_record(calls.BackwardCall, _fake_backward),
    "backward_into": _fake_backward_into,
    "scale_": lambda *args: None,
    "scaled": lambda grad, grad_output, scalars, dtype: torch.empty_like(grad, dtype=dtype),
    "cross_entropy_forward": _of_record(calls.LogitsCall, _fake_cross_entropy_forward),
    "cross_entropy_backward": _of_record(calls.LogitsBackwardCall, _fake_logits_backward),
}

for _name, _fake in _FAKES.items():
    for _op in variants(_name):
        torch.library.register_fake(_op, _fake, lib=library)
        for _key in ("FuncTorchBatched", "Batched"):  # Batched: is_grads_batched, vectorize=True
            library.impl(_op, refuse_vmap, _key)


# ---- FLOPs, for torch.utils.flop_counter ----


def _gemm_flops(input, operands, options, gemms, entries=None):
    """FLOPs of GEMMs over the rows that are computed and all classes, or `entries` of each row.
    input: of these GEMMs; operands: as of described."""
    target, classes = operands.target, len(operands.linear_weight)
    classes = entries or min(options.valid_vocab or classes, classes)
    rows = _rows_in_memory(target, options.rows)
    if target.is_cpu and not target.is_floating_point() and not torch_private.is_fake(target):
        rows = int((~is_equal(target, options.value("ignore_index"))).sum())
    return 2 * gemms * rows * input.shape[-1] * classes


def _entries(options):
    """The classes of a row that a sampled gradient holds."""
    return math.ceil(1 / dict(zip(NUMBERS, options.numbers, strict=True))["gradient_eps"])


@register_flop_formula([inner.forward, inner.graph_forward], get_raw=True)
def _forward_flops(*args, out_val=None, **_):
    call = calls.read(calls.ForwardCall, args)
    outputs, options = calls.read(calls.ForwardOutputs, out_val), call.options
    gradients = sum(grad is not None for grad in (outputs.grad_input, outputs.grad_weight))
    entries = _entries(options) if options.choice("gradient") == "sampled" else None
    flops = _gemm_flops(call.input, call, options, 1)
    flops += _gemm_flops(call.input, call, options, gradients, entries)
    if call.teacher and call.teacher.linear_weight is not None:
        flops += _gemm_flops(call.teacher.input, call, options, 1)
    return flops


@register_flop_formula([inner.backward, inner.graph_backward], get_raw=True)
def _backward_flops(*args, **_):
    call = calls.read(calls.BackwardCall, args)
    operands, options, save = call.forward, call.options, call.options.choice("save")
    gemms = sum(options.value(name) for name in GRADIENTS[:2]) + (save == "stats")
    entries = _entries(options) if save == "samples" else None
    return _gemm_flops(operands.input, operands, options, gemms, entries)


@register_flop_formula(inner.backward_into, get_raw=True)
def _backward_into_flops(grad_weight_into, *args, **named):
    return _backward_flops(*args, **named)
