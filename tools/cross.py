"""Makes the libraries that link flce for another machine: `python tools/cross.py aarch64`.

It writes to build/cross-MACHINE, where setup.py looks with FLCE_MACHINE: libtorch_cpu.so and
libc10.so, empty but for the names of the stable ABI of torch (tests/stable_abi_2_10.txt), because a
linker reads nothing else of a shared library; and the static CUDA runtime of nvcc's release, from
NVIDIA's package for that machine. Needs MACHINE-linux-gnu-gcc.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STABLE_ABI = ROOT / "tests" / "stable_abi_2_10.txt"


def write_library(machine, path, names):
    """A shared library that defines functions of these names, which do nothing."""
    code = "".join(f"void {name}(void) {{}}\n" for name in names)
    flags = ["-shared", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{path.name}", "-x", "c", "-"]
    command = [f"{machine}-linux-gnu-gcc", *flags, "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)


def nvcc_release(nvcc):
    """Such as 13.0."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"release (\d+\.\d+)", text)[1]


def fetch_cuda_runtime(machine, path, release):
    """Writes libcudart_static.a of that release of CUDA."""
    major = int(release.split(".")[0])
    name = "nvidia-cuda-runtime" + (f"-cu{major}" if major < 13 else "")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        platform = ["--platform", f"manylinux2014_{machine}", "--only-binary=:all:", "--no-deps"]
        subprocess.run([*pip, *platform, "-d", folder, f"{name}=={release}.*"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (one for one in archive.namelist() if one.endswith(f"/{path.name}"))
            path.write_bytes(archive.read(member))


def main(machine):
    sys.path.insert(0, str(ROOT))
    import setup

    folder = ROOT / "build" / f"cross-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    write_library(machine, folder / "libtorch_cpu.so", STABLE_ABI.read_text().split())
    write_library(machine, folder / "libc10.so", [])
    nvcc, _, why = setup.find_cuda()
    if not nvcc:
        sys.exit(f"cross: no CUDA runtime: {why}")
    fetch_cuda_runtime(machine, folder / "libcudart_static.a", nvcc_release(nvcc))
    print(f"cross: {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
