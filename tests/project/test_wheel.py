"""tests/check_wheel.py, on the libraries of this build. `make wheel` checks what it has built."""

import hashlib
import json
import platform
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import check_wheel
import flce
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import cross  # noqa: E402
import cuda_library  # noqa: E402
import sbom  # noqa: E402

LIBRARIES = [Path(flce.__file__).with_name(name) for name in check_wheel.EXPORTS]

pytestmark = pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_libraries_use_the_stable_abi_alone(library):
    if not library.exists():
        pytest.skip("the CUDA library was not built")
    assert list(check_wheel.faults_of_names(library)) == []


def test_what_is_looked_up_at_run_time_is_in_the_stable_abi():
    source = ROOT / "csrc" / "binding" / "device.cpp"
    assert 'dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")' in source.read_text()
    assert "aoti_torch_get_current_cuda_stream" in check_wheel.STABLE_ABI.read_text().split()


def test_faults_are_found(tmp_path, monkeypatch):
    """In a library of torch's own, which uses its C++ functions."""
    library = tmp_path / "_C.abi3.so"
    shutil.copy(Path(torch.__file__).parent / "lib" / "libtorch_python.so", library)
    names = list(check_wheel.faults_of_names(library))
    assert "PyInit__C is not exported" in names
    assert any(name.startswith("takes _ZN") for name in names)
    monkeypatch.setitem(check_wheel.NEWEST, "GLIBCXX", (3, 4, 10))
    faults = list(check_wheel.faults_of_versions(library, platform.machine()))
    assert any(fault.startswith("needs GLIBCXX_3.4.") for fault in faults)
    assert "needs the library libtorch.so" in faults


def test_a_file_that_is_no_wheel_of_flce_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "flce-0.1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flce/_C.abi3.so", "")
    monkeypatch.setattr(check_wheel, "MOST_BYTES", 1)
    (tag,) = check_wheel.faults_of(wheel)
    assert "is not tagged cp310-abi3-manylinux_2_28_ and one of x86_64, aarch64" in tag
    wheel = wheel.rename(tmp_path / "flce-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl")
    size, libraries = check_wheel.faults_of(wheel)
    assert "at most 1" in size
    assert libraries == "has ['_C.abi3.so'], not ['_C.abi3.so', 'libflce_cuda.so']"


@pytest.mark.parametrize("machine", check_wheel.MACHINES)
def test_a_library_of_another_machine_is_found(machine):
    """In a wheel that is tagged for this one."""
    faults = list(check_wheel.faults_of_machine(LIBRARIES[0], machine))
    name = check_wheel.MACHINES[platform.machine()][0]
    assert faults == ([] if machine == platform.machine() else [f"is for {name}"])


def test_a_cuda_library_is_read_from_its_file(tmp_path):
    path = tmp_path / "libflce_cuda.so"
    path.write_bytes(b"\x7fELF\0flce_cuda built by nvcc 12.9 for 800,900,1200;\0more")
    assert cuda_library.built(path) == ("12.9", ["80", "90", "120"])
    path.write_bytes(b"\x7fELF\0")
    with pytest.raises(ValueError, match="expected a CUDA library of flce"):
        cuda_library.built(path)


def test_the_file_says_what_the_library_says():
    if not LIBRARIES[1].exists():
        pytest.skip("the CUDA library was not built")
    nvcc, architectures = cuda_library.built(LIBRARIES[1])
    gpus = " ".join(f"sm_{one}" for one in architectures)
    described = torch.ops.flce.cuda_describe()
    assert f"nvcc {nvcc}, " in described and f"GPUs {gpus}\n" in described


@pytest.mark.parametrize("machine", check_wheel.MACHINES)
def test_torch_of_another_machine_is_its_names(machine, tmp_path):
    if not shutil.which(f"{machine}-linux-gnu-gcc"):
        pytest.skip(f"no {machine}-linux-gnu-gcc")
    path = tmp_path / "libtorch_cpu.so"
    cross.write_library(machine, path, ["aoti_torch_one", "torch_two"])
    defined = {name for _, here, name, _ in check_wheel.symbols(path) if here}
    assert {"aoti_torch_one", "torch_two"} == defined
    assert "Library soname: [libtorch_cpu.so]" in check_wheel.run("readelf", "-dW", str(path))
    assert list(check_wheel.faults_of_machine(path, machine)) == []


def test_the_bill_of_materials_names_what_is_linked_in(tmp_path):
    library = LIBRARIES[1]
    if not library.exists():
        pytest.skip("the CUDA library was not built")
    wheel = tmp_path / "flce-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    headers = "Name: flce\nVersion: 0.1.0\nLicense-Expression: BSD-3-Clause\n"
    headers += 'Requires-Dist: torch>=2.10\nRequires-Dist: numpy; extra == "tests"\n'
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flce-0.1.0.dist-info/METADATA", headers)
        archive.write(library, "flce/libflce_cuda.so")
    sbom.main(wheel)
    bill = json.loads(wheel.with_suffix(".cdx.json").read_text())
    (digest,) = bill["metadata"]["component"]["hashes"]
    assert digest["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    runtime, torch_ = bill["components"]
    release = cuda_library.built(library).nvcc
    assert runtime["name"].startswith("NVIDIA CUDA Runtime") and runtime["version"] == release
    assert torch_["name"] == "torch" and torch_["description"] == "required: torch>=2.10"
