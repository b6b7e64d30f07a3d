"""Loads the library; registers what its C++ cannot for its operators: fakes and autograd formulas.

The tensors of these inner operators are positional, their output shapes follow from their
arguments alone. flce/composite.py has the operators that users call.
"""

import enum

import torch

from . import compiled  # noqa: F401  registers the operators
from .options import Settings
from .strategy import gemm_dtype, row_pitch, saved_dtype, stat_dtype

library = torch.library.Library("flce", "FRAGMENT")
inner = torch.ops.flce

# csrc/backend.h: enum flce_stat_row, enum flce_scalar
STAT_LSE, STAT_ENTROPY, _ROWS_OF_STATS = 0, 4, 7
SCALAR_VALID, _SCALARS = 0, 7


def _holds_units(device_type, dtype):
    """Whether save="grads" holds gradients times a unit, which the backward has to take back:
    in float16 the denominator is applied with grad_output alone (engine.c: unit_factor)."""
    return gemm_dtype(device_type, dtype) == torch.float16


_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


def raise_out_of_memory(error):
    raise torch.OutOfMemoryError(str(error)) from None


# ---- fakes: shapes and dtypes only ----


def _fake_gradients(input, linear_weight, linear_bias, settings, wanted):
    widened = torch.float16 if settings.save == "grads" else None  # plan.c: kept_dtype
    holds_units = _holds_units(input.device.type, settings.dtype)
    holds_weight = holds_units and settings.accum_dtype == torch.float16  # plan.c: holds_weight

    def make(like):
        keeps = like.dtype != widened or (like is linear_weight and holds_weight)
        return like.new_empty(like.shape, dtype=like.dtype if keeps else torch.float32)

    leaves = (input, linear_weight, linear_bias)
    return tuple(make(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))


def _wanted(settings):
    return settings.grad_input, settings.grad_weight, settings.grad_bias


def _saved_shape(input, linear_weight, target, settings):
    """Shape and dtype of what save="logits" keeps."""
    operand = gemm_dtype(input.device.type, settings.dtype)
    logits = operand if input.device.type == "cpu" else settings.logits_dtype
    differentiates = settings.wants_entropy and any(_wanted(settings))
    dtype = saved_dtype((operand, logits), settings, target.is_floating_point(), differentiates)
    vocab = linear_weight.shape[0] if settings.valid_vocab is None else settings.valid_vocab
    rows = input.shape[0] if settings.rows is None else settings.rows
    return (rows, row_pitch(vocab, dtype, input.device.type)), dtype


def _keeps_statistics(device_type, settings):
    """plan.c: keeps_statistics."""
    in_units = settings.save == "grads" and _holds_units(device_type, settings.dtype)
    return settings.wants_statistics or settings.save in ("logits", "stats") or in_units


def _fake_loss(rows, reduction, stat):
    return rows.new_empty((rows.shape[0],) if reduction == "none" else (), dtype=stat)


def _fake_statistics(rows, stat):
    shapes = (_ROWS_OF_STATS, rows.shape[0]), (_SCALARS,)
    return tuple(rows.new_empty(shape, dtype=stat) for shape in shapes)


def _fake_predictions(rows, wanted):
    return rows.new_empty((rows.shape[0],), dtype=torch.int64) if wanted else None


@torch.library.register_fake("flce::forward", lib=library)
def _fake_forward(input, linear_weight, target, linear_bias, *rest):
    settings = Settings.of_arguments(*rest[4:])
    save, stats, scalars, saved = settings.save, None, None, None
    if _keeps_statistics(input.device.type, settings):
        stats, scalars = _fake_statistics(input, stat_dtype(settings.dtype))
    if save == "logits":
        shape, dtype = _saved_shape(input, linear_weight, target, settings)
        saved = input.new_empty(shape, dtype=dtype)
    wanted = tuple(want and save == "grads" for want in _wanted(settings))
    return (
        _fake_loss(input, settings.reduction, stat_dtype(settings.dtype)),
        stats,
        scalars,
        _fake_predictions(input, settings.wants_predictions),
        saved,
        *_fake_gradients(input, linear_weight, linear_bias, settings, wanted),
    )


@torch.library.register_fake("flce::backward", lib=library)
def _fake_backward(grad_output, grad_stats, input, linear_weight, target, linear_bias, *rest):
    settings = Settings.of_arguments(*rest[6:])
    return _fake_gradients(input, linear_weight, linear_bias, settings, _wanted(settings))


@torch.library.register_fake("flce::backward_into", lib=library)
def _fake_backward_into(grad_weight_into, *args):
    grad_input, _, grad_bias = _fake_backward(*args)
    return grad_input, grad_bias


@torch.library.register_fake("flce::scale_", lib=library)
def _fake_scale_(grad_input, grad_weight, grad_bias, grad_output, scalars):
    return None


@torch.library.register_fake("flce::scaled", lib=library)
def _fake_scaled(grad, grad_output, scalars, dtype):
    return torch.empty_like(grad, dtype=dtype)


@torch.library.register_fake("flce::cross_entropy_forward", lib=library)
def _fake_cross_entropy_forward(logits, target, *rest):
    if logits.shape[-1] < 1:
        raise ValueError("logits: expected at least one class, got 0")
    settings = Settings.of_arguments(None, None, *rest[4:])
    stat = stat_dtype(logits.dtype)
    return (
        _fake_loss(logits, settings.reduction, stat),
        *_fake_statistics(logits, stat),
        _fake_predictions(logits, settings.wants_predictions),
    )


@torch.library.register_fake("flce::cross_entropy_backward", lib=library)
def _fake_cross_entropy_backward(grad_output, grad_stats, logits, *rest):
    return torch.empty_like(logits)


# ---- autograd of the inner operators ----
#
# Kernels for the Autograd key with Functions of their own: torch.library.register_autograd reads
# an operator's schema again in each call, which takes more host time than the rest of a small step.


# A Function is applied to what its operator has made already: on a GPU the kernels run by then, and
# the device does not wait for what the Function costs.


def below_autograd(op, *args):
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _register_autograd(name, apply):
    """Registers the operator's kernel for the Autograd key; `apply(made, *args)` is its Function's,
    of the outputs and the arguments."""
    op = getattr(inner, name).default

    def kernel(*args):
        made = below_autograd(op, *args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return apply(made, *args)
        return made

    library.impl(name, kernel, "Autograd")


def _refuse_double_backward():
    raise RuntimeError(
        "flce: double backward (create_graph=True) is not supported; use "
        "torch.nn.functional.linear and cross_entropy where you differentiate a gradient"
    )


class _Refuse(torch.autograd.Function):
    """An operator of the backward, whose own gradient is refused."""

    @staticmethod
    def forward(ctx, made, *args):
        return made

    @staticmethod
    def backward(ctx, *_):
        _refuse_double_backward()


def _once_only(make):
    """The backward of a Function from `make(ctx, grad_output, grad_stats)`, which gives the first
    gradients; grad_stats is None where neither lse nor entropy has one.

    Grad mode is on here for create_graph=True alone. It is refused at once: to a second derivative
    the gradients would be constants, and their part of it would be missing without a word.
    """

    def backward(ctx, grad_output, grad_stats=None, *_):
        if torch.is_grad_enabled():
            _refuse_double_backward()
        needs = ctx.needs_input_grad
        if grad_output is None and grad_stats is None:
            return (None,) * len(needs)
        if grad_output is None:
            grad_output = grad_stats.new_zeros(ctx.loss_shape)
        if grad_stats is not None:
            grad_stats = grad_stats.contiguous()
        try:
            grads = make(ctx, grad_output.contiguous(), grad_stats)
        except MemoryError as error:
            raise_out_of_memory(error)
        return (*grads, *(None,) * (len(needs) - len(grads)))

    return staticmethod(backward)


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _graph_is_kept():
    """Whether this backward may run again. True where that cannot be known, as under compile."""
    return _keeps_graph is None or torch.compiler.is_compiling() or _keeps_graph()


def _saved_by_hooks():
    """Whether the caller's hooks hold what is saved now: then it is theirs, never to be written."""
    return _top_hooks is None or _top_hooks(True) is not None


def _hand_over(grads, grad_output, scalars, dtypes, keep):
    """The forward's gradients times grad_output, None where the dtype is: in their own memory where
    nobody reads it again."""
    ours = not keep and type(grad_output) is torch.Tensor
    in_place = [
        grad if ours and type(grad) is torch.Tensor and grad.dtype == dtype else None
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]
    if any(grad is not None for grad in in_place):
        _scale_unseen(*in_place, grad_output, scalars)
    made = []
    for grad, own, dtype in zip(grads, in_place, dtypes, strict=True):
        if own is not None:
            # A new tensor on the same memory: autograd may keep it as .grad without a copy.
            made.append(own.detach())
        else:
            made.append(None if dtype is None else inner.scaled(grad, grad_output, scalars, dtype))
    return tuple(made)


class Returns(enum.Enum):
    """What a Function gives of its operator's outputs; the loss and the statistics are the first.

    The composite takes one or both of them as differentiable, the statistics for lse and entropy.
    Who calls the operator itself gets all, of which the loss is.
    """

    LOSS = enum.auto()
    LOSS_AND_STATS = enum.auto()
    ALL = enum.auto()


def _returned(ctx, made, returns):
    ctx.set_materialize_grads(False)
    ctx.loss_shape = made[0].shape
    if returns is Returns.LOSS:
        return (made[0],)
    if returns is Returns.LOSS_AND_STATS:
        return made[0], made[1]
    ctx.mark_non_differentiable(*(output for output in made[1:] if output is not None))
    return made


class Forward(torch.autograd.Function):
    """flce::forward, applied to its outputs `made`.

    `constants`: the operator's tensors without a gradient, all but num_items, which has become a
    scalar. `accumulator`: accumulate.Accumulator of linear_weight, or None.
    """

    @staticmethod
    def forward(
        ctx, made, returns, settings, constants, accumulator, input, linear_weight, linear_bias
    ):
        ctx.settings, ctx.accumulator = settings, accumulator
        _, stats, scalars, _, saved, *grads = made
        target, *others = constants
        # What the backward operator takes.
        arguments = (input, linear_weight, target, linear_bias, *others, stats, scalars, saved)
        if settings.save == "grads":
            leaves = (input, linear_weight, linear_bias)
            ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
            # The composite drops what is saved: the backward may write to it.
            ctx.owned = returns is not Returns.ALL and not _saved_by_hooks()
            ctx.scaled = False
            again = arguments if returns is Returns.LOSS_AND_STATS else ()
            ctx.save_for_backward(scalars, *grads, *again)
        else:
            ctx.save_for_backward(*arguments)
        return _returned(ctx, made, returns)

    @_once_only
    def backward(ctx, grad_output, grad_stats):
        wanted = ctx.needs_input_grad[5:]
        settings, saved = ctx.settings, ctx.saved_tensors
        if settings.save != "grads":
            made = _run_backward(ctx, settings, saved, grad_output, grad_stats, wanted)
        elif grad_stats is None:
            made = _scale_made(ctx, saved[:4], grad_output, wanted)
        else:
            # Of the loss alone are the gradients that the forward made: all of them again.
            settings = settings._replace(save="stats")
            made = _run_backward(ctx, settings, saved[4:], grad_output, grad_stats, wanted)
        return (None,) * 5 + made


def _scale_made(ctx, saved, grad_output, wanted):
    scalars, *grads = saved
    keep = not ctx.owned or _graph_is_kept()
    if ctx.scaled:
        raise RuntimeError(
            "flce: a backward that failed has used up this loss's gradients; run the forward again"
        )
    for name, grad, want in zip(_GRADIENTS, grads, wanted, strict=True):
        if want and grad is None:
            raise RuntimeError(
                f"{name}: expected True in the options of the forward, got False; it makes the "
                'gradients with save="grads"'
            )
    ctx.scaled = not keep
    dtypes = [dtype if want else None for dtype, want in zip(ctx.dtypes, wanted, strict=True)]
    in_units = _holds_units(grad_output.device.type, ctx.settings.dtype)
    return _hand_over(grads, grad_output, scalars if in_units else None, dtypes, keep)


def _run_backward(ctx, settings, saved, grad_output, grad_stats, wanted):
    accumulator, into = ctx.accumulator, None
    if accumulator is not None:
        # The Function's tensors are the operands: the second is the weight.
        if accumulator.is_asked(ctx.next_functions[1][0]):
            into = accumulator.open()
        else:
            accumulator, wanted = None, (wanted[0], False, wanted[2])
    grads = dict(zip(_GRADIENTS, wanted, strict=True))
    args = (grad_output, grad_stats, *saved, *settings._replace(**grads).arguments())
    if into is None:
        made = below_autograd(inner.backward.default, *args)
        grad_weight = made[1]
    else:
        made = below_autograd(inner.backward_into.default, into, *args)
        grad_weight = None
    if accumulator is not None:
        grad_weight = accumulator.close(grad_weight)
    made = (made[0], grad_weight, made[-1])
    return tuple(grad if want else None for grad, want in zip(made, wanted, strict=True))


class CrossEntropyForward(torch.autograd.Function):
    """flce::cross_entropy_forward, as Forward."""

    @staticmethod
    def forward(ctx, made, returns, settings, constants, logits):
        ctx.settings = settings
        ctx.save_for_backward(logits, *constants, *made[1:3])
        return _returned(ctx, made, returns)

    @_once_only
    def backward(ctx, grad_output, grad_stats):
        args = (grad_output, grad_stats, *ctx.saved_tensors, *ctx.settings)
        return None, None, None, None, below_autograd(inner.cross_entropy_backward.default, *args)


def _apply_forward(made, input, linear_weight, target, linear_bias, *rest):
    constants = (target, *rest[:3])
    operands = (input, linear_weight, linear_bias)
    settings = Settings.of_arguments(*rest[4:])
    return Forward.apply(made, Returns.ALL, settings, constants, None, *operands)


def _apply_cross_entropy_forward(made, logits, target, *rest):
    constants = (target, *rest[:3])
    return CrossEntropyForward.apply(made, Returns.ALL, rest[4:], constants, logits)


_register_autograd("forward", _apply_forward)
_register_autograd("cross_entropy_forward", _apply_cross_entropy_forward)
for _name in ("backward", "backward_into", "scaled", "cross_entropy_backward"):
    _register_autograd(_name, _Refuse.apply)


def _scale_unseen(*args):
    with torch._C._AutoDispatchBelowAutograd(), torch._C._AutoDispatchBelowADInplaceOrView():
        inner.scale_.default(*args)


def _scale_seen(*args):
    """scale_ called by itself: graphs that saved a gradient learn that it has changed."""
    grads = {name: grad for name, grad in zip(_GRADIENTS, args, strict=False) if grad is not None}
    for name, grad in grads.items():
        if grad.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: expected a tensor that does not require grad, to scale in place"
            )
    _scale_unseen(*args)
    for grad in grads.values():
        torch.autograd.graph.increment_version(grad)


library.impl("scale_", _scale_seen, "ADInplaceOrView")


def _backward_into_seen(grad_weight_into, *args):
    """As _scale_seen; a tensor that may not be written to is refused before it is."""
    if grad_weight_into.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "grad_weight_into: expected a tensor that does not require grad, to add to in place"
        )
    torch.autograd.graph.increment_version(grad_weight_into)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return inner.backward_into.default(grad_weight_into, *args)


library.impl("backward_into", _backward_into_seen, "ADInplaceOrView")
