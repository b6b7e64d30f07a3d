"""`python -m flce.info`: prints versions, what was built, and what is selected on this machine."""

import platform

import torch

import flce


def lines():
    """Yields the lines of the report."""
    yield f"flce {flce.__version__}"
    yield f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}"
    if not flce.installation.COMPILED:
        yield "no compiled module for this platform: losses by flce.reference"
        return
    yield from _compiled()


def _compiled():
    from flce.operators import inner, run_plain
    from flce.packing import default_memory

    variant = run_plain(inner.cpu_variant.default)
    yield f"cpu row passes: {variant}, {torch.get_num_threads()} threads"
    yield f"cpu default max_memory: {default_memory(torch.device('cpu')).max_memory} bytes"
    for line in torch.ops.flce.cuda_describe().splitlines():
        yield f"cuda library: {line}"
    if not torch.cuda.is_available():
        yield "cuda device: none"
        return
    for index in range(torch.cuda.device_count()):
        facts, device = torch.cuda.get_device_properties(index), torch.device("cuda", index)
        yield (
            f"cuda device {index}: {facts.name}, sm_{facts.major}{facts.minor}, "
            f"{facts.multi_processor_count} multiprocessors, {facts.total_memory} bytes, "
            f"default max_memory {default_memory(device).max_memory} bytes"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
