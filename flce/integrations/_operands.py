"""Operands as a framework's own loss casts them."""

from flce.modes import autocast_dtype


def in_dtype_of(hidden, tensor):
    """`tensor` in hidden's dtype, None for None; unchanged under autocast, where flce casts it."""
    if tensor is None or autocast_dtype(hidden.device.type) is not None:
        return tensor
    return tensor.to(hidden.dtype)
