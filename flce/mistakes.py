"""What a refused call most likely meant: names that others give to flce's options, and remedies
that are added to a refusal, from the arguments of the call. Only refused calls come here."""

import difflib
import inspect
import typing

import torch

# Others' names of our options and arguments. A name that a function itself has is never looked up.
_OUR_NAME = {
    "bias": "linear_bias",
    "lm_head_bias": "linear_bias",
    "lse_square_scale": "z_loss",
    "z_loss_weight": "z_loss",
    "z_loss_coef": "z_loss",
    "softcapping": "softcap",
    "logit_softcap": "softcap",
    "logit_softcapping": "softcap",
    "final_logit_softcapping": "softcap",
    "logits_soft_cap": "softcap",
    "smoothing": "label_smoothing",
    "label_smoothing_factor": "label_smoothing",
    "ignored_index": "ignore_index",
    "padding_idx": "ignore_index",
    "class_weight": "weight",
    "ce_weight": "weight",
    "sample_weight": "token_weight",
    "loss_mask": "token_weight",
    "loss_weight": "token_weight",
    "num_items_in_batch": "num_items",
    "denominator": "num_items",
    "logits_scale": "logit_scale",
    "scale": "logit_scale",
    "chunk_size": "max_memory",
    "num_chunks": "max_memory",
    "memory": "max_memory",
    "vocab_size": "valid_vocab",
    "acc_dtype": "accum_dtype",
    "accum_c_fp32": "accum_dtype",
    "vocab_parallel_options": "vocab_parallel",
    "process_group": "vocab_parallel",
    "seed": "gradient_seed",
    "return_logsumexp": "return_lse",
    "return_token_accuracy": "return_accuracy",
    "return_predicted_tokens": "return_predictions",
    "top_k": "topk",
    "loss_type": "divergence",
    "kl_type": "divergence",
    "distill_type": "divergence",
}
# Others' values of our options.
_OUR_VALUE = {
    "kl": "forward_kl",
    "fkl": "forward_kl",
    "kld": "forward_kl",
    "kl_div": "forward_kl",
    "rkl": "reverse_kl",
    "js": "jsd",
    "js_div": "jsd",
    "jensen_shannon": "jsd",
    "average": "mean",
    "avg": "mean",
    "batchmean": "mean",
    "main": "main_grad",
}
_WEIGHTS = {"linear_weight": "input", "teacher_weight": "teacher_input"}
_OPERANDS = ("input", *_WEIGHTS, "linear_bias", "teacher_input", "teacher_bias", "logits")
_OPERANDS += ("adapter_input", "adapter_weight", "teacher_logits")
_INDEX_TYPES = (torch.int64, torch.int32)


def _closest(name, known):
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return matches[0] if matches else None


def our_name(name, known):
    """The one of the names `known` that is most likely meant by another name, or None."""
    ours = _OUR_NAME.get(name.lower())
    return ours if ours in known else _closest(name.lower(), known)


def our_value(value, choices):
    """Words that name the one of `choices` that is most likely meant by a wrong value, or ""."""
    if not isinstance(value, str):
        return ""
    meant = _OUR_VALUE.get(value.lower().replace("-", "_"))
    names = [choice for choice in choices if isinstance(choice, str)]
    meant = meant if meant in names else _closest(value.lower(), names)
    return f"; use {meant!r}" if meant else ""


def refuse_positional(function, operands, others, example):
    """A TypeError for `others`, what a call has by position after its operands, whose names are in
    `operands`. example: (name of the option that a tensor there is likely meant for, its words)."""
    first, (option, meaning) = others[0], example
    got = type(first).__name__
    if isinstance(first, torch.Tensor):
        got = f"a tensor of shape {tuple(first.shape)}; {meaning} is passed as {option}="
    names = ", ".join(operands)
    raise TypeError(
        f"{function}() takes {names} by position, all options by name; got one more, {got}"
    )


def kind_of(value):
    """What a value is that should be a tensor, with a remedy if it is a Module with a weight."""
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module) and isinstance(
        getattr(value, "weight", None), torch.Tensor
    ):
        bias = getattr(value, "bias", None)
        others = "" if bias is None else " (and linear_bias=linear.bias)"
        return f"{kind}, a Module; pass linear.weight{others}"
    return kind


def other_parameters(function, count):
    """The parameters of a function that cannot be called with `count` values, as text, else ""."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function of C
        return ""
    try:
        signature.bind(*(None,) * count)
    except TypeError:
        return str(signature)
    return ""


def add_remedy(error, arguments):
    """Adds to a refusal what the caller most likely has to change. `arguments`: those of the
    refused call by name."""
    if not hasattr(error, "is_flce_refusal"):
        return
    text = str(error)
    name = text.partition(":")[0]
    if remedy := _remedy(name, {n: value for n, value in arguments.items() if _is_dense(value)}):
        error.args = (f"{text}; {remedy}", *error.args[1:])


def _is_dense(value):
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.layout is torch.strided and not value.is_nested


class _Operands(typing.NamedTuple):
    """Tensors of a refused call. `rows`: the one whose leading dimensions are those of the rows,
    `rows_name` its name; weight: None in a call with logits."""

    rows_name: str
    rows: torch.Tensor
    weight: torch.Tensor | None
    target: torch.Tensor

    @property
    def shape(self):
        """Of the rows."""
        return self.rows.shape[:-1]

    @property
    def classes(self):
        return self.rows.shape[-1] if self.weight is None else self.weight.shape[0]


def _remedy(name, arguments):
    """The remedy for a refusal of the argument `name`, or None. `arguments`: dense tensors."""
    value = arguments.get(name)
    if value is None:
        return None
    if name in _OPERANDS and (remedy := _of_dtype(name, value)):
        return remedy
    operands = _operands_of(arguments)
    if operands is None:
        return None
    if name in ("linear_weight", "target") and _are_swapped(operands):
        return (
            "input and linear_weight look swapped: the order is input (..., H), linear_weight "
            "(V, H), target (...)"
        )
    if name in _WEIGHTS:
        return _of_weight(name, value, arguments.get(_WEIGHTS[name]))
    return _of_target(operands) if name == "target" else None


def _operands_of(arguments):
    """The _Operands, or None if the call has not all of them."""
    rows_name = "logits" if "logits" in arguments else "input"
    rows, weight = arguments.get(rows_name), arguments.get("linear_weight")
    target = arguments.get("target")
    if target is None or rows is None or rows.dim() == 0:
        return None
    if rows_name == "input" and (weight is None or weight.dim() == 0):
        return None
    return _Operands(rows_name, rows, weight, target)


def _of_dtype(name, tensor):
    """Of an operand that is quantised, or that holds other things than an operand does."""
    dtype = tensor.dtype
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        return None
    if name == "input" and dtype in _INDEX_TYPES:
        return "input takes hidden states (..., H), not token ids"
    if dtype.is_floating_point:
        return f"{dtype}: pass {name}.to(torch.bfloat16), times the scale that belongs to it"
    if dtype == torch.bool or dtype in _INDEX_TYPES:
        return f"pass {name} in a floating dtype"
    return (
        f"quantised values: pass what dequantize() of {name} gives "
        "(bitsandbytes.functional.dequantize_4bit for its 4-bit weights)"
    )


def _are_swapped(operands):
    weight = operands.weight
    if weight is None or operands.rows.dim() != 2 or weight.dim() < 2:
        return False
    is_of_weight = operands.target.shape == weight.shape[:-1] != operands.shape
    return is_of_weight and weight.shape[-1] == operands.rows.shape[-1]


def _of_weight(name, weight, rows):
    is_matrix = weight.dim() == 2 and rows is not None and rows.dim() > 0
    if is_matrix and weight.shape[0] == rows.shape[-1] != weight.shape[1]:
        return f"it looks transposed, (H, V): pass {name}.T"
    return None


def _of_target(operands):
    target, shape, classes = operands.target, operands.shape, operands.classes
    is_index = target.dtype in _INDEX_TYPES
    if target.shape == shape:
        return _of_label_dtype(target.dtype)
    if target.shape == (*shape, 1):
        return f"pass target.squeeze(-1){'' if is_index else '.long()'}"
    if target.shape == (*shape, classes) and not target.is_floating_point():
        return "one-hot labels: pass target.argmax(-1), or target.float() as probabilities"
    if _is_cut(target, shape):
        uncut = "" if operands.weight is None else "the uncut labels with shift=1, or "
        cut = f"{operands.rows_name}[{':, ' * (len(shape) - 1)}:-1]"
        return f"labels are one position shorter than {operands.rows_name}: pass {uncut}{cut}"
    if target.numel() == shape.numel() and len(shape) == 1:
        return "pass target.flatten()"
    if target.numel() == shape.numel() and target.dim() == 1:
        return f"pass {operands.rows_name}.flatten(0, -2)"
    return None


def _of_label_dtype(dtype):
    """Of labels of the right shape."""
    if dtype.is_floating_point:
        return f"integer class labels are expected in this shape, got {dtype}: pass target.long()"
    has_no_remedy = dtype in _INDEX_TYPES or dtype == torch.bool or dtype.is_complex
    return None if has_no_remedy else "pass target.long()"


def _is_cut(target, shape):
    """Whether labels have lost the first or last position of each sequence."""
    is_alike = target.dim() == len(shape) > 0 and target.shape[:-1] == shape[:-1]
    return is_alike and target.shape[-1] == shape[-1] - 1
