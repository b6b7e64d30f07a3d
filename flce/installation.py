"""Imports torch and the compiled module, or says in a sentence what is wrong with them.

Where no module is built (not on Linux) and there is none, COMPILED is False, and flce/plain.py
serves: with one warning.

`python -m flce.info` has to report where the import of flce fails, but Python imports the package
before flce/info.py runs. So the report is made here, and this file imports no other of flce.
"""

import platform
import sys
import warnings
from pathlib import Path

TORCH = (2, 10)  # the oldest
_FOLDER = Path(__file__).parent


def _load():
    """Whether the module is loaded. ImportError where torch or the module cannot be used; for
    `python -m flce.info` the report, and the end of the process."""
    try:
        _import_torch()
        if sys.platform != "linux" and not _module_files():
            return False
        _import_module()
        return True
    except (ImportError, OSError) as error:  # torch's libraries may lack others
        # Where `-m` is still in the place of the script, Python is searching for its module.
        if sys.argv[:1] != ["-m"] or f"{__package__}.info" not in sys.orig_argv:
            raise
        print("\n".join(_report(error)))
        sys.exit(1)


def _import_torch():
    with warnings.catch_warnings():
        # Neither torch nor flce needs numpy. Without it torch says so when it is imported.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch
    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH:
        raise ImportError(f"flce needs torch 2.10 or later, got {torch.__version__}")


def _import_module():
    try:
        from ._C import read_environment  # noqa: F401  registers the operators
    except ImportError as error:
        if not _module_files():
            raise ImportError(
                f"flce: no compiled module flce._C in {_FOLDER}. In a clone, run `pip install "
                "--no-build-isolation -e .`, or start Python in another folder"
            ) from error
        module, torch = _module_files()[0], sys.modules["torch"].__version__
        raise ImportError(
            f"flce: the compiled module {module} cannot be loaded with torch {torch}: {error}. "
            "Install flce again; `python -m flce.info` prints what there is"
        ) from error


def _module_files():
    """[the compiled module's file], or [] without one."""
    return sorted(_FOLDER.glob("_C.*"))


def _report(error):
    """The lines that `python -m flce.info` prints in place of its own."""
    yield f"flce {sys.modules[__package__].__version__}"
    torch = sys.modules.get("torch")
    version = f"torch {torch.__version__}" if torch else "no torch that can be imported"
    yield f"{version}, python {platform.python_version()}, {platform.system()} {platform.machine()}"
    files = sorted(path for one in ("_C.*", "libflce_cuda.*") for path in _FOLDER.glob(one))
    yield from (f"built: {path}, {path.stat().st_size} bytes" for path in files)
    if not files:
        yield f"built: nothing in {_FOLDER}"
    yield f"not usable: {error}"


COMPILED = _load()
if not COMPILED:
    warnings.warn(
        "flce: there is no compiled module for this platform: losses are computed by "
        "flce.reference, slowly and with all logits in memory",
        stacklevel=3,
    )
