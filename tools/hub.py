"""Builds flce in the layout of Hugging Face's kernel hub: `python tools/hub.py FOLDER`.

FOLDER/build has a folder for each variant, all for every torch >= 2.10 (torch-stable-abi210): the
package at its top, imported relatively, metadata.json, and the operators in a namespace that is
named after the sources, so that a process may load other builds of flce too. The CUDA
variants are left out with FLCE_CUDA=0. FLCE_GLIBC: the oldest glibc it is for, 2.28 unless set.
"""

import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_library

ROOT = Path(__file__).resolve().parents[1]
VERSION = 1  # of the kernel; raised with a change that breaks its callers
SYSTEM = f"{os.environ.get('FLCE_MACHINE') or platform.machine()}-linux"
# The hub takes a variant for CUDA x.y where torch is built with x.z, z >= y: the first that any
# torch >= 2.10 is built with.
CUDA = ("cu126", "cu130")


def name_of_operators():
    """The operators' namespace: _flce_ and a digest of all sources."""
    digest = hashlib.sha256()
    sources = [p for folder in ("csrc", "flce") for p in Path(ROOT, folder).rglob("*.*")]
    suffixes = (".c", ".h", ".cpp", ".cu", ".cuh", ".map", ".py")
    for path in sorted(p for p in [*sources, ROOT / "setup.py"] if p.suffix in suffixes):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return f"_flce_{digest.hexdigest()[:8]}"


def relative(text, depth, operators):
    """A module's source, with imports relative to the package that is `depth` folders up, and with
    the operators' namespace. ValueError if it still names the package flce."""
    text = re.sub(r"^( *)from flce\.", rf"\1from .{'.' * depth}", text, flags=re.MULTILINE)
    # The package itself, by a name that is not known before it is loaded.
    parent = f'flce = importlib.import_module(".{"." * depth}", __package__)'
    text = re.sub(r"^import flce$", f"import importlib\n{parent}", text, flags=re.MULTILINE)
    text = text.replace("torch.ops.flce", f"torch.ops.{operators}")
    text = text.replace('Library("flce"', f'Library("{operators}"')
    text = text.replace("flce::", f"{operators}::")
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if any(name.split(".")[0] == "flce" for name in names):
            raise ValueError(f"line {node.lineno} imports flce: {ast.unparse(node)}")
    return text


def compile_libraries(folder, operators):
    """The folder with the module and, unless FLCE_CUDA=0, the CUDA library."""
    library, objects = folder / "lib", folder / "temp"
    environment = {"FLCE_GLIBC": "2.28", "FLCE_CUDA": "1", **os.environ, "FLCE_OPS": operators}
    folders = ["-b", str(library), "-t", str(objects)]
    command = [sys.executable, "setup.py", "build_clib", *folders, "build_ext", *folders]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return library / "flce"


def capabilities(library):
    """The compute capabilities that the CUDA library was compiled for, as the hub writes them."""
    found = [f"{one[:-1]}.{one[-1]}" for one in cuda_library.built(library).architectures]
    return found if os.environ.get("FLCE_CUDA_ARCHS") else [*found, f"{found[-1]}+PTX"]


def write_variant(folder, name, operators, libraries, backend):
    """One variant: sources, libraries and metadata. backend: its entry in metadata.json."""
    target = folder / "build" / f"torch-stable-abi210-{name}-{SYSTEM}"
    shutil.rmtree(target, ignore_errors=True)
    for source in sorted(Path(ROOT, "flce").rglob("*.py")):
        path = source.relative_to(ROOT / "flce")
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        text = relative(source.read_text(), len(path.parts) - 1, operators)
        (target / path).write_text(text)
    for library in libraries:
        shutil.copy(library, target)
    identity = operators.replace("_flce_", f"_flce_{backend['type']}_")
    metadata = {"name": "flce", "id": identity, "version": VERSION, "license": "BSD-3-Clause"}
    metadata |= {"python-depends": [], "backend": backend}
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder)
    print(f"hub: {target}")


def main(folder):
    operators = name_of_operators()
    libraries = compile_libraries(folder / "objects", operators)
    module, cuda = libraries / "_C.abi3.so", libraries / "libflce_cuda.so"
    left_out = cuda.with_suffix(".txt")  # says why there is no CUDA library
    if not left_out.exists():
        archs = capabilities(cuda)
        for name in CUDA:
            backend = {"type": "cuda", "archs": archs}
            write_variant(folder, name, operators, [module, cuda], backend)
        left_out.write_text("left out of the build: the CPU variant for the kernel hub\n")
    write_variant(folder, "cpu", operators, [module, left_out], {"type": "cpu"})


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
