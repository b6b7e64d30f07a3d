"""The inner operators' fake (meta) implementations and autograd Functions, which need Python.

The tensors of the inner operators are positional, and their output shapes follow from their
arguments alone. The operators that users call are in flce/composite.py.
"""

import functools
import math
import re
import typing

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._mode_utils import no_dispatch
from torch.utils.flop_counter import register_flop_formula

from .options import CHOICES, DTYPES, GRADIENTS, replaced, value_of
from .validate import check_same_device, check_tensor, refuse, refuse_vmap

library = torch.library.Library("flce", "FRAGMENT")
inner = torch.ops.flce

# Indices in enum flce_stat_row and enum flce_scalar of csrc/backend.h.
STAT_LSE, STAT_ENTROPY, _ROWS_OF_STATS = 0, 4, 7
SCALAR_VALID, _SCALARS = 0, 7
_AUTO = CHOICES["save"].index("auto")


def _lists_of(rest):
    """The arguments of forward and backward after their tensors: valid_vocab, rows, integers,
    numbers, group. torch leaves out a last one that is the default."""
    return (*rest, None)[:5]


# ---- fakes ----


class Described(typing.NamedTuple):
    """What csrc/binding/plan.cpp: describe says of a call; a dtype is its index in DTYPES."""

    few: int  # strategy up to few_rows rows
    few_rows: int
    some: int  # strategy up to some_rows rows
    some_rows: int
    many: int  # strategy of more rows
    keeps_statistics: int
    saved_dtype: int  # -1: int32
    saved_pitch: int
    grad_input_dtype: int
    grad_weight_dtype: int
    grad_bias_dtype: int
    stat_dtype: int
    first_class: int
    classes: int

    def strategy(self, rows):
        """torch.export needs one strategy for all sizes of a dynamic shape."""
        if self.few == self.some == self.many:
            return self.many
        if self.few != self.some and _is_at_most(rows, self.few_rows):
            return self.few
        return self.some if _is_at_most(rows, self.some_rows) else self.many


def _is_at_most(rows, limit):
    if isinstance(rows, int) or not torch.compiler.is_exporting():
        return rows <= limit
    return torch.fx.experimental.symbolic_shapes.statically_known_true(rows <= limit)


def describe_sizes(*operands, valid_vocab, integers, numbers):
    """The Described of csrc/binding/plan.cpp's OperandSlot; checks the options. No dispatch mode
    sees it, because it has no tensors and symbolic sizes become numbers."""
    operands = [int(value) for value in operands]
    valid_vocab = None if valid_vocab is None else int(valid_vocab)
    with no_dispatch():
        return Described(*run_plain(inner.describe.default, operands, valid_vocab, integers, numbers))


def described(input, linear_weight, target, linear_bias, lists):
    """The Described of a call; no result depends on the number of its rows, which may be
    symbolic."""
    valid_vocab, _, integers, numbers, _ = lists
    hidden, dtypes = input.shape[-1], (input.dtype, linear_weight.dtype, linear_bias)
    codes = [DTYPES.index(dtype) for dtype in dtypes[:2]]
    codes.append(-1 if linear_bias is None else DTYPES.index(linear_bias.dtype))
    sizes = input.device.type == "cpu", 0, hidden, linear_weight.shape[0], 0
    others = (-1, target.is_floating_point())
    named = {"valid_vocab": valid_vocab, "integers": integers, "numbers": numbers}
    return describe_sizes(*sizes, *codes, *others, **named)


def with_strategy(input, linear_weight, target, linear_bias, lists):
    """`lists` with the strategy in place of "auto"."""
    valid_vocab, rows, integers, numbers, group = lists
    if value_of(integers, "save") != _AUTO:
        return lists
    found = described(input, linear_weight, target, linear_bias, lists)
    tokens = math.prod(_rows_shape(target))
    save = found.strategy(tokens if rows is None or rows < 0 else rows)
    return valid_vocab, rows, replaced(integers, save=save), numbers, group


def _rows_shape(target):
    return target.shape[:-1] if target.is_floating_point() else target.shape


def _fake_loss(target, integers, dtype, keeps_statistics):
    """The fake loss, stats, scalars and predictions."""
    shape = _rows_shape(target)
    stats = scalars = predictions = None
    if keeps_statistics:
        stats = target.new_empty((_ROWS_OF_STATS, math.prod(shape)), dtype=dtype)
        scalars = target.new_empty((_SCALARS,), dtype=dtype)
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


def _fake_forward(input, linear_weight, target, linear_bias, *rest):
    operands = input, linear_weight, target, linear_bias
    _check_devices("forward", *operands, *rest[:5])
    lists = with_strategy(*operands, _lists_of(rest[5:]))
    _, rows, integers, _, _ = lists
    found = described(*operands, lists)
    made = _fake_loss(target, integers, DTYPES[found.stat_dtype], found.keeps_statistics)
    save, saved, grads = CHOICES["save"][found.many], None, (None,) * 3
    if save in ("logits", "samples"):
        tokens = math.prod(_rows_shape(target))
        dtype = torch.int32 if found.saved_dtype < 0 else DTYPES[found.saved_dtype]
        shape = (tokens if rows is None or rows < 0 else rows, found.saved_pitch)
        saved = input.new_empty(shape, dtype=dtype)
    if save == "grads":
        grads = _fake_gradients(input, linear_weight, linear_bias, integers, found)
    return *made, saved, *grads


def _check_devices(name, input, *others):
    for argument, tensor in zip(getattr(inner, name).default._schema.arguments[1:], others, strict=False):
        if tensor is not None:
            check_same_device(argument.name, tensor, "input", input)


def _fake_backward(grad_output, grad_stats, input, linear_weight, target, linear_bias, *rest):
    lists = _lists_of(rest[6:])
    found = described(input, linear_weight, target, linear_bias, lists)
    return _fake_gradients(input, linear_weight, linear_bias, lists[2], found)


def _fake_cross_entropy_forward(logits, target, *rest):
    if logits.shape[-1] < 1:
        refuse("logits", "at least one class", f"shape {tuple(logits.shape)}")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return _fake_loss(target, rest[4], dtype, True)


_FAKES = {
    "forward": _fake_forward,
    "backward": _fake_backward,
    "backward_into": lambda grad_weight_into, *args: _fake_backward(*args)[::2],
    "scale_": lambda *args: None,
    "scaled": lambda grad, grad_output, scalars, dtype: torch.empty_like(grad, dtype=dtype),
    "cross_entropy_forward": _fake_cross_entropy_forward,
    "cross_entropy_backward": lambda _, grad_stats, logits, *rest: logits.new_empty(logits.shape),
}
# Kernels for the Autograd key with autograd Functions of our own. torch.library.register_autograd
# parses the operator's schema in every call, which takes more host time than the rest of a small
# step. A Function is applied to the outputs that its operator has already produced: on a GPU the
# kernels are running by then, so the host time of the Function is hidden.


_EXCEPTIONS = {  # by flce_status_name; any other status is a RuntimeError with the whole text
    "invalid argument": ValueError,
    "invalid type": TypeError,
    "target out of range": IndexError,
    "out of memory": torch.OutOfMemoryError,
}
_FAILURE = re.compile(f"flce: ({'|'.join(_EXCEPTIONS)}): (.*)", re.DOTALL)


def run(op, *args):
    """Calls an operator below autograd; where tensors are traced, its `graph_` variant."""
    if type(args[0]) not in _PLAIN:
        op = _graph_variants.get(op, op)
    return run_plain(op, *args)


def run_plain(op, *args, **kwargs):
    """Calls an operator, whose exceptions it translates. Which class an exception of C++ arrives as
    differs between versions of torch, so its text has the status (binding/errors.h: Failure)."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)
    except Exception as error:
        if found := _FAILURE.search(str(error)):
            raise _EXCEPTIONS[found[1]](found[2]) from None
        if "flce: exchange failed: " in str(error) and pending_error is not None:
            _raise(pending_error())
        _refuse_operands(op, args, error)
        raise


def _raise(error):
    """Raises what has ended a collective, if it is known."""
    if error is not None:
        try:
            raise error from error.__cause__
        finally:
            del error  # its frames hold the call's memory, and would be held by this one


def _refuse_operands(op, args, error):
    """Names the first operand that is no dense tensor, or of a class whose __torch_dispatch__ has
    no rule for the operator, as those of quantised weights."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if "Tensor" not in str(argument.type) or type(value) in _PLAIN and _is_dense(value):
            continue
        name = "temperature" if argument.name == "token_temperature" else argument.name
        if value is not None or "Optional" not in str(argument.type):
            check_tensor(name, value)
            if isinstance(error, (NotImplementedError, TypeError)):
                expected = f"{name}: expected a plain tensor, as dequantize() makes it, got"
                raise TypeError(f"{expected} {type(value).__name__}, which has no {op}") from error


def _is_dense(tensor):
    return tensor.layout is torch.strided and not tensor.is_nested


def _define_graph_variant(name):
    """Defines `graph_<name>`, which compiled graphs call in place of the operator of C++, because
    these call it where nothing else could translate its exceptions."""
    op, variant = getattr(inner, name).default, f"graph_{name}"
    library.define(str(op._schema).replace(f"flce::{name}", variant, 1))
    for key in ("CPU", "CUDA"):
        library.impl(variant, functools.partial(run_plain, op), key)
    _graph_variants[op] = getattr(inner, variant).default


# Set by flce.distributed: the exception that has ended a collective of this thread, or None.
pending_error = None
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_graph_variants = {}
for _name in ("forward", "backward", "scaled", "cross_entropy_forward", "cross_entropy_backward"):
    _define_graph_variant(_name)


def _variants(name):
    """The operator and, unless it writes to an argument, its variant for graphs."""
    op = getattr(inner, name).default
    return (op, _graph_variants[op]) if op in _graph_variants else (op,)


for _name, _fake in _FAKES.items():
    for _op in _variants(_name):
        torch.library.register_fake(_op, _fake, lib=library)
        for _key in ("FuncTorchBatched", "Batched"):  # Batched: is_grads_batched, vectorize=True
            library.impl(_op, refuse_vmap, _key)


def _register_autograd(name, apply):
    """Registers the operator's kernel for the Autograd key; `apply(made, *args)` is the
    Function's `apply`, called with the outputs and the arguments."""
    for op in _variants(name):
        library.impl(op, functools.partial(_differentiable, op, apply), "Autograd")


def _differentiable(op, apply, *args):
    made = run(op, *args)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return apply(made, *args)
    return made


def _refuse_double_backward():
    raise RuntimeError(
        "flce: double backward (create_graph=True) is not supported; use "
        "torch.nn.functional.linear and cross_entropy where you differentiate a gradient"
    )


class _Refuse(torch.autograd.Function):
    """For a backward operator: its own gradient (double backward) is refused."""

    @staticmethod
    def forward(ctx, made, *args):
        return made

    @staticmethod
    def backward(ctx, *_):
        _refuse_double_backward()


def refuse_entropy_gradient(_):
    raise RuntimeError(
        'return_entropy: its gradient is not sampled; use gradient="exact" to differentiate the '
        "entropy, or detach() it"
    )


def _once_differentiable(make):
    """The backward of a Function from `make(ctx, grad_output, grad_stats)`, which returns the
    first-order gradients; grad_stats is None if neither lse nor entropy has a gradient.

    In a backward grad mode is on only for create_graph=True, which is refused at once: in a second
    derivative the gradients would be constants, so a part of it would silently be missing.
    """

    def backward(ctx, grad_output, grad_stats=None, *_):
        if torch.is_grad_enabled():
            _refuse_double_backward()
        needs = ctx.needs_input_grad
        if grad_output is None and grad_stats is None:
            return (None,) * len(needs)
        if grad_output is None:
            grad_output = grad_stats.new_zeros(ctx.loss_shape)
        elif grad_output._is_zerotensor():  # without memory
            grad_output = torch.zeros_like(grad_output)
        if grad_stats is not None:
            grad_stats = grad_stats.contiguous()
        grads = make(ctx, grad_output.contiguous(), grad_stats)
        return (*grads, *(None,) * (len(needs) - len(grads)))

    return staticmethod(backward)


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _returned(ctx, made, count):
    """The first `count` outputs, all differentiable: the loss (1), or it and the statistics (2).
    None, for a direct call of the operator: all outputs; only the loss is differentiable then."""
    ctx.set_materialize_grads(False)
    ctx.loss_shape = made[0].shape
    if count is None:
        ctx.mark_non_differentiable(*(output for output in made[1:] if output is not None))
    return tuple(made[:count])


class LinearCrossEntropy(torch.autograd.Function):
    """The Function of flce::forward: takes its outputs `made`, returns `count` of them (_returned).

    `lists`: the operator's arguments after its tensors. `constants`: its tensors without a
    gradient, except num_items, which has already become one of the scalars, and the seed, which has
    become the samples. `accumulator`: accumulate.Accumulator of linear_weight, or None.
    `gemm_weight`: the weight of the GEMMs, (V, H), where linear_weight is adapter_weight, (V, r),
    which alone gets a gradient; else None.
    """

    @staticmethod
    def forward(
        ctx,
        input,
        linear_weight,
        linear_bias,
        made,
        count,
        lists,
        constants,
        accumulator,
        gemm_weight,
    ):
        ctx.lists, ctx.accumulator = lists, accumulator
        _, stats, scalars, _, saved, *grads = made
        target, *others = constants
        # The arguments of the backward operator.
        weight = linear_weight if gemm_weight is None else gemm_weight
        arguments = (input, weight, target, linear_bias, *others, stats, scalars, saved)
        # What "auto" was shows in the outputs.
        ctx.save = "nothing" if stats is None else "stats"
        if saved is not None:
            ctx.save = "samples" if saved.dtype == torch.int32 else "logits"
        elif any(grad is not None for grad in grads):
            ctx.save = "grads"
            leaves = (input, linear_weight, linear_bias)
            ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            # The composite operator does not return the saved tensor, so the backward may overwrite
            # it, unless saved-tensor hooks of the caller hold it.
            held = _top_hooks is None or _top_hooks(True) is not None
            ctx.owned = count is not None and not held
            ctx.scaled = False
            ctx.holds_units = _holds_units(input, linear_weight, lists[2])
            ctx.save_for_backward(scalars, *grads, *(arguments if count == 2 else ()))
            return _returned(ctx, made, count)
        ctx.save_for_backward(*arguments)
        return _returned(ctx, made, count)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats):
        wanted, save, saved = _asked(ctx), ctx.save, ctx.saved_tensors
        if save == "grads":
            if grad_stats is None:
                return _scale_made(ctx, saved[:4], grad_output, wanted)
            # The gradients that the forward made are those of the loss alone: compute all again.
            save, saved = "stats", saved[4:]
        return _run_backward(ctx, save, saved, grad_output, grad_stats, wanted)


def _holds_units(input, linear_weight, integers):
    """Whether save="grads" keeps gradients times a unit, which the backward must remove: in float16
    the denominator is applied together with grad_output (engine.c: unit_factor)."""
    dtypes, autocast = (input.dtype, linear_weight.dtype), value_of(integers, "autocast")
    if autocast >= 0 and torch.float64 not in dtypes:
        dtypes = (DTYPES[autocast],)
    return dtypes[0] == torch.float16 and input.device.type != "cpu"


def _asked(ctx):
    """Which gradients of input, linear_weight and linear_bias the running backward needs: fewer
    than ctx.needs_input_grad has where it is for other leaves, as in pipeline schedules that ask
    for the gradients of inputs and of weights apart."""
    asked = []
    for i, needed in enumerate(ctx.needs_input_grad[:3]):
        if needed:
            try:
                needed = torch._C._will_engine_execute_node(ctx.next_functions[i][0])
            except RuntimeError:
                # Of a leaf that torch.autograd.grad() returns, or outside of the engine.
                needed = True
        asked.append(needed)
    return tuple(asked)


def _scale_made(ctx, saved, grad_output, wanted):
    """The wanted gradients, made by the forward, times grad_output; in place if possible."""
    scalars, *grads = saved
    if ctx.scaled:
        raise RuntimeError(
            "flce: a backward that failed has used up this loss's gradients; run the forward again"
        )
    # If it is unknown whether the graph is kept (as under compile), it may run again.
    repeats = _keeps_graph is None or torch.compiler.is_compiling() or _keeps_graph()
    may_write = ctx.owned and not repeats
    if not ctx.holds_units:
        scalars = None
    own, made = [None] * 3, [None] * 3
    for i, (name, grad, dtype) in enumerate(zip(GRADIENTS, grads, ctx.dtypes, strict=True)):
        if not wanted[i]:
            continue
        if grad is None:
            raise RuntimeError(
                f"{name}: expected True in the options of the forward, got False; it makes the "
                'gradients with save="grads"'
            )
        plain = type(grad) is torch.Tensor and type(grad_output) is torch.Tensor
        if may_write and plain and grad.dtype == dtype:
            # A new tensor on the same memory, which autograd may keep as .grad.
            own[i], made[i] = grad, grad.detach()
        else:
            made[i] = run(inner.scaled.default, grad, grad_output, scalars, dtype)
    ctx.scaled = may_write
    if any(grad is not None for grad in own):
        _scale_untracked(*own, grad_output, scalars)
    return tuple(made)


def _run_backward(ctx, save, saved, grad_output, grad_stats, wanted):
    accumulator = ctx.accumulator
    # The Function's differentiable tensors are the operands; the second one is the weight.
    if accumulator and not accumulator.should_accumulate(ctx.next_functions[1][0]):
        accumulator, wanted = None, (wanted[0], False, wanted[2])
    valid_vocab, rows, integers, numbers, group = ctx.lists
    grads = dict(zip(GRADIENTS, wanted, strict=True))
    integers = replaced(integers, save=CHOICES["save"].index(save), **grads)
    args = (grad_output, grad_stats, *saved, valid_vocab, rows, integers, numbers, group)
    if accumulator is None:
        return run(inner.backward.default, *args)
    with accumulator.lock:
        if (into := accumulator.checked_target()) is None:
            grad_input, grad_weight, grad_bias = run(inner.backward.default, *args)
        else:
            grad_input, grad_bias = run(inner.backward_into.default, into, *args)
            grad_weight = None
        return grad_input, accumulator.finish(grad_weight), grad_bias


class CrossEntropy(torch.autograd.Function):
    """The autograd Function of flce::cross_entropy_forward, as LinearCrossEntropy."""

    @staticmethod
    def forward(ctx, logits, made, count, lists, constants):
        ctx.lists = lists
        ctx.save_for_backward(logits, *constants, *made[1:3])
        return _returned(ctx, made, count)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats):
        args = (grad_output, grad_stats, *ctx.saved_tensors, *ctx.lists)
        return (run(inner.cross_entropy_backward.default, *args),)


def _apply_forward(made, input, linear_weight, target, linear_bias, *rest):
    constants, lists = (target, *rest[:3]), _lists_of(rest[5:])
    leaves = (input, linear_weight, linear_bias)
    return LinearCrossEntropy.apply(*leaves, made, None, lists, constants, None, None)


def _apply_cross_entropy_forward(made, logits, target, *rest):
    return CrossEntropy.apply(logits, made, None, rest[4:], (target, *rest[:3]))


_register_autograd("forward", _apply_forward)
_register_autograd("cross_entropy_forward", _apply_cross_entropy_forward)
for _name in ("backward", "backward_into", "scaled", "cross_entropy_backward"):
    _register_autograd(_name, _Refuse.apply)


def _scale_untracked(*args):
    with torch._C._AutoDispatchBelowAutograd(), torch._C._AutoDispatchBelowADInplaceOrView():
        inner.scale_.default(*args)


def _check_writable(name, tensor, use):
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: expected a tensor that does not require grad, to {use}")


def _scale_bumping_version(*args):
    """scale_ called directly: bumps the version of what it writes, for graphs that saved it."""
    grads = {name: grad for name, grad in zip(GRADIENTS, args, strict=False) if grad is not None}
    for name, grad in grads.items():
        _check_writable(name, grad, "scale in place")
    _scale_untracked(*args)
    for grad in grads.values():
        torch.autograd.graph.increment_version(grad)


def _backward_into_bumping_version(grad_weight_into, *args):
    """As _scale_bumping_version."""
    _check_writable("grad_weight_into", grad_weight_into, "add to in place")
    torch.autograd.graph.increment_version(grad_weight_into)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return inner.backward_into.default(grad_weight_into, *args)


library.impl("scale_", _scale_bumping_version, "ADInplaceOrView")
library.impl("backward_into", _backward_into_bumping_version, "ADInplaceOrView")


# ---- FLOPs, for torch.utils.flop_counter ----


def _gemm_flops(input, linear_weight, target, lists, gemms):
    """Of GEMMs as large as that of the logits, over the rows that are computed."""
    valid_vocab, rows, integers, _, _ = lists
    vocab = len(linear_weight) if valid_vocab is None else min(valid_vocab, len(linear_weight))
    if target.is_cpu and not target.is_floating_point() and not is_fake(target):
        rows = int((target != value_of(integers, "ignore_index")).sum())
    elif rows is None or rows < 0:
        rows = math.prod(_rows_shape(target))
    return 2 * gemms * rows * input.shape[-1] * vocab


def _forward_flops(input, linear_weight, target, *rest, out_val=None, **_):
    made = sum(grad is not None for grad in out_val[5:7])  # with save="grads"
    return _gemm_flops(input, linear_weight, target, _lists_of(rest[6:]), 1 + made)


def _backward_flops(grad_output, grad_stats, input, linear_weight, target, *rest, **_):
    lists = _lists_of(rest[7:])
    integers, numbers = lists[2:4]
    wanted = value_of(integers, "grad_input") + value_of(integers, "grad_weight")
    save = CHOICES["save"][value_of(integers, "save")]
    if save == "samples":  # a row's list in place of all classes
        pairs = range(math.ceil(1 / numbers[-1]))
        return _gemm_flops(input, pairs, target, (None, *lists[1:]), wanted)
    return _gemm_flops(input, linear_weight, target, lists, wanted + (save == "stats"))


register_flop_formula([inner.forward, inner.graph_forward], get_raw=True)(_forward_flops)
register_flop_formula([inner.backward, inner.graph_backward], get_raw=True)(_backward_flops)
register_flop_formula(inner.backward_into, get_raw=True)(
    lambda _, *args, **named: _backward_flops(*args, **named)
)
