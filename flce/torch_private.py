"""Names of torch that are not public: all that flce uses, each with a reason why a public name does
not serve. NAMES and ATTRIBUTES say which versions of torch have them, and test_torch_private.py
compares both with the running torch and with flce's sources. CONTRIBUTING.md has how a new torch is
checked."""

import contextlib
import sys

import torch
import torch.utils._python_dispatch
from torch._C._dynamo import eval_frame
from torch._guards import CompileContext, detect_fake_mode
from torch._ops import OpOverload  # noqa: F401  the class of torch.ops' operators
from torch._subclasses.fake_tensor import is_fake  # noqa: F401
from torch.nn.modules.loss import _WeightedLoss as WeightedLoss  # noqa: F401  torch's losses' base
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext  # that of torch.set_default_device
from torch.utils._mode_utils import no_dispatch  # noqa: F401  without dispatch modes and subclasses
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: F401

# By the first and the last version in which they were found: each in 2.10, 2.11, 2.13 and 2.14.
NAMES = {
    ("2.10", "2.14"): """
        torch._C.DisableTorchFunctionSubclass
        torch._C.DispatchKey.AutogradFunctionality
        torch._C._AutoDispatchBelowADInplaceOrView
        torch._C._AutoDispatchBelowAutograd
        torch._C._ForceDispatchKeyGuard
        torch._C._TorchDispatchModeKey.PROXY
        torch._C._any_requires_grad
        torch._C._are_functorch_transforms_active
        torch._C._autograd._get_current_graph_task_keep_graph
        torch._C._autograd._top_saved_tensors_default_hooks
        torch._C._current_autograd_node
        torch._C._current_graph_task_id
        torch._C._dispatch_tls_local_exclude_set
        torch._C._dispatch_tls_local_include_set
        torch._C._dynamo.eval_frame._FrameAction.SKIP
        torch._C._dynamo.eval_frame._FrameExecStrategy
        torch._C._dynamo.eval_frame.set_code_exec_strategy
        torch._C._functorch.is_gradtrackingtensor
        torch._C._get_dispatch_mode
        torch._C._get_function_stack_at
        torch._C._is_alias_of
        torch._C._is_any_autocast_enabled
        torch._C._is_tracing
        torch._C._len_torch_dispatch_stack
        torch._C._len_torch_function_stack
        torch._C._set_throw_on_mutable_data_ptr
        torch._C._will_engine_execute_node
        torch._disable_dynamo
        torch._guards.CompileContext.try_get
        torch._guards.detect_fake_mode
        torch._inductor.ir.ExternKernelOut
        torch._inductor.ir.FallbackKernel
        torch._inductor.lowering.lowerings
        torch._inductor.lowering.make_fallback
        torch._inductor.lowering.tag_to_layout_constraint
        torch._inductor.virtualized.V
        torch._library.utils.get_layout_constraint_tag
        torch._ops.OpOverload
        torch._subclasses.fake_tensor.is_fake
        torch.Tensor._make_wrapper_subclass
        torch.autograd.Variable._execution_engine.queue_callback
        torch.autograd.Variable._execution_engine.run_backward
        torch.autograd.forward_ad._current_level
        torch.distributed._functional_collectives.all_reduce
        torch.distributed._functional_collectives.wait_tensor
        torch.distributed._symmetric_memory.empty
        torch.distributed._symmetric_memory.rendezvous
        torch.distributed.distributed_c10d._resolve_process_group
        torch.nn.modules.loss._WeightedLoss
        torch.nn.modules.module._has_any_global_hook
        torch.nn.parallel.DistributedDataParallel._active_ddp_module
        torch.ops._c10d_functional
        torch.utils._device.DeviceContext
        torch.utils._mode_utils.no_dispatch
        torch.utils._python_dispatch._disable_current_modes
        torch.utils._python_dispatch.is_traceable_wrapper_subclass
        torch.utils._pytree.tree_map
        torch.utils._pytree.tree_map_only
    """.split(),
}
# Attributes of objects of torch, which other files read, or write, themselves: of a Tensor, a
# Module (_is_replica: of a copy by nn.DataParallel; _is_fsdp_managed_module: below), a compiled
# Module, a class of autograd Functions, and an operator.
ATTRIBUTES = {
    ("2.10", "2.14"): """
        Tensor._backward_hooks Tensor._is_view Tensor._is_zerotensor
        Tensor._post_accumulate_grad_hooks Tensor._version
        Module._backward_hooks Module._backward_pre_hooks Module._forward_hooks
        Module._forward_pre_hooks Module._modules Module._parameters
        Module._is_fsdp_managed_module Module._is_replica
        OptimizedModule._orig_mod Function._backward_cls OpOverload._schema
    """.split(),
}

# ---- dispatch ----

# Contexts that call an operator's kernel below that of the Autograd key, and below that of the
# ADInplaceOrView key: torch.library has no public name for what C++ kernels do so.
below_autograd = torch._C._AutoDispatchBelowAutograd
below_inplace_or_view = torch._C._AutoDispatchBelowADInplaceOrView
# The number of TorchDispatchModes that are active.
count_of_dispatch_modes = torch._C._len_torch_dispatch_stack
# Whether an argument is a Tensor that requires grad, or contains one: one call for all arguments.
any_requires_grad = torch._C._any_requires_grad
# Whether autocast is on for any device: faster than the question for one.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# Collectives that a graph can contain, without torch.distributed's Tensors that wait.
functional_collectives = torch.ops._c10d_functional


# ---- tracers and transforms ----

# Whether torch.jit.trace runs; whether a transform of torch.func is active; whether a Tensor is one
# of torch.func's gradients.
jit_traces = torch._C._is_tracing
function_transforms_are_on = torch._C._are_functorch_transforms_active
is_of_torch_func = torch._C._functorch.is_gradtrackingtensor
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY


def make_fx_traces():
    """Whether make_fx, and so torch.export, traces."""
    return torch._C._get_dispatch_mode(_PROXY_MODE) is not None


def forward_ad_is_on():
    """Whether a level of forward-mode AD is entered."""
    return torch.autograd.forward_ad._current_level >= 0


# As torch.compiler.disable, which imports torch._dynamo.
disable_dynamo = torch._disable_dynamo


def call_while_tracing(function):
    """torch.compile calls the function while it traces and takes the result as a constant: as
    torch.compiler.assume_constant_result, which imports all of torch._dynamo."""
    function._dynamo_marked_constant = True
    return function


# ---- torch.nn ----


def active_ddp():
    """The DistributedDataParallel whose forward runs; None without."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def is_in_flat_parameter(module):
    """Whether FullyShardedDataParallel (that of FSDP1) manages a Module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


# Whether hooks of all Modules (register_module_forward_hook) are set.
has_any_global_hook = torch.nn.modules.module._has_any_global_hook


# ---- torch.distributed ----


def process_group_of(name):
    """The ProcessGroup of a name, by which operators are given it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def all_reduced(tensor, group):
    """The sum over the ranks of a group, by its name: a collective that a graph can contain."""
    from torch.distributed import _functional_collectives as functional

    return functional.wait_tensor(functional.all_reduce(tensor, "sum", group))


def symmetric_memory(size, group):
    """(bytes of a GPU that the group's ranks can read, their handle): there is no public name."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
    return memory, _symmetric_memory.rendezvous(memory, group)


# ---- TorchInductor, whose import takes long ----


def inductor_is_imported():
    return "torch._inductor.lowering" in sys.modules


def inductor_lowering():
    """(the lowerings of operators, get_layout_constraint_tag)"""
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    return lowering, get_layout_constraint_tag


def inductor_graph():
    """(the classes of a graph's operations, the graph that is compiled now: virtualized.V.graph)"""
    from torch._inductor import ir, virtualized

    return ir, virtualized


# ---- autograd ----

# Whether the running backward executes a node of autograd; raises RuntimeError for a leaf whose
# gradient torch.autograd.grad returns, and outside of a backward.
engine_executes = torch._C._will_engine_execute_node


def saved_tensor_hooks_are_on():
    """Whether hooks of torch.autograd.graph.saved_tensors_hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# A Tensor of a subclass, with sizes and without memory. torch documents it, with this name.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


def tree_map(function, *trees):
    """`function` of the leaves of nested containers; torch.utils._pytree has no public name."""
    return torch.utils._pytree.tree_map(function, *trees)


def tree_map_only(kind, function, tree):
    """The same of the leaves of this type; the others are kept."""
    return torch.utils._pytree.tree_map_only(kind, function, tree)


def call_after_backward(function):
    """Calls the function when the backward that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Whether two Tensors share their storage.
is_alias = torch._C._is_alias_of
# A context without __torch_function__ of subclasses.
without_torch_function = torch._C.DisableTorchFunctionSubclass


# Whether the backward that runs now was called with retain_graph=True. A nested one has to do the
# same.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def nested_gradients(values, leaves, gradients, keeps):
    """torch.autograd.grad of plain Tensors, None for leaves that are not used, in a third of its
    time."""
    engine, creates = torch.autograd.Variable._execution_engine, torch.is_grad_enabled()
    values, leaves, gradients = tuple(values), tuple(leaves), tuple(gradients)
    return engine.run_backward(
        values, gradients, keeps, creates, leaves, allow_unreachable=True, accumulate_grad=False
    )


def is_executed(node):
    """Whether the running backward executes a node of autograd, or returns its gradient; True
    outside of a backward."""
    try:
        return engine_executes(node)
    except RuntimeError:
        return True


def running_node():
    """The node of autograd whose backward, or hooks, run in this thread; None without."""
    return torch._C._current_autograd_node()


def in_backward():
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def is_in_dispatch():
    """Whether a __torch_dispatch__ runs in this thread, and so what it calls is below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    is_below = excluded.has(torch._C.DispatchKey.AutogradFunctionality)
    return is_below and not torch.is_inference_mode_enabled()  # which excludes it too


def autograd_in_dispatch():
    """A context in which a __torch_dispatch__ can record and run autograd: its dispatch
    keys are excluded there."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        if hasattr(torch._C.DispatchKey, name):
            excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def without_dispatch_modes():
    """A context without TorchDispatchModes, which are not to see Tensors without values."""
    if count_of_dispatch_modes() == 0:
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
    """Where uncompiled code calls the function, as after a break of the graph, torch.compile
    compiles neither it nor what it calls. Where a caller is traced, the function is too."""
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
    methods = [getattr(torch.Tensor, name, None) for name in names.split()]
    return [method for method in methods if method is not None]


# Methods that read a Tensor's memory themselves, some by private names. True: what they return may
# be written to.
OF_MEMORY = dict.fromkeys(
    _methods("numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage"), True
)
OF_MEMORY |= dict.fromkeys(
    _methods("tolist __reduce_ex__ __deepcopy__ __repr__ __dlpack_device__ share_memory_"), False
)
