"""Writes the software bill of materials of a wheel, CycloneDX 1.6: `python tools/sbom.py WHEEL`.

It writes WHEEL.cdx.json next to the wheel: the wheel with its digest, the CUDA runtime that is
linked into it, and what it requires. The version of the CUDA runtime is that of the nvcc whose
library names it.
"""

import hashlib
import json
import re
import sys
import tempfile
import uuid
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import cuda_library


def cuda_release(archive):
    """The release of nvcc that built the wheel's CUDA library, such as 12.9."""
    with tempfile.TemporaryDirectory() as folder:
        return cuda_library.built(archive.extract("flce/libflce_cuda.so", folder)).nvcc


def bill(wheel):
    """The document, the same for the same wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        runtime = cuda_release(archive)
    name, version = headers["Name"], headers["Version"]
    required = [one for one in headers.get_all("Requires-Dist") if "extra ==" not in one]
    own = {"type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name}
    own |= {"version": version, "purl": f"pkg:pypi/{name}@{version}"}
    own |= {"licenses": [{"license": {"id": headers["License-Expression"]}}]}
    own |= {"hashes": [{"alg": "SHA-256", "content": digest}]}
    cudart = {"type": "library", "bom-ref": "cudart", "name": "NVIDIA CUDA Runtime (static)"}
    cudart |= {"version": runtime, "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}]}
    parts = [cudart]
    for requirement in required:
        package = re.match(r"[\w.-]+", requirement)[0]
        purl = f"pkg:pypi/{package}"
        parts.append({"type": "library", "bom-ref": purl, "name": package, "purl": purl})
        parts[-1]["description"] = f"required: {requirement}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"component": own},
        "components": parts,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [p["bom-ref"] for p in parts]}],
    }


def main(wheel):
    out = wheel.with_suffix(".cdx.json")
    out.write_text(json.dumps(bill(wheel), indent=2) + "\n")
    print(f"sbom: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
