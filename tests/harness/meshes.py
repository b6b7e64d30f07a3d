"""Device meshes of four processes."""

import torch.distributed as dist


def whole_mesh():
    return dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def square_mesh():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
