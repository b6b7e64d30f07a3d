"""The checks of check_kernels.py, on reports in the format of ptxas and nvdisasm."""

import re

import pytest

import check_kernels

GENERAL = "logits_gemm_sm90<(Kind)4, (FusedResult)1, false, false>"
MANGLED = (
    "_ZN47_GLOBAL__N__df133974_14_logits_gemm_cu_505519bc16logits_gemm_sm90IL4Kind4E"
    "L11FusedResult1ELb0ELb0EEEv14CUtensorMap_stS3_S3_NS_16logits_gemm_argsE"
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


def test_every_kernel_is_judged():
    granted = check_kernels.LOCAL_BYTES[GENERAL]
    healthy = report("fine") + report(MANGLED, granted - 8, granted - 4, granted)
    text = check_kernels.plain(report("first", 0, 4, 4) + healthy + report("second", 16))
    used = {"first": 4, "fine": 0, GENERAL: granted, "second": 16}
    assert check_kernels.local_bytes(text) == used
    faults = check_kernels.faults_of(text)
    assert [fault.split(":")[0] for fault in faults] == ["first", "second"]


@pytest.mark.parametrize("sizes", [(4, 0, 0), (0, 4, 0), (0, 0, 4)])
@pytest.mark.parametrize("name", ["grad_weight_gemm_sm90", GENERAL])
def test_local_memory(name, sizes):
    granted = check_kernels.LOCAL_BYTES.get(name, 0)
    (fault,) = check_kernels.faults_of(report(name, *(granted + size for size in sizes)))
    assert fault == f"{name}: {granted + 4} bytes of local memory, LOCAL_BYTES grants {granted}"


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


def listed(name, *instructions):
    lines = "".join(
        f"{text}\n" if text.endswith(":") else f" /*{at:03x}0*/ {text} ;\n"
        for at, text in enumerate(instructions)
    )
    return f'\t.section\t.text.{name},"ax",@progbits\n.text.{name}:\n{lines}'


LOAD, STORE, WAIT = "LDG.E R3, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R3", "ACQBULK"
OVER, INTO = "@P0 BRA `(.L_x_7)", ".L_x_7:"
HGMMA = "HGMMA.64x192x16.F32.BF16 R24, gdesc[UR20], R24"


def test_multiplying():
    listing = '\t.section\t.nv.info.f,"",@"SHT_CUDA_INFO"\n'
    listing += listed("f", "FFMA R1, R2, R3, R1") + listed(MANGLED, WAIT, HGMMA)
    listing += listed("g", "HMMA.16816.F32 R4, R2, R6, R4")
    faults = check_kernels.faults_of_code(listing, True)
    assert faults == [f"{name}: no HGMMA in its machine code" for name in ("f", "g")]
    assert check_kernels.faults_of_code(listing, False) == []
    assert check_kernels.faults_of_code("", True) == []


@pytest.mark.parametrize(
    "name, instructions, good",
    [
        ("find_row_offsets", ("LDC R1, c[0x0][0x28]", WAIT, LOAD, STORE, "EXIT"), True),
        ("find_row_offsets", (LOAD, WAIT, STORE, "EXIT"), False),
        ("find_row_offsets", ("@P0 EXIT", WAIT, STORE, "EXIT"), False),
        ("find_row_offsets", ("@P0 BRA 0x80", WAIT, STORE, "EXIT"), False),
        ("find_row_offsets", ("UTMALDG.2D [UR8], [UR4]", WAIT, "EXIT"), False),
        ("find_row_offsets", (LOAD, STORE, "EXIT"), False),
        ("find_row_offsets", (WAIT, LOAD, WAIT, "EXIT"), False),
        ("make_keys", (LOAD, STORE, "EXIT"), True),
        ("make_keys", (WAIT, LOAD, STORE, "EXIT"), False),
        ("reduce_values", (LOAD, OVER, INTO, WAIT, STORE, "EXIT"), True),
        ("reduce_values", (LOAD, OVER, WAIT, INTO, STORE, "EXIT"), False),
        ("reduce_values", (LOAD, f"@P0 {WAIT}", STORE, "EXIT"), False),
        ("reduce_values", (LOAD, "REDG.E.ADD desc[UR4][R2.64], R3", WAIT, "EXIT"), False),
        ("reduce_values", (LOAD, STORE, WAIT, "EXIT"), False),
        ("reduce_values", (LOAD, "@P0 EXIT", WAIT, STORE, "EXIT"), False),
        ("reduce_values", (LOAD, STORE, "EXIT"), False),
    ],
)
def test_dependent(name, instructions, good):
    faults = check_kernels.faults_of_code(listed(name, *instructions), False)
    late = f"{name}: it waits for its predecessor too late, or never, or in vain"
    assert faults == ([] if good else [late])


def test_dependent_is_complete():
    """Every kernel that the sources launch with PDL is in the tables."""
    launched, overlapping = set(), set()
    for path in (check_kernels.ROOT / "csrc" / "cuda").rglob("*.cu"):
        text = path.read_text()
        overlapping.update(re.findall(r"launch_overlapping\(\s*self,\s*(\w+)", text))
        for launch in re.finditer(r"launch_dependent\(\s*self,\s*(\w+)", text):
            name = launch[1]
            if name == "kernel":
                *_, name = re.findall(r"kernel = \w[^;]*? ([a-z_]+)<", text[: launch.start()])
            launched.add(name)
        if "supports_pdl(" in text:
            launched.update(re.findall(r"^    ([a-z_]+_sm90)\(const __grid", text, re.MULTILINE))
    assert launched == check_kernels.DEPENDENT
    assert overlapping == check_kernels.OVERLAPPING
