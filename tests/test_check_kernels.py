"""The checks of check_kernels.py on reports as ptxas and nvdisasm write them."""

import check_kernels
import pytest

GENERAL = "product_sm90<(Kind)4, true, false>"
MANGLED = (
    "_ZN48_GLOBAL__N__5f85877a_15_product_sm90_cu_5ff5098912product_sm90IL4Kind4ELb1ELb0EEEv"
    "14CUtensorMap_stS2_S2_NS_12product_argsE"
)
LOSS = "Potential Performance Loss:"


def report(name, stack=0, stores=0, loads=0, remark=""):
    return (
        f"{remark}ptxas info    : 0 bytes gmem\n"
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 5 barriers, 8 bytes cumulative stack size\n"
        "ptxas info    : Compile time = 383.847 ms\n"
    )


def test_healthy():
    granted = check_kernels.LOCAL_BYTES[GENERAL]
    both = report("weight_sm90") + report(GENERAL, granted - 8, granted - 4, granted)
    assert check_kernels.local_bytes(both) == {"weight_sm90": 0, GENERAL: granted}
    assert check_kernels.faults_of(both) == []


@pytest.mark.parametrize("sizes", [(4, 0, 0), (0, 4, 0), (0, 0, 4)])
@pytest.mark.parametrize("name", ["weight_sm90", GENERAL])
def test_local_memory(name, sizes):
    granted = check_kernels.LOCAL_BYTES.get(name, 0)
    (fault,) = check_kernels.faults_of(report(name, *(granted + size for size in sizes)))
    assert fault == f"{name}: {granted + 4} bytes of local memory, LOCAL_BYTES grants {granted}"


def test_every_kernel_is_judged():
    both = report("first", 0, 4, 4) + report("fine") + report("second", 16)
    faults = check_kernels.faults_of(both)
    assert [fault.split(":")[0] for fault in faults] == ["first", "second"]


@pytest.mark.parametrize(
    "remark",
    [
        f"ptxas info    : (C7510) {LOSS} wgmma.mma_async instructions are serialized in 'f'",
        f"ptxas info    : (C7508) {LOSS} 'setmaxnreg' ignored; unable to determine registers",
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 1400 in function 'f'",
        "ptxas warning : Value of threads per SM for entry f is out of range",
    ],
)
def test_remarks(remark):
    assert check_kernels.faults_of(report("f", remark=remark + "\n")) == [remark]


def test_plain_names():
    text = check_kernels.plain(report(MANGLED, stores=420))
    assert check_kernels.local_bytes(text) == {GENERAL: 420}


def test_multiplying():
    listing = (
        '\t.section\t.nv.info.f,"",@"SHT_CUDA_INFO"\n'
        '\t.section\t.text.f,"ax",@progbits\n.text.f:\n /*0010*/ FFMA R1, R2, R3, R1 ;\n'
        f'\t.section\t.text.{MANGLED},"ax",@progbits\n.text.{MANGLED}:\n'
        " /*0c90*/ HGMMA.64x192x16.F32.BF16 R24, gdesc[UR20], R24 ;\n"
        '\t.section\t.text.g,"ax",@progbits\n.text.g:\n /*0010*/ HMMA.16816.F32 R4, R2, R6, R4 ;\n'
    )
    assert check_kernels.multiplying(listing) == [MANGLED]
    assert check_kernels.multiplying("") == []
