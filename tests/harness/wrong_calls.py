"""Wrong implementations: layouts, operands without a gradient, repeated calls; see wrong.py."""

import torch

from harness.wrong import WRONG, Changed, Raised, Wrong, found_by, right

# ---- layouts ----


@found_by("layout", layout="strided", bias=None)
def reads_rows_as_contiguous(x, w, y, bias, options):
    plain = x.as_strided(x.shape, (x.shape[1], 1))
    return right(plain, w, y, bias, options)


@found_by("layout", layout="padded", bias=None)
def reads_rows_without_their_distance(x, w, y, bias, options):
    """A copy only where the elements of a row are apart."""
    if x.stride(1) == 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))
    return right(x, w, y, bias, options)


@found_by("layout", layout="strided", bias=None)
def reads_the_weight_as_contiguous(x, w, y, bias, options):
    return right(x, w.as_strided(w.shape, (w.shape[1], 1)), y, bias, options)


@found_by("layout", layout="unaligned")
def begins_at_the_storage(x, w, y, bias, options):
    return right(x.as_strided(x.shape, x.stride(), 0), w, y, bias, options)


@found_by("layout", layout="strided", bias="normal")
def reads_the_bias_as_contiguous(x, w, y, bias, options):
    bias = None if bias is None else bias.as_strided(bias.shape, (1,))
    return right(x, w, y, bias, options)


@found_by("layout", layout="strided", bias=None)
def reads_targets_as_contiguous(x, w, y, bias, options):
    y = y.as_strided(y.shape, (1,))
    return right(x, w, y.masked_fill(y == -1, 0), bias, options)


@found_by("layout", layout="tied")
def scales_the_gradient_of_tied_rows(x, w, y, bias, options):
    tied = x.requires_grad and not x.is_leaf
    return right(Changed.apply(x, lambda g: 16 * g) if tied else x, w, y, bias, options)


@found_by("layout", layout="same")
def forgets_one_gradient_where_x_is_w(x, w, y, bias, options):
    return right(x.detach() if x is w else x, w, y, bias, options)


@found_by("layout", targets="equal")
def adds_one_row_of_a_target_to_the_weight(x, w, y, bias, options):
    """A scatter without accumulation: the term -x of a target's class comes from one row alone."""
    first = torch.tensor([(y[:n] == y[n]).sum() == 0 for n in range(len(y))], dtype=torch.bool)
    loss = right(x, w, y, bias, options)
    valid = y != options["ignore_index"]
    rows = -(x.detach().double() * w.double()[y.masked_fill(~valid, 0)]).sum(-1)
    rows = rows.masked_fill(first | ~valid, 0.0)
    if options["reduction"] == "none":
        return loss - rows + rows.detach()
    lost = rows.sum() / (valid.sum() if options["reduction"] == "mean" else 1)
    return loss - lost + lost.detach()


# ---- operands without a gradient ----


@found_by("layout", wants="weight")
def no_gradient_of_the_weight_if_x_needs_none(x, w, y, bias, options):
    return right(x, w if x.requires_grad else w.detach() + 0.0 * w, y, bias, options)


@found_by("layout", wants="input")
def no_gradient_of_x_if_the_weight_needs_none(x, w, y, bias, options):
    return right(x if w.requires_grad else x.detach() + 0.0 * x, w, y, bias, options)


@found_by("layout", wants="bias")
def no_gradient_of_the_bias_if_the_weight_needs_none(x, w, y, bias, options):
    if bias is not None and not w.requires_grad:
        bias = bias.detach() + 0.0 * bias
    return right(x, w, y, bias, options)


@found_by("layout", wants="nothing")
def the_loss_is_0_if_nothing_needs_a_gradient(x, w, y, bias, options):
    loss = right(x, w, y, bias, options)
    return loss if loss.requires_grad else 0.0 * loss


# ---- calls ----


class Loss(torch.autograd.Function):
    """`right` as one Function. `call`: an instance of Call or of a class derived from it."""

    @staticmethod
    def forward(ctx, call, x, w, y, bias, options):
        ctx.call, ctx.backwards, ctx.y, ctx.options = call, 0, y, options
        if call.checks_versions:
            ctx.save_for_backward(x, w, y)
        with torch.enable_grad():
            ctx.leaves = [t if t is None else t.detach().requires_grad_() for t in (x, w, bias)]
            x, w, bias = ctx.leaves
            ctx.loss = right(x, w, y, bias, options)
        call.latest = ctx
        return call.value(ctx.loss.detach())

    @staticmethod
    def backward(ctx, upstream):
        _ = ctx.saved_tensors  # refuses those that have changed
        ctx.backwards += 1
        x, w, bias = ctx.call.gradients(ctx, upstream)
        return None, x, w, None, bias, None


class Call:
    """The right one. An instance lives as long as its adapter."""

    checks_versions = True

    def __call__(self, x, w, y, bias, options):
        return Loss.apply(self, x, w, y, bias, options)

    def value(self, loss):
        return loss

    def gradients(self, ctx, upstream):
        return gradients_of(ctx.loss, ctx.leaves, upstream)


def gradients_of(loss, leaves, upstream):
    there = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(loss, there, upstream.to(loss.dtype), retain_graph=True))
    return [None if leaf is None else next(grads) for leaf in leaves]


@found_by("calls", call="second backward")
class ScalesTheSecondBackwardTwice(Call):
    def gradients(self, ctx, upstream):
        return super().gradients(ctx, upstream if ctx.backwards == 1 else upstream * upstream)


@found_by("calls", call="separate backwards")
class FreesItsBuffersInABackward(Call):
    def gradients(self, ctx, upstream):
        if ctx.backwards > 1:
            raise Raised
        return super().gradients(ctx, upstream)


@found_by("calls", call="second backward")
class ReturnsTheGradientsThatItKeeps(Call):
    """The caller may write to them before a second backward."""

    def gradients(self, ctx, upstream):
        if ctx.backwards == 1:
            ctx.kept = super().gradients(ctx, upstream)
        return ctx.kept


@found_by("calls", call="separate backwards")
class ScalesWhatItKeepsInPlace(Call):
    """The gradients of the second leaf have the upstream gradient twice."""

    def gradients(self, ctx, upstream):
        ctx.kept = upstream if ctx.backwards == 1 else ctx.kept * upstream
        return super().gradients(ctx, ctx.kept)


@found_by("calls", call="interleaved")
class SharesAWorkspaceAmongForwards(Call):
    def gradients(self, ctx, upstream):
        return gradients_of(self.latest.loss, self.latest.leaves, upstream)


@found_by("calls", call="no_grad")
class TheLossIs0WithoutGrad(Call):
    def __call__(self, *operands):
        loss = super().__call__(*operands)
        return loss if torch.is_grad_enabled() else 0.0 * loss


@found_by("calls", call="no_grad")
class RaisesWithoutGrad(Call):
    def __call__(self, *operands):
        if not torch.is_grad_enabled():
            raise Raised
        return super().__call__(*operands)


@found_by("calls", call="repeated")
class AddsInAnOrderThatVaries(Call):
    """By less than a rounding of a float32 sum, as with atomics."""

    calls = 0

    def value(self, loss):
        self.calls += 1
        return loss * (1.0 + 1e-12 * self.calls)


@found_by("calls", call="repeated")
class AddsToTheLossOfTheCallBefore(Call):
    before = 0.0

    def value(self, loss):
        loss, self.before = loss + self.before, loss
        return loss


@found_by("upstream", upstream="other")
class WritesToItsUpstreamGradient(Call):
    def value(self, loss):
        return loss.float()

    def gradients(self, ctx, upstream):
        return super().gradients(ctx, upstream.mul_(2.0))


class ReadsOperandsInTheBackward(Call):
    """As they are then."""

    checks_versions = False

    def gradients(self, ctx, upstream):
        x, w, bias = ctx.leaves
        with torch.enable_grad():
            loss = right(x, w, ctx.y, bias, ctx.options)
        return gradients_of(loss, ctx.leaves, upstream)


for _operand in ("x", "w", "y"):
    _name, _fields = f"reads_{_operand}_in_the_backward", {"call": f"{_operand} changed"}
    WRONG.append(Wrong(_name, ReadsOperandsInTheBackward(), "calls", _fields))
