"""Wrong implementations: ignored rows and upstream gradients; see wrong.py."""

import functools

import torch
import torch.nn.functional as F

import flce
from harness.wrong import WRONG, Changed, Wrong, found_by, ignored, right, zero_from

# ---- ignored rows ----


@found_by("ignored", reduction="mean")
def counts_ignored_rows(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    valid = (~ignored(y, options)).sum()
    return loss * valid / max(len(y), 1) if options["reduction"] == "mean" else loss


@found_by("ignored", ignore_index=3)
def ignores_minus_100_alone(x, w, y, bias, options):
    return right(x, w, y.clamp(min=0), bias, options | {"ignore_index": -100})


@found_by("ignored", ignore_index=504)
def clamps_targets_before_it_compares(x, w, y, bias, options):
    return right(x, w, y.clamp(max=len(w) - 1), bias, options)


@found_by("ignored", ignore_index=3)
def leaves_the_ignored_class_out(x, w, y, bias, options):
    index = options["ignore_index"]
    out = torch.arange(len(w)) == index
    return right(x, w, y, bias, options, logits=lambda z: z.masked_fill(out, -1e9))


@found_by("ignored", ignored="some")
def ignored_rows_have_gradients(x, w, y, bias, options):
    cut, loss = ignored(y, options), right(x, w, y, bias, options)
    others = {"reduction": "sum", "ignore_index": -100}
    extra = right(x, w, y.masked_fill(~cut, -100).masked_fill(cut, 0), bias, others)
    return loss + 1e-2 * (extra - extra.detach())


@found_by("ignored", poisoned=True)
def leaks_nan_of_ignored_rows(x, w, y, bias, options):
    x, w, bias = (None if one is None else one.double() for one in (x, w, bias))
    return flce.reference.cross_entropy(F.linear(x, w, bias), y, **options)


@found_by("ignored", ignored="all", reduction="sum")
def nan_if_all_rows_are_ignored(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss * torch.nan if ignored(y, options).all() else loss


@found_by("ignored", ignored="all", reduction="mean")
def gradient_is_nan_if_all_rows_are_ignored(x, w, y, bias, options):
    nothing = ignored(y, options).all()
    return right(x, w, y, bias, options, of_logits=lambda g: g * torch.nan if nothing else g)


@found_by("ignored", ignored="first")
def ends_at_the_first_ignored_row(x, w, y, bias, options):
    later = ignored(y, options).cumsum(0) > 0
    return right(x, w, y.masked_fill(later, options["ignore_index"]), bias, options)


@found_by("ignored", reduction="none", ignored="some")
def ignored_rows_have_losses(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss.masked_fill(ignored(y, options), 1.0) if loss.dim() else loss


@found_by("ignored", reduction="none", ignored="some")
def losses_of_valid_rows_come_first(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss[torch.argsort(ignored(y, options).int(), stable=True)] if loss.dim() else loss


@found_by("pairs", int32=True, ignored="some")
def int32_targets_with_ignored_rows(x, w, y, bias, options):
    wrong = y.dtype == torch.int32 and ignored(y, options).any()
    return right(x, w, y, bias, options, of_logits=lambda g: g + 1e-2 if wrong else g)


# ---- upstream gradients ----


def changing_upstream(change, x, w, y, bias, options):
    return Changed.apply(right(x, w, y, bias, options), change)


def upstream(group, name, change, **fields):
    loss = functools.partial(changing_upstream, change)
    WRONG.append(Wrong(f"upstream_{name}", loss, group, fields))


upstream("upstream", "is_ignored", torch.ones_like)
upstream("upstream", "is_squared", torch.square, upstream="other")
upstream("upstream", "of_0_gives_nan", lambda grad: grad / grad.ne(0), upstream="zero")
upstream("upstream", "overflows_float16", lambda g: g.half().to(g.dtype), upstream="scaled")
upstream(
    "upstream",
    "of_the_first_row_is_that_of_all",
    lambda grad: grad[:1].expand_as(grad) if grad.dim() else grad,
    reduction="none",
)
upstream(
    "upstream",
    "is_read_without_its_stride",
    lambda grad: grad.flip(0) if grad.dim() and len(grad) > 1 and grad.stride(0) > 1 else grad,
    upstream="strided",
)
upstream(
    "upstream",
    "that_is_expanded_is_read_as_one_row",
    lambda grad: zero_from(1, grad) if grad.dim() and grad.stride(0) == 0 else grad,
    upstream="expanded",
)


@found_by("upstream", upstream="other")
def upstream_reaches_x_alone(x, w, y, bias, options):
    of_x = right(x, w.detach(), y, bias, options)
    of_w = Changed.apply(right(x.detach(), w, y, bias, options), torch.ones_like)
    return of_x + of_w - of_w.detach()


@found_by("options", bias="normal", weight=None)
def upstream_does_not_reach_the_bias(x, w, y, bias, options):
    if bias is None:
        return right(x, w, y, bias, options)
    of_others = right(x, w, y, bias.detach(), options)
    of_bias = right(x.detach(), w.detach(), y, bias, options)
    of_bias = Changed.apply(of_bias, torch.ones_like)
    return of_others + of_bias - of_bias.detach()
