"""Builds the module flce._C (C core, CPU, binding) and, with nvcc, flce/libflce_cuda.so."""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

INCLUDE = "csrc"  # the sources name headers by their path from here
CORE = sorted(str(path) for path in Path("csrc").rglob("*.c"))
BINDING = sorted(str(path) for path in Path("csrc/binding").glob("*.cpp"))
SHARED = ["csrc/core/gpu_facts.c", "csrc/core/status.c"]  # of both libraries
CUDA_SOURCES = [*SHARED, *sorted(map(str, Path("csrc/cuda").rglob("*.cu")))]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.*h"))
# Objects of the CUDA sources, for all clones.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flce"
CUDA_ARCHS = ["80", "86", "89", "90", "100", "120"]
# Folders of csrc/cuda with instructions of one architecture that no later one has, and its name.
# csrc/cuda/fused, the other kernels of a fused logits GEMM, is compiled for these alone.
OWN_ARCHS = {"sm90": "90a"}
# Last on the command line: they win over the flags that Python itself was built with.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
C_FLAGS = ["-O3", "-g0", "-fno-wrapv", "-fno-lto", "-fPIC", "-fvisibility=hidden", "-Wall"]
# A switch over an enum, such as that of the divergences, lacks none of its values.
C_FLAGS += ["-Werror=switch", *HARDENED]
# The addresses of other libraries' functions are bound when a library is loaded, then read-only.
LINK_FLAGS = ["-z,relro", "-z,now"]


def headers_digest():
    """What the module and the CUDA library agree on: the headers that both include."""
    digest = hashlib.sha256()
    for path in sorted(Path(INCLUDE).glob("*.h")):
        digest.update(path.read_bytes())
    return f"0x{digest.hexdigest()[:16]}ULL"


# Names that a library exports. hidden does not reach templates of libstdc++ and static libraries:
# those of cudart must not be bound to the ones of torch's libcudart.
EXPORTS = {"_C": "csrc/binding/exports.map", "libflce_cuda": "csrc/cuda/exports.map"}
GLIBC = os.environ.get("FLCE_GLIBC", "")  # the oldest that a wheel is for, such as 2.28
# The machine that is built for: with another than this one's, by its GNU cross compilers and the
# libraries that tools/cross.py has put into CROSS_LIBRARIES.
MACHINE = os.environ.get("FLCE_MACHINE") or platform.machine()
CROSS = MACHINE != platform.machine()
CROSS_LIBRARIES = Path("build", f"cross-{MACHINE}")
if CROSS:
    os.environ["CC"], os.environ["CXX"] = f"{MACHINE}-linux-gnu-gcc", f"{MACHINE}-linux-gnu-g++"
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{MACHINE}"  # folders of build/, and the tag
# Where the sources are on the web: of a release, by .github/workflows/build.yml.
URL = os.environ.get("FLCE_URL", "").rstrip("/")
# The namespace of the operators; another where several builds are to be loaded by one process.
OPS = os.environ.get("FLCE_OPS") or "flce"


def links(readme):
    """README.md for a package index, which does not know where links of the clone lead."""
    if not URL:
        return readme
    readme = re.sub(r"!\[([^]]*)\]\((?!\w+:)", rf"![\1]({URL}/raw/HEAD/", readme)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!\w+:|#)", rf"[\1]({URL}/blob/HEAD/", readme)


def project_urls():
    pages = {"Documentation": "tree/HEAD/docs", "Changelog": "blob/HEAD/CHANGELOG.md"}
    pages |= {"Issues": "issues"}
    return {"Source": URL, **{name: f"{URL}/{page}" for name, page in pages.items()}} if URL else {}


def say(line):
    """Prints a line of the build, on the terminal too: pip shows what a build prints with -v
    alone."""
    # The line's end is in the text: print writes its own apart, and other threads print too.
    print(f"flce: {line}\n", end="", flush=True)
    if sys.stdout.isatty():
        return
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\r\033[Kflce: {line}\n")  # over pip's spinner
    except OSError:
        return  # there is none: a CI's job


def find_cuda():
    """(nvcc, the folder of cublasLt.h, None), or (None, None, why the CUDA library is left out).
    Ends the build where FLCE_CUDA=1 wants it."""
    wanted = os.environ.get("FLCE_CUDA", "")
    if wanted == "0":
        return None, None, "FLCE_CUDA=0"
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = f"{home}/bin:{os.environ.get('PATH')}:/usr/local/cuda/bin"
    nvcc = shutil.which("nvcc", path=places)
    homes = [home, Path(nvcc).resolve().parents[1]] if nvcc else [home]
    folders = [Path(home, "include") for home in homes]
    spec = importlib.util.find_spec("nvidia")  # the namespace of NVIDIA's own wheels
    for root in spec.submodule_search_locations if spec else []:
        folders += sorted(Path(root).glob("*/include"), reverse=True)
    header = next((folder for folder in folders if (folder / "cublasLt.h").exists()), None)
    lacking = [] if nvcc else [f"no nvcc in {places}"]
    if not header:
        remedy = "pip install --no-deps nvidia-cublas brings it"
        lacking.append(f"no cublasLt.h in {':'.join(map(str, folders))} ({remedy})")
    if not lacking:
        return nvcc, header, None
    why = "; ".join(lacking)
    if wanted == "1":
        sys.exit(f"flce: FLCE_CUDA=1, but {why}")
    return None, None, why


def torch_folders():
    """torch's folders of headers and of libraries; ends the build where torch does not fit."""
    try:
        import torch
    except ImportError as error:
        sys.exit(f"flce: to build, install torch and use --no-build-isolation ({error})")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        sys.exit(f"flce: to build, torch 2.10 or later is needed, not {torch.__version__}")
    from torch.utils.cpp_extension import include_paths, library_paths

    return include_paths(), [str(CROSS_LIBRARIES)] if CROSS else library_paths()


def check_cross_build():
    """Ends the build for another machine where what it takes is missing."""
    if CROSS and not GLIBC:
        sys.exit(f"flce: FLCE_MACHINE={MACHINE} needs FLCE_GLIBC, such as 2.28, too")
    if CROSS and not (CROSS_LIBRARIES / "libtorch_cpu.so").exists():
        remedy = f"`python tools/cross.py {MACHINE}` makes them"
        sys.exit(f"flce: FLCE_MACHINE={MACHINE}, but no libraries in {CROSS_LIBRARIES}: {remedy}")


def check_compilers():
    """Ends the build where a compiler or Python's headers are missing."""
    for variable, language in (("CC", "C"), ("CXX", "C++")):
        command = os.environ.get(variable) or sysconfig.get_config_var(variable)
        words = [word for word in shlex.split(command) if "=" not in word]
        if not any(map(shutil.which, words[:2])):  # the first word may be env or ccache
            sys.exit(f"flce: to build, a {language} compiler is needed: there is no {command!r}")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        sys.exit(f"flce: to build, Python's headers (python3-dev) are needed: there is no {header}")


def portable_linker():
    """The command that links for GLIBC and later, and the C++ libraries that it has to name.
    zig knows the symbols of each glibc; its own C++ library is another than torch's."""
    if not importlib.util.find_spec("ziglang"):
        sys.exit(f"flce: FLCE_GLIBC={GLIBC}, but there is no zig: pip install ziglang")
    cxx = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX"))[:1]
    # libgcc.a: nothing fills zig's own __cpu_model, by which no CPU has AVX.
    names = ["libgcc.a", "libstdc++.so.6", "libgcc_s.so.1"]
    command = [[*cxx, f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(c, check=True, capture_output=True, text=True) for c in command]
    target = f"{MACHINE}-linux-gnu.{GLIBC}"
    linker = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"]
    return linker, [run.stdout.strip() for run in found]


def architectures(nvcc):
    """(FLCE_CUDA_ARCHS, else the CUDA_ARCHS that nvcc knows; of which there is PTX for newer GPUs,
    the last unless they were asked for)."""
    asked = os.environ.get("FLCE_CUDA_ARCHS", "").replace(",", " ").replace(";", " ").split()
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True)
    archs = asked or [arch for arch in CUDA_ARCHS if f"compute_{arch}" in known.stdout.split()]
    return archs, [] if asked else archs[-1:]


def arch_flags(nvcc):
    archs, of_ptx = architectures(nvcc)
    codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes += [f"arch=compute_{arch},code=compute_{arch}" for arch in of_ptx]
    return [f"-gencode={code}" for code in codes]


def included(source, header):
    """The source, all headers of csrc that it includes, and cuBLASLt's."""
    found = [Path(source)]
    for path in found:
        names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        found += [Path(INCLUDE, name) for name in names if Path(INCLUDE, name) not in found]
    return [*found, header / "cublasLt.h"]


def check_cache():
    """Makes the folder of objects; ends the build where another user may write to it, whose object
    would become a part of the library."""
    CACHE.mkdir(0o700, parents=True, exist_ok=True)
    found = CACHE.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o002:
        sys.exit(
            f"flce: others may write to {CACHE}, where objects of the build are kept: remove "
            "it, or name a folder of your own by XDG_CACHE_HOME"
        )


def compile_cuda_source(nvcc, header, number, source, flags):
    """The object of a source, from the cache unless what it is made of has changed: flags, nvcc,
    and contents of files. Objects that nothing has used for a month are removed."""
    release = subprocess.run([nvcc, "--version"], check=True, capture_output=True).stdout
    key = [source, *(flag for flag in flags if not flag.startswith("--threads"))]
    digest = hashlib.sha256(release + " ".join(key).encode())
    for path in included(source, header):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    out = CACHE / f"{source.replace(os.sep, '-')}-{digest.hexdigest()[:16]}.o"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        say(f"nvcc {number} of {len(CUDA_SOURCES)}: {source}")
        made = out.with_suffix(f".{os.getpid()}.o")  # another build may be at it too
        # -isystem: a wheel's folder may hold other headers, of another version than the toolkit's.
        command = [nvcc, *flags, "-isystem", str(header), "-c", source, "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(out)
    out.touch()
    return str(out)


def cuda_flags(nvcc):
    """nvcc's flags for each of CUDA_SOURCES."""
    options = ",".join(["-fPIC", "-fvisibility=hidden", "-g0", *HARDENED])
    host = ["-O3", "-Xcompiler", options, f"-I{INCLUDE}"]
    if CROSS:  # the toolkit's headers are the same for every machine
        host += ["-ccbin", os.environ["CXX"], "-target-dir", f"{platform.machine()}-linux"]
    threads = f"--threads={(os.cpu_count() or 1) // len(CUDA_SOURCES) or 1}"
    device = [*host, "-std=c++17", threads, *arch_flags(nvcc)]
    own = {name: [f"-gencode=arch=compute_{a},code=sm_{a}"] for name, a in OWN_ARCHS.items()}
    own["fused"] = sum(own.values(), [])

    def flags_of(source):
        if source.endswith(".c"):
            return host
        if source == "csrc/cuda/backend.cu":
            return [*device, f"-DFLCE_HEADERS={headers_digest()}"]
        folder = Path(source).parent.name
        return [*host, "-std=c++17", threads, *own[folder]] if folder in own else device

    return [flags_of(source) for source in CUDA_SOURCES]


def build_cuda(library, nvcc, header):
    check_cache()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        numbers, flags = range(1, len(CUDA_SOURCES) + 1), cuda_flags(nvcc)
        compile_one = functools.partial(compile_cuda_source, nvcc, header)
        objects = list(pool.map(compile_one, numbers, CUDA_SOURCES, flags))
    for old in CACHE.glob("*.o"):
        if old.stat().st_mtime < time.time() - 30 * 86400:
            old.unlink(missing_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    exports = f"--version-script={EXPORTS['libflce_cuda']}"
    link = [nvcc, "-shared", "--cudart", "static"]
    for flag in (exports, *LINK_FLAGS):
        link += ["-Xlinker", flag]
    libraries = ["-ldl"]
    if GLIBC:
        linker, cxx_libraries = portable_linker()
        link = [*linker, "-shared", *(f"-Wl,{flag}" for flag in (exports, *LINK_FLAGS))]
        libraries = [static_cudart(nvcc), *cxx_libraries, "-lpthread", "-lrt", "-ldl"]
    subprocess.run([*link, "-o", str(library), *objects, *libraries], check=True)


def static_cudart(nvcc):
    """The CUDA runtime of the toolkit of nvcc, or that of another machine."""
    root = Path(nvcc).resolve().parents[1]
    folders = [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]
    folders = [CROSS_LIBRARIES] if CROSS else folders
    for path in (folder / "libcudart_static.a" for folder in folders):
        if path.exists():
            return str(path)
    sys.exit(f"flce: no libcudart_static.a in {':'.join(map(str, folders))}")


class BuildCore(build_clib):
    def run(self):  # the first command: what lacks is said before anything is compiled
        torch_folders()
        find_cuda()
        check_compilers()
        check_cross_build()
        if GLIBC:
            portable_linker()
        super().run()

    def build_libraries(self, libraries):
        for name, _ in libraries:  # ar adds to an archive, which would keep objects of old sources
            Path(self.build_clib, f"lib{name}.a").unlink(missing_ok=True)
        super().build_libraries(libraries)


def summary(nvcc, why):
    """The last lines of a build: what was built, why, and how to build something else."""
    if nvcc:
        archs, of_ptx = architectures(nvcc)
        gpus = " ".join([f"sm_{arch}" for arch in archs] + [f"compute_{a} (PTX)" for a in of_ptx])
        yield f"built for the CPU and for CUDA, GPUs of {gpus}, by {nvcc}"
        yield 'FLCE_CUDA_ARCHS, such as "90", chooses other GPUs; FLCE_CUDA=0 leaves CUDA out'
        return
    yield f"built for the CPU alone, CUDA tensors will be refused: {why}"
    if why == "FLCE_CUDA=0":
        yield "without it the CUDA library is built too where nvcc and cublasLt.h are found"
    else:
        yield "FLCE_CUDA=1 makes this an error; FLCE_CUDA=0 says that it is wanted"


class Build(build_ext):
    summary = ()  # lines for the end of the build

    def run(self):
        super().run()
        library = Path("" if self.inplace else self.build_lib, "flce", "libflce_cuda.so")
        nvcc, header, why = find_cuda()
        left_out = library.with_suffix(".txt")  # in place of the library; the module reads it
        for path in (library, left_out):  # one of an earlier build may not fit this module
            path.unlink(missing_ok=True)
        self.summary = tuple(summary(nvcc, why))
        if nvcc:
            say(f"CPU module and {library}: {nvcc}, cublasLt.h in {header}")
            return build_cuda(library, nvcc, header)
        text = f"left out of the build: {why}\n"
        left_out.write_text(text, encoding="utf-8", errors="replace")  # PATH may not be UTF-8

    def build_extensions(self):
        headers, libraries = torch_folders()
        self.extensions[0].include_dirs += headers
        self.extensions[0].library_dirs += libraries
        for name in ("linker_so", "linker_so_cxx"):  # Python's own may name this machine's folders
            words = getattr(self.compiler, name)
            setattr(self.compiler, name, [w for w in words if not w.startswith("-Wl,-rpath")])
        if GLIBC:  # again, even if a module that another linker has made is newer than its sources
            Path(self.get_ext_fullpath(self.extensions[0].name)).unlink(missing_ok=True)
            linker, self.extensions[0].extra_objects = portable_linker()
            self.extensions[0].language = "c"  # else setuptools links by the C++ compiler
            self.compiler.linker_so = [*linker, "-shared"]
        super().build_extensions()


LINUX = sys.platform == "linux"
# The stable ABI of torch 2.10 and of Python 3.10: one module for these and all later ones.
ABI = [("TORCH_TARGET_VERSION", "0x020a000000000000"), ("Py_LIMITED_API", "0x030a0000")]
PLATFORM = {"plat_name": f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}"}
MODULE = Extension(
    "flce._C",
    BINDING,
    include_dirs=[INCLUDE],
    depends=[*CORE, *HEADERS, EXPORTS["_C"]],
    libraries=["torch_cpu", "c10", "dl"],  # found by name: torch is imported before the module
    define_macros=[*ABI, ("FLCE_OPS", OPS), ("FLCE_HEADERS", headers_digest())],
    extra_compile_args=["-std=c++17", *C_FLAGS],
    extra_link_args=[
        *(f"-Wl,{flag}" for flag in (*LINK_FLAGS, f"--version-script={EXPORTS['_C']}")),
    ],
    py_limited_api=True,
)
# Not among the extension's sources: setuptools would compile C there as C++.
CORE_LIBRARY = {
    "sources": CORE,
    "include_dirs": [INCLUDE],
    "obj_deps": {"": HEADERS},
    "cflags": ["-std=c11", *C_FLAGS],
}
if sys.version_info < (3, 10):  # noqa: UP036  it may be run by hand
    sys.exit(
        "flce: Python 3.10 or later is needed, not " + ".".join(map(str, sys.version_info[:2]))
    )
if int(setuptools.__version__.split(".")[0]) < 77:  # it does not know pyproject.toml's license
    sys.exit(
        f"flce: to build, setuptools 77 or later is needed, not {setuptools.__version__}: "
        'pip install "setuptools>=77"'
    )
if __name__ == "__main__":  # tests/check_kernels.py imports the rest
    distribution = setup(
        long_description=links(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        project_urls=project_urls(),
        # Elsewhere the package is Python alone, and flce/plain.py serves.
        libraries=[("flce_core", CORE_LIBRARY)] if LINUX else [],
        ext_modules=[MODULE] if LINUX else [],
        cmdclass={"build_clib": BuildCore, "build_ext": Build} if LINUX else {},
        options={"bdist_wheel": {"py_limited_api": "cp310", **(PLATFORM if GLIBC else {})}},
    )
    if not LINUX:
        say(f"no compiled module for {sys.platform}: losses will be computed by flce.reference")
    for line in getattr(distribution.command_obj.get("build_ext"), "summary", ()):
        say(line)
