"""The inner operators' kernels for the Autograd key, and their autograd Functions.

Registered directly, because torch.library.register_autograd parses the operator's schema in every
call, which takes more host time than the rest of a small step. A Function is applied to the outputs
that its operator has already produced: on a GPU the kernels are running by then, so the host time
of the Function is hidden. flce's functions call the operators below autograd and then
with_forward_graph; the kernels for the Autograd key, which call that too, serve direct calls of the
operators.
"""

import contextlib
import functools
import math
import threading
import typing

import torch

from . import calls, torch_private
from .operators import inner, library, run, variants
from .packing import GRADIENTS, gemm_dtype


def _register_autograd(name, apply, call=None):
    """Registers the operator's kernel for the Autograd key. `apply`: takes the outputs and the
    arguments, as records where `call` is the class of the latter."""
    for op in variants(name):
        library.impl(op, functools.partial(_autograd_kernel, op, apply, call), "Autograd")


def _autograd_kernel(op, apply, call, *args):
    outputs = run(op, *args)
    if not (torch.is_grad_enabled() and torch_private.any_requires_grad(*args)):
        return outputs
    if call is None:
        return apply(outputs, *args)
    _, kind = calls.OPERATORS[call]
    return apply(calls.read(kind, outputs), calls.read(call, args))


def refuse_double_backward():
    raise RuntimeError(
        "flce: double backward (create_graph=True) is not supported; use "
        "torch.nn.functional.linear and cross_entropy where you differentiate a gradient"
    )


class _Refuse(torch.autograd.Function):
    """For a backward operator: its own gradient (double backward) is refused."""

    @staticmethod
    def forward(ctx, outputs, *args):
        return outputs

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
        if grad_output is None:
            other = grad_classes if grad_stats is None else grad_stats
            if other is None:
                return (None,) * len(needs)
            grad_output = other.new_zeros(ctx.loss_shape)
        elif grad_output._is_zerotensor():  # it has no memory to read
            grad_output = torch.zeros_like(grad_output)
        grad_stats = None if grad_stats is None else grad_stats.contiguous()
        grad_classes = None if grad_classes is None else grad_classes.contiguous()
        grads = make(ctx, grad_output.contiguous(), grad_stats, grad_classes)
        return (*grads, *(None,) * (len(needs) - len(grads)))

    return staticmethod(backward)


def _loss_scale(call, outputs):
    """The scalars, if float16's gradients are times a loss scale, as they are on a GPU: the
    backward divides it out (loss_factor of csrc/core/forward_steps.c). Else None."""
    input, autocast = call.input, call.options.value("autocast")
    dtype = gemm_dtype(autocast, input.dtype, call.linear_weight.dtype)
    return outputs.scalars if dtype == torch.float16 and not input.is_cpu else None


def _set_up(ctx, outputs, owned, accumulator):
    """What every Function of a linear loss sets. owned: whether nobody else has what it saves, so
    that the backward may overwrite it; saved-tensor hooks of the caller may have it too."""
    ctx.set_materialize_grads(False)
    ctx.loss_shape, ctx.accumulator = outputs.loss.shape, accumulator
    ctx.owned = owned and not torch_private.saved_tensor_hooks_are_on()
    ctx.overwritten = False


def _dtypes_of(graph_inputs):
    return [None if tensor is None else tensor.dtype for tensor in graph_inputs]


def _save_gradients(ctx, graph_inputs, outputs, loss_scale, forward):
    """Saves the gradients of a forward with save="grads". loss_scale, forward: as in
    calls.SavedGradients."""
    ctx.dtypes = _dtypes_of(graph_inputs)
    gradients = outputs.grad_input, outputs.grad_weight, outputs.grad_bias
    calls.save(ctx, calls.SavedGradients(loss_scale, *gradients, forward))


class ScaledGradients(torch.autograd.Function):
    """Of a loss whose forward has made its gradients: the backward multiplies them by grad_output.

    input, linear_weight, linear_bias: as in LinearCrossEntropy. outputs: a record with the loss and
    the gradients. loss_scale: as in calls.SavedGradients. owned, accumulator: see _set_up.
    """

    @staticmethod
    def forward(
        ctx, input, linear_weight, linear_bias, outputs, loss_scale, owned=True, accumulator=None
    ):
        _set_up(ctx, outputs, owned, accumulator)
        graph_inputs = input, linear_weight, linear_bias
        _save_gradients(ctx, graph_inputs, outputs, loss_scale, calls.ForwardTensors())
        return outputs.loss

    @_once_differentiable
    def backward(ctx, grad_output, *_):
        saved = calls.saved(ctx, calls.SavedGradients)
        return _scale_saved(ctx, saved, grad_output, _wanted_gradients(ctx))


class ExecutedForward(typing.NamedTuple):
    """A flce::forward that has run. call, outputs: its records. strategy: what "auto" became, or
    "forward": the backward runs the forward again, which makes the gradients then, as of a
    divergence. names: of the outputs that get a graph, the first ones of calls.DIFFERENTIABLE.
    owned: see _set_up. accumulator: accumulate.Accumulator of linear_weight, or None."""

    call: calls.ForwardCall
    outputs: calls.ForwardOutputs
    strategy: str
    names: tuple
    owned: bool
    accumulator: typing.Any


class LinearCrossEntropy(torch.autograd.Function):
    """Of a flce::forward whose backward computes gradients, or may have to.

    input, linear_weight, linear_bias: what has a gradient; with a frozen linear_weight beside an
    adapter, the adapter's weight. record: an ExecutedForward.
    """

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, record):
        call, outputs, strategy, names, owned, accumulator = record
        _set_up(ctx, outputs, owned, accumulator)
        ctx.options, ctx.strategy = call.options, strategy
        graph_inputs = input, linear_weight, linear_bias
        if strategy == "forward":
            _save_call(ctx, graph_inputs, call)
        elif strategy == "grads":
            forward = call.kept_for_backward(outputs)
            _save_gradients(ctx, graph_inputs, outputs, _loss_scale(call, outputs), forward)
        else:
            calls.save(ctx, call.kept_for_backward(outputs))
        return tuple([getattr(outputs, name) for name in names])

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, grad_classes):
        wanted, strategy = _wanted_gradients(ctx), ctx.strategy
        if strategy == "forward":
            return _run_forward_again(ctx, grad_output, wanted)
        if strategy == "samples" and grad_classes is not None and ctx.options.value("traced"):
            # A compiled backward gets zeros for an output without a gradient. The samples give no
            # other gradient of these logits, and no value can be seen here: NaN.
            grad_output = grad_output.masked_fill((grad_classes != 0).any(), math.nan)
            grad_classes = None
        if strategy == "grads":
            saved = calls.saved(ctx, calls.SavedGradients)
            if grad_stats is None and grad_classes is None:
                return _scale_saved(ctx, saved, grad_output, wanted)
            # The gradients that exist are those of the loss alone.
            strategy, forward = "stats", saved.forward
        else:
            forward = calls.saved(ctx, calls.ForwardTensors)
        return _run_backward(
            ctx, strategy, (grad_output, grad_stats, grad_classes), forward, wanted
        )


def _save_call(ctx, graph_inputs, call):
    """Saves a calls.ForwardCall, but for its options, which ctx has. A teacher's tensors may be
    those of inference mode, which autograd refuses to save."""
    ctx.dtypes = _dtypes_of(graph_inputs)
    tensors = [value if isinstance(value, torch.Tensor) else None for value in call.flat()]
    ctx.unsaved = [
        tensor if tensor is not None and tensor.is_inference() else None for tensor in tensors
    ]
    pairs = zip(tensors, ctx.unsaved, strict=True)
    ctx.save_for_backward(*(tensor if unsaved is None else None for tensor, unsaved in pairs))


def _saved_call(ctx):
    """The calls.ForwardCall of _save_call."""
    pairs = zip(ctx.saved_tensors, ctx.unsaved, strict=True)
    tensors = [saved if unsaved is None else unsaved for saved, unsaved in pairs]
    return calls.read(calls.ForwardCall, tensors)._replace(options=ctx.options)


def _run_forward_again(ctx, grad_output, wanted):
    """The wanted gradients of a divergence, by its call of the forward, which makes them now;
    grad_output is a factor of the rows."""
    call = _saved_call(ctx)
    options = call.options.replaced(save="grads", **dict(zip(GRADIENTS, wanted, strict=True)))
    if options.choice("reduction") == "none":
        options = options.replaced(reduction="sum")
    factor = grad_output.expand(call.target.shape)
    factor = factor * (1 if call.token_weight is None else call.token_weight)
    call = call._replace(token_weight=factor, options=options)
    outputs = calls.run(call)
    gradients = outputs.grad_input, outputs.grad_weight, outputs.grad_bias
    loss_scale = _loss_scale(call, outputs)
    saved = calls.SavedGradients(loss_scale, *gradients, calls.ForwardTensors())
    return _scale_saved(ctx, saved, grad_output.new_ones(()), wanted)


class _Nested(threading.local):
    """wants_all: a backward within another one computes the gradients of all operands. It does not
    ask the engine which ones are wanted: for leaves whose gradients are returned, as by
    torch.autograd.grad, asking is slow, because the engine answers by an exception."""

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
    needs, nodes, is_executed = ctx.needs_input_grad, ctx.next_functions, torch_private.is_executed
    return tuple([needs[i] and is_executed(nodes[i][0]) for i in range(3)])


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
    """The wanted ones of the gradients of calls.SavedGradients times grad_output; in place if
    possible."""
    gradients = saved.grad_input, saved.grad_weight, saved.grad_bias
    # accumulate_into comes here with linear_loss and divergences alone: their forward makes the
    # gradients, but must not add to the parameter's.
    adds = bool(ctx.accumulator and wanted[1])
    adds = adds and ctx.accumulator.should_accumulate(ctx.next_functions[1][0])
    may_write = _may_overwrite(ctx)
    in_place, results = [None] * 3, [None] * 3
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
            in_place[i], results[i] = grad, grad.detach()
        else:
            results[i] = run(inner.scaled.default, grad, grad_output, saved.loss_scale, dtype)
    ctx.overwritten = may_write
    if any(grad is not None for grad in in_place):
        _scale_untracked(*in_place, grad_output, saved.loss_scale)
    if adds:
        results[1] = ctx.accumulator.add(results[1])
    return tuple(results)


def _run_backward(ctx, strategy, upstream, forward, wanted):
    """The wanted gradients. upstream: those of the outputs calls.DIFFERENTIABLE; forward:
    calls.ForwardTensors."""
    accumulator = ctx.accumulator
    # The Function's differentiable tensors are the operands; the second one is the weight.
    if accumulator and not accumulator.should_accumulate(ctx.next_functions[1][0]):
        accumulator, wanted = None, (wanted[0], False, wanted[2])
    consumes = ctx.overwritten = strategy == "logits" and _may_overwrite(ctx)
    options = ctx.options.for_backward(strategy, consumes, wanted)
    call = calls.BackwardCall(*upstream, forward, options)
    if accumulator is None:
        return calls.run(call)
    with accumulator.lock:
        if (into := accumulator.checked_target()) is None:
            gradients = calls.run(call)
        else:
            gradients = calls.run_backward_into(into, call)
        return gradients._replace(grad_weight=accumulator.finish(gradients.grad_weight))


class CrossEntropy(torch.autograd.Function):
    """Of a flce::cross_entropy_forward. call, outputs: calls.LogitsCall and LogitsOutputs; names:
    as in LinearCrossEntropy."""

    @staticmethod
    def forward(ctx, logits, call, outputs, names):
        ctx.set_materialize_grads(False)
        ctx.loss_shape, ctx.integers, ctx.numbers = outputs.loss.shape, call.integers, call.numbers
        of_loss = call.weight, call.token_weight, call.token_temperature
        tensors = calls.LogitsTensors(logits, call.target, *of_loss, outputs.stats, outputs.scalars)
        calls.save(ctx, tensors)
        return tuple([getattr(outputs, name) for name in names])

    @_once_differentiable
    def backward(ctx, grad_output, grad_stats, _):
        tensors = calls.saved(ctx, calls.LogitsTensors)
        call = calls.LogitsBackwardCall(grad_output, grad_stats, tensors, ctx.integers, ctx.numbers)
        return (calls.run_logits_backward(call),)


def with_forward_graph(call, outputs, graph_inputs, names, owned, accumulator=None):
    """The outputs of a ForwardCall, of which `names`, the first ones of DIFFERENTIABLE, have a
    graph that ends in `graph_inputs`: input, the weight that gets a gradient (which may be the
    adapter's) and the bias or None."""
    strategy = outputs.strategy()
    if strategy == "grads" and len(names) == 1:
        loss_scale = _loss_scale(call, outputs)
        loss = ScaledGradients.apply(*graph_inputs, outputs, loss_scale, owned, accumulator)
        return outputs._replace(loss=loss)
    if call.teacher and strategy != "grads":
        strategy = "forward"
    record = ExecutedForward(call, outputs, strategy, names, owned, accumulator)
    return outputs.with_differentiable(*LinearCrossEntropy.apply(*graph_inputs, record))


def with_logits_graph(call, outputs, names):
    """The outputs of a LogitsCall, of which `names` have a graph."""
    values = CrossEntropy.apply(call.logits, call, outputs, names)
    return outputs._replace(**dict(zip(names, values, strict=True)))


def _of_direct_call(outputs, call):
    graph_inputs = call.input, call.linear_weight, call.linear_bias
    return tuple(with_forward_graph(call, outputs, graph_inputs, ("loss",), owned=False))


def _of_direct_logits_call(outputs, call):
    return tuple(with_logits_graph(call, outputs, ("loss",)))


_register_autograd("forward", _of_direct_call, calls.ForwardCall)
_register_autograd("cross_entropy_forward", _of_direct_logits_call, calls.LogitsCall)
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
