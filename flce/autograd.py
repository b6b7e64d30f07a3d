"""The inner operators' fake (meta) implementations and autograd Functions, which need Python.

The tensors of the inner operators are positional, and their output shapes follow from their
arguments alone. The operators that users call are in flce/composite.py.
"""

import functools
import math
import re

import torch
from torch.utils.flop_counter import register_flop_formula

from . import inductor
from .options import GRADIENTS, Settings
from .strategy import gemm_dtype, row_pitch, sample_pitch, saved_dtype, stat_dtype
from .validate import refuse_vmap

library = torch.library.Library("flce", "FRAGMENT")
inner = torch.ops.flce

# Indices in enum flce_stat_row and enum flce_scalar of csrc/backend.h.
STAT_LSE, STAT_ENTROPY, _ROWS_OF_STATS = 0, 4, 7
SCALAR_VALID, _SCALARS = 0, 7


def _holds_units(device_type, dtype):
    """Whether save="grads" keeps gradients times a unit, which the backward must remove: in float16
    the denominator is applied together with grad_output (engine.c: unit_factor)."""
    return gemm_dtype(device_type, dtype) == torch.float16


def _fake_gradients(input, linear_weight, linear_bias, settings, wanted):
    # With save="grads" float16 gradients are kept in float32 (plan.c: kept_dtype), except the
    # weight's gradient if it is summed in units (plan.c: holds_weight).
    holds_units = _holds_units(input.device.type, settings.dtype)
    holds_weight = holds_units and settings.accum_dtype == torch.float16
    made = []
    for leaf, want in zip((input, linear_weight, linear_bias), wanted, strict=True):
        widens = want and settings.save == "grads" and leaf.dtype == torch.float16
        widens = widens and not (leaf is linear_weight and holds_weight)
        dtype = torch.float32 if widens else None
        made.append(leaf.new_empty(leaf.shape, dtype=dtype) if want else None)
    if made[1] is not None and settings.frozen_hidden > 0:
        made[1] = made[1][:, settings.frozen_hidden :].contiguous()
    return tuple(made)


def _fake_loss(rows, settings, dtype, keeps_statistics=True):
    """The fake loss, stats, scalars and predictions."""
    tokens = rows.shape[0] * (settings.ranks if settings.input_is_sharded else 1)
    stats = scalars = predictions = None
    if keeps_statistics:
        stats = rows.new_empty((_ROWS_OF_STATS, tokens), dtype=dtype)
        scalars = rows.new_empty((_SCALARS,), dtype=dtype)
    if settings.wants_predictions:
        predictions = rows.new_empty((tokens,), dtype=torch.int64)
    shape = (tokens,) if settings.reduction == "none" else ()
    return rows.new_empty(shape, dtype=dtype), stats, scalars, predictions


def _fake_forward(input, linear_weight, target, linear_bias, *rest):
    settings, device_type = Settings.of_arguments(*rest[5:]), input.device.type
    if settings.ranks:
        inductor.order_exchanges()
    makes_grads = settings.save == "grads"
    keeps_statistics = (  # as in plan.c: keeps_statistics
        settings.wants_statistics
        or settings.save in ("logits", "stats", "samples")
        or (makes_grads and _holds_units(device_type, settings.dtype))
    )
    loss = _fake_loss(input, settings, stat_dtype(settings.dtype), keeps_statistics)
    tokens = input.shape[0] * (settings.ranks if settings.input_is_sharded else 1)
    saved, rows = None, tokens if settings.rows is None else settings.rows
    if settings.save == "samples":
        saved = input.new_empty((rows, sample_pitch(settings.gradient_eps)), dtype=torch.int32)
    if settings.save == "logits":
        dtype = saved_dtype(settings, device_type, target.is_floating_point())
        vocab = linear_weight.shape[0] if settings.valid_vocab is None else settings.valid_vocab
        if settings.ranks:
            vocab = min(vocab, settings.classes - settings.first_class)
        saved = input.new_empty((rows, row_pitch(vocab, dtype, device_type)), dtype=dtype)
    wanted = [want and makes_grads for want in settings.gradients]
    return *loss, saved, *_fake_gradients(input, linear_weight, linear_bias, settings, wanted)


def _fake_backward(grad_output, grad_stats, input, linear_weight, target, linear_bias, *rest):
    settings = Settings.of_arguments(*rest[6:])
    return _fake_gradients(input, linear_weight, linear_bias, settings, settings.gradients)


def _fake_cross_entropy_forward(logits, target, *rest):
    if logits.shape[-1] < 1:
        raise ValueError("logits: expected at least one class, got 0")
    settings = Settings.of_arguments(None, None, *rest[4:])
    return _fake_loss(logits, settings, stat_dtype(logits.dtype))


_FAKES = {
    "forward": _fake_forward,
    "backward": _fake_backward,
    "backward_into": lambda grad_weight_into, *args: _fake_backward(*args)[::2],
    "scale_": lambda *args: None,
    "scaled": lambda grad, grad_output, scalars, dtype: torch.empty_like(grad, dtype=dtype),
    "cross_entropy_forward": _fake_cross_entropy_forward,
    "cross_entropy_backward": lambda _, grad_stats, logits, *rest: torch.empty_like(logits),
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
    return _below_autograd(op, *args)


def _below_autograd(op, *args, **kwargs):
    """Calls an operator, whose exceptions it translates. Which class an exception of C++ arrives as
    differs between versions of torch, so its text has the status (torch_device.h: Failure)."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)
    except Exception as error:
        if found := _FAILURE.search(str(error)):
            raise _EXCEPTIONS[found[1]](found[2]) from None
        if "flce: exchange failed: " in str(error):
            _raise_pending()
        if isinstance(error, (NotImplementedError, TypeError)):
            _refuse_subclasses(op, args, error)
        raise


def _raise_pending():
    """Raises what has ended a collective, if flce.collectives knows it."""
    from .collectives import pending_error  # which imports this module

    if (error := pending_error()) is not None:
        try:
            raise error from error.__cause__
        finally:
            del error  # its frames hold the call's memory, and would be held by this one


def _refuse_subclasses(op, args, error):
    """Names the first operand of a class whose __torch_dispatch__ has no rule for the operator, as
    those of quantised weights."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            expected = f"{argument.name}: expected a plain tensor, as dequantize() makes it, got"
            raise TypeError(f"{expected} {type(value).__name__}, which has no {op}") from error


def _define_graph_variant(name):
    """Defines `graph_<name>`, which compiled graphs call in place of the operator of C++, because
    these call it where nothing else could translate its exceptions."""
    op, variant = getattr(inner, name).default, f"graph_{name}"
    library.define(str(op._schema).replace(f"flce::{name}", variant, 1))
    for key in ("CPU", "CUDA"):
        library.impl(variant, functools.partial(_below_autograd, op), key)
    _graph_variants[op] = getattr(inner, variant).default


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

    `constants`: the operator's tensors without a gradient, except num_items, which has already
    become one of the scalars, and the seed, which has become the samples. `accumulator`:
    accumulate.Accumulator of linear_weight, or None. `gemm_weight`: the
    weight of the GEMMs, (V, H), where linear_weight is adapter_weight, (V, r), which alone gets a
    gradient; else None.
    """

    @staticmethod
    def forward(
        ctx,
        input,
        linear_weight,
        linear_bias,
        made,
        count,
        settings,
        constants,
        accumulator,
        gemm_weight,
    ):
        ctx.settings, ctx.accumulator = settings, accumulator
        _, stats, scalars, _, saved, *grads = made
        target, *others = constants
        # The arguments of the backward operator.
        weight = linear_weight if gemm_weight is None else gemm_weight
        arguments = (input, weight, target, linear_bias, *others, stats, scalars, saved)
        if settings.save == "grads":
            leaves = (input, linear_weight, linear_bias)
            ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            # The composite operator does not return the saved tensor, so the backward may overwrite
            # it, unless saved-tensor hooks of the caller hold it.
            held = _top_hooks is None or _top_hooks(True) is not None
            ctx.owned = count is not None and not held
            ctx.scaled = False
            ctx.save_for_backward(scalars, *grads, *(arguments if count == 2 else ()))
        else:
            ctx.save_for_backward(*arguments)
        return _returned(ctx, made, count)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats):
        wanted, settings, saved = _asked(ctx), ctx.settings, ctx.saved_tensors
        if settings.save == "grads":
            if grad_stats is None:
                return _scale_made(ctx, saved[:4], grad_output, wanted)
            # The gradients that the forward made are those of the loss alone: compute all again.
            settings, saved = settings._replace(save="stats"), saved[4:]
        return _run_backward(ctx, settings, saved, grad_output, grad_stats, wanted)


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
    if not _holds_units(grad_output.device.type, ctx.settings.dtype):
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


def _run_backward(ctx, settings, saved, grad_output, grad_stats, wanted):
    accumulator = ctx.accumulator
    # The Function's differentiable tensors are the operands; the second one is the weight.
    if accumulator and not accumulator.should_accumulate(ctx.next_functions[1][0]):
        accumulator, wanted = None, (wanted[0], False, wanted[2])
    grads = dict(zip(GRADIENTS, wanted, strict=True))
    args = (grad_output, grad_stats, *saved, *settings._replace(**grads).arguments())
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
    constants, settings = (target, *rest[:3]), Settings.of_arguments(*rest[5:])
    leaves = (input, linear_weight, linear_bias)
    return LinearCrossEntropy.apply(*leaves, made, None, settings, constants, None, None)


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


def _gemm_flops(input, linear_weight, settings, gemms):
    """Of GEMMs as large as that of the logits, over the rows that are computed."""
    (tokens, hidden), (vocab, _) = input, linear_weight
    rows = tokens if settings.rows is None else settings.rows
    return 2 * gemms * rows * hidden * (settings.valid_vocab or vocab)


def _forward_flops(input, linear_weight, *rest, **_):
    settings = Settings.of_arguments(*rest[7:])
    gemms = 1 + (settings.grad_input + settings.grad_weight) * (settings.save == "grads")
    return _gemm_flops(input, linear_weight, settings, gemms)


def _backward_flops(grad_output, grad_stats, input, linear_weight, *rest, **_):
    settings = Settings.of_arguments(*rest[8:])
    wanted = settings.grad_input + settings.grad_weight
    if settings.save == "samples":  # a row's list in place of all classes
        pairs = math.ceil(1 / settings.gradient_eps)
        return _gemm_flops(input, (pairs, None), settings._replace(valid_vocab=None), wanted)
    recomputed = settings.save == "stats"
    return _gemm_flops(input, linear_weight, settings, wanted + recomputed)


register_flop_formula([inner.forward, inner.graph_forward])(_forward_flops)
register_flop_formula([inner.backward, inner.graph_backward])(_backward_flops)
register_flop_formula(inner.backward_into)(
    lambda _, *args, **named: _backward_flops(*args, **named)
)
