"""flce.integrations.axolotl by Axolotl's own plugin manager."""

import sys

import pytest

base = pytest.importorskip("axolotl.integrations.base", exc_type=ImportError)
pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
cut_cross_entropy = pytest.importorskip("cut_cross_entropy", exc_type=ImportError)

PLUGIN = "flce.integrations.axolotl.FlcePlugin"


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(base.PluginManager, "_instance", None)
    manager = base.PluginManager.get_instance()
    manager.register(PLUGIN)
    yield manager
    manager.post_train_unload(None)


def served():
    """(whether Liger's loss is flce's, whether CCE's is)."""
    functions = (
        sys.modules["liger_kernel.ops"].LigerFusedLinearCrossEntropyFunction,
        cut_cross_entropy.linear_cross_entropy,
    )
    return tuple(hasattr(function, "flce_original") for function in functions)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"liger_fused_linear_cross_entropy": True}, (True, False)),
        ({"cut_cross_entropy": True, "liger_fused_linear_cross_entropy": False}, (False, True)),
    ],
)
def test_the_configured_loss_is_served_until_the_end(manager, flags, expected):
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"plugins": [PLUGIN], **flags})
    manager.pre_model_load(cfg)
    assert served() == expected
    manager.post_train_unload(cfg)
    assert served() == (False, False)


def test_a_configuration_without_either_is_refused(manager):
    from axolotl.utils.dict import DictDefault

    with pytest.raises(ValueError, match="plugins: expected FlcePlugin with one of liger_fused"):
        manager.pre_model_load(DictDefault({"plugins": [PLUGIN]}))
    assert served() == (False, False)
