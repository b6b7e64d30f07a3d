"""setup.py and pyproject.toml: what ends a build before it compiles, what it prints, what a wheel
has, and where an editable installation is found."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import ROOT


def python(code, *arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )


NO_PROGRAMS = "import shutil; shutil.which = lambda *_, **__: None"
LACKING = {  # what is done first, the environment, what is said
    "no torch": ("sys.modules['torch'] = None", {}, "install torch and use --no-build-isolation"),
    "old torch": (
        "import types; sys.modules['torch'] = types.SimpleNamespace(__version__='2.9.1+cpu')",
        {},
        "torch 2.10 or later is needed, not 2.9.1+cpu",
    ),
    "no nvcc": (NO_PROGRAMS, {"FLCE_CUDA": "1"}, "FLCE_CUDA=1, but no nvcc in "),
    "no compiler": (
        NO_PROGRAMS,
        {"CC": "absent-cc"},
        "a C compiler is needed: there is no 'absent-cc'",
    ),
    "no headers": (
        "import sysconfig; sysconfig.get_path = lambda *_: '/absent'",
        {"CC": sys.executable, "CXX": sys.executable},
        "Python's headers (python3-dev) are needed: there is no /absent/Python.h",
    ),
    "old Python": (
        "sys.version_info = (3, 9, 1)",
        {},
        "Python 3.10 or later is needed, not 3.9",
    ),
    "old setuptools": (
        "import setuptools; setuptools.__version__ = '76.1.0'",
        {},
        "setuptools 77 or later is needed, not 76.1.0: pip install ",
    ),
    "no cublasLt.h": (
        "import importlib.util; importlib.util.find_spec = lambda name: None;"
        "import shutil; shutil.which = lambda *_, **__: '/absent/bin/nvcc'",
        {"FLCE_CUDA": "1", "CUDA_HOME": "/absent"},
        "pip install --no-deps nvidia-cublas brings it",
    ),
    "no libraries of another machine": (
        "import shutil; shutil.which = lambda *_, **__: sys.executable",
        {"FLCE_MACHINE": "sparc64", "FLCE_GLIBC": "2.28"},
        "no libraries in build/cross-sparc64: `python tools/cross.py sparc64` makes them",
    ),
    "another machine's glibc": (
        "import shutil; shutil.which = lambda *_, **__: sys.executable",
        {"FLCE_MACHINE": "sparc64"},
        "FLCE_MACHINE=sparc64 needs FLCE_GLIBC, such as 2.28, too",
    ),
    "no zig": (
        "sys.modules['ziglang'] = None",
        {"FLCE_GLIBC": "2.28", "CC": sys.executable, "CXX": sys.executable},
        "FLCE_GLIBC=2.28, but there is no zig: pip install ziglang",
    ),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_nothing_is_compiled_where_something_lacks(tmp_path, lacking):
    pytest.importorskip("setuptools", "77")
    prelude, environment, said = LACKING[lacking]
    code = f"import runpy, sys; {prelude}; runpy.run_path('setup.py', run_name='__main__')"
    folders = ("-b", tmp_path, "-t", tmp_path)
    commands = ("build_clib", *folders, "build_ext", *folders)
    done = python(code, *commands, cwd=ROOT, **{"FLCE_CUDA": "0", **environment})
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("flce: "))
    assert done.returncode == 1 and said in line
    assert list(tmp_path.iterdir()) == []


def built_lines(monkeypatch, tmp_path, nvcc, why):
    """The last lines of a build in which nothing is compiled."""
    monkeypatch.chdir(tmp_path)
    Path("flce").mkdir()
    for name in ("FLCE_CUDA_ARCHS", "FLCE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    Build = setup["Build"]
    monkeypatch.setitem(Build.run.__globals__, "find_cuda", lambda: (nvcc, "/include", why))
    monkeypatch.setitem(Build.run.__globals__, "build_cuda", lambda *_: None)
    monkeypatch.setattr(setup["build_ext"], "run", lambda self: None)
    command = Build(setup["setuptools"].Distribution({"name": "flce"}))
    command.inplace = 1
    command.run()
    return command.summary


def test_the_last_lines_say_what_was_built(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_90\\ncompute_91\\n'\n")
    nvcc.chmod(0o755)
    built, choice = built_lines(monkeypatch, tmp_path, str(nvcc), None)
    gpus = "sm_80 sm_90 compute_90 (PTX)"
    assert built == f"built for the CPU and for CUDA, GPUs of {gpus}, by {nvcc}"
    assert "FLCE_CUDA_ARCHS" in choice and "FLCE_CUDA=0" in choice


@pytest.mark.parametrize("why", ["no cublasLt.h in /include", "FLCE_CUDA=0"])
def test_the_last_lines_say_why_there_is_no_cuda(monkeypatch, tmp_path, why):
    built, choice = built_lines(monkeypatch, tmp_path, None, why)
    assert built == f"built for the CPU alone, CUDA tensors will be refused: {why}"
    assert ("FLCE_CUDA=1 makes this an error" in choice) == (why != "FLCE_CUDA=0")
    assert Path("flce/libflce_cuda.txt").read_text() == f"left out of the build: {why}\n"


NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "release $RELEASE"
while [ $# -gt 1 ]; do shift; [ "$1" = -o ] && : >"$2"; done
exit 0
"""


def test_nvcc_compiles_what_has_changed(tmp_path, monkeypatch, capsys):
    """And says which file of how many. a.cu includes x.h, which includes y.h."""
    pytest.importorskip("setuptools", "77")
    monkeypatch.chdir(tmp_path)
    for name, value in (("XDG_CACHE_HOME", str(tmp_path / "cache")), ("FLCE_CUDA_ARCHS", "90")):
        monkeypatch.setenv(name, value)
    for folder in ("csrc/core", "csrc/cuda", "include", "flce"):
        Path(folder).mkdir(parents=True)
    nvcc, a, b = Path("nvcc").resolve(), "csrc/cuda/a.cu", "csrc/cuda/b.cu"
    shared = ["csrc/core/gpu_facts.c", "csrc/core/status.c"]
    files = dict.fromkeys((*shared, b, "include/cublasLt.h"), "") | {a: '#include "cuda/x.h"'}
    files |= {"csrc/cuda/x.h": '#include "cuda/y.h"', "csrc/cuda/y.h": "", str(nvcc): NVCC}
    for path, text in files.items():
        Path(path).write_text(text)
    nvcc.chmod(0o755)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    sources = [*shared, a, b]
    for path, text, release, compiled in (
        (b, "", "1", sources),
        (b, "", "1", []),
        (b, "int i;", "1", [b]),
        ("csrc/cuda/y.h", "int i;", "1", [a]),
        ("csrc/cuda/y.h", "", "1", []),
        ("include/cublasLt.h", "int i;", "1", sources),
        (b, "int i;", "2", sources),
    ):
        Path(path).write_text(text)
        monkeypatch.setenv("RELEASE", release)
        setup["build_cuda"](Path("flce/libflce_cuda.so"), str(nvcc), Path("include"))
        expected = [f"flce: nvcc {1 + sources.index(s)} of 4: {s}" for s in compiled]
        assert sorted(capsys.readouterr().out.splitlines()) == expected
    monkeypatch.setenv("FLCE_CUDA_ARCHS", "80")
    setup["build_cuda"](Path("flce/libflce_cuda.so"), str(nvcc), Path("include"))
    assert len(capsys.readouterr().out.splitlines()) == 2  # not the C files


def test_a_wheel_has_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = (.*)", text, re.MULTILINE)
    found = {path.parent.relative_to(ROOT) for path in ROOT.glob("flce/**/__init__.py")}
    assert set(ast.literal_eval(listed)) == {".".join(path.parts) for path in found}


def test_a_wheel_has_the_types():
    text = (ROOT / "pyproject.toml").read_text()
    (patterns,) = re.findall(r'^package-data = \{ "\*" = (.*) \}$', text, re.MULTILINE)
    found = [path.name for path in ROOT.glob("flce/**/*") if path.suffix in (".pyi", ".typed")]
    assert found == ["py.typed"]  # and no stubs: the types are in the code
    assert ast.literal_eval(patterns) == found


def test_an_editable_installation_is_found_beside_the_clone(tmp_path):
    """The clone, called flce too, must not be imported as a namespace package."""
    pytest.importorskip("setuptools", "77")
    clone, site = tmp_path / "flce", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "flce"):
        (clone / name).symlink_to(ROOT / name)
    setup = "import setuptools; setuptools.setup(long_description='', project_urls={'Source': 'a'})"
    (clone / "setup.py").write_text(setup)  # nothing compiles
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    done = python(build, cwd=clone)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path += sys.argv[2:];"
        "import flce; flce.fuse; print(flce.__file__)"
    )
    # -S: without the .pth files of this environment, which may name another clone.
    command = [sys.executable, "-S", "-c", code, str(site), *filter(None, sys.path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == clone / "flce" / "__init__.py"


def test_an_installed_wheel_is_found_beside_a_clone(tmp_path):
    """And in the clone itself, whose flce has no compiled module, an error says what to do."""
    clone, site = tmp_path / "flce", tmp_path / "site"
    for folder in (clone / "flce", site):
        folder.mkdir(parents=True)
    for name in ("__init__.py", "installation.py"):
        (clone / "flce" / name).write_text((ROOT / "flce" / name).read_text())
    (site / "flce").symlink_to(ROOT / "flce")
    code = "import sys; sys.path[1:1] = sys.argv[1:]; import flce; print(flce.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code, str(site), *filter(None, sys.path)]
    done = [
        subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        for folder in (tmp_path, clone)
    ]
    assert Path(done[0].stdout.strip()) == site / "flce" / "__init__.py", done[0].stderr
    assert "or start Python in another folder" in done[1].stderr.splitlines()[-1]


def test_the_source_distribution_builds(tmp_path):
    """Unpacked and away from the clone, in the environment that is there."""
    pytest.importorskip("setuptools", "77")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("no clone of git: its files are not known")
    for name in filter(None, files.stdout.split("\0")):  # what is not tracked may not be needed
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    build = "from setuptools import build_meta as b; print(b.build_{}(sys.argv[1]))"
    done = python("import sys;" + build.format("sdist"), tmp_path, cwd=tmp_path / "clone")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("flce-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    shutil.rmtree(tmp_path / "clone")
    (source,) = (path.parent for path in tmp_path.glob("flce-*/setup.py"))
    cuda = {"FLCE_CUDA": "0", "FLCE_GLIBC": ""}
    done = python("import sys;" + build.format("wheel"), tmp_path, cwd=source, **cuda)
    assert done.returncode == 0, done.stderr[-2000:]
    *_, built, choice = (line for line in done.stdout.splitlines() if line.startswith("flce: "))
    assert "built for the CPU alone" in built and "nvcc and cublasLt.h are found" in choice
    (wheel,) = tmp_path.glob("flce-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    loss = "flce.linear_cross_entropy(torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 2]))"
    code = f"import torch, flce; print(flce.__file__, round({loss}.item(), 3))"
    done = python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.split() == [str(tmp_path / "site/flce/__init__.py"), "1.099"], done.stderr


LIBRARIES = sorted((ROOT / "flce").glob("*.so"))


def read_elf(*arguments):
    tool = shutil.which(arguments[0]) or pytest.skip(f"no {arguments[0]}")
    return subprocess.run([tool, *map(str, arguments[1:])], capture_output=True, text=True).stdout


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_are_hardened(library):
    """Stack protector, checked calls of libc, addresses bound at load and then read-only, no
    executable stack, no path where libraries are searched for."""
    dynamic, segments = read_elf("readelf", "-dW", library), read_elf("readelf", "-lW", library)
    assert "GNU_RELRO" in segments and re.search(r"FLAGS.*\bNOW\b", dynamic)
    assert re.search(r"GNU_STACK.* RW ", segments) and "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    wanted = read_elf("nm", "-D", "--undefined-only", library)
    assert "__stack_chk_fail" in wanted and re.search(r"__\w+_chk\b", wanted)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_export_what_they_should(library):
    names = {
        line.split()[-1] for line in read_elf("nm", "-D", "--defined-only", library).splitlines()
    }
    exported = ("backend", "describe", "headers", "peers_begin", "peers_wait")
    cuda = {f"flce_cuda_{name}" for name in exported}
    assert names == (cuda if "cuda" in library.name else {"PyInit__C"})


@pytest.mark.parametrize("kind", ["writable", "another user's"])
def test_a_cache_that_others_may_write_to_is_refused(tmp_path, monkeypatch, kind):
    pytest.importorskip("setuptools", "77")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    setup["check_cache"]()
    assert (tmp_path / "flce").stat().st_mode & 0o777 == 0o700
    if kind == "writable":
        (tmp_path / "flce").chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SystemExit, match="others may write to .*XDG_CACHE_HOME"):
        setup["check_cache"]()
