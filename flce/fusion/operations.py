"""The table of operations that deferred logits record or answer.

A handler takes (function, deferred, args, kwargs), args[0] being a deferred Tensor and `deferred`
its DeferredValue, and returns the result, or raises Unknown, by `require`: real logits are computed
then. Shapes, dtypes and devices of results come from the function itself, of empty tensors.
"""

import copy
import functools
import inspect
import math
import numbers
import operator

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from . import loss, steps
from .steps import KL, LOG_P, P_LOG_P, P_Z, SECOND, SPLIT, P, require
from .values import deferred_value_of

HANDLERS = {}  # {(form of the Record, function): (handler, number of arguments or None)}
# Forms of one head's logits with the classes last; None: the logits themselves.
_ROW_FORMS = (None, LOG_P, P, P_LOG_P, P_Z)
_PRODUCTS = {frozenset((P, LOG_P)): P_LOG_P, frozenset((P, None)): P_Z}


def handles(names, arity=None, forms=(None,)):
    """The handler of torch's functions and Tensor's methods of these names. arity: the number of
    positional arguments without keywords that it knows; None: it checks them itself."""

    def register(handler):
        for name in names.split():
            for space in (torch.Tensor, torch, F):
                if callable(function := getattr(space, name, None)):
                    HANDLERS.update({(form, function): (handler, arity) for form in forms})
        return handler

    return register


# ---- what keeps a row a row ----

_DIVISIONS = {torch.Tensor.div, torch.div, torch.Tensor.true_divide, torch.true_divide}


@handles("neg negative", 1, _ROW_FORMS)
@handles("mul multiply div true_divide", 2, _ROW_FORMS)
def _scale(function, deferred, args, kwargs):
    record, number = deferred.record, args[1] if len(args) > 1 else -1
    if (other := deferred_value_of(number)) is not None and function not in _DIVISIONS:
        return _product_with_p(deferred, other)
    # Plain types first: asking an abstract class takes several times as long.
    require(isinstance(number, (int, float, numbers.Real)) and not isinstance(number, bool))
    factor = float(number)
    if function in _DIVISIONS:
        factor = 1 / factor if factor else math.inf
    require(steps.is_scale(factor, record.form_steps or record.steps))
    compute = (lambda z: function(z, number)) if len(args) > 1 else function
    return deferred.then(record.then(steps.SCALE, factor, compute))


def _product_with_p(deferred, other):
    """p log p or p z of the same logits, where the gradient goes through both factors or through
    neither."""
    left, right = deferred.record, other.record
    form = _PRODUCTS.get(frozenset((left.form(), right.form())))
    require(form and left.rows.statistics is right.rows.statistics)
    require(steps.hashable_steps(left) == steps.hashable_steps(right))
    require(other.is_pending() and deferred.has_gradient == other.has_gradient)
    both = left.form_steps, right.form_steps
    compute = lambda z: steps.apply_steps(both[0], z) * steps.apply_steps(both[1], z)  # noqa: E731
    step = steps.Step(form, left.factor() * right.factor(), compute)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return deferred.then(left.changed(form_steps=(step,), dtype=dtype))


@handles(" ".join(steps.CAPS), 1)
def _cap(function, deferred, args, kwargs):
    require(not steps.is_capped(deferred.record.steps))
    return deferred.then(deferred.record.then(function.__name__, 1, function))


@handles("exp", 1, (LOG_P,))
def _exp(function, deferred, args, kwargs):
    """p of log p."""
    require(deferred.record.factor() == 1)
    return deferred.then(deferred.record.then(P, 1, function))


@handles("add", 2)
def _add(function, deferred, args, kwargs):
    record, vector = deferred.record, args[1]
    if (other := deferred_value_of(vector)) is not None:
        return _sum_of_products(deferred, other)
    require(isinstance(vector, torch.Tensor) and vector.is_floating_point())
    require(vector.dim() >= 1 and vector.shape[-1] == vector.numel() == record.shape[-1])
    require(vector.dim() <= len(record.shape) and not steps.is_capped(record.steps))
    # Of a trained vector the loss would need another edge; torch.compile records it by itself.
    require(is_compiling() or not (vector.requires_grad and torch.is_grad_enabled()))
    dtype = torch.promote_types(record.dtype, vector.dtype)
    vector = vector.flatten().clone()  # the caller may write to it later
    return deferred.then(record.then(steps.BIAS, vector, lambda z: z + vector, dtype=dtype))


def _sum_of_products(deferred, other):
    left, right = deferred.record, other.record
    left_call, right_call = deferred.head_call, other.head_call
    linears = {id(source.linear) for source in (*left.sources, *right.sources)}
    kinds = steps.kinds((*left.steps, *right.steps, *right.form_steps))
    require(other.is_pending() and left.shape == right.shape and kinds <= {steps.SCALE, steps.CAST})
    require(len(linears) == len(left.sources) + len(right.sources))
    # Both with their gradients, or neither.
    cut = [
        operand.head_call.requires_grad and not operand.has_gradient
        for operand in (deferred, other)
    ]
    require(cut[0] == cut[1] and left_call.grad_mode == right_call.grad_mode)
    require(left_call.autocast == right_call.autocast)
    require(torch.float64 not in (left.dtype, right.dtype) or left.dtype == right.dtype)
    sources = [
        source.with_changes(source.x, (*source.steps, *record.steps))
        for record in (left, right)
        for source in record.sources
    ]
    dtype = torch.promote_types(left.dtype, right.dtype)
    # The sum has the gradients of both.
    head_call = copy.copy(left_call if left_call.requires_grad else right_call)
    head_call.snapshots = left_call.snapshots + right_call.snapshots
    total = steps.Record(tuple(sources), (), left.shape, dtype, steps.Rows())
    return deferred.summed(other, head_call, total)


@handles("to type_as float double half bfloat16", forms=_ROW_FORMS)
def _cast(function, deferred, args, kwargs):
    """Casts of the logits become casts of the loss, which is computed in float32 at least, so
    one to float64 is not deferred. One to the own dtype is the same object, as of real tensors."""
    require(set(kwargs) <= {"dtype", "device", "non_blocking", "copy"} and not kwargs.get("copy"))
    require(not any(a is True for a in args[3:]))  # copy
    like = [a if deferred_value_of(a) is None else a._flce.like() for a in args]
    cast = function(*like, **kwargs)
    require(cast.device == deferred.head_call.device)
    if (dtype := cast.dtype) == deferred.record.dtype:
        return args[0]
    require(dtype.is_floating_point and dtype != torch.float64)
    return deferred.then(
        deferred.record.then(steps.CAST, dtype, lambda z: z.to(dtype), dtype=dtype)
    )


@handles("contiguous clone detach", 1, _ROW_FORMS)
def _copy(function, deferred, args, kwargs):
    if function is torch.Tensor.contiguous and deferred.meta_tensor().is_contiguous():
        return args[0]
    if function not in (torch.detach, torch.Tensor.detach):
        # A copy of a softmax is a step of its own: the caller may write to it, and the values of
        # the softmax itself are those that autograd has saved.
        copy_record = deferred.record.then(steps.CAST, deferred.record.dtype, torch.clone)
        return deferred.then(copy_record if deferred.record.form_steps else deferred.record)
    # With when="labels" who detaches logits may keep them, to read them after a step.
    require(deferred.head_call.fusion.when == "always" or not torch.is_grad_enabled())
    with torch.no_grad():
        return deferred.then(deferred.record, torch.Tensor.detach)


@handles("view reshape flatten squeeze unsqueeze", forms=_ROW_FORMS)
def _reshape(function, deferred, args, kwargs):
    """Another shape of the rows, or classes that are split into groups of equal size."""
    record, old = deferred.record, deferred.record.shape
    require(old[-1])  # without classes a shape does not tell where they are
    meta = deferred.meta_tensor()
    result = function(meta, *args[1:], **kwargs)
    require(result.dtype == record.dtype)
    shape = tuple(result.shape)
    # While torch.compile traces, writes to logits make them first: nothing has to be shared.
    is_view = meta.is_contiguous() or (not is_compiling() and result._is_view())
    view = (lambda z: z.view(shape)) if is_view else None
    if shape[-1:] == old[-1:]:
        record = record.of_rows(lambda x: x.reshape(*shape[:-1], x.shape[-1]))
    else:
        require(is_view and not record.form_steps and len(shape) > 2 and shape[:-2] == old[:-1])
        require(shape[-2] * shape[-1] == old[-1])  # with no rows other shapes would do
        record = record.then(SPLIT, 1, view, shape=shape)
    return deferred.then(record, view)


@handles("transpose swapaxes swapdims permute", forms=(None, LOG_P))
def _transpose(function, deferred, args, kwargs):
    """(B, V, T) of (B, T, V), however that is called."""
    example, shape = torch.empty(2, 3, 5, device="meta"), deferred.record.shape
    require(len(shape) == 3 and function(example, *args[1:], **kwargs).shape == (2, 5, 3))
    view = lambda z: z.transpose(1, 2)  # noqa: E731
    return deferred.then(
        deferred.record.then(SECOND, 1, view, shape=(shape[0], shape[2], shape[1])), view
    )


def _split_index(index, dims):
    """(index of the rows, slice of the classes) for a tensor of `dims` dimensions. Raises Unknown
    where a part of the index is not known or the classes' dimension moves."""
    index, unindexed = index if isinstance(index, tuple) else (index,), dims
    for item in index:
        if isinstance(item, torch.Tensor) and deferred_value_of(item) is None:
            unindexed -= item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif item is not None and item is not Ellipsis:
            require(isinstance(item, slice | numbers.Integral) and not isinstance(item, bool))
            unindexed -= 1
    at = [*[item is Ellipsis for item in index], True].index(True)
    index = (*index[:at], *[slice(None)] * unindexed, *index[at + 1 :])
    require(unindexed >= 0 and isinstance(index[-1], slice))
    return index[:-1], index[-1]


@handles("__getitem__", forms=(*_ROW_FORMS, SPLIT))
def _select(function, deferred, args, kwargs):
    """Rows, and a range of the classes, or of those of one group."""
    record, index = deferred.record, args[1]
    rows, classes = _split_index(index, len(record.shape))
    class_range = range(record.shape[-1])[classes]
    if record.form() == SPLIT:
        *shape, groups, size = record.shape
        *rows, group = rows
        require(isinstance(group, int) and len(rows) == len(shape))
        require(all(isinstance(item, slice) for item in rows) and class_range.step == 1)
        first, rows = range(groups)[group] * size, tuple(rows)
        class_range = range(first + class_range.start, first + class_range.stop)
        record = record.changed(form_steps=(), shape=(*shape, groups * size))
    tensors = [item for item in rows if isinstance(item, torch.Tensor)]
    # A view for an integer; bytes are a mask.
    require(all(item.dim() > 0 and item.dtype != torch.uint8 for item in tensors))
    if tensors or any(item != slice(None) for item in rows):
        # The caller may write to an index later.
        rows = tuple([i.clone() if isinstance(i, torch.Tensor) else i for i in rows])
        record = record.of_rows(lambda x: x[rows])
    if len(class_range) < record.shape[-1]:
        start, stop = class_range.start, class_range.stop
        require(class_range.step == 1 and start < stop and not record.form_steps)
        shape, compute = (*record.shape[:-1], len(class_range)), lambda z: z[..., start:stop]
        record = record.then(steps.CLASSES, (start, stop), compute, shape=shape)
    return deferred.then(record, None if tensors else lambda z: z[index])


@handles("split chunk unbind __iter__", forms=_ROW_FORMS)
def _pieces_of_first_dimension(function, deferred, args, kwargs):
    record, at = deferred.record, 2 if function.__name__ in ("split", "chunk") else 1
    require(len(record.shape) > 1 and (args[at:] or (kwargs.get("dim", 0),)) == (0,))
    stop, pieces = 0, []
    for piece in function(deferred.meta_tensor(), *args[1:], **kwargs):
        is_row = piece.dim() < len(record.shape)
        first, stop = stop, stop + (1 if is_row else len(piece))
        select = operator.itemgetter(first if is_row else slice(first, stop))
        pieces.append(deferred.then(record.of_rows(select, is_piece=True), select))
    return tuple(pieces)


# ---- what is computed of a row ----

handles("cross_entropy", forms=(None, LOG_P, SECOND))(loss.cross_entropy)
handles("nll_loss", forms=(LOG_P, SECOND))(loss.cross_entropy)
_OF_KL_DIV = tuple(inspect.signature(F.kl_div).parameters)
_KEYWORDS = {"input", "dim", "axis", "keepdim", "dtype", "index", "indices", "_stacklevel"}


def _over_classes(deferred, names, args, kwargs):
    """{name: argument} of a function that acts on the classes alone."""
    arguments = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    require(len(args) <= len(names.split()) and set(arguments) <= _KEYWORDS)
    dim = arguments.get("dim", arguments.get("axis"))
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    require(type(dim) is int and dim in (-1, len(deferred.record.shape) - 1))
    return arguments


def _dtype_by(function, deferred, arguments):
    """The dtype of a result, by autocast or as the argument says."""
    dtype = function(
        deferred.like(), 0, **{k: v for k, v in arguments.items() if k == "dtype"}
    ).dtype
    require(dtype.is_floating_point and (dtype != torch.float64 or dtype == deferred.record.dtype))
    return dtype


def _result(record, values, dtype, keepdim):
    """What a function returns, in memory of its own: it may be written to."""
    values = (values * record.factor()).to(dtype)
    return values.unsqueeze(-1) if keepdim else values


@handles("log_softmax softmax", forms=(None, LOG_P))
def _softmax(function, deferred, args, kwargs):
    dtype = _dtype_by(function, deferred, _over_classes(deferred, "input dim", args, kwargs))
    require(deferred.record.factor() == 1)
    is_log = function.__name__ == "log_softmax"
    form, torch_function = (LOG_P, torch.log_softmax) if is_log else (P, torch.softmax)
    compute = lambda z: torch_function(z, -1, dtype=dtype)  # noqa: E731
    return deferred.then(deferred.record.then(form, 1, compute, dtype=dtype))


@handles("logsumexp")
@handles("mean", forms=(None, KL))
@handles("sum", forms=(LOG_P, P_LOG_P, P_Z, KL))
def _reduced(function, deferred, args, kwargs):
    """A sum over p log p is the entropy times -1, and one over p z logsumexp - entropy."""
    name, record, form = function.__name__, deferred.record, deferred.record.form()
    if is_of_all := len(args) == 1 and not kwargs and (name == "mean" or form == KL):
        args = (*args, -1)
    arguments = _over_classes(deferred, "input dim keepdim", args, kwargs)
    dtype = _dtype_by(function, deferred, arguments)
    statistic = functools.partial(loss.statistic, deferred, record)
    if form == KL:
        values = loss.kl_sum(record, "sum" if is_of_all else "none")
        count = math.prod(record.shape if is_of_all else record.shape[-1:])
        values = values / count if name == "mean" else values
    elif name == "mean":
        values = statistic("mean_log_p") + statistic("lse")
    elif form is None:
        values = statistic("lse")
    elif form == LOG_P:
        values = record.shape[-1] * statistic("mean_log_p")
    else:
        values = (statistic("lse") if form == P_Z else 0) - statistic("entropy")
    values = _result(record, values, dtype, arguments.get("keepdim"))
    return values.mean() if is_of_all else values


@handles("kl_div", forms=(LOG_P,))
def _kl_div(function, deferred, args, kwargs):
    arguments = {"reduction": "mean", "log_target": False}
    arguments |= {**dict(zip(_OF_KL_DIV, args, strict=False)), **kwargs}
    target, record = deferred_value_of(arguments["target"]), deferred.record
    reduction = arguments["reduction"]
    require(target is not None and target.is_pending())
    require(arguments.get("size_average") is arguments.get("reduce") is None)
    require(target.record.form() == (LOG_P if arguments["log_target"] else P))
    require(record.factor() == target.record.factor() == 1)
    dtype = F.kl_div(deferred.like(), target.like(), reduction="none").dtype
    compute = functools.partial(loss.kl_elements, deferred, target, dtype)
    record = record.then(KL, 1, compute, dtype=dtype)
    if reduction == "none":
        return (target if target.wants_gradient() else deferred).then(record)
    count = {"mean": math.prod(record.shape), "batchmean": record.shape[0], "sum": 1}
    require(reduction in count)
    return (loss.kl_sum(record, "sum") / count[reduction]).to(dtype)


@handles("argmax")
def _argmax(function, deferred, args, kwargs):
    """After a loss was computed only: rounded logits may be equal, which changes what a model
    generates."""
    arguments = _over_classes(deferred, "input dim keepdim", args, kwargs)
    require(deferred.head_call.fusion.when == "always" and deferred.head_call.loss_is_settled)
    deferred.head_call.check(compares_elements=True)
    with torch.no_grad():
        values = loss.statistic(deferred, deferred.record, "predictions")
    return _result(deferred.record, values, torch.int64, arguments.get("keepdim"))


@handles("gather take_along_dim", forms=(None, LOG_P, P))
def _gather(function, deferred, args, kwargs):
    """z, log p or p of K classes of each row."""
    record, is_gather = deferred.record, function.__name__ == "gather"
    names = "input dim index" if is_gather else "input index dim"
    arguments, form = _over_classes(deferred, names, args, kwargs), record.form()
    index = arguments.get("index", arguments.get("indices"))
    require(isinstance(index, torch.Tensor) and deferred_value_of(index) is None)
    require(index.dtype == torch.int64 and index.dim() == len(record.shape))
    require(tuple(index.shape[:-1]) == record.shape[:-1] and index.shape[-1])
    if not is_gather:  # which takes classes counted from the end
        index = torch.where(index < 0, index + record.shape[-1], index)
    statistic = functools.partial(loss.statistic, deferred, record)
    if index.shape[-1] == 1:
        values = statistic("log_p", index.squeeze(-1)).unsqueeze(-1)
        values = values + statistic("lse").unsqueeze(-1) if form is None else values
    else:
        values = statistic("class_logits", index)
        values = values if form is None else values - statistic("lse").unsqueeze(-1)
    return _result(record, values.exp() if form == P else values, record.dtype, False)
