"""The inner operators' kernels for the Autograd key, and their autograd Functions.

Registered directly, because torch.library.register_autograd parses the operator's schema in every
call, which takes more host time than the rest of a small step. A Function is applied to the outputs
that its operator has already produced: on a GPU the kernels are running by then, so the host time
of the Function is hidden.
"""

import contextlib
import functools
import math
import threading

import torch

from . import torch_private
from .operators import inner, library, lists_of, run, variants
from .options import CHOICES, GRADIENTS, gemm_dtype, replaced, value_of


def _register_autograd(name, apply):
    """Registers the operator's kernel for the Autograd key; `apply(made, *args)` is the
    Function's `apply`, called with the outputs and the arguments."""
    for op in variants(name):
        library.impl(op, functools.partial(_differentiable, op, apply), "Autograd")


def _differentiable(op, apply, *args):
    made = run(op, *args)
    if torch.is_grad_enabled() and torch_private.any_requires_grad(*args):
        return apply(made, *args)
    return made


def refuse_double_backward():
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
        refuse_double_backward()


def _once_differentiable(make):
    """The backward of a Function from `make(ctx, grad_output, grad_stats, grad_classes)`, which
    returns the first-order gradients; grad_stats is None if neither lse nor entropy has a gradient,
    grad_classes if the logits of classes have none.

    In a backward grad mode is on only for create_graph=True, which is refused at once: in a second
    derivative the gradients would be constants, so a part of it would silently be missing.
    """

    def backward(ctx, grad_output, grad_stats=None, grad_classes=None, *_):
        if torch.is_grad_enabled():
            refuse_double_backward()
        needs = ctx.needs_input_grad
        others = [grad for grad in (grad_stats, grad_classes) if grad is not None]
        if grad_output is None and not others:
            return (None,) * len(needs)
        if grad_output is None:
            grad_output = others[0].new_zeros(ctx.loss_shape)
        elif grad_output._is_zerotensor():  # it has no memory to read
            grad_output = torch.zeros_like(grad_output)
        others = (
            None if grad is None else grad.contiguous() for grad in (grad_stats, grad_classes)
        )
        grads = make(ctx, grad_output.contiguous(), *others)
        return (*grads, *(None,) * (len(needs) - len(grads)))

    return staticmethod(backward)


# Of the outputs of flce::forward: the loss, the statistics, the logits of classes.
DIFFERENTIABLE = (0, 1, 8)


def _returned(ctx, made, count):
    """The first `count` of the DIFFERENTIABLE outputs. None, for a direct call of the operator: all
    outputs; only the loss is differentiable then."""
    ctx.set_materialize_grads(False)
    ctx.loss_shape = made[0].shape
    if count is None:
        ctx.mark_non_differentiable(*(output for output in made[1:] if output is not None))
        return tuple(made)
    return tuple(made[index] for index in DIFFERENTIABLE[:count])


class LinearCrossEntropy(torch.autograd.Function):
    """The Function of flce::forward: takes its outputs `made`, returns `count` of them (_returned).

    `lists`: the operator's arguments after its tensors. `constants`: its tensors without a
    gradient, except num_items, which has already become one of the scalars, and the seed, which has
    become the samples. `accumulator`: accumulate.Accumulator of linear_weight, or None.
    `gemm`: the weight of the GEMMs, (V, H), where linear_weight is adapter_weight, (V, r), which
    alone gets a gradient; else None.
    """

    @staticmethod
    def forward(
        ctx, input, linear_weight, linear_bias, made, count, lists, constants, accumulator, gemm
    ):
        ctx.lists, ctx.accumulator = lists, accumulator
        _, stats, scalars, _, saved, *grads, class_logits, _ = made
        target, *others = constants
        # The arguments of the backward operator.
        weight = linear_weight if gemm is None else gemm
        statistics = class_logits, stats, scalars, saved
        arguments = (input, weight, target, linear_bias, *others, *statistics)
        # The composite operator does not return the saved tensor, so the backward may overwrite it,
        # unless saved-tensor hooks of the caller hold it.
        has_hooks = torch_private.saved_tensor_hooks_are_on()
        ctx.owned, ctx.overwritten = count is not None and not has_hooks, False
        # The outputs tell which strategy "auto" became.
        ctx.save = "nothing" if stats is None else "stats"
        if saved is not None:
            ctx.save = "samples" if saved.dtype == torch.int32 else "logits"
        elif any(grad is not None for grad in grads):
            ctx.save = "grads"
            leaves = (input, linear_weight, linear_bias)
            ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            # On a GPU float16's gradients are times a loss scale, which the backward divides out
            # (loss_factor of csrc/core/engine.c).
            dtype = gemm_dtype(value_of(lists[2], "autocast"), input.dtype, linear_weight.dtype)
            scale = scalars if dtype == torch.float16 and not input.is_cpu else None
            again = arguments if count is not None and count > 1 else ()
            arguments = scale, *grads, *again
        ctx.save_for_backward(*arguments)
        return _returned(ctx, made, count)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, grad_classes):
        wanted, save, saved = _wanted_gradients(ctx), ctx.save, ctx.saved_tensors
        if save == "samples" and grad_classes is not None and value_of(ctx.lists[2], "traced"):
            # A compiled backward gets zeros for an output without a gradient. The samples give no
            # other gradient of these logits, and no value can be seen here: NaN.
            grad_output = grad_output.masked_fill((grad_classes != 0).any(), math.nan)
            grad_classes = None
        if save == "grads":
            if grad_stats is None and grad_classes is None:
                return _scale_saved(ctx, saved[:4], grad_output, wanted)
            # The gradients that the forward made are those of the loss alone: compute all again.
            save, saved = "stats", saved[4:]
        return _run_backward(ctx, save, saved, (grad_output, grad_stats, grad_classes), wanted)


class _Nested(threading.local):
    """wants_all: a backward within another one computes the gradients of all leaves, and does not
    ask the engine, which is slow for leaves whose gradients are returned."""

    wants_all = False


_nested = _Nested()


@contextlib.contextmanager
def all_gradients_wanted():
    _nested.wants_all = True
    try:
        yield
    finally:
        _nested.wants_all = False


def _wanted_gradients(ctx):
    """Which gradients of input, linear_weight and linear_bias the running backward computes. They
    are fewer than in ctx.needs_input_grad if it was called for some leaves only, as in pipeline
    schedules that compute the gradients of inputs and of weights apart."""
    if _nested.wants_all:
        return tuple(ctx.needs_input_grad[:3])
    wanted, nodes = [], ctx.next_functions
    for i, needed in enumerate(ctx.needs_input_grad[:3]):
        if needed:
            needed = torch_private.is_executed(nodes[i][0])
        wanted.append(needed)
    return tuple(wanted)


def _may_overwrite(ctx):
    """Whether the running backward may overwrite what the forward saved."""
    if ctx.overwritten:
        raise RuntimeError(
            "flce: a backward that failed has used up what this loss saved; run the forward again"
        )
    # If it is unknown whether the graph is kept (as under compile), it may run again.
    repeats = torch.compiler.is_compiling() or torch_private.keeps_graph()
    return ctx.owned and not repeats


def _scale_saved(ctx, saved, grad_output, wanted):
    """The wanted gradients, made by the forward, times grad_output; in place if possible."""
    scalars, *grads = saved
    # Of linear_loss or a divergence, whose forward cannot add to the caller's gradient.
    adds = bool(ctx.accumulator and wanted[1])
    adds = adds and ctx.accumulator.should_accumulate(ctx.next_functions[1][0])
    may_write = _may_overwrite(ctx)
    in_place, made = [None] * 3, [None] * 3
    for i, (name, grad, dtype) in enumerate(zip(GRADIENTS, grads, ctx.dtypes, strict=True)):
        if not wanted[i]:
            continue
        if grad is None:
            raise RuntimeError(
                f"{name}: expected True in the options of the forward, got False; it makes the "
                'gradients with save="grads"'
            )
        if i == 1 and adds and ctx.accumulator.dtype() is not None:
            dtype = grad.dtype  # the sum rounds it
        plain = type(grad) is torch.Tensor and type(grad_output) is torch.Tensor
        if may_write and plain and grad.dtype == dtype:
            # A new tensor on the same memory, which autograd may keep as .grad.
            in_place[i], made[i] = grad, grad.detach()
        else:
            made[i] = run(inner.scaled.default, grad, grad_output, scalars, dtype)
    ctx.overwritten = may_write
    if any(grad is not None for grad in in_place):
        _scale_untracked(*in_place, grad_output, scalars)
    if adds:
        made[1] = ctx.accumulator.add(made[1])
    return tuple(made)


def _run_backward(ctx, save, saved, upstream, wanted):
    accumulator = ctx.accumulator
    # The Function's differentiable tensors are the operands; the second one is the weight.
    if accumulator and not accumulator.should_accumulate(ctx.next_functions[1][0]):
        accumulator, wanted = None, (wanted[0], False, wanted[2])
    valid_vocab, rows, integers, numbers, group = ctx.lists
    grads = dict(zip(GRADIENTS, wanted, strict=True))
    consumes = ctx.overwritten = save == "logits" and _may_overwrite(ctx)
    saved_as = {"save": CHOICES["save"].index(save), "consumes_saved": consumes}
    integers = replaced(integers, **saved_as, **grads)
    args = (*upstream, *saved, valid_vocab, rows, integers, numbers, group)
    if accumulator is None:
        return run(inner.backward.default, *args)
    with accumulator.lock:
        if (into := accumulator.checked_target()) is None:
            grad_input, grad_weight, grad_bias = run(inner.backward.default, *args)
        else:
            grad_input, grad_bias = run(inner.backward_into.default, into, *args)
            grad_weight = None
        return grad_input, accumulator.finish(grad_weight), grad_bias


class LinearDivergence(torch.autograd.Function):
    """Of a flce::divergence whose gradients the backward makes, by another call of it, to which
    grad_output is a factor of the rows. `tensors`, `lists`: the operator's other arguments."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, loss, tensors, lists, accumulator):
        ctx.lists, ctx.loss_shape, ctx.accumulator = lists, loss.shape, accumulator
        ctx.owned, ctx.overwritten = True, False
        leaves = input, linear_weight, linear_bias
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        # A teacher's tensors may be those of inference mode, which autograd refuses to save.
        unsaved = [one if one is not None and one.is_inference() else None for one in tensors]
        both, ctx.unsaved = zip(tensors, unsaved, strict=True), unsaved
        ctx.save_for_backward(*leaves, *(one if other is None else None for one, other in both))
        return loss.view_as(loss)

    @_once_differentiable
    def backward(ctx, grad_output, *_):
        wanted, (teacher, valid_vocab, rows, integers, *rest) = _wanted_gradients(ctx), ctx.lists
        input, weight, bias, *tensors = ctx.saved_tensors
        both = zip(tensors, ctx.unsaved, strict=True)
        target, factor, *tensors = (saved if other is None else other for saved, other in both)
        factor = grad_output.expand(target.shape) * (1 if factor is None else factor)
        names = dict(zip(GRADIENTS, wanted, strict=True)) | {"save": CHOICES["save"].index("grads")}
        if value_of(integers, "reduction") == CHOICES["reduction"].index("none"):
            names["reduction"] = CHOICES["reduction"].index("sum")
        lists = teacher, valid_vocab, rows, replaced(integers, **names), *rest
        args = input, weight, target, bias, factor, *tensors, *lists
        _, scalars, *grads = run(inner.divergence.default, *args)
        dtype = gemm_dtype(value_of(integers, "autocast"), input.dtype, weight.dtype)
        scalars = scalars if dtype == torch.float16 and not input.is_cpu else None
        return _scale_saved(ctx, (scalars, *grads), grad_output.new_ones(()), wanted)


class CrossEntropy(torch.autograd.Function):
    """The autograd Function of flce::cross_entropy_forward, as LinearCrossEntropy."""

    @staticmethod
    def forward(ctx, logits, made, count, lists, constants):
        ctx.lists = lists
        ctx.save_for_backward(logits, *constants, *made[1:3])
        return _returned(ctx, made, count)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, _):
        args = (grad_output, grad_stats, *ctx.saved_tensors, *ctx.lists)
        return (run(inner.cross_entropy_backward.default, *args),)


def _apply_forward(made, input, linear_weight, target, linear_bias, *rest):
    constants, lists = (target, *rest[:3], rest[5]), lists_of(rest[6:])
    leaves = (input, linear_weight, linear_bias)
    return LinearCrossEntropy.apply(*leaves, made, None, lists, constants, None, None)


def _apply_cross_entropy_forward(made, logits, target, *rest):
    return CrossEntropy.apply(logits, made, None, rest[4:], (target, *rest[:3]))


def apply_divergence(
    made, input, linear_weight, target, linear_bias, *rest, count=None, accumulator=None
):
    """The outputs `made` of flce::divergence of these arguments, joined to autograd."""
    loss, scalars, *grads = made
    leaves, lists = (input, linear_weight, linear_bias), lists_of(rest[9:])
    if all(grad is None for grad in grads):
        of_call = loss, (target, *rest[:8]), (rest[8], *lists), accumulator
        loss = LinearDivergence.apply(*leaves, *of_call)
        return loss, *made[1:]
    outputs = [loss, None, scalars, None, None, *grads, None, None]
    of_call = outputs, count, lists, (None,) * 5, accumulator, None
    outputs = LinearCrossEntropy.apply(*leaves, *of_call)
    return outputs if count else (outputs[0], outputs[2], *outputs[5:8])


_register_autograd("forward", _apply_forward)
_register_autograd("divergence", apply_divergence)
_register_autograd("cross_entropy_forward", _apply_cross_entropy_forward)
for _name in ("backward", "backward_into", "scaled", "cross_entropy_backward"):
    _register_autograd(_name, _Refuse.apply)


def _scale_untracked(*args):
    with torch_private.below_autograd(), torch_private.below_inplace_or_view():
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
    """backward_into called directly: as _scale_bumping_version, for grad_weight_into."""
    _check_writable("grad_weight_into", grad_weight_into, "add to in place")
    torch.autograd.graph.increment_version(grad_weight_into)
    with torch_private.below_inplace_or_view():
        return inner.backward_into.default(grad_weight_into, *args)


library.impl("scale_", _scale_bumping_version, "ADInplaceOrView")
library.impl("backward_into", _backward_into_bumping_version, "ADInplaceOrView")
