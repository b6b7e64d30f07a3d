"""Deferred values computed from a head's output, and how the real ones are computed.

The functions that do this, from the caller's side to the head's product; those before
compute_logits are methods of a DeferredValue:

    materialize_for(function)       __torch_function__ and __torch_dispatch__, for a function that
                                    is not deferred: counts and tells that, then materialize()
    materialize()                   the value that the caller sees: computed once and kept, so that
                                    what is written to it stays
    recompute()                     the value as it was before such writes, not kept: for gradients
                                    and divergences, which must not see the writes
    compute_from_head()             what both call for a value with a Record: the steps of the
                                    Record on its logits, cached ones if that is allowed
    compute_logits(record, ...)     the real logits of a Record, where the weight is whole, without
                                    a cache; also for the backward of a weight of another class
    DeferringMixin.linear_forward   (head.py) the forward of nn.Linear, inside the Module's hooks

An EagerValue (eager.py) has no graph, as autograd has recorded the deferred Tensor: it computes
without gradients. The values of a TracedValue have a graph of their own.

Four things tell about gradients:

    head_call.grad_mode         whether grad mode was on in the head's call
    head_call.requires_grad     whether the head's real product requires grad: grad_mode, and an
                                operand does
    deferred.has_gradient       whether this deferred Tensor requires grad: not after detach()
    deferred.wants_gradient()   has_gradient, and grad mode is on now: what is computed of the value
                                now gets a gradient
"""

import contextlib
import copy
import functools

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from ..modes import autocast_dtype
from ..validate import is_dtensor
from . import steps
from .reentry import own_fusion, with_whole_weights


def mapped(change, tree):
    """The tree of tuples, lists and dicts with change(leaf) for each leaf. A tree of arguments is
    flat in nearly all calls, where torch.utils._pytree takes several times as long."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(change, branch) for branch in tree])
    if kind is dict:
        return {name: mapped(change, branch) for name, branch in tree.items()}
    return change(tree)


def instances_in(kind, tree):
    """The instances of a class in a tree of arguments, in its order."""
    instances = []
    mapped(lambda leaf: instances.append(leaf) if isinstance(leaf, kind) else None, tree)
    return instances


class Snapshot:
    """A head's hidden states, weight and bias at its call. Three things tell that they changed:
    the Fusion's last_optimizer_step, as fused optimizers do not raise `_version`; `_version`, which
    torch.compile does not trace and inference tensors do not have; some of the elements.
    holds: the logits are of these Tensors, whatever the nn.Linear has later."""

    def __init__(self, linear, x, holds):
        self.fusion, self.linear, self.holds = linear._flce_fusion, linear, holds
        self.last_optimizer_step, named = self.fusion.last_optimizer_step, {"hidden states": x}
        # Hooks may gather the weight, which changes it: then optimizer steps alone are compared.
        if not linear._forward_pre_hooks and "_old_forward" not in linear.__dict__:
            named |= {"weight": linear.weight, "bias": linear.bias}
        self.tensors = []  # (name, tensor, version or None, elements or None)
        for name, tensor in named.items():
            if _is_plain(tensor):
                version = None if is_compiling() or tensor.is_inference() else tensor._version
                compares = version is None or name != "hidden states"
                elements = _some_elements_of(name, tensor).clone() if compares else None
                self.tensors.append((name, tensor, version, elements))

    def change(self, compares_elements):
        """What has changed, in words, or None. compares_elements: waits for the device."""
        if self.fusion.last_optimizer_step is not self.last_optimizer_step:
            return "an optimizer that has stepped since"
        for name, tensor, version, elements in self.tensors:
            is_held = self.holds or name == "hidden states"
            current = tensor if is_held else getattr(self.linear, name)
            is_written = version is not None and tensor._version != version
            is_written = is_written or (compares_elements and _differs(elements, name, tensor))
            # Another Tensor is a replacement, unless it is the sharded or offloaded form of the
            # weight, which hooks of an enclosing Module make whole.
            is_changed = is_written if current is tensor else _is_plain(current)
            if is_changed:
                return f"{name} of shape {tuple(tensor.shape)} written to or replaced since"
        return None


def _is_plain(tensor):
    return type(tensor) in (torch.nn.Parameter, torch.Tensor) and not tensor.is_meta


def _some_elements_of(name, tensor):
    """An element of each row of the hidden states, at most 31 x 31 of a weight."""
    if name == "hidden states":
        return tensor.detach()[..., :1]
    return tensor.detach()[tuple([slice(None, None, max(n // 16, 1)) for n in tensor.shape])]


def _differs(elements, name, tensor):
    # FSDP2 frees the memory of weights; a graph that is captured cannot wait.
    if elements is None or tensor.untyped_storage().size() == 0:
        return False
    if elements.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    current = _some_elements_of(name, tensor)
    is_alike = current.shape == elements.shape
    is_alike = is_alike and (current.dtype, current.device) == (elements.dtype, elements.device)
    return not (is_alike and torch.allclose(current, elements, rtol=0, atol=0, equal_nan=True))


class HeadCall:
    """One call of a head, shared by all values computed from its output. fusion: the Fusion, which
    counts losses, reads and fall-backs. requires_grad, grad_mode: as above. snapshots: of what has
    to be the same when the logits are made. autocast: the dtype of autocast in the call, or None.
    loss_is_settled: whether flce has computed a loss of the call (or log p of targets), or reported
    that the loss needs the logits; logits made after that count as reads, not as fall-backs."""

    def __init__(self, fusion, device, requires_grad, snapshots):
        self.fusion, self.device = fusion, device
        self.requires_grad, self.snapshots = requires_grad, snapshots
        self.grad_mode, self.autocast = torch.is_grad_enabled(), autocast_dtype(device.type)
        self.is_inference = not is_compiling() and torch.is_inference_mode_enabled()
        self.leaves, self.accumulates = (), fusion.options.get("accumulate_into") is not None
        self.loss_is_settled = False

    def product_dtype(self, x):
        """The dtype of the output of an nn.Linear for x."""
        return x.dtype if x.dtype == torch.float64 else self.autocast or x.dtype

    def check(self, compares_elements):
        """Raises RuntimeError if what the logits depend on has changed (`Snapshot.change`)."""
        if is_compiling():
            return
        for snapshot in self.snapshots:
            if change := snapshot.change(compares_elements):
                raise RuntimeError(
                    "flce.fuse: expected the logits to be read before the head's weight or input "
                    f"changes, got {change}: read outputs.logits before optimizer.step(), and give "
                    "the head a copy of what is written to"
                )

    @contextlib.contextmanager
    def entered(self, grad):
        """Restores the autocast state of the head's call, with gradients on or off."""
        enabled = self.autocast is not None
        if torch.is_grad_enabled() == grad and autocast_dtype(self.device.type) == self.autocast:
            yield  # as in every training step
            return
        with torch.set_grad_enabled(grad), torch.autocast(self.device.type, self.autocast, enabled):
            yield

    def now(self):
        """The HeadCall of a value that is computed now: this one, or a copy without gradients where
        grad mode is off now and was on in the call."""
        if torch.is_grad_enabled() or not self.grad_mode:
            return self
        head_call = copy.copy(self)
        head_call.grad_mode = head_call.requires_grad = False
        return head_call


class DeferredValue:
    """One deferred value. record: how it is computed from a head's products. parent: the one whose
    memory it shares, as a view of it; without one it has memory of its own. value: the real tensor,
    once there is one. Subclasses have `materialize` and `recompute`, as above."""

    def __init__(self, head_call, record, parent=None):
        self.head_call, self.record, self.parent, self.value = head_call, record, parent, None

    def like(self, device=None, shape=0):
        """An empty tensor of the value's dtype, and of its device."""
        dtype = self.meta_tensor().dtype if self.record is None else self.record.dtype
        return torch.empty(shape, dtype=dtype, device=device or self.head_call.device)

    def is_pending(self):
        """Whether neither this value nor one that it is a view of is real yet."""
        return self.value is None and (self.parent is None or self.parent.is_pending())

    def note_materialized(self, name):
        """Notes that real logits are computed for the operation `name`, which is not deferred: as a
        read if the loss is settled or the head's call had no gradients; else as a fall-back."""
        if self.head_call.loss_is_settled or not self.head_call.grad_mode:
            self.head_call.fusion.note_read(name)
        else:
            self.head_call.fusion.note_fall_back(f"{name} is not deferred")

    def materialize_for(self, function):
        """The real value, because `function` is not deferred."""
        if self.is_pending() and not self.is_read_by_autograd():
            self.note_materialized(name_of(function))
        return self.materialize()

    def compute_from_head(self, uses_cache=False, memory=None):
        """The real value: the Record's steps on its logits. uses_cache: on real logits that exist
        already, if they do. memory: the Memory of this value, kept with new logits."""
        head_call, record = self.head_call, self.record
        # Values for a loss are not compared: nothing may wait for the device in a training step.
        is_read = head_call.loss_is_settled or not head_call.requires_grad
        head_call.check(compares_elements=is_read)
        if record.form() == steps.KL:  # of two values
            return steps.apply_steps(record.form_steps[-1:], None)
        rows = record.rows
        logits = rows.cached_logits(record.steps, head_call.requires_grad) if uses_cache else None
        if logits is not None and not record.form_steps:
            return logits.clone()
        if logits is not None:
            return steps.apply_steps(record.form_steps, logits)
        logits = compute_logits(record, head_call)
        rows.logits_cache = None if is_compiling() else (record.steps, logits, memory)
        return steps.apply_steps(record.form_steps, logits)


class TracedValue(DeferredValue):
    """A value of a graph, and of what a graph has returned: its real values have a graph of their
    own. view: it is view(the parent's value)."""

    def __init__(self, head_call, record, parent=None, view=None):
        super().__init__(head_call, record, parent)
        self.view = view

    def meta_tensor(self):
        """A meta tensor with the strides of the real value; views of it alias as that would."""
        if self.parent is not None:
            return self.view(self.parent.meta_tensor())
        return torch.empty(self.record.shape, dtype=self.record.dtype, device="meta")

    has_gradient = property(lambda self: self.head_call.requires_grad)

    def wants_gradient(self):
        return self.head_call.requires_grad and torch.is_grad_enabled()

    def then(self, record, view=None):
        """The TracedValue of what `record` computes from this one: a view of it, or with memory of
        its own."""
        return TracedValue(self.head_call.now(), record, None if view is None else self, view)

    def summed(self, other, head_call, record):
        """The TracedValue of the sum of this one and `other`."""
        return TracedValue(head_call.now(), record)

    def is_read_by_autograd(self):
        """No: its values have a graph, so autograd saves real ones."""
        return False

    def materialize(self):
        """Under the modes of the head's call: what a reader under no_grad computes must have a
        gradient for later readers."""
        if self.value is None:
            with self.head_call.entered(self.head_call.grad_mode):
                if self.parent is None:
                    self.value = self.compute_from_head(uses_cache=True)
                else:
                    self.value = self.view(self.parent.materialize())
        return self.value

    def recompute(self):
        with self.head_call.entered(self.head_call.grad_mode):
            return self.compute_from_head()


def compute_logits(record, head_call):
    """The real logits of a Record. Of heads that are not fused any more, too."""
    dtype = None if is_compiling() else head_call.autocast
    work = functools.partial(_logits_of_sources, record.steps, dtype)
    return with_whole_weights(record.sources, work)


def _logits_of_sources(steps_after, dtype, sources):
    products = [steps.apply_steps(s.steps, _linear_output(s, dtype)) for s in sources]
    return steps.apply_steps(steps_after, sum(products[1:], products[0]))


def _linear_output(source, dtype):
    """What the nn.Linear computes, without hooks. dtype: that of autocast, whose casts are made
    here, because a __torch_dispatch__ runs below autocast."""
    linear, x, (weight, bias) = source.linear, source.x, source.parameters()
    if source.weight_and_bias is None or is_dtensor(weight):
        return linear(x) if own_fusion(linear) is None else linear.linear_forward(x)
    if dtype is not None and x.dtype != torch.float64:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return F.linear(x, weight, bias)


def deferred_value_of(value):
    """The DeferredValue of a deferred Tensor; None for everything else."""
    return getattr(value, "_flce", None)


_COMMUTATIVE = {torch.add, torch.Tensor.add, torch.mul, torch.multiply, torch.Tensor.mul}


def with_deferred_first(function, args, kwargs):
    """(the DeferredValue of the first operand, or None; the operands). Those of a sum or a product
    are exchanged where the second one is deferred."""
    if not args:
        return None, args
    first, *others = args
    deferred = deferred_value_of(first)
    if deferred is None and len(others) == 1 and not kwargs and function in _COMMUTATIVE:
        (second,) = others
        return deferred_value_of(second), (second, first)
    return deferred, args


def name_of(function):
    if is_compiling():
        return function.__name__  # resolve_name is not traced
    is_ours = getattr(function, "__module__", None) == "flce.functional"
    name = f"flce.{function.__name__}" if is_ours else torch.overrides.resolve_name(function)
    return name or str(function)
