"""Facts of the machine for a record: none that names its owner."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import re

import torch

import flce

BUSY = 0.25  # load of the last minute over the cores, from which a warning is due


def load_warning() -> str:
    """A sentence if other programs take more than a quarter of the cores, else ""."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
    except (AttributeError, OSError):  # not on every system
        return ""
    if load <= BUSY * cores:
        return ""
    return (
        f"the machine is under load ({load:.1f} on {cores} cores in the last minute): times will "
        "vary; close other programs and run it again"
    )


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
