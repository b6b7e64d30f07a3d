"""Checks a wheel: `python tests/check_wheel.py dist/flce-*.whl`; `make wheel` runs it.

Its tag, its size, the machine of its libraries, which may be another than this one, the libraries
and versions of symbols that it needs, that all it takes of torch is the stable ABI of torch 2.10
(stable_abi_2_10.txt), the names that it exports, the GPUs that it was compiled for; and what
auditwheel and abi3audit say. Exit status 1 if a check fails.

`python tests/check_wheel.py --list TORCH` writes stable_abi_2_10.txt from the folder of an
installed torch 2.10.0: the names that its C headers declare and its libraries define.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import cuda_library  # noqa: E402

STABLE_ABI = Path(__file__).with_name("stable_abi_2_10.txt")
TAG = "cp310-abi3-manylinux_2_28_"  # and the machine
# Of each machine: its name in the header of an ELF file, and its loader.
MACHINES = {
    "x86_64": ("Advanced Micro Devices X86-64", "ld-linux-x86-64.so.2"),
    "aarch64": ("AArch64", "ld-linux-aarch64.so.1"),
}
MOST_BYTES = 100_000_000
# manylinux_2_28: glibc 2.28 and the libraries of gcc 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
SYSTEM |= {"libstdc++.so.6", "libgcc_s.so.1"}
TORCH = {"libtorch_cpu.so", "libc10.so"}  # those that torch has loaded
CUDA_EXPORTS = ("backend", "describe", "headers", "peers_begin", "peers_wait")
EXPORTS = {
    "_C.abi3.so": {"PyInit__C"},
    "libflce_cuda.so": {f"flce_cuda_{name}" for name in CUDA_EXPORTS},
}
HEADERS = ("stable/c/*.h", "inductor/aoti_torch/c/shim*.h", "inductor/aoti_torch/generated/*.h")
SYMBOL = re.compile(r"^ *\d+: \S+ +\S+ +\S+ +(\S+) +\S+ +(\S+) (\S*?)(?:@+(\S+))?(?: \(\d+\))?$")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library):
    """(bind, defined, name, version or None) of each dynamic symbol."""
    for line in run("readelf", "-W", "--dyn-syms", str(library)).splitlines():
        if (match := SYMBOL.match(line)) and match[3]:
            yield match[1], match[2] != "UND", match[3], match[4]


def faults_of_names(library):
    """What it exports or takes from outside of the system's libraries, but should not."""
    stable = set(STABLE_ABI.read_text().split())
    python = library.name.startswith("_C.")
    exported = set()
    for bind, defined, name, version in symbols(library):
        if defined:
            exported.add(name)
        elif not version and bind != "WEAK":
            # abi3audit checks which of Python's.
            if not (python and (name in stable or re.match("_?Py", name))):
                yield f"takes {name}, which is not in the stable ABI of torch 2.10"
    for name in sorted(exported ^ EXPORTS[library.name]):
        yield f"{name} is {'exported' if name in exported else 'not exported'}"


def faults_of_machine(library, machine):
    header = run("readelf", "-W", "-h", str(library))
    found = re.search(r"^ *Machine: +(.+)$", header, re.MULTILINE)[1]
    if found != MACHINES[machine][0]:
        yield f"is for {found}"


def faults_of_versions(library, machine):
    """What it needs that manylinux_2_28 does not have."""
    dynamic = run("readelf", "-W", "-d", str(library))
    allowed = SYSTEM | {MACHINES[machine][1]} | (TORCH if library.name.startswith("_C.") else set())
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if name not in allowed:
            yield f"needs the library {name}"
    if "PATH)" in dynamic:
        yield "has a path where libraries are searched for"
    for version in sorted({version for *_, version in symbols(library) if version}):
        family, _, numbers = version.partition("_")
        if tuple(map(int, numbers.split("."))) > NEWEST.get(family, ()):
            yield f"needs {version}"


def faults_of_gpus(library):
    """Of the GPUs that it was compiled for; prints what built it."""
    import setup

    nvcc, found = cuda_library.built(library)
    print(f"wheel: nvcc {nvcc}, GPUs of {' '.join(found)}")
    asked = os.environ.get("FLCE_CUDA_ARCHS", "").replace(",", " ").split() or setup.CUDA_ARCHS
    if found != asked:
        yield f"was compiled for {found}, not for {asked}"


def faults_of_audits(wheel, machine):
    """auditwheel cannot leave out torch's libraries: its tag is by the versions of symbols."""
    report = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)))
    print(f"wheel: auditwheel: {report['sym_tag']}, besides {sorted(report['external_libs'])}")
    if set(report["external_libs"]) - TORCH:
        yield f"auditwheel: needs {sorted(report['external_libs'])}"
    glibc = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", report["sym_tag"])
    if not glibc or int(glibc[1]) > NEWEST["GLIBC"][1]:
        yield f"auditwheel: {report['sym_tag']}"
    command = [sys.executable, "-m", "abi3audit", "-S", "-s", str(wheel)]
    audit = subprocess.run(command, capture_output=True, text=True)
    print("wheel: abi3audit:", " ".join((audit.stdout + audit.stderr).split()))
    if audit.returncode:
        yield "abi3audit fails"


def faults_of(wheel):
    machine = next((one for one in MACHINES if wheel.name.endswith(f"-{TAG}{one}.whl")), None)
    if not machine:
        yield f"{wheel.name} is not tagged {TAG} and one of {', '.join(MACHINES)}"
        return
    if (size := wheel.stat().st_size) >= MOST_BYTES:
        yield f"{size} bytes, at most {MOST_BYTES} are allowed"
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so"))
        if [library.name for library in libraries] != sorted(EXPORTS):
            yield f"has {[library.name for library in libraries]}, not {sorted(EXPORTS)}"
            return
        for library in libraries:
            for faults in (
                faults_of_machine(library, machine),
                faults_of_names(library),
                faults_of_versions(library, machine),
            ):
                yield from (f"{library.name} {fault}" for fault in faults)
            needs = {version for *_, version in symbols(library) if version}
            print(f"wheel: {library.name}, {library.stat().st_size} bytes, needs", *sorted(needs))
        yield from faults_of_gpus(libraries[1])
    yield from faults_of_audits(wheel, machine)


def stable_abi(torch):
    """The names that torch's C headers declare and its libraries define."""
    headers = [h for glob in HEADERS for h in (torch / "include/torch/csrc").glob(glob)]
    declared = set(re.findall(r"\b\w+(?= ?\()", "".join(h.read_text() for h in headers)))
    defined = {
        name
        for library in ("libtorch_cpu.so", "libtorch_cuda.so")
        for _, here, name, _ in symbols(torch / "lib" / library)
        if here
    }
    return sorted(name for name in declared & defined if re.match("aoti_|torch_", name))


def main(arguments):
    if arguments[0] == "--list":
        STABLE_ABI.write_text("\n".join(stable_abi(Path(arguments[1]))) + "\n")
        return False
    wheel = Path(arguments[0])
    print(f"wheel: {wheel}, {wheel.stat().st_size} bytes")
    faults = list(faults_of(wheel))
    for fault in faults:
        print("wheel: FAULT:", fault)
    print(f"wheel: {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
