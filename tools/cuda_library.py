"""What a libflce_cuda.so was built by and for, read from the file: one of another machine cannot be
loaded."""

import re
from pathlib import Path
from typing import NamedTuple

_TEXT = re.compile(rb"flce_cuda built by nvcc (\d+\.\d+) for ([\d,]+);")  # of csrc/cuda/backend.cu


class Built(NamedTuple):
    """nvcc: its release, such as "13.0". architectures: of GPUs, such as ["80", "90"]."""

    nvcc: str
    architectures: list


def built(library):
    """Of the library's path. ValueError if it is no CUDA library of flce."""
    found = _TEXT.search(Path(library).read_bytes())
    if not found:
        raise ValueError(f"{library}: expected a CUDA library of flce, got a file without its text")
    numbers = found[2].decode().split(",")
    return Built(found[1].decode(), [str(int(number) // 10) for number in numbers])
