"""Names of torch that are not public: all that flce.fusion uses, each with a reason why a public
name does not serve. The tests of flce.fuse ran with them in torch 2.10, 2.11, 2.13 and 2.14."""

import contextlib

import torch
import torch.utils._python_dispatch
from torch._C._dynamo import eval_frame
from torch._guards import CompileContext, detect_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext  # that of torch.set_default_device

# Whether two Tensors share their storage.
is_alias = torch._C._is_alias_of
# What a Tensor's own method does, without __torch_function__.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def keeps_graph():
    """Whether the backward that runs now was called with retain_graph=True. A nested one has to do
    the same."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def nested_gradients(values, leaves, gradients, keeps):
    """torch.autograd.grad of plain Tensors, None for leaves that are not used, in a third of its
    time."""
    engine, creates = torch.autograd.Variable._execution_engine, torch.is_grad_enabled()
    values, leaves, gradients = tuple(values), tuple(leaves), tuple(gradients)
    return engine.run_backward(
        values, gradients, keeps, creates, leaves, allow_unreachable=True, accumulate_grad=False
    )


def is_executed(node):
    """Whether the running backward executes a node of autograd, or returns its gradient."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns
        return True


def backward_now():
    """A number of the backward that runs in this thread; -1 without."""
    return torch._C._current_graph_task_id()


def in_backward():
    """Whether this thread runs a backward."""
    return backward_now() != -1


def autograd_in_dispatch():
    """A context in which a __torch_dispatch__ can record and run autograd: its dispatch
    keys are excluded there."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        if hasattr(torch._C.DispatchKey, name):
            excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def without_dispatch_modes():
    """A context without TorchDispatchModes: values that are not made are none of theirs."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


def forbid_addresses(tensor):
    """Makes C++ that asks for the address of a tensor without memory raise."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def is_faking():
    """Whether torch.compile describes Tensors that a graph is given, traces, or writes guards:
    those of torch 2.10 and 2.11 ask Tensors after the trace, without its fake mode."""
    return CompileContext.try_get() is not None or detect_fake_mode() is not None


def run_uncompiled(function):
    """torch.compile does not compile a call of the function by itself, nor what that calls, but
    traces it as a part of its caller."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def foreign_function_mode():
    """The name of a TorchFunctionMode that is active, but for that of a default device; None if
    there is none."""
    for i in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(i)
        if isinstance(mode, TorchFunctionMode) and not isinstance(mode, DeviceContext):
            return type(mode).__name__
    return None


def _methods(names):
    found = [getattr(torch.Tensor, name, None) for name in names.split()]
    return [one for one in found if one is not None]


# Methods that read a Tensor's memory themselves, some by private names. True: what they return may
# be written to.
OF_MEMORY = dict.fromkeys(
    _methods("numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage"), True
)
OF_MEMORY |= dict.fromkeys(
    _methods("tolist __reduce_ex__ __deepcopy__ __repr__ __dlpack_device__ share_memory_"), False
)
