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

from . import calls, torch_private
from .operators import inner, library, run, variants
from .options import GRADIENTS, gemm_dtype


def _register_autograd(name, apply, call=None):
    """Registers the operator's kernel for the Autograd key. `apply`: takes the outputs and the
    arguments, as records where `call` is the class of the latter."""
    for op in variants(name):
        library.impl(op, functools.partial(_differentiable, op, apply, call), "Autograd")


def _differentiable(op, apply, call, *args):
    made = run(op, *args)
    if not (torch.is_grad_enabled() and torch_private.any_requires_grad(*args)):
        return made
    if call is None:
        return apply(made, *args)
    _, outputs = calls.OPERATORS[call]
    return apply(calls.read(outputs, made), calls.read(call, args))


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


# The outputs of flce::forward that have a gradient, in the order in which Functions return them.
DIFFERENTIABLE = ("loss", "stats", "class_logits")


def _returned(ctx, outputs, names):
    """The outputs `names`, the first ones of DIFFERENTIABLE. None, for a direct call of the
    operator: all outputs; only the loss is differentiable then."""
    ctx.set_materialize_grads(False)
    ctx.loss_shape = outputs.loss.shape
    if names is None:
        others = [value for value in outputs if value is not None and value is not outputs.loss]
        ctx.mark_non_differentiable(*others)
        return tuple(outputs)
    return tuple(getattr(outputs, name) for name in names)


def _strategy(outputs):
    """The strategy that "auto" became, which the outputs tell."""
    if outputs.saved is not None:
        return "samples" if outputs.saved.dtype == torch.int32 else "logits"
    if any(getattr(outputs, name) is not None for name in GRADIENTS):
        return "grads"
    return "nothing" if outputs.stats is None else "stats"


def _loss_scale(outputs, options, input, linear_weight):
    """The scalars, if float16's gradients are times a loss scale, as they are on a GPU: the
    backward divides it out (loss_factor of csrc/core/engine.c). Else None."""
    dtype = gemm_dtype(options.value("autocast"), input.dtype, linear_weight.dtype)
    return outputs.scalars if dtype == torch.float16 and not input.is_cpu else None


class LinearCrossEntropy(torch.autograd.Function):
    """The Function of flce::forward, and of gradients that a forward has made.

    input, linear_weight, linear_bias: what has a gradient; with a frozen linear_weight beside an
    adapter, the adapter's weight. outputs: a calls.ForwardOutputs. tensors: the
    calls.ForwardTensors from which the backward computes; empty where `outputs` has all gradients.
    names: of the outputs that it returns (_returned). accumulator: accumulate.Accumulator of
    linear_weight, or None.
    """

    @staticmethod
    def forward(
        ctx, input, linear_weight, linear_bias, outputs, tensors, options, names, accumulator
    ):
        ctx.options, ctx.accumulator = options, accumulator
        # The composite operator does not return the saved tensor, so the backward may overwrite it,
        # unless saved-tensor hooks of the caller hold it.
        has_hooks = torch_private.saved_tensor_hooks_are_on()
        ctx.owned, ctx.overwritten = names is not None and not has_hooks, False
        ctx.strategy = _strategy(outputs)
        scale, gradients = None, calls.Gradients(None, None, None)
        if ctx.strategy == "grads":
            leaves = (input, linear_weight, linear_bias)
            ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            scale = _loss_scale(outputs, options, input, linear_weight)
            gradients = calls.Gradients(outputs.grad_input, outputs.grad_weight, outputs.grad_bias)
            if names is None or len(names) == 1:  # of the loss alone: nothing is computed again
                tensors = calls.ForwardTensors()
        saved = calls.Saved(
            scale, gradients.grad_input, gradients.grad_weight, gradients.grad_bias, tensors
        )
        calls.save(ctx, saved)
        return _returned(ctx, outputs, names)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, grad_classes):
        wanted, strategy, saved = (
            _wanted_gradients(ctx),
            ctx.strategy,
            calls.saved(ctx, calls.Saved),
        )
        if strategy == "samples" and grad_classes is not None and ctx.options.value("traced"):
            # A compiled backward gets zeros for an output without a gradient. The samples give no
            # other gradient of these logits, and no value can be seen here: NaN.
            grad_output = grad_output.masked_fill((grad_classes != 0).any(), math.nan)
            grad_classes = None
        if strategy == "grads":
            if grad_stats is None and grad_classes is None:
                gradients = saved.grad_input, saved.grad_weight, saved.grad_bias
                return _scale_saved(ctx, saved.loss_scale, gradients, grad_output, wanted)
            strategy = "stats"  # the gradients that exist are those of the loss alone
        call = calls.BackwardCall(grad_output, grad_stats, grad_classes, saved.forward, ctx.options)
        return _run_backward(ctx, strategy, call, wanted)


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


def _scale_saved(ctx, loss_scale, gradients, grad_output, wanted):
    """The wanted gradients, made by the forward, times grad_output; in place if possible."""
    # Of linear_loss or a divergence, whose forward cannot add to the caller's gradient.
    adds = bool(ctx.accumulator and wanted[1])
    adds = adds and ctx.accumulator.should_accumulate(ctx.next_functions[1][0])
    may_write = _may_overwrite(ctx)
    in_place, made = [None] * 3, [None] * 3
    for i, (name, grad, dtype) in enumerate(zip(GRADIENTS, gradients, ctx.dtypes, strict=True)):
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
            made[i] = run(inner.scaled.default, grad, grad_output, loss_scale, dtype)
    ctx.overwritten = may_write
    if any(grad is not None for grad in in_place):
        _scale_untracked(*in_place, grad_output, loss_scale)
    if adds:
        made[1] = ctx.accumulator.add(made[1])
    return tuple(made)


def _run_backward(ctx, strategy, call, wanted):
    accumulator = ctx.accumulator
    # The Function's differentiable tensors are the operands; the second one is the weight.
    if accumulator and not accumulator.should_accumulate(ctx.next_functions[1][0]):
        accumulator, wanted = None, (wanted[0], False, wanted[2])
    consumes = ctx.overwritten = strategy == "logits" and _may_overwrite(ctx)
    wants = dict(zip(GRADIENTS, wanted, strict=True))
    options = call.options.replaced(save=strategy, consumes_saved=consumes, **wants)
    call = call._replace(options=options)
    if accumulator is None:
        return calls.run(call)
    with accumulator.lock:
        if (into := accumulator.checked_target()) is None:
            gradients = calls.run(call)
        else:
            gradients = calls.run_backward_into(into, call)
        return gradients._replace(grad_weight=accumulator.finish(gradients.grad_weight))


class LinearDivergence(torch.autograd.Function):
    """Of a flce::divergence whose gradients the backward makes, by another call of it, to which
    grad_output is a factor of the rows. call: its calls.DivergenceCall."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, loss, call, accumulator):
        ctx.options, ctx.loss_shape, ctx.accumulator = call.options, loss.shape, accumulator
        ctx.numbers, ctx.owned, ctx.overwritten = call.teacher.numbers, True, False
        leaves = input, linear_weight, linear_bias
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        tensors = calls.flat(call._replace(teacher=call.teacher._replace(numbers=None)))
        tensors = [one if isinstance(one, torch.Tensor) else None for one in tensors]
        # A teacher's tensors may be those of inference mode, which autograd refuses to save.
        ctx.unsaved = [one if one is not None and one.is_inference() else None for one in tensors]
        pairs = zip(tensors, ctx.unsaved, strict=True)
        ctx.save_for_backward(*(one if unsaved is None else None for one, unsaved in pairs))
        return loss.view_as(loss)

    @staticmethod
    def call(ctx):
        """The call of the forward."""
        pairs = zip(ctx.saved_tensors, ctx.unsaved, strict=True)
        tensors = [saved if unsaved is None else unsaved for saved, unsaved in pairs]
        call = calls.read(calls.DivergenceCall, tensors)
        return call._replace(
            teacher=call.teacher._replace(numbers=ctx.numbers), options=ctx.options
        )

    @_once_differentiable
    def backward(ctx, grad_output, *_):
        wanted, call = _wanted_gradients(ctx), LinearDivergence.call(ctx)
        options = call.options.replaced(save="grads", **dict(zip(GRADIENTS, wanted, strict=True)))
        if options.choice("reduction") == "none":
            options = options.replaced(reduction="sum")
        factor = grad_output.expand(call.target.shape)
        factor = factor * (1 if call.token_weight is None else call.token_weight)
        outputs = calls.run(call._replace(token_weight=factor, options=options))
        scale = _loss_scale(outputs, options, call.input, call.linear_weight)
        gradients = outputs.grad_input, outputs.grad_weight, outputs.grad_bias
        return _scale_saved(ctx, scale, gradients, grad_output.new_ones(()), wanted)


class CrossEntropy(torch.autograd.Function):
    """The autograd Function of flce::cross_entropy_forward, as LinearCrossEntropy. call: its
    calls.LogitsCall."""

    @staticmethod
    def forward(ctx, logits, call, outputs, names):
        ctx.integers, ctx.numbers = call.integers, call.numbers
        of_loss = call.weight, call.token_weight, call.token_temperature
        tensors = calls.LogitsTensors(logits, call.target, *of_loss, outputs.stats, outputs.scalars)
        calls.save(ctx, tensors)
        return _returned(ctx, outputs, names)

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, _):
        tensors = calls.saved(ctx, calls.LogitsTensors)
        call = calls.LogitsBackwardCall(grad_output, grad_stats, tensors, ctx.integers, ctx.numbers)
        return (calls.run_logits_backward(call),)


def with_graph(outputs, call, leaves, names, accumulator=None):
    """The outputs `names` of a ForwardCall or DivergenceCall, with a graph that ends in `leaves`;
    all of them, flat, where `names` is None. A divergence has the loss alone."""
    if isinstance(call, calls.ForwardCall):
        tensors = call.kept_for_backward(outputs)
        of_call = outputs, tensors, call.options, names, accumulator
        return LinearCrossEntropy.apply(*leaves, *of_call)
    if all(getattr(outputs, name) is None for name in GRADIENTS):
        loss = LinearDivergence.apply(*leaves, outputs.loss, call, accumulator)
        return (loss,) if names else outputs._replace(loss=loss)
    of_call = calls.ForwardTensors(), call.options, names, accumulator
    returned = LinearCrossEntropy.apply(*leaves, outputs.of_forward(), *of_call)
    return returned if names else calls.DivergenceOutputs.of(calls.ForwardOutputs(*returned))


def _with_graph(outputs, call):
    return with_graph(outputs, call, (call.input, call.linear_weight, call.linear_bias), None)


_register_autograd("forward", _with_graph, calls.ForwardCall)
_register_autograd("divergence", _with_graph, calls.DivergenceCall)
_register_autograd(
    "cross_entropy_forward",
    lambda outputs, call: CrossEntropy.apply(call.logits, call, outputs, None),
    calls.LogitsCall,
)
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
