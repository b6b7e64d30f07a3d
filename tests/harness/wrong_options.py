"""Wrong implementations: options; see wrong.py."""

import functools

import torch
import torch.nn.functional as F

from harness.wrong import WRONG, Changed, Wrong, found_by, ignored, right, zero_from


def without(name, x, w, y, bias, options):
    options = {key: value for key, value in options.items() if key != name}
    return right(x, w, y, None if name == "bias" else bias, options)


for _name, _value in (
    ("bias", "normal"),
    ("weight", "positive"),
    ("softcap", 3.0),
    ("label_smoothing", 0.1),
    ("z_loss", 0.01),
):
    _loss = functools.partial(without, _name)
    WRONG.append(Wrong(f"without_{_name}", _loss, "options", {_name: _value}))


@found_by("options", bias="normal")
def gradient_of_bias_is_a_mean(x, w, y, bias, options):
    bias = None if bias is None else Changed.apply(bias, lambda grad: grad / len(x))
    return right(x, w, y, bias, options)


@found_by("options", softcap=5.0)
def caps_before_it_adds_the_bias(x, w, y, bias, options):
    cap = options.get("softcap")
    if cap is None or bias is None:
        return right(x, w, y, bias, options)

    def capped(z):
        return cap * torch.tanh((z - bias.double()) / cap) + bias.double()

    return right(x, w, y, bias, options | {"softcap": None}, logits=capped)


@found_by("options", softcap=3.0)
def forgets_the_slope_of_softcap(x, w, y, bias, options):
    other = without("softcap", x, w, y, bias, options)
    return right(x, w, y, bias, options).detach() + other - other.detach()


@found_by("pairs", softcap=1.5, logits="extreme")
def slope_of_softcap_is_at_least_1e_3(x, w, y, bias, options):
    """The product has one slope more, of a softcap whose own is divided out."""
    if "softcap" not in options:
        return right(x, w, y, bias, options)
    cap = options["softcap"]

    def capped(z):
        t = torch.tanh(z / cap)
        slope = (1.0 - t.square()).clamp(min=1e-3).detach()
        return (cap * t - slope * z).detach() + slope * z

    return right(x, w, y, bias, options | {"softcap": None}, logits=capped)


@found_by("options", reduction="mean", weight="positive")
def divides_by_rows_not_weights(x, w, y, bias, options):
    if options["reduction"] != "mean":
        return right(x, w, y, bias, options)
    total = right(x, w, y, bias, options | {"reduction": "sum"})
    return total / (~ignored(y, options)).sum().clamp(min=1)


@found_by("options", reduction="none", weight="positive")
def rows_have_no_class_weights_with_reduction_none(x, w, y, bias, options):
    return without("weight" if options["reduction"] == "none" else "", x, w, y, bias, options)


@found_by("options", weight="zeros")
def class_weight_0_gives_nan(x, w, y, bias, options):
    loss, weight = right(x, w, y, bias, options), options.get("weight")
    return loss if weight is None or weight.ne(0).all() else loss * torch.nan


@found_by("options", weight="signed")
def class_weights_are_at_least_0(x, w, y, bias, options):
    options = {k: v.clamp(min=0) if k == "weight" else v for k, v in options.items()}
    return right(x, w, y, bias, options)


@found_by("options", bias="masked")
def bias_of_minus_inf_gives_nan(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss * torch.nan if bias is not None and bias.isinf().any() else loss


@found_by("options", bias="masked")
def gradient_is_nan_where_the_bias_is_minus_inf(x, w, y, bias, options):
    def of_logits(grad):
        return grad if bias is None else grad.masked_fill(bias.isinf(), torch.nan)

    return right(x, w, y, bias, options, of_logits=of_logits)


@found_by("pairs", bias="normal", ignored="some")
def gradient_with_bias_and_ignored_rows_is_1_percent_off(x, w, y, bias, options):
    plain = "softcap" not in options and "z_loss" not in options
    off = 1.01 if plain and bias is not None and ignored(y, options).any() else 1.0
    return right(x, w, y, bias, options, of_logits=lambda grad: off * grad)


@found_by("options", label_smoothing=0.1)
def smooths_over_other_classes(x, w, y, bias, options):
    if "label_smoothing" in options:
        eps = options["label_smoothing"] * len(w) / (len(w) - 1)
        options = options | {"label_smoothing": min(1.0, eps)}
    return right(x, w, y, bias, options)


@found_by("pairs", weight="positive", label_smoothing=0.1)
def smooths_without_class_weights(x, w, y, bias, options):
    eps, weight = options.get("label_smoothing"), options.get("weight")
    if eps is None or weight is None or options["reduction"] != "mean" or "z_loss" in options:
        return right(x, w, y, bias, options)
    valid = ~ignored(y, options)
    own = right(x, w, y, bias, options | {"label_smoothing": 0.0})
    unweighted = options | {"label_smoothing": 1.0, "weight": None, "z_loss": 0.0}
    factor = valid.sum() / weight.double()[y.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()
    return (1 - eps) * own + eps * factor * right(x, w, y, bias, unweighted)


@found_by("pairs", label_smoothing=1.0)
def label_smoothing_of_1_is_none(x, w, y, bias, options):
    options = {k: v for k, v in options.items() if k != "label_smoothing" or v < 1.0}
    return right(x, w, y, bias, options)


@found_by("pairs", vocab=129, label_smoothing=0.1)
def last_class_has_no_gradient_with_smoothing(x, w, y, bias, options):
    def of_logits(grad):
        wrong = "label_smoothing" in options and grad.shape[-1] % 128 == 1
        return zero_from(grad.shape[-1] - 1, grad.T).T if wrong else grad

    return right(x, w, y, bias, options, of_logits=of_logits)


def z_term(x, w, y, bias, options):
    """The part z_loss lse^2 alone."""
    loss = right(x, w, y, bias, options)
    return loss - right(x, w, y, bias, options | {"z_loss": 0.0})


@found_by("options", z_loss=0.01)
def z_loss_has_no_gradient(x, w, y, bias, options):
    if "z_loss" not in options:
        return right(x, w, y, bias, options)
    part = z_term(x, w, y, bias, options)
    return right(x, w, y, bias, options | {"z_loss": 0.0}) + part.detach()


@found_by("options", z_loss=0.01, reduction="mean")
def z_loss_is_the_square_of_a_mean(x, w, y, bias, options):
    if "z_loss" not in options or options["reduction"] != "mean":
        return right(x, w, y, bias, options)
    number = options["z_loss"]
    rows = z_term(x, w, y, bias, options | {"reduction": "none"}) / number
    plain = right(x, w, y, bias, options | {"z_loss": 0.0})
    return plain + number * rows.clamp(min=1e-12).sqrt().sum().square() / len(x) ** 2


@found_by("pairs", z_loss=0.1, ignored="some")
def z_loss_counts_ignored_rows(x, w, y, bias, options):
    if "z_loss" not in options or options["reduction"] != "mean":
        return right(x, w, y, bias, options)
    part, share = z_term(x, w, y, bias, options), (~ignored(y, options)).sum() / max(1, len(y))
    return right(x, w, y, bias, options | {"z_loss": 0.0}) + share * part


def reduced(rows, y, options):
    """Of losses of rows, without class weights."""
    if options["reduction"] == "none":
        return rows
    return rows.sum() / (1 if options["reduction"] == "sum" else (~ignored(y, options)).sum())


@found_by("pairs", z_loss=0.1, logits="offset")
def gradient_of_z_loss_is_that_of_the_absolute_lse(x, w, y, bias, options):
    if "z_loss" not in options:
        return right(x, w, y, bias, options)
    cut = ignored(y, options)
    logits = F.linear(*(None if one is None else one.double() for one in (x, w, bias)))
    lse = logits.logsumexp(-1).masked_fill(cut, 0.0)
    wrong = reduced(options["z_loss"] * 2 * lse.abs().detach() * lse, y, options)
    part = z_term(x, w, y, bias, options).detach()
    return right(x, w, y, bias, options | {"z_loss": 0.0}) + part + wrong - wrong.detach()
