"""The folders of csrc, and the texts of sources."""

import re

from harness import ROOT

CSRC = ROOT / "csrc"
SOURCES = [path for path in CSRC.rglob("*") if path.suffix in (".c", ".cpp", ".cu", ".h", ".cuh")]
# Folders that a file may include from, in addition to its own. ".": csrc itself.
MAY_INCLUDE = {
    ".": set(),
    "core": {"."},
    "binding": {"."},
    "cpu": {".", "cpu/simd"},
    "cpu/simd": {".", "cpu"},
    "cuda": {".", "cuda/common"},
    "cuda/common": {"."},
    "cuda/rows": {".", "cuda", "cuda/common"},
    "cuda/passes": {".", "cuda", "cuda/common"},
    "cuda/gemm": {"cuda"},
    "cuda/samples": {".", "cuda", "cuda/common"},
    "cuda/fused": {".", "cuda", "cuda/common", "cuda/rows"},
    # A folder for each architecture with GEMMs of its own (csrc/architectures.h).
    "cuda/sm90": {".", "cuda", "cuda/common", "cuda/fused"},
}


def text_of(*patterns):
    """Of all files of these patterns."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert paths, patterns
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def body_of(path, function):
    """The text of a C function."""
    pattern = rf"^[^\n]*\b{function}\([^;{{]*\{{\n(.*?)^\}}"
    return re.search(pattern, text_of(path), re.MULTILINE | re.DOTALL)[1]


def without_comments(text):
    """C without its comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
