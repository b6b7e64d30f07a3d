"""The folders of csrc."""

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
