"""Loads the library; registers what its C++ cannot: fakes, autograd formulas, composite operators.

`torch.ops.flce.linear_cross_entropy` and `torch.ops.flce.cross_entropy` are composite: they read
requires_grad and autocast, resolve `save`, and call the inner operators, whose tensors are
positional and whose output shapes follow from their arguments alone. An inner operator's autograd
formula never sees the composite.
"""

import torch

try:
    from . import _C  # noqa: F401  its import registers the operators
except ImportError as error:
    raise ImportError(
        "flce: the compiled module flce._C is missing or unfit for this torch "
        f"({torch.__version__}): {error}. In a clone, run `pip install --no-build-isolation -e .`"
    ) from error

from . import options

_library = torch.library.Library("flce", "FRAGMENT")
_inner = torch.ops.flce

_ROWS_OF_STATS = 4  # flce.h: FLCE_STAT_ROWS
_SCALARS = 4  # flce.h: FLCE_SCALAR_COUNT


def stat_dtype(dtype):
    """The dtype of losses and row statistics: float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gemm_dtype(device_type, dtype):
    """The dtype of the products' operands: the CPU widens float16 to float32."""
    return torch.float32 if dtype == torch.float16 and device_type == "cpu" else dtype


def _raise_out_of_memory(error):
    raise torch.OutOfMemoryError(str(error)) from None


# ---- fakes: shapes and dtypes only ----


def _kept_dtype(save, dtype):
    return torch.float32 if save == "grads" and dtype == torch.float16 else dtype


def _fake_gradients(input, linear_weight, linear_bias, save, wanted):
    def make(like, want):
        dtype = torch.float32 if like is None else _kept_dtype(save, like.dtype)
        device = input.device
        return torch.empty(like.shape if want else (0,), dtype=dtype, device=device)

    bias = input if linear_bias is None else linear_bias
    return tuple(
        make(like, want) for like, want in zip((input, linear_weight, bias), wanted, strict=True)
    )


@torch.library.register_fake("flce::forward", lib=_library)
def _fake_forward(
    input,
    linear_weight,
    target,
    linear_bias,
    weight,
    reduction,
    ignore_index,
    label_smoothing,
    dtype,
    accum_dtype,
    logits_dtype,
    save,
    max_memory,
    grad_input,
    grad_weight,
    grad_bias,
    allow_tf32,
):
    tokens, vocab = input.shape[0], linear_weight.shape[0]
    stat = stat_dtype(dtype)
    element = gemm_dtype(input.device.type, dtype)
    pitch = options.row_pitch(vocab, element)
    loss = input.new_empty((tokens,) if reduction == "none" else (), dtype=stat)
    stats = input.new_empty((_ROWS_OF_STATS, tokens), dtype=stat)
    scalars = input.new_empty((_SCALARS,), dtype=stat)
    saved = input.new_empty((tokens, pitch) if save == "logits" else (0,), dtype=element)
    wanted = tuple(want and save == "grads" for want in (grad_input, grad_weight, grad_bias))
    return (
        loss,
        stats,
        scalars,
        saved,
        *_fake_gradients(input, linear_weight, linear_bias, save, wanted),
    )


@torch.library.register_fake("flce::backward", lib=_library)
def _fake_backward(grad_output, input, linear_weight, target, linear_bias, *rest):
    save, (grad_input, grad_weight, grad_bias) = rest[-6], rest[-4:-1]
    return _fake_gradients(
        input, linear_weight, linear_bias, save, (grad_input, grad_weight, grad_bias)
    )


@torch.library.register_fake("flce::scale_", lib=_library)
def _fake_scale_(grad, grad_output, scalars):
    return None


@torch.library.register_fake("flce::scaled", lib=_library)
def _fake_scaled(grad, grad_output, scalars, dtype):
    return torch.empty_like(grad, dtype=dtype)


@torch.library.register_fake("flce::cross_entropy_forward", lib=_library)
def _fake_cross_entropy_forward(logits, target, weight, reduction, ignore_index, label_smoothing):
    tokens, stat = logits.shape[0], stat_dtype(logits.dtype)
    return (
        logits.new_empty((tokens,) if reduction == "none" else (), dtype=stat),
        logits.new_empty((_ROWS_OF_STATS, tokens), dtype=stat),
        logits.new_empty((_SCALARS,), dtype=stat),
    )


@torch.library.register_fake("flce::cross_entropy_backward", lib=_library)
def _fake_cross_entropy_backward(grad_output, logits, *rest):
    return torch.empty_like(logits)


# ---- autograd of the inner operators ----
#
# Kernels for the Autograd key with Functions of their own: torch.library.register_autograd reads
# an operator's schema again in each call, which takes more host time than the rest of a small step.


def _below_autograd(op, args):
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _register_autograd(name, function):
    op = getattr(_inner, name).default

    def kernel(*args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(op, False, *args)
        return _below_autograd(op, args)

    _library.impl(name, kernel, "Autograd")


def _refuse_double_backward():
    raise RuntimeError(
        "flce: double backward (create_graph=True) is not supported; use "
        "torch.nn.functional.linear and cross_entropy where you differentiate a gradient"
    )


class _Refuse(torch.autograd.Function):
    """An operator of the backward, whose own gradient is refused."""

    @staticmethod
    def forward(ctx, op, owned, *args):
        return _below_autograd(op, args)

    @staticmethod
    def backward(ctx, *_):
        _refuse_double_backward()


def _once_only(make):
    """The backward of a Function from `make(ctx, grad_output)`, which gives the first gradients.

    Grad mode is on here for create_graph=True alone. It is refused at once: to a second derivative
    the gradients would be constants, and their part of it would be missing without a word.
    """

    def backward(ctx, grad_output, *_):
        if torch.is_grad_enabled():
            _refuse_double_backward()
        needs = ctx.needs_input_grad
        if grad_output is None:
            return (None,) * len(needs)
        try:
            grads = make(ctx, grad_output.contiguous())
        except MemoryError as error:
            _raise_out_of_memory(error)
        return (*grads, *(None,) * (len(needs) - len(grads)))

    return staticmethod(backward)


def _graph_is_kept():
    """Whether this backward may run again. True where that cannot be known, as under compile."""
    if torch.compiler.is_compiling():
        return True
    known = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return known is None or known()


def _saved_by_hooks():
    """Whether the caller's hooks hold what is saved now: then it is theirs, never to be written."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is None or hooks(True) is not None


def _hand_over(grad, grad_output, scalars, dtype, keep):
    """The forward's gradient times grad_output, in its own memory where nobody reads it again."""
    plain = type(grad) is torch.Tensor and type(grad_output) is torch.Tensor
    if keep or not plain or grad.dtype != dtype:
        return _inner.scaled(grad, grad_output, scalars, dtype)
    _scale_unseen(grad, grad_output, scalars)
    # A new tensor on the same memory: autograd may keep it as .grad without a copy.
    return grad.detach()


class _Forward(torch.autograd.Function):
    """flce::forward; its saved outputs are not differentiable.

    `owned`: the composite dropped them, so the backward may write to them.
    """

    @staticmethod
    def forward(ctx, op, owned, *args):
        output = _below_autograd(op, args)
        input, linear_weight, target, linear_bias, weight, *settings = args
        _, stats, scalars, saved, grad_input, grad_weight, grad_bias = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.settings = settings
        ctx.save = settings[6]
        ctx.dtypes = tuple(
            None if t is None else t.dtype for t in (input, linear_weight, linear_bias)
        )
        if ctx.save == "grads":
            ctx.owned = owned and not _saved_by_hooks()
            ctx.save_for_backward(scalars, grad_input, grad_weight, grad_bias)
        else:
            ctx.save_for_backward(
                input, linear_weight, target, linear_bias, weight, stats, scalars, saved
            )
        return output

    @_once_only
    def backward(ctx, grad_output):
        needs = ctx.needs_input_grad  # of op and owned, then of the operator's arguments
        wanted = (needs[2], needs[3], needs[5])
        make = _scale_made if ctx.save == "grads" else _run_backward
        grad_input, grad_weight, grad_bias = make(ctx, grad_output, wanted)
        return (None, None, grad_input, grad_weight, None, grad_bias)


def _scale_made(ctx, grad_output, wanted):
    scalars, *grads = ctx.saved_tensors
    dtype = ctx.settings[3]
    # In float16 form dz the denominator is still to be applied (engine.c: forward_gradients).
    pending = scalars if gemm_dtype(scalars.device.type, dtype) == torch.float16 else None
    keep = not ctx.owned or _graph_is_kept()
    return tuple(
        _hand_over(grad, grad_output, pending, given, keep) if want else None
        for grad, given, want in zip(grads, ctx.dtypes, wanted, strict=True)
    )


def _run_backward(ctx, grad_output, wanted):
    # settings end in max_memory, the three wanted gradients, allow_tf32
    settings = (*ctx.settings[:8], *wanted, ctx.settings[-1])
    made = _below_autograd(_inner.backward.default, (grad_output, *ctx.saved_tensors, *settings))
    return tuple(grad if want else None for grad, want in zip(made, wanted, strict=True))


class _CrossEntropyForward(torch.autograd.Function):
    """flce::cross_entropy_forward."""

    @staticmethod
    def forward(ctx, op, owned, *args):
        output = _below_autograd(op, args)
        logits, target, weight, *settings = args
        _, stats, scalars = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats, scalars)
        ctx.settings = settings
        ctx.save_for_backward(logits, target, weight, stats, scalars)
        return output

    @_once_only
    def backward(ctx, grad_output):
        args = (grad_output, *ctx.saved_tensors, *ctx.settings)
        grad = _below_autograd(_inner.cross_entropy_backward.default, args)
        return (None, None, grad)


_register_autograd("forward", _Forward)
_register_autograd("cross_entropy_forward", _CrossEntropyForward)
for _name in ("backward", "scaled", "cross_entropy_backward"):
    _register_autograd(_name, _Refuse)


def _scale_unseen(grad, grad_output, scalars):
    with torch._C._AutoDispatchBelowAutograd(), torch._C._AutoDispatchBelowADInplaceOrView():
        _inner.scale_.default(grad, grad_output, scalars)


def _scale_seen(grad, grad_output, scalars):
    """scale_ called by itself: graphs that saved `grad` learn that it has changed."""
    if grad.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("grad: expected a tensor that does not require grad, to scale in place")
    _scale_unseen(grad, grad_output, scalars)
    torch.autograd.graph.increment_version(grad)


_library.impl("scale_", _scale_seen, "ADInplaceOrView")


# ---- the composite operators ----


def _wants(tensor):
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _call(op, function, differentiable, *args):
    """The operator through its Function at once, past the dispatcher's way to the same Function."""
    return function.apply(op, True, *args) if differentiable else op(*args)


def _allow_tf32(device_type, dtype):
    if device_type != "cuda" or dtype != torch.float32:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    accum_dtype=None,
    logits_dtype=None,
    save="auto",
    max_memory=None,
):
    options.check_choices(reduction, label_smoothing, save)
    options.check_linear(input, linear_weight, target, linear_bias, weight)
    options.refuse_transforms(input, linear_weight, linear_bias)
    device_type = input.device.type
    ignore_index = options.check_ignore_index(ignore_index)
    dtype = options.compute_dtype(input, linear_weight, linear_bias)
    stat = stat_dtype(dtype)
    accum_dtype = options.check_dtype("accum_dtype", accum_dtype, dtype, stat) or dtype
    logits_dtype = options.check_dtype("logits_dtype", logits_dtype, dtype, stat) or stat
    vocab, hidden = linear_weight.shape
    if options.checks_targets(input.device):
        options.check_target_range(target, vocab, ignore_index)

    wanted = (_wants(input), _wants(linear_weight), _wants(linear_bias))
    max_memory = options.resolve_max_memory(max_memory, input.device)
    save = options.resolve_save(
        save if any(wanted) else "nothing",
        device_type,
        (target.numel(), hidden, vocab),
        (gemm_dtype(device_type, dtype), logits_dtype),
        reduction,
        max_memory,
    )
    try:
        loss = _call(
            _inner.forward.default,
            _Forward,
            any(wanted),
            input.reshape(-1, hidden).contiguous(),
            linear_weight.contiguous(),
            target.reshape(-1).contiguous(),
            None if linear_bias is None else linear_bias.contiguous(),
            None if weight is None else weight.detach().to(stat).contiguous(),
            reduction,
            ignore_index,
            label_smoothing,
            dtype,
            accum_dtype,
            logits_dtype,
            save,
            max_memory,
            *wanted,
            _allow_tf32(device_type, dtype),
        )[0]
    except MemoryError as error:
        _raise_out_of_memory(error)
    return loss.reshape(target.shape) if reduction == "none" else loss


def cross_entropy(
    logits, target, *, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0
):
    options.check_choices(reduction, label_smoothing)
    options.check_logits(logits, target, weight)
    options.refuse_transforms(logits)
    ignore_index = options.check_ignore_index(ignore_index)
    vocab = logits.shape[-1]
    if options.checks_targets(logits.device):
        options.check_target_range(target, vocab, ignore_index)
    stat = stat_dtype(logits.dtype)
    try:
        loss = _call(
            _inner.cross_entropy_forward.default,
            _CrossEntropyForward,
            _wants(logits),
            logits.reshape(-1, vocab).contiguous(),
            target.reshape(-1).contiguous(),
            None if weight is None else weight.detach().to(stat).contiguous(),
            reduction,
            ignore_index,
            label_smoothing,
        )[0]
    except MemoryError as error:
        _raise_out_of_memory(error)
    return loss.reshape(target.shape) if reduction == "none" else loss


_LOSS_SCHEMA = (
    "Tensor? weight=None, str reduction='mean', int? ignore_index=-100, float label_smoothing=0.0"
)
_library.define(
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, "
    f"Tensor? linear_bias=None, {_LOSS_SCHEMA}, ScalarType? accum_dtype=None, "
    "ScalarType? logits_dtype=None, str save='auto', int? max_memory=None) -> Tensor"
)
_library.define(f"cross_entropy(Tensor logits, Tensor target, *, {_LOSS_SCHEMA}) -> Tensor")
for _name in ("linear_cross_entropy", "cross_entropy"):
    # Without this vmap would loop over the batch, one call a slice, with only a warning.
    _library.impl(_name, options.refuse_vmap, "FuncTorchBatched")
_library.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")
_library.impl("cross_entropy", cross_entropy, "CompositeImplicitAutograd")
