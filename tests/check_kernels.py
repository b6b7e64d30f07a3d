"""Compiles the kernels for Hopper and checks ptxas' report and the machine code.

ptxas must print no numbered remark: those say that WGMMAs are serialized, or that setmaxnreg had no
effect. A kernel may use no local memory beyond its entry in LOCAL_BYTES, and each kernel of
csrc/cuda/sm90/*_gemm.cu must contain HGMMA. A kernel that may start while its predecessor ends
(PDL: launch_dependent, or a launch with supports_pdl) must wait for it before it accesses global
memory, branches or ends; with launch_overlapping, before it writes or ends. Exit status 1 if a
check fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# As counted by local_bytes() with nvcc 13.0. The template arguments of the logits GEMM are Kind (0
# plain, 1 biased, 4 general, 5 probabilities, 6 scaled), FusedResult (0 nothing, 1 E, 2 E
# and its maxima, 3 z, 4 packed), RETRY and HALF.
LOCAL_BYTES = {
    "logits_gemm_sm90<(Kind)0, (FusedResult)1, false, false>": 12,
    "logits_gemm_sm90<(Kind)0, (FusedResult)1, true, false>": 8,
    "logits_gemm_sm90<(Kind)1, (FusedResult)1, false, false>": 8,
    "logits_gemm_sm90<(Kind)1, (FusedResult)1, true, false>": 8,
    "logits_gemm_sm90<(Kind)0, (FusedResult)2, false, false>": 8,
    "logits_gemm_sm90<(Kind)0, (FusedResult)2, true, false>": 8,
    "logits_gemm_sm90<(Kind)1, (FusedResult)2, false, false>": 8,
    "logits_gemm_sm90<(Kind)1, (FusedResult)2, true, false>": 8,
    "finish_all_rows<double, double, 1>": 40,
}
for half in ("false", "true"):
    LOCAL_BYTES |= {
        f"logits_gemm_sm90<(Kind)4, (FusedResult)0, false, {half}>": 116,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)0, true, {half}>": 156,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)1, false, {half}>": 292,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)1, true, {half}>": 476,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)2, false, {half}>": 312,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)2, true, {half}>": 328,
        f"logits_gemm_sm90<(Kind)4, (FusedResult)3, false, {half}>": 132,
        f"logits_gemm_sm90<(Kind)5, (FusedResult)0, false, {half}>": 132,
        f"logits_gemm_sm90<(Kind)5, (FusedResult)0, true, {half}>": 268,
        f"logits_gemm_sm90<(Kind)5, (FusedResult)3, false, {half}>": 168,
        f"logits_gemm_sm90<(Kind)6, (FusedResult)4, true, {half}>": 20,
    }
REMARK = re.compile(r"^ptxas (?:warning|info *: \(C\d+\)).*", re.MULTILINE)
PROPERTIES = re.compile(
    r"Function properties for (.+)\n"
    r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
CODE = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
# Kernels launched with PDL: they may start while the preceding kernel ends.
DEPENDENT = {
    *(
        "find_row_offsets",
        "take_known_offsets",
        "tile_statistics",
        "row_coefficients",
        "scale_rows",
        "finish_grad_input",
    ),
    *("scale_elements", "finish_touched_rows", "scale_coefficients"),
    *("shard_targets", "pack_statistics", "merge_statistics", "sum_partial_dx"),
    *("sample_rows", "sampled_grad_input", "sampled_grad_weight"),
    *("class_logits", "class_gradients", "tail_rows", "top_classes"),
    *("logits_gemm_sm90", "grad_weight_gemm_sm90"),
}
OVERLAPPING = {"prepare_call", "reduce_values"}  # these read before they wait
WAITS = re.compile(r"\bACQBULK\b")
TOUCHES = re.compile(
    r"\b(LD|ST|LDG|STG|STAS|LDGSTS|ATOM|ATOMG|RED|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|EXIT|BRA|BRX)\b"
)
WRITES = re.compile(r"\b(ST|STG|STAS|ATOM|ATOMG|RED|REDG|UTMASTG|UTMAREDG|UBLKCP|EXIT|BRX)\b")
JUMP = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +([^;]+);")


def plain(text):
    """The text with C++ names demangled as in the source, template arguments included."""
    run = subprocess.run(["c++filt", "-p"], input=text, check=True, capture_output=True, text=True)
    return run.stdout.replace("(anonymous namespace)::", "")


def local_bytes(report):
    """{kernel: the largest of stack frame (of an array indexed at run time), stores and loads}"""
    return {name: max(map(int, sizes)) for name, *sizes in PROPERTIES.findall(report)}


def faults_of(report):
    return REMARK.findall(report) + [
        f"{name}: {used} bytes of local memory, LOCAL_BYTES grants {LOCAL_BYTES.get(name, 0)}"
        for name, used in local_bytes(report).items()
        if used > LOCAL_BYTES.get(name, 0)
    ]


def codes(listing):
    """(mangled name, machine code) of each kernel in nvdisasm's listing."""
    _, *parts = CODE.split(listing)
    return list(zip(parts[::2], parts[1::2], strict=True))


def waits_in_time(name, code):
    """Whether a kernel waits early enough if it is launched with PDL, and only then."""
    instructions = INSTRUCTION.findall(code)
    waits = [at for at, text in enumerate(instructions) if WAITS.search(text)]
    kernel = re.sub(r"[<(].*", "", name).split(" ")[-1]
    if kernel not in DEPENDENT | OVERLAPPING:
        return not waits
    if len(waits) != 1 or instructions[waits[0]].startswith("@"):
        return False
    forbidden = WRITES if kernel in OVERLAPPING else TOUCHES
    touches = [at for at, text in enumerate(instructions) if forbidden.search(text)]
    return all(waits[0] < at for at in touches) and not jumps_over_wait(code)


def jumps_over_wait(code):
    """Whether a branch that precedes the only wait jumps past it."""
    before, _, _ = code.partition(WAITS.search(code)[0])
    return any(f"{label}:" not in before for label in JUMP.findall(before))


def faults_of_code(listing, multiplies):
    """The faults in the machine code of a source; `multiplies`: whether HGMMA is required."""
    kernels = codes(listing)
    names = plain("\n".join(name for name, _ in kernels)).splitlines()
    faults = []
    for name, (_, code) in zip(names, kernels, strict=True):
        if multiplies and "HGMMA" not in code:
            faults.append(f"{name}: no HGMMA in its machine code")
        if not waits_in_time(name, code):
            faults.append(f"{name}: it waits for its predecessor too late, or never, or in vain")
    return faults


def check(source, command, nvdisasm, folder):
    cubin = str(Path(folder, source.replace(os.sep, "-") + ".cubin"))
    command = [*command, "-Xptxas", "-v", "-cubin", source, "-o", cubin]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    report = plain(run.stderr)
    if run.returncode:
        return [], [f"{source}: nvcc failed\n{report}"]
    kernels, faults = list(local_bytes(report)), faults_of(report)
    if nvdisasm:
        run = subprocess.run([nvdisasm, cubin], check=True, stdout=subprocess.PIPE, text=True)
        faults += faults_of_code(run.stdout, re.search("sm90/.*_gemm.cu", source))
    return kernels, [f"{source}: {fault}" for fault in faults]


def main():
    # setup.py has the flags and finds the toolkit; its source paths are relative to ROOT.
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ.update(FLCE_CUDA_ARCHS="90", FLCE_CUDA="1")  # 1: exits where nvcc is missing
    import setup

    nvcc, header, _ = setup.find_cuda()
    # In nvcc's directory, or in NVIDIA's wheel.
    folders = [str(Path(nvcc).resolve().parent), os.environ["PATH"], str(header.parent / "bin")]
    nvdisasm = shutil.which("nvdisasm", path=os.pathsep.join(folders))
    commands = [[nvcc, *flags, "-isystem", str(header)] for flags in setup.cuda_flags(nvcc)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(check, source, command, nvdisasm, folder)
            for source, command in zip(setup.CUDA_SOURCES, commands, strict=True)
            if source.endswith(".cu")
        ]
        results = [job.result() for job in jobs]
    kernels = [name for names, _ in results for name in names]
    faults = [fault for _, found in results for fault in found]
    # An entry is also missing if PROPERTIES does not match another nvcc's report.
    gone = [f"LOCAL_BYTES: there is no {name}" for name in LOCAL_BYTES if name not in kernels]
    for fault in faults or gone:
        print("kernels:", fault)
    by = f"machine code by {nvdisasm}" if nvdisasm else "no nvdisasm: machine code was NOT checked"
    print(f"kernels: {len(kernels)} for sm_90, {len(faults or gone)} faults; {by}")
    return bool(faults or gone)


if __name__ == "__main__":
    sys.exit(main())
