"""accumulate_into: the backward adds the weight's gradient to its .grad or .main_grad.

Nothing is written before every check has passed, and each backward adds once. A forward writes
nothing here, also if a checkpoint runs it again.
"""

import contextlib
import threading

import torch

from . import torch_private, validate
from .validate import refuse

_NAME = "accumulate_into"
# Held while a backward on the CPU adds, because threads would lose sums; on CUDA one thread of
# autograd runs all backwards of a device.
_CPU_LOCK = threading.RLock()
# Where torch keeps the hooks on a parameter's gradient, by the function that registers them.
_HOOKS = {
    "Tensor.register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}


def refuse_tracing():
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"flce: {_NAME} is not supported under torch.compile and torch.export, where no "
            "backward may write to a parameter's gradient; call the loss outside of the compiled "
            f"region, or with {_NAME}=None"
        )
    if validate.function_transforms_are_on():
        raise RuntimeError(f"flce: {_NAME} is not supported in torch.func transforms: use backward")


class Accumulator:
    """Adds the weight's gradient of one call to an attribute of the parameter `weight`."""

    def __init__(self, weight, attribute):
        self.weight, self.attribute = weight, attribute
        self.lock = _CPU_LOCK if weight.is_cpu else contextlib.nullcontext()
        if attribute == "main_grad":
            self.checked_target()
        else:
            self._check_weight()

    def _check_weight(self):
        weight = self.weight
        if torch_private.is_traceable_wrapper_subclass(weight):
            got = f"{type(weight).__name__}, whose gradient is not one piece of memory"
            refuse(_NAME, "a plain tensor as linear_weight", f"{got}; use {_NAME}=None")
        if not weight.is_leaf:
            others = f"others, which has no .{self.attribute} of its own; use {_NAME}=None"
            refuse(_NAME, "a leaf as linear_weight", f"a tensor that was computed from {others}")
        if not weight.is_contiguous():
            refuse(_NAME, "a contiguous linear_weight", "another layout")
        hooks = [name for name, attribute in _HOOKS.items() if getattr(weight, attribute)]
        if hooks and not self._is_declared():
            which = " and ".join(hooks)
            got = f"one with hooks of {which}, which would not get the gradient; remove them, use "
            got += f'{_NAME}=None, or "main_grad" with weight.grad_added_to_main_grad declared'
            refuse(_NAME, "a linear_weight without gradient hooks", got)

    def _is_declared(self):
        """Whether the owner of main_grad has declared Megatron's protocol: its hooks expect a
        gradient, and grad_added_to_main_grad tells them to drop it."""
        return self.attribute == "main_grad" and hasattr(self.weight, "grad_added_to_main_grad")

    def dtype(self):
        """Of the tensor to add to, which is checked before anything is added; None without one."""
        return getattr(getattr(self.weight, self.attribute, None), "dtype", None)

    def checked_target(self):
        """The tensor for flce::backward_into to add to, checked against the weight; None if
        flce::backward must create .grad. Runs in a backward, before anything is written."""
        self._check_weight()
        weight, name = self.weight, f"linear_weight.{self.attribute}"
        target = getattr(weight, self.attribute, None)
        if target is None and self.attribute == "grad":
            if getattr(weight, "grad_dtype", weight.dtype) in (weight.dtype, None):
                return None
            raise ValueError(f"linear_weight.grad_dtype: expected {weight.dtype} for {_NAME}")
        if not isinstance(target, torch.Tensor):
            refuse(name, f'a tensor for {_NAME}="main_grad"', type(target).__name__)
        if torch_private.is_traceable_wrapper_subclass(target) or target.layout != torch.strided:
            got = f"{type(target).__name__} of layout {target.layout}"
            refuse(name, "a plain dense tensor", got)
        widens = self.attribute == "main_grad" and weight.dtype.itemsize == 2
        dtypes = (weight.dtype, torch.float32) if widens else (weight.dtype,)
        if target.dtype not in dtypes:
            refuse(name, f"dtype {' or '.join(map(str, dtypes))}", target.dtype)
        validate.check_shape(name, target, weight.shape)
        validate.check_same_device(name, target, "linear_weight", weight)
        if target.is_neg():
            refuse(name, "a tensor that holds its values", "a view that negates them (is_neg)")
        if not target.is_contiguous():
            refuse(name, "a contiguous tensor", f"strides {target.stride()}")
        begins = target.data_ptr(), weight.data_ptr()
        if all(begins) and max(begins) < min(begins[0] + target.nbytes, begins[1] + weight.nbytes):
            refuse(name, "memory of its own", "that of linear_weight")
        if target.requires_grad or target.is_inference():
            kind = "an inference tensor" if target.is_inference() else "one that requires grad"
            refuse(name, "a tensor that may be written to", kind)
        return target

    def should_accumulate(self, node):
        """Whether the running backward should accumulate: not if it computes only other leaves'
        gradients, which needs_input_grad does not tell. `node`: the weight's AccumulateGrad."""
        refuse_tracing()
        if not self.weight.requires_grad:  # the weight was frozen after the forward
            return False
        try:
            return torch_private.engine_executes(node)
        except RuntimeError:
            # The engine reports this for a leaf whose gradient torch.autograd.grad() has to return.
            raise RuntimeError(
                f"flce: {_NAME}={self.attribute!r} adds linear_weight's gradient to "
                f".{self.attribute} in backward(); torch.autograd.grad() cannot return it. Leave "
                f"linear_weight out of its inputs, or use {_NAME}=None"
            ) from None

    def add(self, grad_weight):
        """Adds a gradient of the weight that exists already. Returns what autograd gets as the
        weight's gradient in its place."""
        with self.lock:
            if (into := self.checked_target()) is None:
                return self.finish(grad_weight)
            into.add_(grad_weight)
            return self.finish(None)

    def finish(self, grad_weight):
        """Runs after the gradients are made. `grad_weight`: the new gradient if checked_target()
        returned None, else None, as it was added to the target. Returns what autograd gets as the
        weight's gradient."""
        weight = self.weight
        if weight.is_cuda:
            # The stream that called backward() must wait for this one, as it does at the end for
            # gradients that are returned to autograd.
            written = torch.cuda.current_stream(weight.device).record_event()
            torch_private.call_after_backward(
                lambda: torch.cuda.current_stream(weight.device).wait_event(written)
            )
        if grad_weight is not None:
            weight.grad = grad_weight
        if not self._is_declared():
            return None
        weight.grad_added_to_main_grad = True
        # Zeros change nothing if a hook adds them all the same, or if the weight is used twice.
        # Expanded from one element, they take no memory until autograd copies them.
        return weight.new_zeros(()).expand(weight.shape)
