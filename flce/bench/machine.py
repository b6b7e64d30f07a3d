"""Facts of the machine for a record: none that names its owner."""

from __future__ import annotations

import datetime
import pathlib
import platform
import re

import torch

import flce


def machine(device: str) -> dict[str, str | int]:
    """Versions, the processor or GPU, the number of threads."""
    now = datetime.datetime.now(datetime.timezone.utc)
    facts: dict[str, str | int] = {
        "date": now.isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flce": flce.__version__,
        "device": device,
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = about.name
        facts["memory_bytes"] = about.total_memory
        facts["cuda"] = str(torch.version.cuda)
        return facts
    facts["threads"] = torch.get_num_threads()
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    facts["cpu"] = model[1] if model else platform.processor()
    return facts
