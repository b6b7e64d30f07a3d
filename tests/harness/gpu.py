"""A captured CUDA graph, and a GPU whose memory is nearly full."""

import gc

import torch


def captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    return graph, static


def cramped(extra):
    """Leaves `extra` bytes of device memory; -> tensors that fill the allocator's holes."""
    gc.collect()  # a tensor in a reference cycle would keep its segment
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    filling = []
    for size in (64 << 20, 8 << 20, 1 << 20):
        try:
            while True:
                filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)
    return filling
