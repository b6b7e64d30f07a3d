"""A call of the loss: from its arguments to the operator of C++, and from what that returns to the
outputs. Also the operators `torch.ops.flce.linear_cross_entropy` and `cross_entropy`, with variants
`_outputs` that return lse, entropy, accuracy, predictions and z_loss too; they have no autograd
formula, as autograd records the operators that they call.
"""

import math
import re
import typing

import torch
from torch.compiler import is_compiling

from . import adapter, autograd, calls, fakes, operators, reference, torch_private, validate
from .accumulate import Accumulator
from .options import DTYPES, NUMBERS, OF_DIVERGENCE, OPTIONS, OUTPUTS, RETURNS, replaced, split
from .targets import shifted_target


class ShardedCall(typing.NamedTuple):
    """What ranks that divide the vocabulary may compare before a call.

    call: a calls.ForwardCall or DivergenceCall, without a seed. options: of the call, by name.
    caller: the name ("call") and the arguments of a public function that is composed of this call;
    None where the user has made this call.
    """

    call: object
    options: dict
    caller: dict | None


before_sharded_call = None  # set by flce.distributed: takes a ShardedCall
_matmul = torch.backends.cuda.matmul
_VECTORS = ("weight", "token_weight", "temperature")
COUNTED = -1  # csrc/binding/call.h: kCountedRows
# Between the seeds of one rank and the next: the draws of the ranks' classes in a row have to be
# independent. Its multiples wrap as int64, and are distinct.
_SEED_STEP = 0x9E3779B97F4A7C15 >> 1


def is_traced():
    """Whether torch.compile, torch.export or make_fx traces the call."""
    return is_compiling() or torch_private.make_fx_traces()


def autocast_dtype(device_type):
    """The dtype to which autocast casts the GEMMs' operands; None if it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def autocast_code(tensor):
    """The index in DTYPES of the dtype to which autocast casts, on the tensor's device; else -1."""
    enabled = torch_private.is_any_autocast_enabled()  # faster than the question for one device
    dtype = autocast_dtype(tensor.device.type) if enabled else None
    return -1 if dtype is None else DTYPES.index(dtype)


def _rows(packed, target):
    """The operator's `rows`: None for all, COUNTED to count on the CPU, else a bound."""
    bound = packed.valid_bound
    if target.is_floating_point():
        if bound is not None:
            expected = "None with probabilities, of which no row is ignored"
            validate.refuse("valid_bound", expected, repr(bound))
        return None
    if target.is_cpu and (bound is None or bound == "count"):
        # A traced or fake target has no values to count.
        counts = type(target) is torch.Tensor and not torch_private.count_of_dispatch_modes()
        return COUNTED if counts and not is_compiling() else None
    if bound is None:
        return None
    if bound == "count":
        if is_traced():
            got = '"count", which waits for the device'
            validate.refuse("valid_bound", "an int or None under torch.compile", got)
        # Synchronises with the device.
        bound = int((~validate.is_equal(target, packed.ignore_index)).sum())
    # With a bound of 0 one row is still computed: its result becomes NaN if it is not ignored.
    least = 0 if target.is_cpu else 1
    return max(bound, least) if bound < target.numel() else None


def _seed(packed, tensors, input):
    """The seed of the draw, or None. It is drawn under no_grad too: a reentrant checkpoint restores
    the generator for its second forward, so without a draw in the first every step would have the
    same seed."""
    seed = tensors.get("gradient_seed")
    if packed.gradient != "sampled" and seed is None:
        return None
    return _seed_of_rank(validate.seed_tensor(seed, input), packed.rank)


def _seed_of_rank(seed, rank):
    step = (rank * _SEED_STEP + 2**63) % 2**64 - 2**63
    return seed + step if rank else seed


class LossTensors(typing.NamedTuple):
    """Tensors that scale the rows of a loss, or None: weight (V,), token_weight and temperature of
    the rows' shape, num_items 0-d."""

    weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    temperature: torch.Tensor | None
    num_items: torch.Tensor | None


def _loss_tensors(packed, tensors, target, *operands):
    """The LossTensors, after the checks of what C cannot see. `operands`: the others that may
    require grad, input or logits first."""
    if validate.transforms_are_on():
        validate.refuse_transforms(*operands, target, *tensors.values())
    for name in _VECTORS:
        if name in tensors:
            validate.check_constant(name, tensors[name])
    validate.check_constant("target", target)
    if packed.wanted.accuracy and target.is_floating_point():
        expected = "False with probabilities, which name no class to be right about"
        validate.refuse("return_accuracy", expected, True)
    if packed.wanted.tail_lse and tensors.get("classes") is None and not packed.topk:
        validate.refuse("return_tail_lse", "False without classes or topk", True)
    weight, token_weight, temperature = map(tensors.get, _VECTORS)
    if temperature is not None and temperature.dim() == 0:
        temperature = temperature.expand(fakes.rows_shape(target))
    if (num_items := tensors.get("num_items")) is not None:
        num_items = validate.num_items_tensor(num_items, packed.reduction, operands[0])
    return LossTensors(weight, token_weight, temperature, num_items)


def _of_ranks(packed, tensor):
    """The tensors of all ranks that divide the vocabulary; this rank's own is differentiable."""
    sent = tensor.detach().contiguous()
    if is_traced():
        functional = torch_private.functional_collectives
        received = functional.all_gather_into_tensor(sent.unsqueeze(0), packed.ranks, packed.group)
        gathered = list(functional.wait_tensor(received))
    else:  # torch 2.11's functional collectives end the process for CUDA tensors over gloo
        received = sent.new_empty((packed.ranks, *sent.shape))
        exchange = packed.group, operators.COLLECTIVE_STATISTICS
        operators.inner.comm_all_gather(*exchange, received.view(-1), sent.view(-1))
        operators.inner.comm_wait(*exchange)
        gathered = list(received)
    gathered[packed.rank] = tensor
    return gathered


def _final_logits(packed, z, temperature, cut):
    """The final logits of z (..., K); `cut`: mask of ignored rows."""
    numbers = dict(zip(NUMBERS, packed.numbers, strict=True))
    return reference.final_logits(
        z,
        cut,
        softcap=numbers["softcap"] or None,
        logit_scale=numbers["logit_scale"],
        temperature=numbers["temperature"] if temperature is None else temperature,
    )


def _top_results(packed, logits, classes, tail_lse):
    """class_logits, classes and tail_lse of the topk largest of the candidates' `logits`.

    `tail_lse`: of all classes but the candidates, or None; those that are not chosen join it.
    """
    absent = classes < 0
    kept = logits.detach().clamp(min=torch.finfo(logits.dtype).min)  # above what is absent
    _, best = kept.masked_fill(absent, -math.inf).topk(packed.topk, dim=-1)
    if tail_lse is not None:
        others = logits.masked_fill(absent.scatter(-1, best, True), -math.inf)
        tail_lse = _logaddexp(tail_lse, others)
    return logits.gather(-1, best), classes.gather(-1, best), tail_lse


def _logaddexp(lse, others):
    """logsumexp of lse (...) and others (..., K). Where all are -inf, so is the result, with the
    gradient 0 and not the NaN of torch's."""
    terms = torch.cat((lse.unsqueeze(-1), others), dim=-1)
    empty = terms.detach().isneginf().all(dim=-1)
    return terms.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty, -math.inf)


def _class_results(packed, outputs, temperature, target, tail_lse):
    """{"class_logits", "classes" (None without topk), "tail_lse"} from an operator's class_logits
    and, with topk, its candidates."""
    z, classes = outputs.class_logits, outputs.top_classes
    if packed.ranks > 1 and packed.topk:
        z, classes = (torch.cat(_of_ranks(packed, one), dim=-1) for one in (z, classes))
    elif packed.ranks > 1:
        z = sum(_of_ranks(packed, z))  # 0 for the classes of other ranks
    cut = reference.ignored(target, packed.ignore_index)
    logits = _final_logits(packed, z, temperature, cut)
    classes = classes if packed.topk else None
    if packed.topk:
        logits, classes, tail_lse = _top_results(packed, logits, classes, tail_lse)
        tail_lse = None if tail_lse is None else tail_lse.masked_fill(cut, 0.0)
    return {"class_logits": logits, "classes": classes, "tail_lse": tail_lse}


def _accuracy(target, ignored, predictions, valid, bound):
    """`bound`: how many rows were computed; NaN with more valid rows, as the loss is."""
    # An ignored row never counts as right: its prediction is -1, which may equal ignore_index.
    right = ((predictions == target) & ~ignored).sum().to(valid.dtype)
    accuracy = right / valid.clamp(min=1.0)
    if bound is None or bound == COUNTED:
        return accuracy
    return accuracy.masked_fill(valid > bound, math.nan)


def _z_loss(packed, lse, token_weight, ignored, valid, num_items):
    """The z-loss's part of the loss. lse: of each row, (...); `valid`: the number of valid rows."""
    rows = packed.z_loss * lse.detach().square()
    if token_weight is not None:
        rows = rows * token_weight.to(rows.dtype)
        rows = rows if ignored is None else rows.masked_fill(ignored, 0.0)
    if packed.reduction == "mean":
        return mean_of(rows.sum(), valid, num_items)
    return rows.sum() if packed.reduction == "sum" else rows


def mean_of(total, valid, num_items):
    """`total` over num_items, or the `valid` rows where that is None: 0 of no valid rows, NaN where
    there are some and 0 items, as in the operators."""
    count = valid if num_items is None else num_items.to(total.dtype)
    of_none = torch.where(valid == 0, 0.0, math.nan)
    return total * torch.where(count == 0, of_none, 1.0 / count)


def _results(packed, outputs, target, tensors, num_items, rows):
    """The list of the loss and, if any are wanted, OUTPUTS, from the outputs of an operator.

    rows: calls.CallOptions' of the call.
    """
    has_classes = outputs.class_logits is not None
    if not packed.outputs and not has_classes:
        return [outputs.loss]
    results = dict.fromkeys(OUTPUTS) | _row_results(packed.wanted, outputs, target)
    if results["entropy"] is not None and packed.detaches_entropy:
        results["entropy"] = results["entropy"].detach()
    ignored = None
    if not target.is_floating_point():
        ignored = validate.is_equal(target, packed.ignore_index)
    valid = None if outputs.scalars is None else outputs.scalars[operators.SCALAR_VALID]
    if packed.wanted.accuracy:
        results["accuracy"] = _accuracy(target, ignored, outputs.predictions, valid, rows)
    if packed.wanted.z_loss:
        lse, token_weight = _lse_of(outputs, target), tensors.get("token_weight")
        results["z_loss"] = _z_loss(packed, lse, token_weight, ignored, valid, num_items)
    if has_classes:
        temperature, tail_lse = tensors.get("temperature"), results["tail_lse"]
        results |= _class_results(packed, outputs, temperature, target, tail_lse)
    return [outputs.loss, *results.values()]


def _lse_of(outputs, target):
    """The logsumexp of each row, (...)."""
    return outputs.stats[operators.STAT_LSE].reshape(fakes.rows_shape(target))


def _row_results(wanted, outputs, target):
    """The wanted ones of lse, entropy, predictions and tail_lse, (...), by name."""
    shape, results = fakes.rows_shape(target), {}
    if wanted.lse:
        results["lse"] = _lse_of(outputs, target)
    if wanted.entropy:
        results["entropy"] = outputs.stats[operators.STAT_ENTROPY].reshape(shape)
    if wanted.predictions:
        results["predictions"] = outputs.predictions
    if wanted.tail_lse:
        results["tail_lse"] = outputs.stats[operators.STAT_TAIL_LSE].reshape(shape)
    return results


def check_options(given, rows, **sizes):
    """The checks of options that need no tensor; `rows`: of linear_weight on this rank. `sizes`:
    others that are known, by their names in the operator's schema."""
    packed, _ = split(given)
    accumulates = packed.accumulate_into is not None
    integers = packed.integers_with(grad_input=1, grad_weight=1, accumulates=accumulates)
    # Which dtypes are allowed depends on that of the operands.
    integers = replaced(integers, accum_dtype=-1, logits_dtype=-1)
    lists = packed.valid_vocab, integers, packed.numbers
    return fakes.describe_sizes(*lists, on_cpu=True, weight_rows=rows, **sizes)


class Operands(typing.NamedTuple):
    """The operands of the logits' GEMM.

    leaves: what gets the gradients: input, weight (the adapter's beside a frozen linear_weight) and
    bias. needs: which of them require grad, and grad mode is on. frozen_hidden: how many columns of
    the weight get no gradient.
    """

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    leaves: tuple
    needs: tuple
    frozen_hidden: int


def _operands(input, linear_weight, tensors, packed, autocast):
    differentiated, frozen_hidden, weight = linear_weight, 0, linear_weight
    if "adapter_input" in tensors or "adapter_weight" in tensors:
        joined = adapter.joined(input, linear_weight, tensors, packed, autocast)
        input, weight, differentiated, frozen_hidden = joined
    bias = tensors.get("linear_bias")
    leaves, grad = (input, differentiated, bias), torch.is_grad_enabled()
    needs = tuple(grad and leaf is not None and leaf.requires_grad for leaf in leaves)
    return Operands(input, weight, bias, leaves, needs, frozen_hidden)


def _accumulator(packed, operands):
    """The Accumulator that accumulate_into asks for; None where no weight gets a gradient."""
    if packed.accumulate_into is None or not operands.needs[1] or operands.frozen_hidden:
        return None
    return Accumulator(operands.weight, packed.accumulate_into)


def _call_options(packed, operands, rows, autocast, accumulates, made_now, wants_classes):
    """The calls.CallOptions. made_now: which gradients a forward with save="grads" makes."""
    input = operands.input
    tf32 = input.is_cuda and input.dtype is torch.float32 and _matmul.fp32_precision == "tf32"
    memory = packed.memory(input.device)
    of_call = autocast, operands.frozen_hidden, accumulates, is_traced(), wants_classes
    integers = packed.integers(*memory, *of_call, *made_now, tf32)
    return calls.CallOptions(packed.valid_vocab, rows, integers, packed.numbers, packed.group)


def linear_cross_entropy_of(
    input, linear_weight, target, given, teacher=None, *, first_token=0, caller=None
):
    """The list of the loss and OUTPUTS, None for those that are not wanted, or of the loss alone if
    none is. `given`: the options that the caller gave, by name; a missing one has its default.
    `teacher`: a calls.Teacher, of a divergence from it. `first_token`: the number of the first row,
    where these are a part of the caller's. `caller`: see ShardedCall."""
    packed, tensors = split(given)
    autocast = autocast_code(input)
    operands = _operands(input, linear_weight, tensors, packed, autocast)
    of_loss = _loss_tensors(packed, tensors, target, operands.input, operands.weight)
    accumulator = _accumulator(packed, operands)
    offsets, classes = tensors.get("cu_seqlens"), tensors.get("classes")
    if packed.shift or offsets is not None:
        target = shifted_target(target, packed.shift, offsets, packed.ignore_index)
    rows = _rows(packed, target)
    # A divergence adds what its forward has made, if anything.
    later = teacher and (packed.reduction == "none" or given.get("save") == "stats")
    options = _call_options(
        packed,
        operands,
        rows,
        autocast,
        accumulates=accumulator is not None and not teacher,
        made_now=(False,) * 3 if later else operands.needs,
        wants_classes=classes is not None or packed.topk > 0,
    )
    if first_token:
        options = options.replaced(first_token=first_token)
    call = _call(operands, target, of_loss, teacher, classes, options)
    if packed.ranks > 1:
        before_sharded_call(ShardedCall(call, given, caller))
    if (seed := _seed(packed, tensors, operands.input)) is not None:
        call = call._replace(seed=seed)
    outputs = _run(call, operands, packed, accumulator)
    return _results(packed, outputs, target, tensors, of_loss.num_items, rows)


def _call(operands, target, of_loss, teacher, classes, options):
    """The calls.ForwardCall, or the DivergenceCall from a teacher, without a seed."""
    of_rows = {
        "input": operands.input,
        "linear_weight": operands.weight,
        "target": target,
        "linear_bias": operands.bias,
        "token_weight": of_loss.token_weight,
        "token_temperature": of_loss.temperature,
        "num_items": of_loss.num_items,
        "seed": None,
        "options": options,
    }
    if teacher:
        return calls.DivergenceCall(**of_rows, teacher=teacher)
    return calls.ForwardCall(**of_rows, weight=of_loss.weight, classes=classes)


def _run(call, operands, packed, accumulator):
    """The calls.ForwardOutputs of a call, with a graph where one is wanted."""
    is_divergence, wants_graph = isinstance(call, calls.DivergenceCall), any(operands.needs)
    if is_traced() and wants_graph and not is_divergence:
        # The fakes have to know which outputs there are.
        call = call._replace(options=fakes.with_strategy(call))
    outputs = calls.run(call)
    if wants_graph:
        names = autograd.DIFFERENTIABLE[: 2 if packed.differentiable else 1]
        if not is_divergence and outputs.class_logits is not None:
            names = autograd.DIFFERENTIABLE
        values = autograd.with_graph(outputs, call, operands.leaves, names, accumulator)
    outputs = outputs.of_forward() if is_divergence else outputs
    return outputs.with_graph(names, values) if wants_graph else outputs


def linear_divergence_of(
    input,
    linear_weight,
    target,
    teacher_input,
    teacher_weight,
    teacher_bias,
    teacher_temperature,
    teacher_numbers,
    given,
):
    """The list of the loss. `teacher_input`: its hidden states, or without a weight its logits;
    `teacher_numbers`: options.TEACHER_NUMBERS; `given`: the other options."""
    tensors = teacher_input, teacher_weight, teacher_bias, teacher_temperature
    tensors = [None if one is None else one.detach() for one in tensors]
    teacher = calls.Teacher(*tensors, teacher_numbers)
    return linear_cross_entropy_of(input, linear_weight, target, given, teacher)


def cross_entropy_of(logits, target, given):
    """As linear_cross_entropy_of, for given logits."""
    packed, tensors = split(given)
    of_loss = _loss_tensors(packed, tensors, target, logits)
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    call = calls.LogitsCall(
        logits,
        target,
        of_loss.weight,
        of_loss.token_weight,
        of_loss.temperature,
        of_loss.num_items,
        packed.integers_with(grad_input=differentiable),
        packed.numbers,
    )
    outputs = calls.run(call)
    if differentiable:
        names = autograd.DIFFERENTIABLE[: 2 if packed.differentiable else 1]
        values = autograd.CrossEntropy.apply(logits, call, outputs, names)
        outputs = outputs._replace(**dict(zip(names, values, strict=True)))
    return _results(packed, outputs.of_forward(), target, tensors, of_loss.num_items, None)


def _kernel_of(function, names, gives_outputs):
    """`function` as the operator's kernel; an unwanted output is an empty tensor, not None.
    `names`: of the first operands, which must be tensors; torch passes None on."""

    def kernel(*tensors, token_temperature=None, detach_entropy=False, **given):
        for name, tensor in zip(names, tensors, strict=False):
            validate.check_tensor(name, tensor)
        if token_temperature is not None:
            given["temperature"] = token_temperature
        if detach_entropy:
            given["return_entropy"] = "detached"
        loss, *outputs = function(*tensors, given)
        if not gives_outputs:
            return loss
        outputs = outputs or [None] * len(OUTPUTS)
        return loss, *(loss.new_empty(0) if value is None else value for value in outputs)

    return kernel


def _register(name, function, operands, options, variants=2):
    """Registers operator `name` and, of two variants, `_outputs`. `operands`: those of both."""
    typed = {option: row for option, row in options.items() if row.schema}
    arguments = [f"{row.schema} {option}={row.default!r}" for option, row in typed.items()]
    schema = ", ".join((operands, "*", *arguments, "Tensor? token_temperature=None"))
    returns = ", ".join(f"bool {option}=False" for option in (*RETURNS, "detach_entropy"))
    outputs = ", ".join(f"Tensor {output}" for output in ("loss", *OUTPUTS))
    names = re.findall(r"Tensor (\w+)", operands)
    for operator_schema, kernel in (
        (f"{name}({schema}) -> Tensor", _kernel_of(function, names, False)),
        (f"{name}_outputs({schema}, {returns}) -> ({outputs})", _kernel_of(function, names, True)),
    )[:variants]:
        registered = operators.library.define(operator_schema)
        # Without this vmap would loop over the batch, one call per slice, with only a warning.
        operators.library.impl(registered, validate.refuse_vmap, "FuncTorchBatched")
        operators.library.impl(registered, kernel, "CompositeImplicitAutograd")


_of_logits = {name: option for name, option in OPTIONS.items() if option.of_logits}
_of_linear = "Tensor input, Tensor linear_weight, Tensor target"
_register("linear_cross_entropy", linear_cross_entropy_of, _of_linear, OPTIONS)
_teacher = "Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, "
_teacher += "Tensor? teacher_temperature, float[] teacher_numbers"
_of_divergence = {name: OPTIONS[name] for name in OF_DIVERGENCE}
_schema = f"{_of_linear}, {_teacher}"
_register("linear_divergence", linear_divergence_of, _schema, _of_divergence, variants=1)
_register("cross_entropy", cross_entropy_of, "Tensor logits, Tensor target", _of_logits)
