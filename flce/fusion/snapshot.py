"""What must not change between a head's call and the making of its logits."""

import torch
from torch.compiler import is_compiling


class Snapshot:
    """A head's hidden states, weight and bias at its call.

    Three things tell that they have changed. An optimizer's step begins another era of the Fusion,
    because fused optimizers do not raise `_version`. Other writes raise it, but torch.compile does
    not trace it and inference tensors have none. The rest, as writes through `.data`, changes some
    of the elements in a sample.
    """

    def __init__(self, linear, x, weight, bias):
        self.fusion, self.linear = linear._flce_fusion, linear
        self.era = self.fusion.era
        named = [("hidden states", x)]
        # Hooks may gather the weight, which changes it: then the era alone tells.
        if not linear._forward_pre_hooks and "_old_forward" not in linear.__dict__:
            named += [("weight", weight), ("bias", bias)]
        self.parts = []  # (name, tensor, version or None, sample or None)
        for name, tensor in named:
            if not _is_plain(tensor):
                continue
            version = None if is_compiling() or tensor.is_inference() else tensor._version
            samples = version is None or name != "hidden states"
            sample = _few(name, tensor).clone() if samples else None
            self.parts.append((name, tensor, version, sample))

    def change(self, compares):
        """What has changed, in words; None if nothing was seen to. compares: look at the samples
        too, which waits for the device."""
        if self.fusion.era is not self.era:
            return "an optimizer that has stepped since"
        for name, tensor, version, sample in self.parts:
            current = tensor if name == "hidden states" else getattr(self.linear, name)
            if current is not tensor:
                # Sharded and offloaded weights are made whole by hooks of an enclosing Module.
                is_same = not _is_plain(current)
            else:
                is_same = version is None or tensor._version == version
                is_same = is_same and not (compares and _differs(sample, name, tensor))
            if not is_same:
                return f"{name} of shape {tuple(tensor.shape)} written to or replaced since"
        return None


def _is_plain(tensor):
    return type(tensor) in (torch.nn.Parameter, torch.Tensor) and not tensor.is_meta


def _few(name, tensor):
    """An element of each row of the hidden states, at most 31 x 31 of a weight."""
    if name == "hidden states":
        return tensor.detach()[..., :1]
    return tensor.detach()[tuple([slice(None, None, max(n // 16, 1)) for n in tensor.shape])]


def _differs(sample, name, tensor):
    if sample is None or (sample.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False  # a graph that is captured cannot wait
    now = _few(name, tensor)
    is_alike = (now.shape, now.dtype, now.device) == (sample.shape, sample.dtype, sample.device)
    return not (is_alike and torch.allclose(now, sample, rtol=0, atol=0, equal_nan=True))
