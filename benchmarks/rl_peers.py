"""Log-probabilities of TRL, verl and Liger, from their wheels unpacked into one folder:

    python -m pip download --no-deps trl==1.16.0 verl==0.9.1 liger-kernel==0.8.5
    for wheel in *.whl; do unzip -q $wheel -d FOLDER; done

Of TRL and verl single files are loaded, without what their packages import. A function takes (x, w,
y, entropy) and returns the log-probabilities and, if `entropy`, the entropies.
"""

import contextlib
import importlib
import importlib.util
import sys
import types

import torch

TRL_CHUNK = 32768  # classes, TRL's default


def stub(name, **attributes):
    """An empty package of this name, of which submodules are loaded from files."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(attributes)


def load(folder, name):
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trl(folder):
    for name in ("trl", "trl.kernels", "trl.trainer"):
        stub(name)
    stub("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    function = load(folder, "trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def call(x, w, y, entropy):
        outputs = ("entropy",) if entropy else ()
        made = function.apply(x, w, None, y, 1.0, TRL_CHUNK, None, 1.0, outputs)
        return made[0], made[1] if entropy else None

    return call


def verl(folder):
    """Its Triton kernel and its chunks in torch; both compute the entropy in any case."""
    cuda = {"is_cuda_available": True, "get_torch_device": lambda: torch.cuda}
    cuda |= {"get_device_name": lambda: "cuda"}
    cuda |= {"get_device_capability": torch.cuda.get_device_capability}
    for name in ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.experimental"):
        stub(name)
    stub("verl.utils.device", **cuda)
    sys.modules["verl.utils.kernel"].kernels = load(folder, "verl.utils.kernel.kernels")
    kernel = load(folder, "verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    chunks = load(folder, "verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def of_kernel(x, w, y, entropy):
        logprobs, entropies = kernel(x, w, y, 1.0, "none")
        # A product: its backward takes only contiguous gradients, and a sum's is expanded.
        return logprobs, entropies * 1.0 if entropy else None

    def of_chunks(x, w, y, entropy):
        logprobs, entropies = chunks(x, w, y)
        return logprobs, entropies if entropy else None

    return {"verl's kernel": of_kernel, "verl's chunks": of_chunks}


def functions(folder):
    return {"TRL's chunks": trl(folder), **verl(folder)}


def liger_grpo(folder):
    """A GRPO loss of its own, of 8 sequences, without a reference model."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
    loss = module.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)

    def call(problem):
        x, y = problem.x.unflatten(0, (8, -1)), problem.y.unflatten(0, (8, -1))
        mask, advantages = torch.ones_like(y), problem.upstream.unflatten(0, (8, -1))[:, 0]
        old = torch.full(y.shape, problem.w.shape[0], dtype=torch.float32, device=y.device)
        given = {"old_per_token_logps": -old.log()}
        return loss(x, problem.w, y, mask, advantages, **given)[0]

    return call
