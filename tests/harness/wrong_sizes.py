"""Wrong implementations: sizes, precision and logits; see wrong.py."""

import functools

import torch
import torch.nn.functional as F

from harness.wrong import Changed, Raised, found_by, ignored, right, same, zero_from

# ---- sizes ----


def first_classes(count, w, y, bias, options):
    """Operands with the first `count` classes alone."""
    options = {k: v[:count] if k == "weight" else v for k, v in options.items()}
    return w[:count], torch.where(y < count, y, 0), None if bias is None else bias[:count], options


@found_by("shapes")
def drops_tail_of_vocabulary(x, w, y, bias, options):
    w, y, bias, options = first_classes(max(1, len(w) // 64 * 64), w, y, bias, options)
    return right(x, w, y, bias, options)


@found_by("shapes")
def reads_beyond_vocabulary(x, w, y, bias, options):
    """Logits of 0 up to a multiple of 64."""
    more = -len(w) % 64
    bias = None if bias is None else F.pad(bias, (0, more))
    options = {k: F.pad(v, (0, more)) if k == "weight" else v for k, v in options.items()}
    return right(x, F.pad(w, (0, 0, 0, more)), y, bias, options)


@found_by("shapes")
def drops_last_rows(x, w, y, bias, options):
    last = torch.arange(len(y)) >= max(1, len(y) // 64 * 64)
    return right(x, w, y.masked_fill(last, options["ignore_index"]), bias, options)


@found_by("shapes")
def drops_tail_of_hidden(x, w, y, bias, options):
    columns = max(1, x.shape[1] // 8 * 8)
    return right(x[:, :columns], w[:, :columns], y, bias, options)


@found_by("shapes", vocab=257)
def last_class_has_no_gradient(x, w, y, bias, options):
    w = Changed.apply(w, lambda grad: zero_from(len(w) - 1, grad)) if len(w) % 128 == 1 else w
    return right(x, w, y, bias, options)


@found_by("shapes", tokens=129)
def last_row_has_no_gradient(x, w, y, bias, options):
    x = Changed.apply(x, lambda grad: zero_from(len(x) - 1, grad)) if len(x) % 128 == 1 else x
    return right(x, w, y, bias, options)


@found_by("shapes")
def wraps_targets_of_8_bits(x, w, y, bias, options):
    return right(x, w, torch.where(y > 127, y - 128, y), bias, options)


@found_by("shapes", tokens=0)
def raises_without_rows(x, w, y, bias, options):
    if len(x) == 0:
        raise Raised
    return right(x, w, y, bias, options)


@found_by("pairs", tokens=0)
def raises_without_rows_unless_mean(x, w, y, bias, options):
    if len(x) == 0 and options["reduction"] != "mean":
        raise Raised
    return right(x, w, y, bias, options)


@found_by("pairs", tokens=1, reduction="none")
def squeezes_one_row(x, w, y, bias, options):
    return right(x, w, y, bias, options).squeeze()


@found_by("pairs", tokens=1, reduction="none")
def doubles_one_row_of_losses(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return 2 * loss if len(x) == 1 and options["reduction"] == "none" else loss


@found_by("options", reduction="none")
def keeps_a_dimension(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss.unsqueeze(-1) if loss.dim() else loss


@found_by("large", tokens=513)
def rows_from_300_on_have_no_gradient(x, w, y, bias, options):
    return right(x, w, y, bias, options, of_logits=functools.partial(zero_from, 300))


@found_by("large", tokens=65537)
def rows_beyond_a_grid_have_no_loss(x, w, y, bias, options):
    beyond = torch.arange(len(y)) >= 65535
    return right(x, w, y.masked_fill(beyond, options["ignore_index"]), bias, options)


@found_by("large", tokens=1025)
def keeps_the_weight_gradient_of_the_last_chunk(x, w, y, bias, options):
    last = (torch.arange(len(x)) >= 1024).unsqueeze(-1)
    if not last.any():
        return right(x, w, y, bias, options)
    of_others = right(x, w.detach(), y, bias, options)
    of_w = right(x.detach(), w, y, bias, options, of_logits=lambda grad: grad * last)
    return of_others + of_w - of_w.detach()


@found_by("large", tokens=513)
def averages_the_means_of_chunks(x, w, y, bias, options):
    if options["reduction"] != "mean" or len(x) <= 256:
        return right(x, w, y, bias, options)
    chunks = zip(x.split(256), y.split(256), strict=True)
    return torch.stack([right(one, w, of_one, bias, options) for one, of_one in chunks]).mean()


@found_by("large", hidden=513)
def columns_from_512_on_are_not_read(x, w, y, bias, options):
    return right(x[:, :512], w[:, :512], y, bias, options)


@found_by("large", vocab=151936)
def classes_above_150000_are_not_read(x, w, y, bias, options):
    w, y, bias, options = first_classes(150000, w, y, bias, options)
    return right(x, w, y, bias, options)


@found_by("large", vocab=128257)
def wraps_targets_of_16_bits(x, w, y, bias, options):
    return right(x, w, torch.where(y > 0, y & 0xFFFF, y), bias, options)


@found_by("large", vocab=50257)
def normalizes_over_the_first_block(x, w, y, bias, options):
    def of_block(z):
        outside = (torch.arange(len(w)) >= 32768) & ~F.one_hot(y.long(), len(w)).bool()
        return z.masked_fill(outside, -1e9)

    return right(x, w, y, bias, options, logits=of_block if len(w) > 32768 else same)


# ---- precision ----


@found_by("shapes", dtype="float32", vocab=384)
def filters_small_gradients(x, w, y, bias, options):
    def filtered(grad):
        return grad.masked_fill(grad.abs() < 2e-4 * grad.abs().max(), 0.0)

    return right(x, w, y, bias, options, of_logits=filtered if len(x) else same)


@found_by("shapes", dtype="bfloat16", vocab=384)
def rounds_logits_unsaid(x, w, y, bias, options):
    def rounded(z):
        return z + (z.bfloat16().double() - z).detach()

    return right(x, w, y, bias, options, logits=rounded)


@found_by("shapes", dtype="float16", vocab=384)
def gradient_of_x_is_off_by_2_to_the_minus_7(x, w, y, bias, options):
    x = Changed.apply(x, lambda grad: (grad.double() * (1 + 2.0**-7)).to(grad.dtype))
    return right(x, w, y, bias, options)


@found_by("shapes", dtype="float32", vocab=384)
def gradient_of_x_is_rounded_to_bfloat16(x, w, y, bias, options):
    x = Changed.apply(x, lambda grad: grad.bfloat16().to(grad.dtype))
    return right(x, w, y, bias, options)


@found_by("large", dtype="bfloat16", tokens=1025)
def sums_gradients_of_chunks_in_the_operands_dtype(x, w, y, bias, options):
    """As autograd does, where the same weight is used for each chunk."""
    if options["reduction"] != "mean" or "weight" in options:
        return right(x, w, y, bias, options)
    chunks, parts = zip(x.split(64), y.split(64), strict=True), options | {"reduction": "sum"}
    total = sum(right(one, w, of_one, bias, parts) for one, of_one in chunks)
    return total / (~ignored(y, options)).sum().clamp(min=1)


@found_by("pairs", dtype="float64")
def computes_float64_in_float32(x, w, y, bias, options):
    x, w, bias = (None if one is None else one.float() for one in (x, w, bias))
    return right(x, w, y, bias, options)


@found_by("shapes", dtype="float64")
def returns_float32_of_float64(x, w, y, bias, options):
    return right(x, w, y, bias, options).float()


@found_by("shapes", dtype="bfloat16", vocab=384)
def returns_the_loss_in_the_operands_dtype(x, w, y, bias, options):
    return right(x, w, y, bias, options).to(x.dtype)


# ---- logits ----


@found_by("logits", offset=1e3)
def subtracts_no_maximum(x, w, y, bias, options):
    """exp overflows float32 above 88.7."""

    def logits(z):
        return z.masked_fill((z > 88.7).any(-1, keepdim=True), torch.nan)

    return right(x, w, y, bias, options, logits)


@found_by("logits", offset=-1e3)
def begins_the_maximum_at_0(x, w, y, bias, options):
    """exp of all logits of a row underflows below -103.3."""

    def logits(z):
        return z.masked_fill((z < -103.3).all(-1, keepdim=True), torch.nan)

    return right(x, w, y, bias, options, logits)


@found_by("logits", offset=-2e4)
def fills_the_last_tile_with_minus_1e4(x, w, y, bias, options):
    more = -len(w) % 64
    if "label_smoothing" in options:  # of which these classes would have a part
        return right(x, w, y, bias, options)
    options = {k: F.pad(v, (0, more)) if k == "weight" else v for k, v in options.items()}
    return right(x, w, y, bias, options, lambda z: F.pad(z, (0, more), value=-1e4))


@found_by("logits", logits="huge")
def clamps_logits_to_1e4(x, w, y, bias, options):
    return right(x, w, y, bias, options, logits=lambda z: z.clamp(-1e4, 1e4))


@found_by("logits", logits="extreme", dtype="float32")
def log2_of_e_has_8_bits(x, w, y, bias, options):
    return right(x, w, y, bias, options, logits=lambda z: z * (1.4453125 / 1.4426950408889634))


@found_by("logits", logits="peaked", reduction="none")
def adds_1e_8_to_the_probability(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    if options.keys() != {"reduction", "ignore_index"} or options["reduction"] != "none":
        return loss
    return -((-loss).exp() + 1e-8).log()


@found_by("logits", logits="peaked")
def gradients_of_logits_are_at_least_1e_8(x, w, y, bias, options):
    return right(x, w, y, bias, options, of_logits=lambda g: g.sign() * g.abs().clamp(min=1e-8))


@found_by("logits", logits="flat")
def flat_rows_have_equal_probabilities(x, w, y, bias, options):
    def levelled(z):
        flat = (z.amax(-1, keepdim=True) - z.amin(-1, keepdim=True)) < 0.2
        return torch.where(flat, z - (z - z.mean(-1, keepdim=True)).detach(), z)

    return right(x, w, y, bias, options, logits=levelled if len(x) else same)
