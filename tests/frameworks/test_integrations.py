"""What flce.integrations imports, and the rebinding that its install() functions share."""

import subprocess
import sys
import types

import pytest

import flce
from flce.integrations._rebind import Installation, count_call

FRAMEWORKS = ("transformers", "trl", "liger_kernel", "cut_cross_entropy", "verl", "torchtitan")
FRAMEWORKS += ("axolotl", "nemo_automodel", "skyrl", "megatron")


def test_importing_flce_imports_no_framework():
    modules = "flce.integrations.trl, flce.integrations.liger, flce.integrations.cce"
    modules = f"{modules}, flce.integrations.verl, flce.integrations.skyrl, flce.fuse"
    program = f"import sys, flce; {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "flce.integrations.verl" in imported
    assert not {name.split(".")[0] for name in imported} & set(FRAMEWORKS)


def test_unknown_integrations():
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        flce.integrations.keras  # noqa: B018


@pytest.fixture
def modules(monkeypatch):
    package, user = types.ModuleType("package"), types.ModuleType("user")
    package.loss = user.theirs = object()
    for module in (package, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package, user


def replacement(original):
    return types.SimpleNamespace(flce_original=original)


def test_every_binding_is_replaced_and_brought_back(modules, monkeypatch):
    package, user = modules
    original = package.loss
    ours = replacement(original)
    with Installation("package", [(original, ours)]) as handle:
        assert package.loss is user.theirs is ours
        later = types.ModuleType("later")
        later.loss = package.loss  # imported while flce is installed
        monkeypatch.setitem(sys.modules, "later", later)
        handle.remove()
        assert package.loss is user.theirs is later.loss is original
        package.loss = ours
    assert package.loss is ours  # the end of the block has removed nothing once more


def test_calls_are_counted(modules):
    package, _ = modules
    with Installation("package", [(package.loss, replacement(package.loss))]) as handle:
        assert repr(handle) == "<flce.integrations.package: installed, no calls yet>"
        for serves in (True, False, True):
            count_call("package", serves)
        counts = "2 calls by flce, 1 calls by package"
        assert repr(handle) == f"<flce.integrations.package: installed, {counts}>"
        assert handle.calls == {"flce": 2, "package": 1}
    assert repr(handle) == f"<flce.integrations.package: removed, {counts}>"
    with Installation("package", [(package.loss, replacement(package.loss))]) as other:
        assert not other.calls


def test_a_block_that_raises_removes_too(modules):
    package, _ = modules
    original = package.loss
    with pytest.raises(ZeroDivisionError), Installation("p", [(original, replacement(original))]):
        1 / 0  # noqa: B018
    assert package.loss is original


def test_a_second_installation_changes_nothing(modules):
    package, _ = modules
    other, ours = object(), replacement(package.loss)
    with Installation("package", [(package.loss, ours)]):
        package.other = other
        pairs = [(other, replacement(other)), (ours, replacement(ours))]
        with pytest.raises(RuntimeError, match="flce.integrations.package: expected package with"):
            Installation("package", pairs)
        assert package.other is other and package.loss is ours
